"""The streams of a node outside a cluster, by name and by token. They end with the process.

Invariants: only this module reads the clock of a stream. The columns that rows need are kept
(`node.shards.needed_shards`). A waiting request is answered once, and a grant that cannot be sent is given back.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from dataplane import waiting as noted
from dataplane.batch.ref import BatchRef
from dataplane.clock import Clock, Deadline
from dataplane.errors import Backpressure, Closed, DataplaneError, LimitExceeded, Misuse, NotReady, Rejected
from dataplane.node.local.unreplicated import UnreplicatedStream
from dataplane.node.partitions.waiters import NOTHING, WaitingRequest
from dataplane.node.sessions.interface import ENDED, MAX_STREAMS, NOT_ASKED, ColumnClaim, Outcome, R, at_once
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.stream import requests as r
from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.settings import StreamSettings
from dataplane.stream.statistics import Waiting as WaitingFor
from dataplane.stream.statistics import figures, labelled
from dataplane.wire import row_messages as rm

T = TypeVar("T")

_MARK = 5  # the random bytes of a stream's mark, which is the prefix of its generated keys
_LOOK_S = 0.5  # the interval at which samplers that judge rows by age run again


class LocalStream(UnreplicatedStream):
    """A stream with its name and clock. `token` identifies the stream to clients and in references. `generation` is the
    prefix of generated keys."""

    def __init__(
        self, name: str, settings: StreamSettings, generation: str, needed: NeededShards, clock: Clock
    ) -> None:
        self.name = name
        self.owner = f"stream {name}"
        """The owner of its shards in `Store.holders`."""
        self.generation = generation
        self.settings = settings
        self.token = secrets.token_bytes(8)
        self.dropped = False
        self._needed = needed
        super().__init__(name, settings, generation, self, clock)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf

    @property
    def partition(self) -> LocalStream:
        return self

    # columns

    def free(self, batches: list[ColumnBatch]) -> None:
        """Free the columns of appends and extends that no row needs any more."""
        self._needed.released(batches, self.name)

    def read(self, refs: Sequence[BatchRef]) -> None:
        """Keep these columns until `unread`, even if no row needs them."""
        for ref in refs:
            self._needed.keep_too(ref)

    def unread(self, refs: Sequence[BatchRef]) -> None:
        for ref in refs:
            self._needed.forget(ref)

    # requests

    def run(self, asked: Any) -> Any:
        """Return the result of a request, which does not wait. Raises the error with which the stream refuses the
        request; Closed if the stream was dropped."""
        self._check()
        try:
            return super().run(asked)
        finally:
            self._schedule()

    def wait(self, asked: Any, queue: str, done: Callable[[Any], None], timeout_s: float) -> WaitingRequest:
        """Execute a request that may wait. `done` is called once, with the result, the error, or `NOTHING` at the
        timeout. Raises Closed, and Backpressure if too many requests wait."""
        self._check()
        waiting = WaitingRequest(queue, asked, done, until_s=self.clock() + timeout_s)
        self.add(waiting)
        self._schedule()
        return waiting

    def has_waiting(self, queue: Callable[[], str]) -> bool:
        return bool(self.waiters) and self.waiters.has(queue())

    def _check(self) -> None:
        if self.dropped:
            raise Closed(f"the stream {self.name!r} was dropped")

    @property
    def waiting(self) -> WaitingFor:
        return self.machine.pending()

    def figures(self) -> dict[str, Any]:
        return figures(self.leased, self.clock(), self.waiting)

    # time

    def _schedule(self) -> None:
        """Set the timer to the time at which `settle` is due."""
        due = self.due_s
        if self.waiters and self.watches_age:
            due = min(due, self.clock() + _LOOK_S)
        if due < self._due_s:
            self._stop()
            self._due_s = due
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - self.clock()), self._tick)

    def _tick(self) -> None:
        self._timer, self._due_s = None, math.inf
        try:
            self.settle()
        finally:
            self._schedule()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Drop the stream. Waiting requests get Closed."""
        self.dropped = True
        self._stop()
        super().end()


