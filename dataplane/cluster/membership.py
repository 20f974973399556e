"""Who is there: the nodes of a cluster, as one of them sees it.

What finds them is an engine behind this interface. Each says who the members are and an epoch, a number that goes up
with every change. A node that was started again is another member. One that others took for dead, and that comes back,
is the same in another incarnation: what they shared is over, as if it had died.

There are two: registrations at a coordinator (`cluster.leases`), and greetings along a list (`cluster.static`). Epochs
are this node's own: those of two nodes can not be compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dataplane.wire import peer_messages as pm

MAX_MEMBERS = 4096


@dataclass(frozen=True, slots=True)
class Coordination:
    """The coordinator that a node asks: what it is and where, and whether it answered last."""

    coordinator: str
    answers: bool


@dataclass(frozen=True, slots=True)
class Member:
    """A node: its number (8 bytes, new with each start), where its control channel listens, and where its transports
    are found, by name. `since`: the first number of what it has stored since it last began anew."""

    node: bytes
    address: str
    transports: Mapping[str, str] = field(default_factory=dict, hash=False)
    since: int = 0

    def stores(self, shard: int) -> bool:
        """Whether others may count on this shard of the node's."""
        return shard >= self.since


class Membership(ABC):
    """The members of a cluster. To be used from one event loop."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Goes up with every change."""

    @property
    @abstractmethod
    def members(self) -> Mapping[bytes, Member]:
        """By their numbers; this node is among them."""

    @abstractmethod
    def greeted(self, greet: pm.Greet) -> pm.Greeted:
        """Somebody greets this node: what it is answered."""

    @abstractmethod
    def look(self) -> None:
        """Notice, now, if this node was away: to be called before anything is done that counts on what it shares."""

    @abstractmethod
    def begin_anew_by(self, begin: Callable[[], int]) -> None:
        """Call `begin` when others took this node for dead, before they are heard again: what it shares with others is
        over. It returns this node's next `since`, higher than that before."""

    @abstractmethod
    def fences(self, node: bytes, since: int) -> bool:
        """Whether what this node says is not heard any more: it was taken for dead since it began with `since`, or has
        begun anew."""

    @abstractmethod
    def met(self, node: bytes, since: int) -> None:
        """This node says that it has begun with `since`: where that is later than is known, it has begun anew."""

    @abstractmethod
    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change of the epoch, from the event loop."""

    @abstractmethod
    async def run(self) -> None:
        """Keep watch until cancelled."""

    @property
    def coordination(self) -> Coordination | None:
        """The coordinator, where there is one."""
        return None

    async def aclose(self) -> None:  # noqa: B027
        """Let go of what it was made with, once it runs no more. Idempotent."""
