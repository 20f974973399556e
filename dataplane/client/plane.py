"""The plane: this process's handle to the system. The one implementation; `client.sync` only waits for it.

A put plans its columns (`batch.columns`), reserves room for all of them at once, writes each byte once, where it
stays, and seals. Columns of some size become shards of their own, so that one that nobody asks for is neither kept
in memory nor read back for another's sake; small ones share a shard. A payload that fits a message travels in it,
which saves a round trip.

What always holds: a put that fails or is cancelled leaves nothing behind; a get that fails or is cancelled holds
nothing; whatever was handed out stays valid when the plane is closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import numpy as np

from dataplane.batch.batch import Batch, Column, Piece
from dataplane.batch.columns import Job, Plan, PlannedColumn, plan
from dataplane.batch.field import Field, is_text
from dataplane.batch.layout import ShardLayout, checked
from dataplane.batch.ref import BatchRef
from dataplane.batch.rows import Rows
from dataplane.client import embedded
from dataplane.client.connection import Connection, Soon
from dataplane.client.draft import Draft, Spec
from dataplane.client.memory import HeldShard
from dataplane.config import NodeConfig
from dataplane.errors import Freed, Misuse, OwnerDied
from dataplane.observe.stats import Stats
from dataplane.wire import messages as m

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""The deadline, in seconds, of a put, get or draft that names none."""

_OWN_SHARD = 256 << 10
"""Bytes from which on a column becomes a shard of its own."""

_IN_LOOP = 1 << 20
"""Bytes up to which writing in the event loop takes less time than handing it to a thread."""

_PIECES, _LEAST_PIECE, _MOST_PIECE = 2, 8 << 20, 64 << 20
"""A put is copied in about so many pieces, of so many bytes. Few: large copies run past the caches, and joining ragged
rows takes the interpreter's lock between rows (in 8 MiB pieces 0.5 of a plain copy's rate, one a column 0.75)."""

_MANY_ROWS = 4096
"""Rows of Python objects from which on planning them takes so long that it is done in a thread."""


