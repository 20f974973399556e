"""Writes columns into the node's memory.

A put plans its columns (`batch.put_plan`), reserves memory for all of them at once, writes each byte once, at its final
place, and seals the shards. A large column is a separate shard, so that it is kept in memory or restored only if it is
read. Small columns share a shard. A payload that fits a message is sent in it, which saves a round trip.

Invariants: a write that fails or is cancelled leaves nothing stored, and no thread still writes. Values on a device are
read after the work that the caller's CUDA streams had queued. The event loop does not wait for that work.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np

from dataplane.batch import put_options, tensors
from dataplane.batch.layout import ALIGNMENT, Bytes
from dataplane.batch.locations import ref_to, ref_to_shard
from dataplane.batch.put_options import Narrow, Objects
from dataplane.batch.put_plan import Job, PlannedColumn, PutPlan, layout_of, plan
from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import SmallColumns, laid_out
from dataplane.client.connection import Connection, Exchange
from dataplane.client.ownership import discard, unstage
from dataplane.device import ordering
from dataplane.observe.ring import CODE
from dataplane.store.budget import Purpose
from dataplane.threads import stopped, together
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

T = TypeVar("T")

_OWN_SHARD = 256 << 10
"""The least bytes of a column that is a separate shard."""

_IN_LOOP = 2 << 20
"""The most bytes that are written in the event loop. Below, handing the work to a thread takes longer."""

_PIECES, _LEAST_PIECE, _MOST_PIECE = 4, 8 << 20, 32 << 20
"""The approximate number of pieces in which a put is copied, and the least and most bytes of a piece. Several pieces
let threads share the work evenly."""

_MANY_ROWS = 4096
"""The number of rows of Python objects above which a put is planned in a thread."""


Placed = tuple[PlannedColumn, int, int]
"""A column, its shard, and its ordinal in the shard."""


class ShardWriter:
    """The writes of one connection. Copies in the threads of `pool`. Used from the connection's event loop only."""

    def __init__(self, connection: Connection, pool: Executor) -> None:
        self._connection = connection
        self._pool = pool
        self._staging, self._staged = f"{rm.STAGED}{secrets.token_hex(8)}", itertools.count(1)

    async def in_thread(self, nbytes: int, work: Callable[..., T], *arguments: Any) -> T:
        """Do work on this number of bytes, in a thread if they are more than `_IN_LOOP`. Returns its result. The work
        has ended when this returns, raises or is cancelled."""
        if nbytes <= _IN_LOOP:
            return work(*arguments)
        (result,) = await self.run([functools.partial(work, *arguments)])
        return result

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Run the work in a thread. Raises Closed."""
        try:
            return self._pool.submit(work)
        except OSError:
            self._connection.check()
            raise

    def each(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """As `map`, in the calling thread and idle threads of the pool. Returns a list."""
        return together(self._pool, work, items)

    async def plan(self, columns: Any, dedupe: Collection[str]) -> PutPlan:
        """The columns, ready to be written. Raises SchemaMismatch."""
        many = isinstance(columns, Mapping) and any(
            isinstance(values, Sequence) and len(values) > _MANY_ROWS for values in columns.values()
        )
        work = functools.partial(plan, columns, dedupe=dedupe, each=self.each)
        return await self._prepared(work, in_thread=bool(many or dedupe) or _on_device(columns))

    async def optioned(self, columns: Any, narrow: Narrow, objects: Objects = "store") -> Any:
        """Apply the options `narrow` and `objects` of a put to columns or a reference. Returns the columns with
        narrowed integers. Raises SchemaMismatch, also for a column of objects if they are refused; Misuse."""
        refused = objects != "store" and put_options.refuses(objects)
        if not refused and not narrow:
            return columns

        def work() -> Any:
            found = put_options.without_objects(columns) if refused else columns
            return put_options.narrowed(found, narrow, self.each) if narrow else found

        return await self._prepared(work, in_thread=_on_device(columns) or _nbytes_of(columns) > _IN_LOOP)

    async def _prepared(self, work: Callable[[], T], *, in_thread: bool) -> T:
        """Do work on columns, after the work queued on the caller's CUDA streams. Returns its result."""
        streams = ordering.noted()
        if not in_thread and not streams:
            return work()

        def ordered() -> T:
            with ordering.as_called(streams) if streams else nullcontext():
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._pool, ordered) if in_thread else ordered()

    async def write(
        self, planned: PutPlan, scope: str, timeout: float, kept: Sequence[Placed] = (), purpose: Purpose = "put"
    ) -> BatchRef:
        """Write the planned columns, under the scope if it is not empty. Returns a reference to all columns. `kept`:
        columns that are stored already, and are freed if the write fails. Raises as `AsyncPlane.put`."""
        if not planned.rows:
            return self._reference(planned, [(column, 0, 0) for column in planned.columns])
        names = {column.name for column, *_ in kept}
        rest = [column for column in planned.columns if column.name not in names]
        groups = _grouped(planned.rows, rest)
        try:
            if not rest:
                shards = []
            elif sum(group.nbytes for group in groups) <= sm.MAX_INLINE:
                shards = [await self._put_inline(groups[0], scope, timeout, purpose)]
            else:
                shards = await self._put_shared(groups, scope, timeout, purpose)
        except BaseException:
            if kept:
                self._connection.tell(sm.Free(self._connection.next_id(), [shard for _, shard, _ in kept]))
            raise
        placed = [
            (c, shard, i) for shard, group in zip(shards, groups, strict=True) for i, c in enumerate(group.columns)
        ]
        placed += kept
        order = {column.name: i for i, column in enumerate(planned.columns)}
        return self._reference(planned, sorted(placed, key=lambda p: order[p[0].name]))

    @asynccontextmanager
    async def staged(
        self, planned: PutPlan, timeout: float, purpose: Purpose = "put"
    ) -> AsyncIterator[tuple[str, BatchRef]]:
        """Write columns that a stream or table is to own by the end of the block. Yields their scope, and a reference.
        They are freed if the block raises, or if this process dies within it. Raises as `write`."""
        scope = f"{self._staging}-{next(self._staged)}"
        try:
            yield scope, await self.write(planned, scope, timeout, purpose=purpose)
        except BaseException:
            unstage(self._connection, scope)
            raise

    async def replicate(self, ref: BatchRef, replicas: int, timeout: float, *, staged: bool = False) -> list[bytes]:
        """Store each shard of the reference on `replicas` hosts. `staged`: for a stream that is to take it. Returns
        the nodes that then have all shards. Raises LimitExceeded if this node is in no cluster, Backpressure, Freed,
        OwnerDied, PeerUnavailable."""
        asked = sm.ReplicateShards(self._connection.next_id(), list(ref.shards()), replicas, timeout, staged)
        return (await self._connection.request(asked, sm.ShardsReplicated, timeout)).nodes

    def _reference(self, planned: PutPlan, placed: list[tuple[PlannedColumn, int, int]]) -> BatchRef:
        columns = [(c.name, c.field, c.logical_nbytes, shard, ordinal) for c, shard, ordinal in placed]
        return ref_to(self._connection.welcome.node, planned.rows, columns)

    def inline(self, planned: PutPlan) -> rm.Inline | None:
        """The columns as they are sent in a message with another request; None if they do not fit."""
        if planned.nbytes > sm.MAX_INLINE or not planned.rows or planned.on_device:
            return None
        sizes = [column.logical_nbytes for column in planned.columns]
        return rm.Inline(_payload(planned.columns), layout_of(planned.columns), sizes)

    def put_exchange(self, columns: Any, scope: str, timeout: float) -> Exchange[Any, BatchRef] | None:
        """A put of simple columns that share a shard: one request, or two (reserve and seal) if they do not fit a
        message. None for other columns."""
        laid = laid_out(columns, _IN_LOOP)
        if laid is None:
            return None
        if laid.nbytes > sm.MAX_INLINE:
            largest = max([nbytes for *_, nbytes in laid.columns]) + 8 * laid.rows  # with its offsets
            if largest >= _OWN_SHARD - 2 * ALIGNMENT:
                return None
            reserve = sm.Reserve(self._connection.next_id(), [laid.nbytes], timeout)
            finish = functools.partial(self._written, laid, scope)
            return Exchange(self._connection, reserve, sm.Reserved, timeout, finish)
        request = sm.PutShard(self._connection.next_id(), laid.payload, laid.layout, scope, timeout)
        return Exchange(
            self._connection, request, sm.ShardStored, timeout, lambda reply: self._meant(laid, reply.shard)
        )

    def _meant(self, laid: SmallColumns, shard: int) -> BatchRef:
        """The reference to an entire shard."""
        sizes = [nbytes for *_, nbytes in laid.columns]
        return ref_to_shard(self._connection.welcome.node, laid.rows, laid.named, sizes, shard)

    def _written(self, laid: SmallColumns, scope: str, reserved: sm.Reserved) -> Exchange[m.Done, BatchRef]:
        """Write the columns into the reserved shard. Returns the exchange that seals it."""
        connection = self._connection
        ((shard, segment, offset, _),) = reserved.extents

        def undo() -> None:
            discard(connection, [shard])
            connection.heartbeat.due(-1)

        def finish(reply: m.Done) -> BatchRef:
            connection.heartbeat.due(-1)
            return self._meant(laid, shard)

        connection.heartbeat.due(+1)
        try:
            laid.write(connection.segments[segment].mapping(writable=True).array(offset, laid.nbytes))
        except BaseException:
            undo()
            raise
        seal = sm.SealShards(connection.next_id(), [(shard, laid.layout)], scope, False)
        return Exchange(connection, seal, m.Done, 0.0, finish, undo=undo)

    async def _put_inline(self, group: PutPlan, scope: str, timeout: float, purpose: Purpose) -> int:
        payload = await self.in_thread(_IN_LOOP + 1 if group.on_device else 0, _payload, group.columns)
        request = sm.PutShard(self._connection.next_id(), payload, layout_of(group.columns), scope, timeout, purpose)
        return (await self._connection.request(request, sm.ShardStored, timeout)).shard

    async def _put_shared(self, groups: Sequence[PutPlan], scope: str, timeout: float, purpose: Purpose) -> list[int]:
        nbytes = sum(group.nbytes for group in groups)
        began = time.monotonic_ns()
        async with self.reserved([group.nbytes for group in groups], timeout, purpose) as places:
            piece = min(max(nbytes // _PIECES, _LEAST_PIECE), _MOST_PIECE)
            jobs: list[Job] = []
            for group, (_, memory) in zip(groups, places, strict=True):
                if group.on_device or nbytes > _IN_LOOP:
                    jobs += group.jobs(memory, piece)
                elif group.nbytes:
                    np.concatenate(_runs(group.columns), out=memory)
            if jobs:
                await self.run(jobs)
            sealed = [(shard, layout_of(g.columns)) for (shard, _), g in zip(places, groups, strict=True)]
            await self.seal(sealed, scope, timeout)
            if self._connection.events is not None:
                self._connection.events.record(CODE["put"], began, nbytes)
        return [shard for shard, _ in places]

    @asynccontextmanager
    async def reserved(
        self, sizes: list[int], timeout: float, purpose: Purpose = "put"
    ) -> AsyncIterator[list[tuple[int, Bytes]]]:
        """Reserve shards of these sizes in bytes, to be written and sealed in the block. Yields the number and the
        memory of each. They are released if the block raises. Raises as `AsyncPlane.put`."""
        connection = self._connection
        request = sm.Reserve(connection.next_id(), sizes, timeout, purpose)
        reserved = await connection.request(request, sm.Reserved, timeout)
        connection.heartbeat.due(+1)
        try:
            yield [
                (shard, connection.segments[segment].mapping(writable=True).array(offset, size))
                for size, (shard, segment, offset, _) in zip(sizes, reserved.extents, strict=True)
            ]
        except BaseException:
            discard(connection, [shard for shard, *_ in reserved.extents])
            raise
        finally:
            connection.heartbeat.due(-1)

    async def seal(self, shards: list[tuple[int, bytes]], scope: str, timeout: float) -> None:
        """Make these shards, each with its encoded layout, immutable and visible under the scope."""
        await self._connection.request(sm.SealShards(self._connection.next_id(), shards, scope, False), m.Done, timeout)

    async def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run the jobs in threads. Returns their results. All jobs that were started have ended when this returns,
        raises or is cancelled."""
        running: list[Future[T]] = []
        try:
            running.extend(map(self._submit, jobs))
            return await asyncio.gather(*map(asyncio.wrap_future, running))
        except BaseException:
            await stopped(running)  # the jobs write into memory that is then released
            raise


def _on_device(columns: Any) -> bool:
    """Whether a column is a tensor on a device. Tensors within dicts of rows are not found; planning then waits for the
    device in the event loop."""
    values = columns.values() if isinstance(columns, Mapping) else ()
    return any(map(tensors.on_device, values)) or getattr(getattr(columns, "device", None), "type", "cpu") != "cpu"


def _nbytes_of(columns: Any) -> int:
    """The approximate bytes of the values; a large number if they are not known without a scan."""
    values = columns.values() if isinstance(columns, Mapping) else ()
    sizes = [getattr(each, "nbytes", None) for each in values]
    return sum(size for size in sizes if isinstance(size, int)) if sizes and None not in sizes else _IN_LOOP + 1


def _grouped(rows: int, columns: Sequence[PlannedColumn]) -> list[PutPlan]:
    """The columns by shard: the small ones together, each larger one by itself."""
    small = tuple([column for column in columns if column.nbytes < _OWN_SHARD])
    large = [PutPlan(rows, (column,)) for column in columns if column.nbytes >= _OWN_SHARD]
    return [PutPlan(rows, small), *large] if small else large


def _runs(group: Sequence[PlannedColumn]) -> list[Any]:
    return [run for column in group for run in column.payload()]


def _payload(group: Sequence[PlannedColumn]) -> bytes:
    return b"".join(_runs(group))
