"""Gathers rows of one process into blocks and appends each block at once, for agents that append a row at a time.

`send` accepts rows and returns at once. Blocks are appended one after another, in the order in which their rows were
sent. A block is appended when it is full, or `max_delay` seconds after its first row or, if that is later, after the
answer to the previous block. If a block is refused or finds no room, half of its calls are tried, down to a single
call, which waits for room. Any other error, such as the loss of the node, is the error of all calls that are left.

Invariants: once a block is done, each of its calls has its keys or an error, or was withdrawn. Rows of a call are
appended once or not at all. The caller may change the arrays after `send`. At most `_BLOCKS` blocks are pending;
further calls wait. Any thread may send; all else runs in the event loop.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dataplane.batch import row_batcher
from dataplane.batch.put_options import Narrow
from dataplane.batch.put_plan import check_counts, columns_of
from dataplane.batch.ref import BatchRef
from dataplane.batch.row_batcher import RowMemory, RowSchema
from dataplane.batch.values import Values
from dataplane.client import arguments
from dataplane.clock import Deadline
from dataplane.errors import (
    Backpressure,
    Closed,
    DataplaneError,
    Forked,
    LimitExceeded,
    Misuse,
    Retryable,
    SchemaMismatch,
)
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream

_BLOCKS = 8  # the most pending blocks, including the one that is being appended
_BLOCK_BYTES = 4 << 20  # the bytes at which a block is full
TIMEOUT_S = 60.0
"""The default timeout of an append or extend, in seconds."""

_FORMS = 64  # the most row layouts that are cached
_MOST_UNSEEN = 1024  # the most failed calls that are kept for `flush`, which raises the first error

_NONE: list[Any] = []  # shared by all calls without metadata, to save the garbage collector an object for each
_UNTAGGED: dict[str, Any] = {}


class Kind(NamedTuple):
    """The properties that all calls of a block share. `gathered`: whether their rows are copied into the block's memory
    as they are sent."""

    form: RowSchema
    keyed: bool
    grouped: bool
    tags: tuple[str, ...]
    gathered: bool


@dataclass(slots=True, eq=False)
class Call:
    """The `count` rows of one `send`: in the block's memory from row `start` on if gathered, else in `columns`."""

    start: int
    count: int
    keys: list[str]
    groups: list[Any]
    versions: list[int]
    tags: dict[str, Any]
    columns: Sequence[Values] = ()
    withdrawn: bool = False
    """Whether the caller has cancelled the call."""
    done: bool = False
    """Whether the rows are in the stream."""
    asked: asyncio.Task[DataplaneError | None] | None = None  # the append of this call alone, while it runs
    error: BaseException | None = None