class AsyncPlane:
    """A connection to this host's node, and all that is done over it. Made by `connect`.

    To be used from the event loop that it was connected in. After a fork, the child connects anew.
    """

    def __init__(self, connection: Connection, node: embedded.EmbeddedNode | None = None) -> None:
        self._connection = connection
        self._node = node
        self._pool = ThreadPoolExecutor(1 + min(4, os.cpu_count() or 1), thread_name_prefix="dataplane-copy")
        self._closed = False
        if connection.welcome.prewarm:
            self._pool.submit(connection.prewarm)

    @property
    def address(self) -> str:
        """What other processes of this host connect to."""
        return self._connection.address

    def check(self) -> None:
        """Raises Closed, Forked or PeerUnavailable where this plane can not be used any more."""
        self._connection.check()

    def busy(self) -> bool:
        """Whether something is reserved, so that signs of life must go on while nobody calls."""
        return self._connection.beating

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child of the process that connected."""
        return self._connection.in_child

    # Putting

    async def put(
        self,
        columns: Any,
        *,
        scope: str | None = None,
        dedupe: Collection[str] = (),
        timeout: float = TIMEOUT_S,
    ) -> BatchRef:
        """Store columns of equal row count, and return a reference to them.

        columns: a mapping of names to values, a TensorDict, an Arrow table or record batch, or a Batch; what each
            kind of value becomes is said in `docs/concepts.md`.
        scope: a name under which to free it later, together with others.
        dedupe: names of columns of which equal rows are stored once.
        timeout: seconds to wait for room.

        Raises SchemaMismatch (the values are no columns), Backpressure (no room in time; says who holds it),
        LimitExceeded (more than the memory budget), PeerUnavailable. Cancelled, it leaves nothing behind.
        """
        self.check()
        scope, timeout = _scope(scope), _seconds(timeout)
        planned = await self._plan(columns, dedupe)
        if not planned.rows:
            return self._reference(planned, [(column, 0, 0) for column in planned.columns])
        groups = _grouped(planned.columns)
        if sum(column.nbytes for column in planned.columns) <= m.MAX_INLINE:
            shards = [await self._put_inline(groups[0], scope, timeout)]
        else:
            shards = await self._put_shared(groups, scope, timeout)
        placed = [(c, shard, i) for shard, group in zip(shards, groups, strict=True) for i, c in enumerate(group)]
        order = {column.name: i for i, column in enumerate(planned.columns)}
        return self._reference(planned, sorted(placed, key=lambda p: order[p[0].name]))

    async def _plan(self, columns: Any, dedupe: Collection[str]) -> Plan:
        many = isinstance(columns, Mapping) and any(
            isinstance(values, Sequence) and len(values) > _MANY_ROWS for values in columns.values()
        )
        if many or dedupe:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, functools.partial(plan, columns, dedupe=dedupe))
        return plan(columns)

    def _reference(self, planned: Plan, placed: list[tuple[PlannedColumn, int, int]]) -> BatchRef:
        columns = [(c.name, c.field, c.logical_nbytes, shard, ordinal) for c, shard, ordinal in placed]
        return BatchRef.of(self._connection.welcome.node, planned.rows, columns)

    async def _put_inline(self, group: Sequence[PlannedColumn], scope: str, timeout: float) -> int:
        payload = np.zeros(sum(column.nbytes for column in group), dtype=np.uint8)
        layout, jobs = _laid_out(group, payload)
        for job in jobs:
            job()
        request = m.Put(self._connection.next_id(), payload.tobytes(), layout, scope, timeout)
        return (await self._connection.request(request, m.Stored, timeout)).shard

    async def _put_shared(self, groups: Sequence[Sequence[PlannedColumn]], scope: str, timeout: float) -> list[int]:
        sizes = [sum(column.nbytes for column in group) for group in groups]
        reserved = await self._reserve(sizes, timeout)
        shards = [shard for shard, *_ in reserved.extents]
        try:
            piece = min(max(sum(sizes) // _PIECES, _LEAST_PIECE), _MOST_PIECE)
            layouts, jobs = [], []
            for group, size, (_, segment, offset, _) in zip(groups, sizes, reserved.extents, strict=True):
                memory = self._connection.segments[segment].mapping(writable=True).array(offset, size)
                layout, more = _laid_out(group, memory, piece)
                layouts.append(layout)
                jobs += more
            await self._run(jobs, sum(sizes))
            await self._seal(list(zip(shards, layouts, strict=True)), scope, timeout)
        except BaseException:
            self._connection.discard(shards)
            raise
        finally:
            self._connection.reserved(-1)
        return shards

    async def _reserve(self, sizes: list[int], timeout: float) -> m.Reserved:
        request = m.Reserve(self._connection.next_id(), sizes, timeout)
        reserved = await self._connection.request(request, m.Reserved, timeout)
        self._connection.reserved(+1)
        return reserved

    async def _seal(self, shards: list[tuple[int, bytes]], scope: str, timeout: float) -> None:
        await self._connection.request(m.Seal(self._connection.next_id(), shards, scope, False), m.Done, timeout)

    async def _run(self, jobs: Sequence[Job], nbytes: int) -> None:
        """Run the jobs; all that started has ended when this returns, raises or is cancelled."""
        if nbytes <= _IN_LOOP:
            for job in jobs:
                job()
            return
        running = [self._pool.submit(job) for job in jobs]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, running))
        except BaseException:
            await _stopped(running)  # they write into memory that is about to be given back
            raise

    async def draft(
        self, columns: Mapping[str, Spec], *, scope: str | None = None, timeout: float = TIMEOUT_S
    ) -> Draft:
        """Room in the shared memory for columns that the caller writes in place, and then seals.

        columns: what each is, by `dataplane.dense` or `dataplane.ragged`. Raises as `put`, and SchemaMismatch where the
        row counts differ.
        """
        self.check()
        return await Draft.open(self._connection, columns, _scope(scope), _seconds(timeout))

    # Getting

    async def get(self, ref: BatchRef, *, timeout: float = TIMEOUT_S) -> Batch:
        """The rows and columns that the reference means, in place where they lie in one run.

        Reads back what is on disk. timeout: seconds to wait for room for that. Raises Freed, OwnerDied, Corrupt,
        Backpressure, LimitExceeded (more at once than the memory budget), PeerUnavailable.
        """
        self.check()
        timeout = _seconds(timeout)
        keys = _reference(ref).shards()
        node = self._connection.welcome.node
        for owner, shard in keys:
            if owner != node:
                raise OwnerDied(
                    f"shard {shard} was put on node {owner.hex()}, and this is node {node.hex()};"
                    " either that node was stopped, or the reference is another host's",
                    node=owner.hex(),
                )
        held: dict[int, tuple[HeldShard, ShardLayout]] = {}
        if keys:
            numbers = [shard for _, shard in keys]
            reply = await self._connection.request(m.Pin(self._connection.next_id(), numbers, timeout), m.Held, timeout)
            try:
                layouts = {number: checked(layout, size) for number, _, _, size, layout, _ in reply.shards}
                live = {number: bits for number, _, _, _, _, bits in reply.shards if bits}
                if live:
                    _check_live(ref, live, layouts)
            except BaseException:
                self._connection.tell(m.Unpin(numbers))  # at once, and not when the error and its frames go
                raise
            for number, segment, offset, size, _, _ in reply.shards:
                pin = self._connection.pins.hold(number)
                held[number] = HeldShard(self._connection.segments[segment], offset, size, pin), layouts[number]
        return Batch({name: _column(ref, name, field, held) for name, field in ref.schema.items()})

    # Freeing

    async def free(self, ref: BatchRef | None = None, *, scope: str | None = None) -> None:
        """Free the rows and columns that a reference means, or everything put under a scope.

        Views of them that exist stay valid. Memory goes back when the last column of the last row of a shard is freed
        and the last view of it dropped. Freeing what is gone already does nothing.
        """
        self.check()
        if (ref is None) == (scope is None):
            raise Misuse("free takes a reference or a scope, and one of them")
        scope = _scope(scope)
        node = self._connection.welcome.node
        parts = [
            (shard, list(ordinals), rows.encode())
            for (owner, shard), selected in (_reference(ref).footprint() if ref is not None else {}).items()
            if owner == node  # what another node held went with it
            for ordinals, rows in selected
        ]
        if parts or scope:
            request = m.Free(self._connection.next_id(), [], parts, scope)
            await self._connection.request(request, m.Done, 0.0)

    async def stats(self) -> Stats:
        """The node's figures now."""
        self.check()
        reply = await self._connection.request(m.Stats(self._connection.next_id()), m.Figures, 0.0)
        return Stats.of(reply.values)

    # The end

    async def aclose(self) -> None:
        """Close the plane. Idempotent. Views stay valid; a node that this plane started ends once nobody uses it."""
        if self._closed:
            return
        self._closed = True
        self._connection.refuse()
        self._pool.shutdown(wait=True)  # it writes into memory that goes to others when the connection ends
        self._connection.close()
        if self._node is not None:
            await self._node.retire(wait=not self._connection.pins.live)

    async def __aenter__(self) -> AsyncPlane:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self._connection.in_child:
            warnings.warn(f"the plane at {self.address} was not closed", ResourceWarning, stacklevel=2, source=self)


