"""How a client asks the partitions of streams: of this node alone (`local`), or of a cluster (`clustered.session`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import DataplaneError
from dataplane.stream import requests as r
from dataplane.stream.settings import Settings
from dataplane.wire import messages as m

R = TypeVar("R", bound=r.Result)
T = TypeVar("T")

Waiting = Callable[[], Coroutine[Any, Any, m.Reply]]
"""What has to be called and awaited for a reply."""

Outcome = r.Result | DataplaneError

ASK_S = 10.0
"""For which a request is asked that has no deadline of its own: longer than a failover takes."""

NOT_ASKED = "it was given up before it was asked"


def asked_until(deadline: Deadline) -> Deadline:
    """For how long to ask what has to be answered, whose caller waits until a deadline for something else too."""
    return Deadline.after(max(deadline.remaining_s, ASK_S))


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a stream of this node is to answer at once")


class Stream(Protocol):
    """A stream that is open on this node. `generation`: what its keys begin with that it makes. `partition`: what
    requests are asked of."""

    name: str
    token: bytes
    generation: str

    @property
    def settings(self) -> Settings: ...

    @property
    def partition(self) -> Any: ...


class Session(Protocol):
    """One client, by its name."""

    client: str

    async def ask(
        self,
        partition: Any,
        request: r.Request,
        kind: type[R],
        deadline: Deadline | None = None,
        *,
        waits: Callable[[], str] | None = None,
        settled: Callable[[Outcome], None] | None = None,
        late: Callable[[R], None] | None = None,
    ) -> R:
        """What the partition answers. `waits` gives the queue of a request that may wait there until its deadline.
        `settled`, of a request that changes rows, is called once with the outcome. `late`, of one that does not, is
        called with each answer that came too late to be returned. Raises what the partition refuses with; NotReady, or
        Backpressure for an append, where there is nothing before the deadline."""

    async def ack(self, partition: Any, grant: int, replica: int | None) -> None:
        """The rows of a grant are done. Raises LeaseExpired."""

    def soon(self, partition: Any, request: r.Request) -> asyncio.Task[Any] | None:
        """Ask without waiting for the answer, which does not matter."""

    def run_soon(self, work: Callable[[], Coroutine[Any, Any, object]]) -> object:
        """Do this without waiting for it; an error of it does not matter."""

    def give_back_soon(self, partition: Any, grant: int) -> None:
        """Give back rows that nobody has seen."""

    def leave(self) -> None:
        """The client has gone: what it holds goes to others."""


class Claim(Protocol):
    """Columns that are retained until they are `released`, or `taken` by the partition that asked for them."""

    def taken(self) -> None: ...

    def release(self) -> None: ...


class Restored(Protocol):
    """A stream that is being restored, and has no name yet."""

    token: bytes
    generation: str

    @property
    def partition(self) -> Any: ...


class Service(Protocol):
    """All streams of a kind."""

    def session(self, owner: object) -> Session:
        """The session of a client that has connected, which `owner` names to people."""

    def label(self, client: str) -> str:
        """What people know the client of a session by."""

    def forget(self, client: str) -> None:
        """The client has gone."""

    async def open(self, name: str, settings: Settings | None) -> Stream:
        """The stream of this name, made if there is none and settings are given. Raises Misuse, LimitExceeded."""

    def find(self, token: bytes) -> Stream:
        """The stream of this token. Raises Closed."""

    def named(self, token: bytes) -> Stream | None:
        """The same, or None."""

    async def on(self, stream: Any, work: Callable[[Any], Awaitable[T]]) -> T:
        """Do this with the stream's partition. Raises Closed, and what `work` raises."""

    async def drop(self, stream: Any) -> None:
        """There is no such stream any more."""

    async def dropped(self, stream: Any) -> bool:
        """Whether there is no such stream any more."""

    async def take_lost(self, request: m.TakeLost, stream: Any, session: Any) -> m.LostRows:
        """Rows that are lost, each told once."""

    def figures(self, after: str | None = None, most: int = ...) -> dict[str, Any]:
        """The figures of the first streams by name, of those after this name; at most so many."""

    async def claim(
        self,
        partition: Any,
        ref: BatchRef,
        copies: Iterable[bytes] = (),
        until: Deadline | None = None,
        *,
        rows: int = 0,
    ) -> Claim:
        """Have columns retained for a partition. Raises Freed, Corrupt, LimitExceeded, OwnerDied, PeerUnavailable."""

    async def prepare(self, name: str, settings: Settings, mark: str) -> Restored:
        """A stream to be restored. Raises Misuse where its name is taken, LimitExceeded, PeerUnavailable."""

    async def publish(self, restored: Any) -> None:
        """From now on it is a stream like others. Raises Misuse where its name was taken meanwhile."""

    async def discard(self, restored: Any) -> None:
        """It is not to be restored, after all."""


def happened(claims: Sequence[Claim], outcome: Outcome) -> None:
    """What was claimed is the partition's, or is not needed."""
    refused = isinstance(outcome, DataplaneError) or (isinstance(outcome, r.Appended) and not outcome.new)
    for claim in claims:
        (claim.release if refused else claim.taken)()