class Block:
    """Calls of one `Kind`, appended together. `gathered`: copies of all their rows; None if each keeps its columns."""

    def __init__(self, kind: Kind, gathered: RowMemory | None, deadline: Deadline, narrow: Narrow = False) -> None:
        self.kind = kind
        self._narrow = narrow
        self.bare = None if kind.keyed or kind.grouped or kind.tags or gathered is None else kind.form
        """The schema of its rows, if they are gathered and have no keys, groups or tags."""
        self.gathered = gathered
        self.calls: list[Call] = []
        self.rows = self.nbytes = 0
        self.full = False  # whether no more calls are added
        self.filled = asyncio.Event()
        self.done = asyncio.Event()
        self._deadline = deadline

    def _columns(self, calls: Sequence[Call]) -> Mapping[str, Values]:
        form, gathered = self.kind.form, self.gathered
        if gathered is None:
            return form.joined([call.columns for call in calls])
        start, stop = calls[0].start, calls[-1].start + calls[-1].count
        if stop - start == sum([call.count for call in calls]):
            return gathered.columns(start, stop)
        return form.joined([list(gathered.columns(c.start, c.start + c.count).values()) for c in calls])

    async def bring(self, stream: AsyncStream, unseen: dict[Call, None]) -> None:
        """Append all calls, as many at a time as find room. Each call then has its keys or an error. Calls with an
        error are added to `unseen`."""
        left, most = self.calls, len(self.calls)
        ended: DataplaneError = Closed("the appender was stopped")
        try:
            while left := [call for call in left if not call.withdrawn]:
                some = left[:most]
                error = await (self._together(some, stream) if len(some) > 1 else self._alone(some[0], stream))
                if error is None:
                    left, most = left[len(some) :], 2 * most
                elif not isinstance(error, Backpressure | LimitExceeded | Misuse) or isinstance(error, Closed | Forked):
                    ended = error
                    break
                elif len(some) > 1:  # some calls may fit, even if all together never do
                    most = len(some) // 2
                else:
                    some[0].error, left = error, left[1:]
        finally:
            for call in self.calls:
                if not call.done:
                    call.error = call.error or type(ended)(str(ended), **ended.fields)
                    if not call.withdrawn and len(unseen) < _MOST_UNSEEN:
                        unseen[call] = None
                call.columns = ()  # frees the values: the caller may keep `Sent` for long
            self.done.set()

    async def _alone(self, call: Call, stream: AsyncStream) -> DataplaneError | None:
        call.asked = asyncio.get_running_loop().create_task(self._together([call], stream))
        try:
            await asyncio.wait([call.asked])
            return None if call.asked.cancelled() else call.asked.result()
        finally:
            call.asked.cancel()
            call.asked = None

    async def _together(self, calls: list[Call], stream: AsyncStream) -> DataplaneError | None:
        """Append the rows of these calls at once. Returns the error if the append fails. Several calls do not wait for
        room: some of them may fit, and consuming their rows may make room for the others."""
        first = calls[0]
        try:
            keys = await stream.writes.append_block(
                self._columns(calls),
                keys=[key for call in calls for key in call.keys] if first.keys else None,
                group=[group for call in calls for group in call.groups] if first.groups else None,
                version=[version for call in calls for version in call.versions],
                tags={name: [tag for call in calls for tag in call.tags[name]] for name in first.tags} or None,
                timeout=self._deadline.remaining_s if len(calls) == 1 else 0.0,
                narrow=self._narrow,
            )
        except DataplaneError as error:
            return error
        except OSError as error:  # no thread can be started
            return Retryable(f"these rows were not appended: {error}")
        start = 0
        for call in calls:
            call.keys = keys[start : start + call.count]
            call.done = True
            start += call.count
        return None


@dataclass(slots=True, eq=False, repr=False)
class Sent:
    """Rows that were sent. Awaiting it returns their keys once they are in the stream, or raises the append's error."""

    _block: Block
    _call: Call
    _unseen: dict[Call, None]

    @property
    def done(self) -> bool:
        """Whether the result is known."""
        return self._block.done.is_set()

    def keys(self) -> list[str]:
        """The keys of the rows, once it is `done`. Raises the append's error."""
        if self._call.error is not None:
            self._unseen.pop(self._call, None)
            raise self._call.error
        return self._call.keys

    async def wait(self) -> list[str]:
        """Wait for the keys of the rows. Raises the append's error."""
        await self._block.done.wait()
        return self.keys()

    def withdraw(self) -> None:
        """Do not append the rows, unless they were appended already."""
        self._call.withdrawn = True
        self._unseen.pop(self._call, None)
        if self._call.asked is not None:
            self._call.asked.cancel()

    def __await__(self) -> Generator[Any, None, list[str]]:
        return self.wait().__await__()