def _scope(scope: Any) -> str:
    """The scope as it is sent; empty for none."""
    if scope is not None and not is_text(scope):
        raise Misuse(f"a scope is a name as text, not {scope!r}")
    return scope or ""


def _seconds(timeout: Any) -> float:
    """A timeout as it is sent: what is below zero has passed already."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.number) or math.isnan(timeout):
        raise Misuse(f"a timeout is seconds, not {timeout!r}")
    return max(0.0, float(timeout))


def _reference(ref: Any) -> BatchRef:
    if not isinstance(ref, BatchRef):
        raise Misuse(f"what was put is named by a BatchRef, not {type(ref).__name__}: pass what put() returned")
    return ref


async def _stopped(running: Sequence[Future[None]]) -> None:
    """Cancel what has not started, and wait for what has, even if this is cancelled meanwhile."""
    for future in running:
        future.cancel()
    # Futures of our own: cancelling those that were waited for before has marked them done, and stopped no thread.
    left = [asyncio.wrap_future(future) for future in running if not future.done()]
    while left:
        with suppress(asyncio.CancelledError):
            await asyncio.wait(left)
        left = [future for future in left if not future.done()]


def _grouped(columns: Sequence[PlannedColumn]) -> list[list[PlannedColumn]]:
    """The columns by shard: the small ones together, each larger one by itself."""
    small = [column for column in columns if column.nbytes < _OWN_SHARD]
    large = [[column] for column in columns if column.nbytes >= _OWN_SHARD]
    return [small, *large] if small else large


def _laid_out(group: Sequence[PlannedColumn], memory: Any, piece: int = _LEAST_PIECE) -> tuple[bytes, list[Job]]:
    """The encoded layout of columns one after another in `memory`, and the jobs that write them there, each of about
    `piece` bytes."""
    layouts, jobs, base = [], [], 0
    for column in group:
        layouts.append((column.name, column.layout(base)))
        jobs += column.jobs(memory[base : base + column.nbytes], piece)
        base += column.nbytes
    return ShardLayout(tuple(layouts)).encode(), jobs


def _column(ref: BatchRef, name: str, field: Field, held: Mapping[int, tuple[HeldShard, ShardLayout]]) -> Column:
    sources, order = ref.sources(name)
    pieces = []
    for source in sources:
        memory, layout = held[source.shard]
        if source.ordinal >= len(layout.columns):
            raise Misuse(f"the reference means column {source.ordinal} of a shard that has {len(layout.columns)}")
        pieces.append(Piece(layout.columns[source.ordinal][1], memory, source.rows))
    return Column(name, field, pieces, order)


def _check_live(ref: BatchRef, live: Mapping[int, bytes], layouts: Mapping[int, ShardLayout]) -> None:
    """Raises Freed where a row that the reference means was freed by itself."""
    for (_, shard), selected in ref.footprint().items():
        if shard not in live:
            continue
        columns = layouts[shard].columns
        rows = columns[0][1].rows
        bits = np.unpackbits(np.frombuffer(live[shard], dtype=np.uint8), count=len(columns) * rows)
        alive = bits.reshape(len(columns), rows).astype(np.bool_)
        for ordinals, chosen in selected:
            _check_rows(alive, ordinals, chosen, shard)


def _check_rows(alive: Any, ordinals: Sequence[int], chosen: Rows, shard: int) -> None:
    for ordinal in ordinals:
        gone = np.flatnonzero(~alive[ordinal, chosen.slice or chosen.array()])
        if len(gone):
            row = int(chosen.array()[gone[0]])
            raise Freed(f"row {row} of shard {shard} was freed, and {len(gone) - 1} more", shard=shard)


class Connecting(AbstractAsyncContextManager[AsyncPlane]):
    """A plane that is being connected: `await` it, or enter it with `async with`."""

    def __init__(
        self, address: str | None, config: NodeConfig | None, *, writes: bool = True, soon: Soon | None = None
    ) -> None:
        self._address = address
        self._config = config
        self._writes = writes
        self._soon = soon
        self._plane: AsyncPlane | None = None

    def __await__(self) -> Generator[Any, None, AsyncPlane]:
        return self._connect().__await__()

    async def _connect(self) -> AsyncPlane:
        soon = self._soon or asyncio.get_running_loop().call_soon_threadsafe
        address, node = self._address, None
        if address is None:
            address, node = await asyncio.to_thread(embedded.find_or_start, self._config)
        if node is None and self._config is not None:
            log.warning("the node at %s was started by others and keeps its own settings: config is not used", address)
        try:
            return AsyncPlane(await Connection.open(str(address), soon, writes=self._writes), node)
        except BaseException:
            if node is not None:
                await node.retire()
            raise

    async def __aenter__(self) -> AsyncPlane:
        self._plane = await self._connect()
        return self._plane

    async def __aexit__(self, *_: object) -> None:
        if self._plane is not None:
            await self._plane.aclose()


def connect(address: str | None = None, *, config: NodeConfig | None = None) -> Connecting:
    """Attach to the node at `address`, at $DATAPLANE_ADDRESS, or at one started for this process and its children.

    config: the settings of a node that is started. Without an address, a process that gives them gets a node of its
        own, even if it started another before; a node that others started keeps its own settings.

    Raises PeerUnavailable, Unauthenticated, ProtocolMismatch; ValueError for what is no address.
    """
    return Connecting(address, config)