class LocalSession:
    """A client of local streams; see `interface.StreamSession`."""

    def __init__(self, client: str, streams: Callable[[], Iterable[LocalStream]]) -> None:
        """`streams()` returns all streams."""
        self.client = client
        self._streams = streams

    async def ask(
        self,
        partition: LocalStream,
        request: r.StreamRequest,
        kind: type[R],
        deadline: Deadline | None = None,
        *,
        waits: Callable[[], str] | None = None,
        settled: Callable[[Outcome], None] | None = None,
        late: Callable[[R], None] | None = None,
    ) -> R:
        outcome: Any = Rejected(NOT_ASKED)
        try:
            asked = request if request.client else msgspec.structs.replace(request, client=self.client)
            if waits is not None and deadline is not None:
                outcome = await self._wait(partition, asked, waits, deadline, late)
            else:
                outcome = partition.run(asked)
        except DataplaneError as error:
            outcome = error
            raise
        finally:
            if settled is not None:
                settled(outcome)
        assert isinstance(outcome, kind), f"a stream answers a {type(request).__name__} by a {type(outcome).__name__}"
        return outcome

    async def _wait(
        self,
        stream: LocalStream,
        asked: Any,
        waits: Callable[[], str],
        deadline: Deadline,
        late: Callable[[Any], None] | None,
    ) -> Any:
        if isinstance(asked, r.Admit) or not stream.has_waiting(waits):
            with suppress(NotReady, Backpressure):
                return stream.run(asked)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def done(result: Any) -> None:
            if not future.cancelled():
                future.set_result(result)
            elif late is not None and isinstance(result, r.StreamResult):
                loop.call_soon(late, result)

        admits = isinstance(asked, r.Admit)
        wait = noted.turn("permits" if admits else "rows", stream.name)
        waiting = stream.wait(asked, waits(), wait.noting(done), deadline.remaining_s)
        if admits and not future.done():
            full = stream.leased.admission.full(stream.machine.entry_of(asked))
            wait.turn(full or "permits", stream.name)
        try:
            result = await future
        except asyncio.CancelledError:
            if (
                future.done()
                and not future.cancelled()
                and late is not None
                and isinstance(future.result(), r.StreamResult)
            ):
                late(future.result())
            stream.waiters.withdraw(waiting)
            raise
        if admits:
            wait.turn("")
        if isinstance(result, Exception):
            raise result
        if result == NOTHING:
            raise Backpressure("is full") if admits else NotReady("no rows became ready")
        return result

    async def ack(self, partition: LocalStream, grant: int, replica: int | None) -> None:
        partition.run(r.Ack(client=self.client, grant=grant, replica=replica))

    def soon(self, partition: LocalStream, request: r.StreamRequest) -> None:
        with suppress(DataplaneError):
            partition.run(msgspec.structs.replace(request, client=self.client))

    def run_soon(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        with suppress(DataplaneError):
            at_once(work())

    def give_back_soon(self, partition: LocalStream, grant: int) -> None:
        self.soon(partition, r.Nack(grant=grant, seen=False))

    def leave(self) -> None:
        for stream in self._streams():
            self.soon(stream, r.EndClient(ended=True))


class _KeptColumns:
    """Columns kept for a stream of this node until the append succeeds or fails."""

    def __init__(self, needed: NeededShards, ref: BatchRef) -> None:
        self._needed = needed
        self._ref = ref

    def taken(self) -> None:
        """Keep the columns: the append succeeded."""

    def release(self) -> None:
        self._needed.forget(self._ref)


class LocalStreams:
    """All streams of a node; see `interface.StreamService`."""

    def __init__(self, needed: NeededShards, clock: Clock) -> None:
        self._needed = needed
        self._clock = clock
        self.freed: Callable[[], None] = lambda: None
        """Called when a stream was dropped and its memory freed."""
        self.ending: Callable[[LocalStream], None] = lambda _: None
        """Called with a stream before it is dropped."""
        self._by_name: dict[str, LocalStream] = {}
        self._by_token: dict[bytes, LocalStream] = {}
        self._numbers = itertools.count(1)
        self._owners: dict[str, object] = {}  # by the name of the session

    def __len__(self) -> int:
        return len(self._by_name)

    def all(self) -> list[LocalStream]:
        return list(self._by_name.values())

    def now(self) -> float:
        """The time of the clock of the streams."""
        return self._clock()

    def session(self, owner: object) -> LocalSession:
        session = LocalSession(f"{next(self._numbers)}", lambda: list(self._by_token.values()))
        self._owners[session.client] = owner
        return session

    def label(self, client: str) -> str:
        return str(self._owners.get(client, ENDED))

    def forget(self, client: str) -> None:
        self._owners.pop(client, None)

    async def open(self, name: str, settings: StreamSettings | None) -> LocalStream:
        stream = self._by_name.get(name)
        if stream is None:
            if settings is None:
                raise Misuse(f"there is no stream {name!r}; name its tasks to make it")
            if settings.durable:
                raise Misuse(
                    f"the stream {name!r} can't be durable: the node has no data directory; start it with"
                    " --data-dir DIR or NodeConfig(data_dir=DIR)"
                )
            stream = self._by_name[name] = self._made(name, settings, secrets.token_hex(_MARK))
        elif settings is not None:
            stream.settings.check_same(name, settings)
        return stream

    def _made(self, name: str, settings: StreamSettings, mark: str) -> LocalStream:
        """A new stream that cannot be found by name yet. Raises LimitExceeded."""
        if len(self._by_token) >= MAX_STREAMS:
            raise LimitExceeded("so many streams", what="streams", asked=MAX_STREAMS + 1, limit=MAX_STREAMS)
        stream = LocalStream(name, settings, mark, self._needed, self._clock)
        self._by_token[stream.token] = stream
        return stream

    def find(self, token: bytes) -> LocalStream:
        stream = self._by_token.get(token)
        if stream is None:
            raise Closed("the stream was dropped")
        return stream

    def named(self, token: bytes) -> LocalStream | None:
        return self._by_token.get(token)

    def on(self, stream: LocalStream, work: Callable[[LocalStream], Awaitable[T]]) -> Awaitable[T]:
        return work(stream)

    async def drop(self, stream: LocalStream) -> None:
        self._drop(stream)

    def _drop(self, stream: LocalStream) -> None:
        self.ending(stream)
        del self._by_token[stream.token]
        if self._by_name.get(stream.name) is stream:
            del self._by_name[stream.name]
        stream.end()
        self.freed()

    async def take_lost(self, request: rm.TakeLostRows, stream: LocalStream, session: LocalSession) -> rm.LostRowsTaken:
        """Return no rows, since all columns of a local stream are on this node."""
        return rm.LostRowsTaken(request.id, stream.token, [])

    def report_again(self, reply: rm.LostRowsTaken) -> None:
        pass

    def figures(self, after: str | None = None, most: int = MAX_STREAMS) -> dict[str, Any]:
        names = sorted(name for name in self._by_name if after is None or name > after)[:most]
        return {name: labelled(self._by_name[name].figures(), self.label) for name in names}

    async def claim(
        self,
        partition: LocalStream,
        ref: BatchRef,
        copies: Iterable[bytes] = (),
        until: Deadline | None = None,
        *,
        rows: int = 0,
    ) -> ColumnClaim:
        self._needed.keep(ref, partition.owner)
        return _KeptColumns(self._needed, ref)

    def append(self, stream: LocalStream, asked: r.Append, shard: int, nbytes: int) -> r.AppendResult:
        """Append rows whose columns are all of `shard`, which has `nbytes` bytes of values and was just stored. Raises
        the error with which the stream refuses the rows. If the rows are refused or not new, no need of the shard is
        added."""
        self._needed.keep_stored(shard, nbytes, stream.owner)
        new = False
        try:
            found: r.AppendResult = stream.run(asked)
            new = found.new
        finally:
            if not new:
                self._needed.forget(asked.ref)
        return found

    # restoring

    async def prepare(self, name: str, settings: StreamSettings, mark: str) -> LocalStream:
        self._check_free(name)
        return self._made(name, settings, mark)

    async def publish(self, restored: LocalStream) -> None:
        self._check_free(restored.name)
        self._by_name[restored.name] = restored

    async def discard(self, restored: LocalStream) -> None:
        self._drop(restored)

    def _check_free(self, name: str) -> None:
        if name in self._by_name:
            raise Misuse(f"there is a stream {name!r} already; drop it first, or name another")

    def close(self) -> None:
        """Drop all streams, since the node stops."""
        for stream in list(self._by_token.values()):
            self._drop(stream)