class AsyncAppender:
    """Gathers rows for a stream. Made by `stream.appender`. The end of its `with` block appends all sent rows."""

    def __init__(
        self,
        stream: AsyncStream,
        begin: Callable[[Coroutine[Any, Any, None]], object],
        soon: Callable[[Callable[[], object]], object],
        *,
        max_rows: int,
        max_delay: float,
        timeout: float | None,
        narrow: Narrow,
    ) -> None:
        """`begin` runs a coroutine in the event loop without waiting for it, `soon` runs a function there."""
        self._stream = stream
        self._begin = begin
        self._soon = soon
        self._max_rows = min(arguments.positive("max_rows", max_rows), rm.MAX_ROWS)
        self._max_delay_s = arguments.seconds(max_delay, what="max_delay")
        self._timeout_s = arguments.seconds(timeout, TIMEOUT_S)
        self._narrow = narrow
        self._lock = threading.Lock()
        self._blocks: deque[Block] = deque()  # the first is being appended, or waits for `max_delay`
        self._form: RowSchema | None = None  # the layout of the last rows
        self._forms: dict[Any, RowSchema] = {}
        self._spare: list[tuple[RowSchema, RowMemory]] = []  # memory of blocks that were appended
        self._unseen: dict[Call, None] = {}  # failed calls whose error was not raised yet
        self._room = asyncio.Event()
        self._running = self._closed = False
        stream._connection.appenders.add(self)

    def __repr__(self) -> str:
        return f"<appender of {self.pending} rows to stream {self._stream.name!r}>"

    @property
    def pending(self) -> int:
        """Rows that were sent and not answered."""
        with self._lock:
            return sum(block.rows for block in self._blocks)

    async def send(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
    ) -> Sent:
        """Accept rows, with arguments as for `stream.append`. Returns an object; awaiting it returns their keys. Waits
        if too many blocks are pending. Raises SchemaMismatch, Misuse, Closed. The stream's error is raised where the
        result is awaited, or else by the next `flush`."""
        while (sent := self.offer(columns, keys, group, version, tags)) is None:
            await self.room()
        return sent

    async def append(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Append rows in a block with those of concurrent calls. Returns their keys. Arguments and errors as for
        `stream.append`. Cancelling it ends only the wait; accepted rows are appended later."""
        sent = await self.send(columns, keys=keys, group=group, version=version, tags=tags)
        return await sent

    async def flush(self) -> None:
        """Append all accepted rows without further delay, and wait until they are in the stream. Raises the first error
        that was not raised to a caller yet; further errors are dropped."""
        with self._lock:
            block = self._blocks[-1] if self._blocks else None
            if block is not None:
                self._fill(block)
        if block is not None:
            await block.done.wait()
        unseen = list(self._unseen)
        self._unseen.clear()
        if unseen and unseen[0].error is not None:
            raise unseen[0].error

    async def aclose(self) -> None:
        """Accept no more rows, and `flush`. Idempotent."""
        self._closed = True
        await self.flush()

    async def __aenter__(self) -> AsyncAppender:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.aclose()
        else:
            with suppress(DataplaneError):  # the caller must see the error that left the block
                await self.aclose()

    # Shared by the asynchronous and the blocking appender

    def offer(self, columns: Any, keys: Any, group: Any, version: Any, tags: Any) -> Sent | None:
        """Validate rows and copy them into a block; None if there is no room. Any thread may call this. Raises
        SchemaMismatch, Misuse, Closed."""
        sent = self._gather(self._form, columns, keys, group, version, tags, sys.maxsize)
        if sent is not None or self._crowded():
            return sent
        pairs = _checked(columns)
        form = self.learn(pairs)
        sent = self._gather(form, columns, keys, group, version, tags, sys.maxsize)
        if sent is not None:
            return sent
        owned = [row_batcher.owned(values) for _, values in pairs]
        call = _called(0, owned[0].rows, keys, group, version, tags)
        call.columns = owned
        kind = Kind(form, bool(call.keys), bool(call.groups), tuple(call.tags), gathered=False)
        with self._lock:
            block = self._block(kind)
            return None if block is None else self._put(block, call, sum([values.nbytes for values in owned]))

    def offer_small(self, columns: Any, group: Any, version: Any, tags: Any) -> Sent | None:
        """As `offer`, for small columns of the layout that was learned last; None for any other columns."""
        return self._gather(self._form, columns, None, group, version, tags, sm.MAX_INLINE)

    def _gather(
        self, form: RowSchema | None, columns: Any, keys: Any, group: Any, version: Any, tags: Any, most: int
    ) -> Sent | None:
        """Add rows of this layout to the last block; None if there is no room, or if the rows have another layout or
        more than `most` bytes. Raises Misuse, Closed, Forked."""
        if self._stream._connection.in_child:  # checked before the lock, which a thread of the parent may have held
            self._stream._connection.check()
        if form is None or not form.simple or not (tags is None or type(tags) is dict):
            return None
        with self._lock:
            block = self._blocks[-1] if self._blocks and keys is None and group is None and not tags else None
            if block is None or block.full or block.bare is not form or self._closed:
                kind = Kind(form, keys is not None, group is not None, tuple(tags) if tags else (), gathered=True)
                block = self._block(kind)
            if block is None or block.gathered is None:
                return None
            gathered, start, before = block.gathered, block.gathered.rows, block.gathered.nbytes
            rows = gathered.take(columns, most)
            try:
                call = _called(start, rows, keys, group, version, tags) if rows else None
            except BaseException:
                gathered.cut(start)
                raise
            finally:
                if not block.rows and gathered.rows == start:
                    self._spare.append((form, gathered))
            return None if call is None else self._put(block, call, gathered.nbytes - before)

    def _crowded(self) -> bool:
        """Whether no block can take rows. `room` then waits until a block was answered."""
        with self._lock:
            crowded = len(self._blocks) >= _BLOCKS and self._blocks[-1].full
            if crowded:
                self._room.clear()
            return crowded

    def learn(self, pairs: Sequence[tuple[str, Values]]) -> RowSchema:
        """The layout of these columns. Further rows are expected to have the same layout."""
        kind = tuple([(name, values.field) for name, values in pairs])
        form = self._forms.get(kind)
        if form is None or form.alone:
            form = RowSchema(pairs)
            if len(self._forms) >= _FORMS:
                self._forms = {}
            self._forms[kind] = form
        self._form = form
        return form

    def _block(self, kind: Kind) -> Block | None:
        """The block for calls of this kind, a new one if needed; None if there is no room. The caller holds the lock.
        Raises Closed."""
        if self._closed:
            raise Closed("the appender is closed")
        block = self._blocks[-1] if self._blocks else None
        if block is not None and not block.full and block.kind == kind and not kind.form.alone:
            return block
        if len(self._blocks) >= _BLOCKS:
            self._room.clear()
            return None
        gathered = self._memory(kind.form) if kind.gathered else None
        return Block(kind, gathered, Deadline.after(self._timeout_s), self._narrow)

    def _memory(self, form: RowSchema) -> RowMemory | None:
        while self._spare:
            of, gathered = self._spare.pop()
            if of is form:
                return gathered
        return form.gathered()

    def _put(self, block: Block, call: Call, nbytes: int) -> Sent:
        """Put the call into the block, which may be new. Under the lock."""
        if not block.calls:
            if self._blocks:
                self._fill(self._blocks[-1])
            self._blocks.append(block)
        block.calls.append(call)
        block.rows += call.count
        block.nbytes += nbytes
        if block.rows >= self._max_rows or block.nbytes >= _BLOCK_BYTES:
            self._fill(block)
        begins, self._running = not self._running, True
        if begins:
            self._begin(self._run())
        return Sent(block, call, self._unseen)

    def _fill(self, block: Block) -> None:
        if not block.full:
            block.full = True
            self._soon(block.filled.set)

    async def room(self) -> None:
        """Wait until a block was answered."""
        await self._room.wait()

    async def _run(self) -> None:
        block: Block | None = None
        try:
            while (block := self._following(block)) is not None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(block.filled.wait(), self._max_delay_s)
                with self._lock:
                    block.full = True
                await block.bring(self._stream, self._unseen)
        finally:
            if block is not None:  # this task was cancelled, most likely at the end of the loop
                self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            blocks, self._blocks = list(self._blocks), deque()
        for block in blocks:
            for call in block.calls if not block.done.is_set() else ():
                call.error = Closed("the appender was stopped")
            block.done.set()
        self._room.set()

    def _following(self, done: Block | None) -> Block | None:
        """Remove the block that is done. Returns the next, or None if none is left: `send` restarts the task."""
        with self._lock:
            if done is not None:
                self._blocks.popleft()
                self._room.set()
                if done.gathered is not None:
                    done.gathered.cut(0)
                    self._spare.append((done.kind.form, done.gathered))
            if not self._blocks:
                self._running = False
                del self._spare[:-1]
                return None
            return self._blocks[0]


def _checked(columns: Any) -> list[tuple[str, Values]]:
    """The columns as values by name. Raises SchemaMismatch if their row counts differ or there are no rows; Misuse."""
    if isinstance(columns, BatchRef):
        raise Misuse("an appender takes rows themselves; append a reference by stream.append")
    pairs = list(columns_of(columns))
    if not pairs or not pairs[0][1].rows:
        raise SchemaMismatch("an append has at least one row", expected="rows", found="none")
    check_counts([(name, values.rows) for name, values in pairs])
    return pairs


@lru_cache(maxsize=256)
def _versions(version: int, rows: int) -> list[int]:
    """The versions of this number of rows; read-only. Raises Misuse."""
    return arguments.plain("version", version, rows, (int,))


def _called(start: int, rows: int, keys: Any, group: Any, version: Any, tags: Any) -> Call:
    """A call with this number of rows, and its metadata. Raises Misuse."""
    if keys is None and group is None and not tags and type(version) is int:
        return Call(start, rows, _NONE, _NONE, _versions(version, rows), _UNTAGGED)
    return Call(
        start,
        rows,
        arguments.keys_of(keys, rows) if keys is not None else [],
        arguments.plain("group", group, rows, arguments.GROUP_KINDS) if group is not None else [],
        arguments.plain("version", version, rows, (int,)),
        arguments.tagged(tags, rows) if tags is not None else {},
    )
