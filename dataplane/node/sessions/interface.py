"""The interface by which a client uses partitions of streams. A node outside a cluster implements it in `node.local`,
a node of a cluster in `node.clustered`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import DataplaneError
from dataplane.stream import requests as r
from dataplane.stream.settings import StreamSettings
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm

R = TypeVar("R", bound=r.StreamResult)
T = TypeVar("T")

Waiting = Callable[[], Coroutine[Any, Any, m.Reply]]
"""A function to call and await for a reply."""

Outcome = r.StreamResult | DataplaneError

MAX_STREAMS = 4096
"""The most streams that are open on a node at a time."""

ASK_S = 10.0
"""The timeout of a request without a deadline of its own. Longer than a failover."""

NOT_ASKED = "it was given up before it was asked"

ENDED = "a process that has ended"
"""The label of a client that has ended."""


def asked_until(deadline: Deadline) -> Deadline:
    """The deadline, but at least `ASK_S` from now, because earlier steps may have used up the caller's time."""
    return Deadline.after(max(deadline.remaining_s, ASK_S))


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a stream of this node is to answer at once")


class OpenedStream(Protocol):
    """An open stream. `generation`: the prefix of generated keys. `partition`: where requests go."""

    name: str
    token: bytes
    generation: str

    @property
    def settings(self) -> StreamSettings: ...

    @property
    def partition(self) -> Any: ...


class StreamSession(Protocol):
    """One client, identified by its name."""

    client: str

    async def ask(
        self,
        partition: Any,
        request: r.StreamRequest,
        kind: type[R],
        deadline: Deadline | None = None,
        *,
        waits: Callable[[], str] | None = None,
        settled: Callable[[Outcome], None] | None = None,
        late: Callable[[R], None] | None = None,
    ) -> R:
        """Return the answer of the partition. `waits` returns the queue of a request that may wait until its deadline.
        `settled`, for a request that changes rows, is called once with the outcome. `late`, for other requests, is
        called with each answer that arrived too late to be returned. Raises the error with which the partition refuses;
        at the deadline NotReady or, for an append, Backpressure."""

    async def ack(self, partition: Any, grant: int, replica: int | None) -> None:
        """Acknowledge the rows of a grant. Raises LeaseExpired."""

    def soon(self, partition: Any, request: r.StreamRequest) -> asyncio.Task[Any] | None:
        """Send a request without waiting for its answer."""

    def run_soon(self, work: Callable[[], Coroutine[Any, Any, object]]) -> object:
        """Run `work` in the background or, in `local`, at once. A DataplaneError that it raises is ignored."""

    def give_back_soon(self, partition: Any, grant: int) -> None:
        """Give back rows of a grant that the client never saw."""

    def leave(self) -> None:
        """Release the leases of a client that has ended, so that its rows are delivered to others."""


class ColumnClaim(Protocol):
    """Columns that are retained for a partition. The claim ends with `taken`, after which the partition owns the
    columns, or with `release`, which frees them."""

    def taken(self) -> None: ...

    def release(self) -> None: ...


class RestoringStream(Protocol):
    """A stream that is being restored and has no name yet."""

    token: bytes
    generation: str

    @property
    def partition(self) -> Any: ...


class StreamService(Protocol):
    """All streams of this node, or of the cluster."""

    def session(self, owner: object) -> StreamSession:
        """A session for a new client. The text of `owner` names the client in messages of errors."""

    def label(self, client: str) -> str:
        """The label of a client in error messages; `ENDED` for one that has ended. `client`: the name of its
        session."""

    def forget(self, client: str) -> None:
        """Forget a client that has ended."""

    async def open(self, name: str, settings: StreamSettings | None) -> OpenedStream:
        """Return the stream with this name; create it if there is none and settings are given. Raises Misuse,
        LimitExceeded."""

    def find(self, token: bytes) -> OpenedStream:
        """The stream with this token. Raises Closed."""

    def named(self, token: bytes) -> OpenedStream | None:
        """The stream with this token, or None."""

    def on(self, stream: Any, work: Callable[[Any], Awaitable[T]]) -> Awaitable[T]:
        """Return the result of `work` with the partition of the stream or, if that is lost, with its successor. Raises
        Closed, and the errors of `work`."""

    async def drop(self, stream: Any) -> None:
        """Drop the stream."""

    async def take_lost(self, request: rm.TakeLostRows, stream: Any, session: Any) -> rm.LostRowsTaken:
        """Return lost rows, each once."""

    def report_again(self, reply: rm.LostRowsTaken) -> None:
        """Report these rows again, since the reply cannot be sent."""

    def figures(self, after: str | None = None, most: int = ...) -> dict[str, Any]:
        """Statistics by name of the first `most` streams after the name `after`."""

    async def claim(
        self,
        partition: Any,
        ref: BatchRef,
        copies: Iterable[bytes] = (),
        until: Deadline | None = None,
        *,
        rows: int = 0,
    ) -> ColumnClaim:
        """Retain columns for a partition; see `ColumnHolders.claim`."""

    async def prepare(self, name: str, settings: StreamSettings, mark: str) -> RestoringStream:
        """Create a stream to be restored, without a name yet. Raises Misuse if the name is taken, LimitExceeded,
        PeerUnavailable."""

    async def publish(self, restored: Any) -> None:
        """Give a restored stream its name. Raises Misuse if it was taken meanwhile."""

    async def discard(self, restored: Any) -> None:
        """Give up a restoration."""


def happened(claims: Sequence[ColumnClaim], outcome: Outcome) -> None:
    """End the claims of an append or extend by its outcome: by a release if it was refused or repeated, else as
    taken."""
    refused = isinstance(outcome, DataplaneError) or (isinstance(outcome, r.AppendResult) and not outcome.new)
    for claim in claims:
        (claim.release if refused else claim.taken)()
