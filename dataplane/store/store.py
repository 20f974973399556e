"""A host's shards: reserved, written, sealed, pinned and freed, in bounded memory.

The store owns the budget, the arena, the pins and the disk. Its rooms: `reservations`, `inline_put` (shards that come
in a message), `residency` (moves between memory and disk), `persistence` (durable shards), `client_shards` (shards that
clients keep), `row_owners`, `hole_punching`, `descriptions`, `holders`, `scopes`.
Invariants:

- a reservation belongs to one client, is invisible to all others, and goes back when it is aborted, when its client
  goes, or when its client sends no heartbeat for the lease;
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
from typing import Any, NamedTuple, cast

import numpy as np

from dataplane.batch.rows import Rows
from dataplane.batch.shard_ids import link_of, shard_of
from dataplane.clock import Clock, Deadline, monotonic
from dataplane.config import NodeConfig, format_size
from dataplane.errors import Backpressure, Corrupt, DataplaneError, LimitExceeded, Misuse, ProtocolMismatch
from dataplane.store.arena import Arena, ArenaStatistics, Extent
from dataplane.store.backing import Backing
from dataplane.store.budget import Budget, BudgetStatistics, Holders
from dataplane.store.client_shards import ClientShard, ClientShards
from dataplane.store.descriptions import Descriptions, check_described
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.freeings import Freeings
from dataplane.store.holders import MemoryHolders
from dataplane.store.hole_punching import HolePunching
from dataplane.store.inline_put import InlinePuts, laid_out
from dataplane.store.links import Selected
from dataplane.store.live_cells import LiveCells
from dataplane.store.persistence import Persistence
from dataplane.store.pins import Pins
from dataplane.store.reservations import Reservations
from dataplane.store.residency import OWN, Residency
from dataplane.store.row_owners import RowOwners
from dataplane.store.scopes import Scopes
from dataplane.store.shard import Shard
from dataplane.store.small_extents import SmallExtents
from dataplane.store.spill import Disk, DiskStatistics
from dataplane.store.spill_file import OpenSpillFile, SpillFile

_extent_of, _damage_of = attrgetter("extent"), attrgetter("damage")


class Pinned(NamedTuple):
    """The location of a pinned shard's bytes, and its live cells (None: all)."""

    shard: int
    extent: Extent
    layout: bytes
    cells: LiveCells | None

    @property
    def live(self) -> bytes:
        """As `Shard.live_bits`."""
        return b"" if self.cells is None else self.cells.encode()


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Statistics of the store. Bytes, except the counts `shards` and `spilled_shards`."""

    budget: BudgetStatistics
    arena: ArenaStatistics
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
        """`directory`: of durable shards, owned by the store from now on. Without one, shards cannot be durable."""
        self._config = config
        self._clock = clock
        self.budget = Budget(
            config.memory_bytes, on_demand=lambda: self._residency.wake_up(), explain=self._explain, clock=clock
        )
        self.arena = Arena(config.memory_bytes)
        self.disk = Disk(config.spill_path, config.spill_bytes, compression=config.compression)
        self.pins = Pins()
        self._shards: dict[int, Shard] = {}
        self._small = SmallExtents(self.arena, OWN)
        self._residency = Residency(config, self.budget, self.arena, self._small, self.disk, self.pins, self._shards)
        self._scopes = Scopes()
        self.freeings = Freeings(clock)
        """The clients that freed shards lately, and the one that does now."""
        self.first = 1 if directory is None else directory.first
        """The least number of a shard that is stored by this process."""
        self._numbers = itertools.count(self.first)
        self.persistence: Persistence | None = None
        """Durable shards, if there is a directory for them."""
        if directory is not None:
            self.persistence = Persistence(
                directory, self.arena, self._residency, self._shards, self._find, self.pin, self.unpin
            )
        self._reservations = made = Reservations(
            self.budget, self.arena, self.following, config.reservation_lease_s, clock
        )
        self.lease_s = made.lease_s
        # The room's methods are the store's: a put calls no others on its way.
        self.reserve_now, self.reserve, self.abort = made.reserve_now, made.reserve, made.abort
        self.touch, self.silent = made.touch, made.silent
        self.revoke, self.revoke_silent = made.revoke, made.revoke_silent
        self._carried = InlinePuts(self.budget, self.arena, self._small, self.following)
        self._held_freed: dict[int, Shard] = {}
        self.client_shards = ClientShards(self._shards, self.pins, self._find)
        """Shards whose bytes clients keep."""
        self.owners = RowOwners(self._shards, self._find, self.free, self.freeings)
        """The owners of rows with several."""
        self.descriptions = Descriptions(self._find_all)
        self._holes = HolePunching(self.arena, self._residency, self.pins)
        self.holders = MemoryHolders(self._shards, self._any, self.pins, made, self.client_shards, clock)
        self._prewarmed: Hashable | None = None  # the client that pages were made ready for
        self._admission = asyncio.Lock()
        self._put_bytes = 0
        self._freed_bytes = 0
        self.freed: Callable[[int, Sequence[int], Rows | None], None] = lambda number, columns, rows: None
        """Called with a shard, or a link to one, of which some columns of some rows were freed; without rows, all."""

    def following(self) -> int:
        """A number that no shard has, higher than those of all shards now, and lower than those of all later ones."""
        return next(self._numbers)

    # Writing

    def seal(
        self, client: Hashable, sealed: Sequence[tuple[int, bytes]], *, scope: str, holder: str, hold: bool = False
    ) -> None:
        """Make the client's reservations (shard, encoded layout) visible, all or none, and read-only.

        With `hold` the client pins them at the same time, so that they stay where it wrote them.

        Raises LeaseExpired if one was taken back meanwhile, ProtocolMismatch or Corrupt for an invalid layout; then
        nothing is visible, and the reservations are gone.
        """
        try:
            made = [self._reservations.sealed(client, number, layout, scope, holder) for number, layout in sealed]
            if len({number for number, _ in sealed}) < len(sealed):
                raise ProtocolMismatch("one reservation, sealed twice at once")
        except BaseException:
            self.abort(client, [number for number, _ in sealed])
            raise
        for shard in made:
            self._reservations.taken(client, shard.number)
            if hold:
                self.pins.add(client, shard.number)
            self._add(shard)

    def _add(self, shard: Shard) -> None:
        shard.since_s = self._clock()
        self._shards[shard.number] = shard
        self._scopes.add(shard)
        self._put_bytes += shard.size
        self._residency.used(shard)

    def put_now(self, client: Hashable, payload: bytes, layout: bytes, *, scope: str, holder: str) -> int | None:
        """A shard whose bytes came in a message, or None if it would have to wait for room. Raises as `put`."""
        shard = self._carried.put_now(payload, layout, scope=scope, holder=holder)
        return None if shard is None else self._came(client, shard)

    async def put(
        self, client: Hashable, payload: bytes, layout: bytes, deadline: Deadline, *, scope: str, holder: str
    ) -> int:
        """As `put_now`, waiting until the deadline. Raises as `InlinePuts.put`."""
        return self._came(client, await self._carried.put(payload, layout, deadline, scope=scope, holder=holder))

    def _came(self, client: Hashable, shard: Shard) -> int:
        self.touch(client)
        self._add(shard)
        return shard.number

    def adopt(
        self,
        size: int,
        rows: int,
        columns: int,
        layout: bytes,
        live: bytes | LiveCells,
        payload: bytes,
        backing: Backing,
        *,
        holder: str,
    ) -> int:
        """A shard whose bytes are elsewhere, and are read when it is pinned. Returns its number here. `payload`: its
        bytes, if they have come already; they are kept if there is room. Its memory is taken before that of any
        other. Raises ProtocolMismatch, Corrupt or LimitExceeded for an invalid layout or payload."""
        described = check_described(size, rows, columns, layout)
        shard = Shard(next(self._numbers), size, rows, columns, layout, holder, "", 0, None, backing)
        shard.since_s = self._clock()
        if isinstance(live, LiveCells):
            shard.live = live
        elif live:
            try:
                shard.live = LiveCells.decode(live, columns, rows)
            except ValueError:
                raise Corrupt("a shard that is described falsely") from None
        if payload and len(payload) == size:
            described.check_contents(np.frombuffer(payload, np.uint8))
            if self.budget.try_reserve(shard.room):
                self._residency.fill(shard, payload)
        self._shards[shard.number] = shard
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
        """A shard whose bytes the client keeps, with the handle by which others map them. Returns its number.
        `tell(number, land)`: see `ClientShard`. Raises Corrupt or LimitExceeded for an invalid layout."""
        laid = laid_out(layout, size)
        number, held = self.following(), self.following()
        kept = ClientShard(client, handle, held, lambda land: tell(number, land))
        shard = Shard(number, size, laid.rows, len(laid.outline.columns), layout, holder, scope, 0, None, kept)
        shard.since_s = self._clock()
        self.client_shards.add(kept)
        self._shards[number] = shard
        self._scopes.add(shard)
        return number

    def land(self, client: Hashable, number: int, reserved: int) -> None:
        """The client has written the bytes of a kept shard into this reservation, which is now their location. A
        shard that was freed meanwhile is ignored. Raises as `seal`; then the shard is unchanged."""
        found = self.client_shards.of(client, number)
        if found is None:
            self.abort(client, [reserved])
            return
        shard, kept = found
        try:
            made = self._reservations.sealed(client, reserved, shard.layout, "", shard.holder)
        except DataplaneError as error:
            self.abort(client, [reserved])
            kept.landed(error)
            raise
        self._reservations.taken(client, reserved)
        shard.extent, shard.size, shard.file, shard.moving = made.extent, made.size, None, None
        self._put_bytes += shard.size
        self._residency.used(shard)
        kept.landed()
        self.client_shards.end(kept)

    def mend(self, number: int) -> bool:
        """Whether the shard exists. One that could not be read is tried again at its next use."""
        shard = self._shards.get(number)
        if shard is not None:
            shard.damage = None
        return shard is not None

    def coming(self, number: int) -> bool:
        """Whether the shard is in memory, or being read."""
        shard = self._find(number)
        return shard.extent is not None or shard.moving is not None

    def ready(self, number: int) -> bool:
        """Whether the shard is in memory, and can be pinned at once."""
        shard = self._shards.get(number)
        return shard is not None and shard.extent is not None and shard.damage is None

    # Reading

    def pin_now(self, client: Hashable, numbers: Sequence[int]) -> list[Pinned] | None:
        """As `pin`, or None if a shard has to be read from disk first."""
        shards = self._find_all(numbers)
        if not all(map(_extent_of, shards)):
            return None
        self.pins.add_all(client, numbers)
        return self._pinned(shards)

    async def pin(self, client: Hashable, numbers: Sequence[int], deadline: Deadline) -> list[Pinned]:
        """Hold the shards in memory for the client, all or none. Those on disk are read back.

        Raises Freed or Corrupt for a shard that is gone, LimitExceeded if they cannot all be in memory at once,
        Backpressure at the deadline. Then, and when cancelled, none is held.
        """
        total = sum(shard.room for shard in {number: self._find(number) for number in numbers}.values())
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
                for shard in map(self._find, numbers):
                    if shard.extent is None and isinstance(shard.file, ClientShard):
                        await shard.file.land()
                async with self._admission:  # a waiter for it holds nothing
                    shards = self._hold(client, numbers)
                    await self._residency.restore(shards, deadline)
                for shard in shards:
                    if shard.extent is None and shard.moving is not None:
                        await asyncio.shield(shard.moving)
            for shard in shards:
                if shard.extent is None and shard.file is not None and shard.damage is None:
                    raise self.budget.backpressure(total, deadline)  # it could not be read just now
                if shard.extent is None:
                    raise (shard.damage or self.freeings.error(shard.number)).with_traceback(None)
            return self._pinned(shards)
        except BaseException as error:
            roomy = all(s.extent is not None or s.moving is not None for s in shards) and not self.budget.restoring
            self.unpin(client, [shard.number for shard in shards])
            if isinstance(error, TimeoutError):
                raise (_slow if roomy else self.budget.backpressure)(total, deadline) from None
            raise

    def size(self, number: int) -> int:
        """The bytes of whole pages that a shard has, or would have by itself. Raises Freed or Corrupt as `pin`."""
        return self._find(number).room

    async def opened(self, number: int) -> OpenSpillFile | None:
        """The file of a shard that is on disk only, to be sent from there and closed by the caller; None if it is in
        memory, its file is compressed, or cannot be read. Raises Freed or Corrupt as `pin`."""
        shard = self._find(number)
        if shard.extent is not None or not isinstance(shard.file, SpillFile):
            return None
        return await self.disk.open(shard.file, shard.room)

    def peek(self, number: int, most: int) -> bytes:
        """The bytes of a shard in memory of at most `most` bytes; else none."""
        shard = self._find(number)
        if shard.extent is None or shard.size > most:
            return b""
        return self.arena.read(shard.extent)[: shard.size]

    async def persist(self, numbers: Iterable[int], deadline: Deadline, *, with_next: bool = False) -> None:
        """Return once these shards, or those of links, are durable: the next node on the directory has them under the
        same numbers, unless they were freed. Concurrent calls share a sync. `with_next`: only their bytes are on disk
        then, and the rest will be before any later write of the directory's journal: a command that names the shards
        costs no further sync.

        Raises Freed or Corrupt as `pin`, Backpressure at the deadline if the disk is full or slow, DirectoryUnusable
        if it refuses, Misuse for shards that were not put here or without a directory. Cancelled, or late, they may
        become durable later.
        """
        await self._persisting.persist(numbers, deadline, with_next=with_next)

    async def recover(self) -> list[int]:
        """Adopt the shards in the data directory that earlier processes of this node stored and did not free. The
        caller frees those that it does not need. To be called once, before the first put. Raises Corrupt."""
        return await self._persisting.recover()

    def tend(self) -> None:
        """Do regular work: reserve shard numbers."""
        if self.persistence is not None:
            self.persistence.durable.tend(self.following())

    @property
    def _persisting(self) -> Persistence:
        if self.persistence is None:
            raise Misuse("nothing is durable without a data directory: start the node with --data-dir DIR")
        return self.persistence

    def carry(self, client: Hashable, pinned: Sequence[Pinned], most: int) -> bytes:
        """The bytes of shards that the client holds, one after another, and one hold less on each; none, and nothing
        done, if they are more than `most`."""
        if len(pinned) > most >> 6 or sum([each.extent.size for each in pinned]) > most:
            return b""
        found = [self.arena.read(each.extent) for each in pinned]
        self.unpin(client, [each.shard for each in pinned])
        return b"".join(found)

    def _hold(self, client: Hashable, numbers: Sequence[int]) -> list[Shard]:
        shards = [self._find(number) for number in numbers]
        for shard in shards:
            self.pins.add(client, shard.number)
        return shards

    def _pinned(self, shards: Iterable[Shard]) -> list[Pinned]:
        return [Pinned(s.number, s.extent, s.layout, s.live) for s in shards if s.extent is not None]

    def _find(self, number: int) -> Shard:
        shard = self._shards.get(number)
        if shard is None:
            raise self.freeings.error(number)
        if shard.damage is not None:
            raise shard.damage.with_traceback(None)  # it is raised again for each caller
        return shard

    def _find_all(self, numbers: Sequence[int]) -> list[Shard]:
        """As `_find`, for all of these: in a few passes that create no object for each shard."""
        found = list(map(self._shards.get, numbers))
        if not all(found) or any(map(_damage_of, found)):
            return [self._find(number) for number in numbers]
        return cast("list[Shard]", found)

    def unpin(self, client: Hashable, numbers: Iterable[int]) -> None:
        """Drop one hold of the client on each shard. Missing holds are ignored."""
        self._unheld(self.pins.drop_all(client, numbers))

    def _unheld(self, numbers: Iterable[int]) -> None:
        used: list[Shard] = []
        kept = bool(self.client_shards)
        for number in numbers:
            if kept and self.client_shards.unpinned(number):
                continue
            freed = self._held_freed.pop(number, None) if self._held_freed else None
            if freed is None:
                shard = self._shards[number]
                self._holes.unpinned(shard)
                used.append(shard)
            elif freed.moving is None:
                self._residency.discard(freed)
        self._residency.used_all(used)

    # Freeing

    def free(self, numbers: Iterable[int]) -> None:
        """Free whole shards, or all cells of a link. Freed ones are ignored, so a retry is harmless."""
        for number in numbers:
            shard = self._shards.get(shard_of(number))
            if shard is None:
                continue
            if shard.links is not None:
                if not link_of(number):
                    self.unscope([number])
                self._release(shard, number, None, punch=True)
            elif not link_of(number):
                self._discard(shard)
            else:
                continue
            self.freed(number, (), None)

    def _discard(self, shard: Shard) -> None:
        """Remove a shard without owners."""
        self.freeings.note(shard.number, shard.scope)
        self.unscope([shard.number])
        del self._shards[shard.number]
        self._holes.forget(shard)
        shard.freed = True
        if isinstance(shard.file, ClientShard):
            self.client_shards.end(shard.file)
        self.owners.forget(shard)
        if shard.ours:
            self._freed_bytes += shard.size
        if self.pins.holds(shard.number):
            self._held_freed[shard.number] = shard
        elif shard.moving is None:
            self._residency.discard(shard)

    def free_part(self, number: int, columns: Sequence[int], rows: Rows, *, punch: bool = False) -> None:
        """Free these columns of these rows of a shard, or of a link; the shard is removed with its last cell. Raises as
        `Shard.free_part`.

        punch: return the memory of their values now, or as soon as the shard is not held. For rows of a shard that
        is soon freed as a whole, as those of streams, that would only take warm pages from the next put.
        """
        shard = self._shards.get(shard_of(number))
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
            self._holes.freed(shard, columns, rows)
        self.freed(number, columns, rows)

    def check_part(self, number: int, columns: Sequence[int], rows: Rows) -> None:
        """Raises as `free_part`, and frees nothing."""
        shard = self._shards.get(shard_of(number))
        if shard is not None:
            shard.check_part(columns, rows)

    def _release(self, shard: Shard, number: int, selected: Selected | None, *, punch: bool) -> None:
        """One owner frees cells; those without another owner are removed."""
        died = self.owners.release(shard, number, selected)
        for column, rows in died:
            if shard.free_part([column], rows):
                self._discard(shard)
                return
        for column, rows in died if punch else ():
            self._holes.freed(shard, [column], rows)

    def put_by(self, number: int) -> tuple[str, str] | None:
        """The client that put the shard, and its scope, or the client that created the link, which has none; None if
        it is gone."""
        shard = self._shards.get(shard_of(number))
        if shard is None:
            return None
        if not link_of(number):
            return shard.holder, shard.scope
        holder = None if shard.links is None else shard.links.holder(link_of(number))
        return None if holder is None else (holder, "")

    def attribute(self, number: int, owner: str) -> None:
        """Set the stream or table whose rows need the shard (empty: none), for `holders`."""
        shard = self._shards.get(shard_of(number))
        if shard is not None:
            shard.owner = owner

    def unscope(self, numbers: Iterable[int]) -> None:
        """Take these shards out of their scopes. Freed ones are ignored."""
        for number in numbers:
            shard = self._shards.get(number)
            if shard is not None:
                self._scopes.remove(shard)

    def scope(self, scope: str) -> list[int]:
        """The shards that were put under the scope and not freed."""
        return self._scopes[scope]

    def free_scope(self, scope: str) -> None:
        """Free every shard that was put under the scope. An unknown scope has none."""
        self.free(self.scope(scope))

    # Clients

    def prewarm(self, client: Hashable) -> tuple[int | None, int]:
        """A segment for the first client, and the number of bytes at its start to prefault. After that client has gone,
        for the next.

        (None, 0) for all others: pages that may never be written are not taken from the host.
        """
        if not self._config.prewarm_bytes or self._prewarmed is not None:
            return None, 0
        try:
            segment, nbytes = self.arena.prewarm(client, self._config.prewarm_bytes)
        except OSError:  # the put raises it
            return None, 0
        self._prewarmed = client
        return segment.number, nbytes

    def cool(self) -> None:
        """Return the pages that the node has warm for small shards to the host."""
        self.arena.cool(OWN)

    def leave(self, client: Hashable) -> None:
        """The client has gone: its pins and reservations go too, and its segments with the last shard in them."""
        self._reservations.leave(client)
        self.client_shards.lose(client)
        self._unheld(self.pins.drop_client(client))
        self.arena.depart(client)
        if self._prewarmed is client:
            self._prewarmed = None

    # Statistics

    def _explain(self) -> Holders:
        return Holders(self.holders.all(), self.disk.error or self._disk_full())

    def _disk_full(self) -> str:
        if not self.disk.quota:
            return "spilling is off"
        used, quota = format_size(self.disk.used), format_size(self.disk.quota)
        return f"the disk budget is full: {used} of {quota}" if self._residency.disk_full else ""

    def _any(self, number: int) -> Shard:
        return self._shards.get(number) or self._held_freed[number]

    async def run(self) -> None:
        """Spill when necessary, until cancelled."""
        await self._residency.run()

    def statistics(self) -> StoreStatistics:
        """The statistics of the store."""
        return StoreStatistics(
            budget=self.budget.statistics(),
            arena=self.arena.statistics(),
            disk=self.disk.statistics(),
            shards=len(self._shards),
            spilled_shards=sum(s.extent is None and s.file is not None and s.ours for s in self._shards.values()),
            pinned=sum(self._any(number).held for number in self.pins.shards() if number not in self.client_shards),
            reserved=sum(nbytes for _, nbytes in self._reservations),
            put=self._put_bytes,
            freed=self._freed_bytes,
            peak=self.budget.peak,
            holders=self.holders.all(),
        )

    async def aclose(self) -> None:
        """Wait for the disk, then return everything to the host. The store cannot be used afterwards."""
        await self._residency.aclose()
        if self.persistence is not None:
            await self.persistence.aclose()
        self.abandon()

    def abandon(self) -> None:
        """Return everything to the host, whatever is in progress; a hanging disk is not waited for. Idempotent."""
        self.disk.close()
        if self.persistence is not None:
            self.persistence.close()
        self.arena.close()


def _slow(nbytes: int, deadline: Deadline) -> Backpressure:
    return Backpressure(
        f"{format_size(nbytes)} are still being read from disk after {deadline.waited_s:.1f} s;"
        " wait longer, or get less at a time",
        needed=nbytes,
        waited_s=deadline.waited_s,
    )
