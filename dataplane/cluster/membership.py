"""Who is there: the nodes of a cluster, as one of them sees it.

What finds them is an engine behind this interface. Each says who the members are and an epoch, a number that goes up
with every change; a node that was away and comes back as it was is the same member, one that was started again is
another.

Whatever finds them, who is alive is decided on the control channel alone: a node is a member while it answers
greetings (`cluster.static`). Epochs are this node's own: those of two nodes can not be compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dataplane.wire import peer_messages as pm


@dataclass(frozen=True, slots=True)
class Member:
    """A node: its number (8 bytes, new with each start), where its control channel listens, and where its transports
    are found, by name."""

    node: bytes
    address: str
    transports: Mapping[str, str] = field(default_factory=dict, hash=False)


class Membership(ABC):
    """The members of a cluster. To be used from one event loop."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Goes up with every change, and when this node was away (stopped, say) for so long that others no longer took
        it for a member: whatever it held on to for them, they may have given to another."""

    @property
    @abstractmethod
    def members(self) -> Mapping[bytes, Member]:
        """By their numbers; this node is among them."""

    @abstractmethod
    def greeted(self, greet: pm.Greet) -> pm.Greeted:
        """Somebody greets this node: what it is answered."""

    @abstractmethod
    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change of the epoch, from the event loop."""

    @abstractmethod
    async def run(self) -> None:
        """Keep watch until cancelled."""
