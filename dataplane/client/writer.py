"""Writing columns into the node's memory.

A put plans its columns (`batch.columns`), reserves room for all of them at once, writes each byte once, where it
stays, and seals. Columns of some size become shards of their own, so that one that nobody asks for is neither kept
in memory nor read back for another's sake; small ones share a shard. A payload that fits a message travels in it,
which saves a round trip.

What always holds: a write that fails or is cancelled leaves nothing behind, and no thread that still writes. What is
on a device is read after all that the caller's streams had to do there; the loop waits for none of that.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from dataplane.batch import form, tensors
from dataplane.batch.columns import Job, Plan, PlannedColumn, plan
from dataplane.batch.ref import BatchRef
from dataplane.client.connection import Connection
from dataplane.device import ordering
from dataplane.threads import stopped, together
from dataplane.wire import messages as m

T = TypeVar("T")

_OWN_SHARD = 256 << 10
"""Bytes from which on a column becomes a shard of its own."""

_IN_LOOP = 1 << 20
"""Bytes up to which writing in the event loop takes less time than handing it to a thread."""

_PIECES, _LEAST_PIECE, _MOST_PIECE = 4, 8 << 20, 32 << 20
"""A put is copied in about so many pieces, of so many bytes: enough for the threads to share the work evenly."""

_MANY_ROWS = 4096
"""Rows of Python objects from which on planning them takes so long that it is done in a thread."""


Placed = tuple[PlannedColumn, int, int]
"""A column, its shard, and its place in that."""

Keep = Callable[[Sequence[PlannedColumn]], Awaitable[list[Placed]]]
"""Keeps those of the columns that are to be kept; what it has placed."""


class Writer:
    """Writes over one connection, copying in the threads of `pool`. To be used from its loop alone."""

    def __init__(self, connection: Connection, pool: Executor) -> None:
        self._connection = connection
        self._pool = pool

    async def in_thread(self, nbytes: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of work on so many bytes: done in a thread if they are many, which has ended when this returns,
        raises or is cancelled."""
        if nbytes <= _IN_LOOP:
            return work(*arguments)
        running = self._pool.submit(work, *arguments)
        try:
            return await asyncio.wrap_future(running)
        except BaseException:
            await stopped([running])
            raise

    def each(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """As `map`, by the calling thread and those that are idle."""
        return together(self._pool, work, items)

    async def plan(self, columns: Any, dedupe: Collection[str]) -> Plan:
        """The columns, ready to be written. Raises SchemaMismatch."""
        many = isinstance(columns, Mapping) and any(
            isinstance(values, Sequence) and len(values) > _MANY_ROWS for values in columns.values()
        )
        if many or dedupe or _on_device(columns):
            planning = functools.partial(_planned, columns, dedupe, self.each, ordering.noted())
            return await asyncio.get_running_loop().run_in_executor(self._pool, planning)
        return _planned(columns, dedupe, self.each, ordering.noted())

    async def write(self, planned: Plan, scope: str, timeout: float, keep: Keep | None = None) -> BatchRef:
        """Write the planned columns, under the scope if it has a name; those that `keep` keeps are left to that. Raises
        as `AsyncPlane.put`."""
        if not planned.rows:
            return self._reference(planned, [(column, 0, 0) for column in planned.columns])
        kept = [] if keep is None else await keep(planned.columns)
        names = {column.name for column, *_ in kept}
        rest = [column for column in planned.columns if column.name not in names]
        groups = _grouped(rest)
        try:
            if not rest:
                shards = []
            elif sum(column.nbytes for column in rest) <= m.MAX_INLINE:
                shards = [await self._put_inline(groups[0], scope, timeout, planned.on_device)]
            else:
                shards = await self._put_shared(groups, scope, timeout, planned.on_device)
        except BaseException:
            if kept:
                self._connection.tell(m.Free(self._connection.next_id(), [shard for _, shard, _ in kept], [], ""))
            raise
        placed = [(c, shard, i) for shard, group in zip(shards, groups, strict=True) for i, c in enumerate(group)]
        placed += kept
        order = {column.name: i for i, column in enumerate(planned.columns)}
        return self._reference(planned, sorted(placed, key=lambda p: order[p[0].name]))

    async def replicate(self, ref: BatchRef, replicas: int, timeout: float) -> list[bytes]:
        """Have what the reference means, of this node, on so many hosts in all; which other nodes. Raises LimitExceeded
        where there are fewer, Backpressure, PeerUnavailable."""
        node = self._connection.welcome.node
        shards = [number for owner, number in ref.shards() if owner == node]
        if not shards:
            return []
        asked = m.Replicate(self._connection.next_id(), shards, replicas, timeout)
        return (await self._connection.request(asked, m.Replicated, timeout)).nodes

    def _reference(self, planned: Plan, placed: list[tuple[PlannedColumn, int, int]]) -> BatchRef:
        columns = [(c.name, c.field, c.logical_nbytes, shard, ordinal) for c, shard, ordinal in placed]
        return BatchRef.of(self._connection.welcome.node, planned.rows, columns)

    def inline(self, planned: Plan) -> m.Inline | None:
        """The columns as they travel in a message with what is to become of them; None where they do not."""
        if planned.nbytes > m.MAX_INLINE or not planned.rows or self._connection.welcome.minor < 1 or planned.on_device:
            return None
        sizes = [column.logical_nbytes for column in planned.columns]
        return m.Inline(_payload(planned.columns), _layout_of(planned.columns), sizes)

    async def _put_inline(self, group: Sequence[PlannedColumn], scope: str, timeout: float, device: bool) -> int:
        payload = await self.in_thread(_IN_LOOP + 1 if device else 0, _payload, group)
        request = m.Put(self._connection.next_id(), payload, _layout_of(group), scope, timeout)
        return (await self._connection.request(request, m.Stored, timeout)).shard

    async def _put_shared(
        self, groups: Sequence[Sequence[PlannedColumn]], scope: str, timeout: float, device: bool
    ) -> list[int]:
        sizes = [sum(column.nbytes for column in group) for group in groups]
        reserved = await self.reserve(sizes, timeout)
        shards = [shard for shard, *_ in reserved.extents]
        try:
            piece = min(max(sum(sizes) // _PIECES, _LEAST_PIECE), _MOST_PIECE)
            layouts, jobs = [], []
            for group, size, (_, segment, offset, _) in zip(groups, sizes, reserved.extents, strict=True):
                memory = self._connection.segments[segment].mapping(writable=True).array(offset, size)
                layout, more = _laid_out(group, memory, piece)
                layouts.append(layout)
                jobs += more
            await self.run(jobs, _IN_LOOP + 1 if device else sum(sizes))
            await self._seal(list(zip(shards, layouts, strict=True)), scope, timeout)
        except BaseException:
            self._connection.discard(shards)
            raise
        finally:
            self._connection.reserved(-1)
        return shards

    async def reserve(self, sizes: list[int], timeout: float) -> m.Reserved:
        """Room for shards of these sizes. Raises as `AsyncPlane.put`."""
        request = m.Reserve(self._connection.next_id(), sizes, timeout)
        reserved = await self._connection.request(request, m.Reserved, timeout)
        self._connection.reserved(+1)
        return reserved

    async def _seal(self, shards: list[tuple[int, bytes]], scope: str, timeout: float) -> None:
        await self._connection.request(m.Seal(self._connection.next_id(), shards, scope, False), m.Done, timeout)

    async def run(self, jobs: Sequence[Job], nbytes: int = _IN_LOOP + 1) -> None:
        """Run the jobs; all that started has ended when this returns, raises or is cancelled."""
        if nbytes <= _IN_LOOP:
            for job in jobs:
                job()
            return
        running = [self._pool.submit(job) for job in jobs]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, running))
        except BaseException:
            await stopped(running)  # they write into memory that is about to be given back
            raise


def _on_device(columns: Any) -> bool:
    """Whether a tensor on a device is seen among them. Within the dicts of rows none is: then planning waits for it."""
    values = columns.values() if isinstance(columns, Mapping) else ()
    return any(map(tensors.on_device, values)) or getattr(getattr(columns, "device", None), "type", "cpu") != "cpu"


def _planned(columns: Any, dedupe: Collection[str], each: Any, streams: Sequence[Any]) -> Plan:
    with ordering.as_called(streams):
        return plan(columns, dedupe=dedupe, each=each)


def _grouped(columns: Sequence[PlannedColumn]) -> list[list[PlannedColumn]]:
    """The columns by shard: the small ones together, each larger one by itself."""
    small = [column for column in columns if column.nbytes < _OWN_SHARD]
    large = [[column] for column in columns if column.nbytes >= _OWN_SHARD]
    return [small, *large] if small else large


def _laid_out(group: Sequence[PlannedColumn], memory: Any, piece: int = _LEAST_PIECE) -> tuple[bytes, list[Job]]:
    """The encoded layout of columns one after another in `memory`, and the jobs that write them there, each of about
    `piece` bytes."""
    jobs, base = [], 0
    for column in group:
        jobs += column.jobs(memory[base : base + column.nbytes], piece)
        base += column.nbytes
    return _layout_of(group), jobs


def _payload(group: Sequence[PlannedColumn]) -> bytes:
    """The bytes of columns one after another."""
    return b"".join([run for column in group for run in column.payload()])


def _layout_of(group: Sequence[PlannedColumn]) -> bytes:
    """The encoded layout of columns one after another."""
    numbers: list[int] = []
    columns, base = [], 0
    for column in group:
        columns.append((column.name, column.form(base, numbers)))
        base += column.nbytes
    return form.join(columns, numbers)
