"""A host's shards: reserved, written, sealed, pinned and freed, in bounded memory.

The store owns the budget, the arena, the pins and the disk. Its parts, most of which callers use directly: `shards`,
`reservations`, `residency` (moves between memory and disk), `persistence` (durable shards), `client_shards` (shards
that clients keep), `row_owners`, `holders`. Invariants:

- a reservation belongs to one client, is invisible to all others, and is given back when it is aborted, when its client
  ends, or when its client sends no heartbeat for the lease;
- a sealed shard's bytes stay where a pin found them until the last pin is dropped, even if it is freed meanwhile;
- the budget counts every extent: reserved, sealed, pinned, being read or written;
- a row with several owners stays until the last has freed it (`store.links`); only an owner frees its share;
- a read of several shards is admitted as one, and only the first waiting read holds memory, so that two readers cannot
  each hold the memory that the other needs.

Used from one event loop alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from dataplane.batch.layout import aligned
from dataplane.batch.layout_check import check_layout
from dataplane.batch.locations import link_of, shard_of
from dataplane.batch.rows import RowIndices
from dataplane.clock import Clock, Deadline, monotonic
from dataplane.closing import close_each
from dataplane.config import NodeConfig, format_size
from dataplane.errors import Backpressure, Corrupt, DataplaneError, LimitExceeded, ProtocolMismatch
from dataplane.store.arena import OWN, Arena, Extent
from dataplane.store.budget import Budget, BudgetStatistics, Purpose
from dataplane.store.client_shards import ClientShard, ClientShards
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.holders import MemoryHolders
from dataplane.store.links import Selected
from dataplane.store.live_cells import LiveBlock, LiveCells
from dataplane.store.persistence import Persistence
from dataplane.store.pins import Pins
from dataplane.store.reservations import Reservations, inline, laid_out
from dataplane.store.residency import Residency
from dataplane.store.row_owners import RowOwners
from dataplane.store.shard import Backing, Shard, check_cost
from dataplane.store.shards import Shards
from dataplane.store.small_extents import MOST, SmallExtents
from dataplane.store.spill import Disk, DiskStatistics
from dataplane.store.stored import StoredBytes

_extent_of = attrgetter("extent")


class Pinned(NamedTuple):
    """The location of a pinned shard's bytes, and its live cells (None: all)."""

    shard: int
    extent: Extent
    layout: bytes
    cells: LiveCells | None


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Statistics of the store. Bytes, except the counts `shards` and `spilled_shards`."""

    budget: BudgetStatistics
    resident: int
    disk: DiskStatistics
    shards: int
    spilled_shards: int
    pinned: int
    reserved: int
    put: int
    freed: int
    peak: int
    holders: tuple[dict[str, Any], ...]


class Store:
    """The shards of one node."""

    def __init__(self, config: NodeConfig, *, directory: DataDirectory | None = None, clock: Clock = monotonic) -> None:
        """`directory`: holds durable shards, and is closed with the store. Without one no shard can be durable."""
        self._config = config
        self.shards = shards = Shards(clock)
        self._stored = stored = StoredBytes(
            config.memory_bytes, lambda: self.disk.room, shards.rooms, broken=lambda: bool(self.disk.error)
        )
        self.budget = Budget(
            config.memory_bytes,
            stored=stored,
            on_demand=lambda: self.residency.wake_up(),
            explain=lambda full: self.holders.explain(full),
            clock=clock,
        )
        self.arena = arena = Arena(config.memory_bytes)
        self.disk = disk = Disk(config.spill_path, config.spill_bytes, compression=config.compression)
        self.pins = pins = Pins()
        self._small = small = SmallExtents(arena, OWN)
        self.residency = Residency(config, self.budget, stored, arena, small, disk, pins, shards)
        """Must `run` for anything to be spilled."""
        self.first = 1 if directory is None else directory.first
        """The least number of a shard that is stored by this process."""
        self._numbers = itertools.count(self.first)
        self.persistence: Persistence | None = None
        """Durable shards, if there is a directory for them."""
        if directory is not None:
            self.persistence = Persistence(
                directory, arena, self.residency, shards, self._numbers, self.pin, self.unpin
            )
        self.reservations = Reservations(
            self.budget, arena, shards.rooms, self._numbers, config.reservation_lease_s, clock
        )
        """The memory that clients may write."""
        self.client_shards = ClientShards(shards, pins)
        """Shards whose bytes clients keep."""
        self.owners = RowOwners(shards, self.free)
        """The owners of rows with several."""
        self.holders = MemoryHolders(shards, pins, self.reservations, self.client_shards, self.residency, disk, clock)
        self._prewarmed: Hashable | None = None  # the client that pages were made ready for
        self._admission = asyncio.Lock()
        self._put_bytes = 0
        self._freed_bytes = 0
        self.freed: Callable[[int, Sequence[int], RowIndices | None], None] = lambda number, columns, rows: None
        """Called with a shard, or a link to one, of which some columns of some rows were freed; without rows, all."""

    # Writing

    def seal(
        self, client: Hashable, sealed: Sequence[tuple[int, bytes]], *, scope: str, holder: str, hold: bool = False
    ) -> None:
        """Turn the client's reservations, given as (shard, encoded layout), into visible shards, all or none.

        `hold`: also pin the shards for the client, so that their bytes stay where it wrote them.

        Raises LeaseExpired if a reservation was revoked, ProtocolMismatch if one is not the client's or is given twice,
        Corrupt or LimitExceeded for an invalid layout. Then no shard is added, and the reservations are given back.
        """
        try:
            made = [self.reservations.sealed(client, number, layout, scope, holder) for number, layout in sealed]
            if len({number for number, _ in sealed}) < len(sealed):
                raise ProtocolMismatch("one reservation, sealed twice at once")
        except BaseException:
            self.reservations.abort(client, [number for number, _ in sealed])
            raise
        for shard in made:
            self.reservations.taken(client, shard.number)
            if hold:
                self.pins.add_all(client, [shard.number])
            self._add(shard)

    def _add(self, shard: Shard) -> int:
        self.shards.add(shard)
        self._stored.add(shard)
        self._put_bytes += shard.size
        self.residency.used(shard)
        return shard.number

    def put_now(
        self, client: Hashable, payload: bytes, layout: bytes, *, scope: str, holder: str, purpose: Purpose = "put"
    ) -> int | None:
        """Store a shard whose bytes came in a message. Returns its number, or None if it has to wait for memory.
        Raises Corrupt or LimitExceeded for an invalid layout or size, Backpressure if the system refuses a segment."""
        shard = inline(payload, layout, scope, holder)
        room = 0 if shard.size <= MOST and self._small.fits(shard.size) else shard.room
        if not (self.budget.try_reserve if room else self.budget.admits)(shard.room, purpose, shard.room):
            return None  # on disk, each takes whole pages
        return self._place(client, shard, payload, room)

    async def put(
        self,
        client: Hashable,
        payload: bytes,
        layout: bytes,
        deadline: Deadline,
        *,
        scope: str,
        holder: str,
        purpose: Purpose = "put",
    ) -> int:
        """Store a shard as `put_now` does, and wait for memory until the deadline. Returns its number. Raises as
        `put_now`, and Backpressure at the deadline. After an error or a cancellation nothing is stored."""
        shard = inline(payload, layout, scope, holder)
        await self.budget.reserve(shard.room, deadline, purpose)
        return self._place(client, shard, payload, shard.room)

    def _place(self, client: Hashable, shard: Shard, payload: bytes, given: int) -> int:
        """Write the shard into the arena and return its new number. `given`: the bytes reserved for it, of which the
        unused ones are released. Raises Backpressure if the system refuses a segment; then all are released."""
        before, shared = self.arena.used, shard.size <= MOST
        try:
            extent = self._small.take(shard.size) if shared else self.arena.allocate(OWN, shard.room)
        except OSError as error:
            self.budget.release(given)
            raise Backpressure(f"the node can not make a segment: {error.strerror}", needed=shard.room) from None
        self.arena.write(extent, payload.ljust(extent.size, b"\0"))
        spare = given - (self.arena.used - before)
        if spare:
            self.budget.release(spare)
        shard.number, shard.extent, shard.shared = next(self._numbers), extent, shared
        self.reservations.touch(client)
        return self._add(shard)

    def adopt(
        self,
        size: int,
        rows: int,
        columns: int,
        layout: bytes,
        live: Sequence[LiveBlock],
        payload: bytes,
        backing: Backing,
        *,
        holder: str,
    ) -> int:
        """Add a shard whose bytes `backing` reads when the shard is pinned. Returns its number here. `payload`: the
        shard's bytes, kept if memory is free; ignored if they are not `size` bytes. Raises ProtocolMismatch if the
        layout cannot be decoded, Corrupt or LimitExceeded for an invalid layout, description or payload."""
        described = check_layout(layout, size)
        check_cost(described, layout, size)
        if aligned(size) != size or (rows, columns) != (described.rows, len(described.outline.columns)):
            raise Corrupt("a shard that is described falsely")
        shard = Shard(next(self._numbers), size, rows, columns, layout, holder, "", 0, None, backing)
        if live:
            try:
                shard.live = LiveCells.of(live, columns, rows)
            except ValueError:
                raise Corrupt("a shard that is described falsely") from None
        if payload and len(payload) == size:
            described.check_contents(np.frombuffer(payload, np.uint8))
            if self.budget.try_reserve(shard.room):
                self.residency.fill(shard, payload)
        self.shards.add(shard)
        return shard.number

    def keep(
        self,
        client: Hashable,
        size: int,
        layout: bytes,
        handle: bytes,
        *,
        scope: str,
        holder: str,
        tell: Callable[[int, bool], None],
    ) -> int:
        """Add a shard whose bytes stay in the client's memory; other processes map it by `handle`. Returns its number.
        `tell(number, land)` asks the client to copy the bytes to the arena if `land`, else to drop its memory.
        Raises Corrupt or LimitExceeded for an invalid layout."""
        laid = laid_out(layout, size)
        number, held = next(self._numbers), next(self._numbers)
        kept = ClientShard(client, handle, held, lambda land: tell(number, land))
        shard = Shard(number, size, laid.rows, len(laid.outline.columns), layout, holder, scope, 0, None, kept)
        self.client_shards.add(kept)
        self.shards.add(shard)
        return number

    def land(self, client: Hashable, number: int, reserved: int) -> None:
        """Move a kept shard to the reservation into which its client has copied the bytes. If the shard was freed, only
        give the reservation back. Raises the errors of `seal`; then the shard stays kept, and may be landed again."""
        found = self.client_shards.of(client, number)
        if found is None:
            self.reservations.abort(client, [reserved])
            return
        shard, kept = found
        try:
            made = self.reservations.sealed(client, reserved, shard.layout, "", shard.holder)
        except DataplaneError as error:
            self.reservations.abort(client, [reserved])
            kept.landed(error)
            raise
        self.reservations.taken(client, reserved)
        self.shards.rooms.remove(shard.room)
        shard.extent, shard.size, shard.file, shard.moving = made.extent, made.size, None, None
        self.shards.rooms.add(shard.room)
        self._stored.add(shard)
        self._put_bytes += shard.size
        self.residency.used(shard)
        kept.landed()
        self.client_shards.end(kept)

    # Reading

    def pin_now(self, client: Hashable, numbers: Sequence[int]) -> list[Pinned] | None:
        """Pin the shards if all are in memory; else return None. Raises Freed, or the `damage` of a shard."""
        shards = self.shards.find_all(numbers)
        if not all(map(_extent_of, shards)):
            return None
        self.pins.add_all(client, numbers)
        return _pinned(shards)

    async def pin(self, client: Hashable, numbers: Sequence[int], deadline: Deadline) -> list[Pinned]:
        """Pin the shards for the client, all or none, and read back those on disk. Returns their locations.

        Raises Freed for a shard that is gone, its `damage` for an unreadable one, LimitExceeded if all exceed the
        memory budget, Backpressure at the deadline or if a read was refused. Then, and when cancelled, no pin is added.
        """
        total = sum(shard.room for shard in {number: self.shards.find(number) for number in numbers}.values())
        if total > self.budget.capacity:
            raise LimitExceeded(
                f"{format_size(total)} to be read at once is more than the memory budget of"
                f" {format_size(self.budget.capacity)}; get fewer rows or columns at a time",
                what="memory",
                asked=total,
                limit=self.budget.capacity,
            )
        shards: list[Shard] = []
        try:
            async with asyncio.timeout(deadline.remaining_s):
                for shard in map(self.shards.find, numbers):
                    if shard.extent is None and isinstance(shard.file, ClientShard):
                        await shard.file.land()
                async with self._admission:  # a waiter for it holds nothing
                    shards = self.shards.find_all(numbers)
                    self.pins.add_all(client, numbers)
                    await self.residency.restore(shards, deadline)
                for shard in shards:
                    if shard.extent is None and shard.moving is not None:
                        await asyncio.shield(shard.moving)
            for shard in shards:
                if shard.extent is None and shard.file is not None and shard.damage is None:
                    raise self.budget.backpressure(total, deadline)  # it could not be read just now
                if shard.extent is None:
                    raise (shard.damage or self.shards.freeings.error(shard.number)).with_traceback(None)
            return _pinned(shards)
        except BaseException as error:
            roomy = all(s.extent is not None or s.moving is not None for s in shards) and not self.budget.restoring
            self.unpin(client, [shard.number for shard in shards])
            if isinstance(error, TimeoutError):
                raise (_slow if roomy else self.budget.backpressure)(total, deadline) from None
            raise

    def payload(self, number: int, most: int) -> bytes:
        """Return a shard's bytes if it is in memory and has at most `most`, else b"". Raises Freed or its `damage`."""
        shard = self.shards.find(number)
        if shard.extent is None or shard.size > most:
            return b""
        return self.arena.read(shard.extent)[: shard.size]

    def unpin(self, client: Hashable, numbers: Iterable[int]) -> None:
        """Drop one pin of the client on each shard. Missing pins are ignored."""
        self._unheld(self.pins.drop_all(client, numbers))

    def _unheld(self, numbers: Iterable[int]) -> None:
        used: list[Shard] = []
        kept = bool(self.client_shards)
        for number in numbers:
            if kept and self.client_shards.unpinned(number):
                continue
            freed = self.shards.freed.pop(number, None) if self.shards.freed else None
            if freed is None:
                shard = self.shards[number]
                if shard.unpunched:
                    self.residency.punch(shard, range(shard.columns), RowIndices.range(0, shard.rows))
                used.append(shard)
            elif freed.moving is None:
                self.residency.discard(freed)
        self.residency.used_all(used)

    # Freeing

    def free(self, numbers: Iterable[int]) -> None:
        """Free whole shards, or all cells of a link. Numbers freed before are ignored, so a retry is harmless."""
        for number in numbers:
            shard = self.shards.get(shard_of(number))
            if shard is None:
                continue
            if shard.links is not None:
                if not link_of(number):
                    self.shards.unscope([number])
                self._release(shard, number, None, punch=True)
            elif not link_of(number):
                self._discard(shard)
            else:
                continue
            self.freed(number, (), None)

    def _discard(self, shard: Shard) -> None:
        self.shards.freeings.note(shard.number, shard.scope)
        self.shards.unscope([shard.number])
        self.shards.remove(shard)
        shard.freed = True
        if isinstance(shard.file, ClientShard):
            self.client_shards.end(shard.file)
        self.owners.forget(shard)
        if shard.ours:
            self._freed_bytes += shard.size
        if self.pins.holds(shard.number):
            self.shards.freed[shard.number] = shard
            self.residency.freed(shard)
        elif shard.moving is None:
            self.residency.discard(shard)

    def free_part(self, number: int, columns: Sequence[int], rows: RowIndices, *, punch: bool = False) -> None:
        """Free these columns of these rows of a shard or link. Remove the shard with its last cell. A number that was
        freed before is ignored. Raises IndexError if the shard has no such column or row.

        `punch`: return the pages of the freed values to the host, at once or when the last pin is dropped. Leave it
        out for shards that are soon freed as a whole, such as those of streams: the next put reuses their warm pages.
        """
        shard = self.shards.get(shard_of(number))
        if shard is None:
            return
        if shard.links is not None:
            shard.check_part(columns, rows)
            self._release(shard, number, [(columns, rows)], punch=punch)
        elif link_of(number):
            return
        elif shard.free_part(columns, rows):
            self._discard(shard)
            self.freed(number, (), None)
            return
        elif punch:
            self.residency.punch(shard, columns, rows)
        self.freed(number, columns, rows)

    def _release(self, shard: Shard, number: int, selected: Selected | None, *, punch: bool) -> None:
        """Free cells (None: all) of the owner `number`. Remove those from the shard that have no other owner."""
        died = self.owners.release(shard, number, selected)
        for column, rows in died:
            if shard.free_part([column], rows):
                self._discard(shard)
                return
        for column, rows in died if punch else ():
            self.residency.punch(shard, [column], rows)

    # Clients

    def prewarm(self, client: Hashable) -> tuple[int | None, int]:
        """Choose a segment for the client to prefault. Returns the segment's number, and the bytes to prefault at its
        start. One client at a time gets a segment, because others may never write their pages. Returns (None, 0) for
        other clients, if prewarming is off, and if the system refuses."""
        if not self._config.prewarm_bytes or self._prewarmed is not None:
            return None, 0
        try:
            segment, nbytes = self.arena.prewarm(client, self._config.prewarm_bytes)
        except OSError:  # the put raises it
            return None, 0
        self._prewarmed = client
        return segment.number, nbytes

    def leave(self, client: Hashable) -> None:
        """Release the pins and reservations of a client that has gone. Its segments close, each with its last shard."""
        self.reservations.leave(client)
        self.client_shards.lose(client)
        self._unheld(self.pins.drop_client(client))
        self.arena.depart(client)
        if self._prewarmed is client:
            self._prewarmed = None

    # Statistics

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            budget=self.budget.statistics(),
            resident=self.arena.resident,
            disk=self.disk.statistics(),
            shards=len(self.shards),
            spilled_shards=sum(s.extent is None and s.file is not None and s.ours for s in self.shards.values()),
            pinned=sum(
                self.shards.held(number).held for number in self.pins.shards() if number not in self.client_shards
            ),
            reserved=sum(nbytes for _, nbytes in self.reservations),
            put=self._put_bytes,
            freed=self._freed_bytes,
            peak=self.budget.peak,
            holders=self.holders.all(),
        )

    async def aclose(self) -> None:
        """Wait for the disk, then return everything to the host. The store cannot be used afterwards."""
        persistent = [] if self.persistence is None else [self.persistence.aclose]
        await close_each(self.residency.aclose, *persistent, self.abandon)

    def abandon(self) -> None:
        """Return everything to the host, without waiting for operations in progress or a hanging disk. Idempotent."""
        self.disk.close()
        if self.persistence is not None:
            self.persistence.close()
        self.arena.close()


def _pinned(shards: Iterable[Shard]) -> list[Pinned]:
    return [Pinned(s.number, s.extent, s.layout, s.live) for s in shards if s.extent is not None]


def _slow(nbytes: int, deadline: Deadline) -> Backpressure:
    return Backpressure(
        f"{format_size(nbytes)} are still being read from disk after {deadline.waited_s:.1f} s;"
        " wait longer, or get less at a time",
        needed=nbytes,
        waited_s=deadline.waited_s,
    )
