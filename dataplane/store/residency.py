"""Decides which sealed shards are in memory and which on disk: eviction, writing ahead, reading back.

Invariants:

- memory is taken from unpinned shards only, from clean ones first, and among those from the one that is read furthest
  in the future (as in Belady's algorithm, with an estimate). Shards are assumed to be read in the order they were put,
  and after a read, to be read again only after all others. So the newest rows of a queue go to disk, not its oldest;
- above the high watermark the shards with the furthest reads are written ahead, down to the low watermark. They stay in
  memory until the room is needed: a producer seldom waits for the disk, and no shard is read back unnecessarily;
- every shard on disk can be read back, even if memory and disk are full, unless everything is pinned: new bytes are
  admitted only while they leave room for an exchange (`store.stored`);
- a shard that is being moved is not touched until the move has ended; if it is freed meanwhile, it is removed then;
- a small shard that shares pages is treated like all others, but its memory comes back with the last shard in its
  pages, and once it was read back it has pages of its own. On disk each takes a page.

Rejected: least-recently-used, the worst order for a queue; to take memory as soon as the high watermark is passed,
which reads back up to a quarter more than necessary.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dataplane.background_tasks import BackgroundTasks
from dataplane.batch.layout_check import check_layout
from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.errors import DataplaneError, Freed
from dataplane.store.arena import OWN, Arena, Extent
from dataplane.store.budget import Budget
from dataplane.store.durable.shards import DurableShard
from dataplane.store.extents import RangeSet
from dataplane.store.live_cells import dead_pages
from dataplane.store.pins import Pins
from dataplane.store.shard import Shard
from dataplane.store.shards import Shards
from dataplane.store.small_extents import SmallExtents
from dataplane.store.spill import Disk
from dataplane.store.spill_file import SpillFile, aligned
from dataplane.store.stored import StoredBytes

_RETRY_S = 0.5  # seconds between attempts to write to a disk that refused
_BATCH_BYTES, _BATCH_SHARDS = 32 << 20, 32  # of the writes at a time: enough to keep the disk busy with small shards
_LATE_S = 1.0  # the most seconds that taking memory of clean shards waits for a batch of writes
_STALE = 4  # stale entries that even a small heap may have before it is rebuilt


class Residency:
    """Moves shards between the arena and the disk. `run` must be running for anything to be spilled."""

    def __init__(
        self,
        config: NodeConfig,
        budget: Budget,
        stored: StoredBytes,
        arena: Arena,
        small: SmallExtents,
        disk: Disk,
        pins: Pins,
        shards: Shards,
    ) -> None:
        self._high = int(config.high_watermark * budget.capacity)
        self._low = int(config.low_watermark * budget.capacity)
        self._budget = budget
        self._stored = stored
        self._arena = arena
        self._small = small
        self._disk = disk
        self._pins = pins
        self._shards = shards
        self._uses = itertools.count(1)
        self._dirty_heap: list[tuple[int, int]] = []  # (-next_use, number), including stale entries
        self._clean_heap: list[tuple[int, int]] = []
        self._ahead = False  # from passing the high watermark until the low one is reached
        self._refused = False  # whether a write has failed since the last `_retry`
        self._retrying = False
        self.disk_full = False
        """Whether the shard that is to go to disk next does not fit the disk's quota."""
        self._wake = asyncio.Event()
        self._background = BackgroundTasks()
        self._batch: set[asyncio.Task[None]] = set()  # the writes that the next batch waits for
        self._late_s = 0.0  # the time until which no clean memory is taken while the batch is written
        disk.removed = self.wake_up

    def wake_up(self) -> None:
        """Make `run` check whether it has to make room."""
        self._wake.set()

    def used(self, shard: Shard) -> None:
        """Note that the shard was put or read just now: its next use is after those of all others."""
        shard.next_use = next(self._uses)
        self._push(shard)
        if self._ahead or self._budget.shortfall or self._budget.used - self._stored.clean > self._high:
            self.wake_up()

    def used_all(self, shards: Iterable[Shard]) -> None:
        """Note that these shards were put or read just now, in this order.

        Many entries are appended to a heap, which is then heapified. Their next uses are the latest of all, so each
        single push would move its entry through the whole heap to the top.
        """
        heaps: tuple[list[tuple[int, int]], ...] = ([], [])
        for shard in shards:
            shard.next_use = next(self._uses)
            heaps[shard.clean].append((-shard.next_use, shard.number))
        for heap, more, clean in ((self._dirty_heap, heaps[False], False), (self._clean_heap, heaps[True], True)):
            if len(more) * len(heap).bit_length() < len(heap):
                for entry in more:
                    heapq.heappush(heap, entry)
            elif more:
                heap += more
                heapq.heapify(heap)
            self._tidy(heap, clean=clean)
        self.wake_up()

    def discard(self, shard: Shard) -> None:
        """Free the memory and the file of the shard."""
        self._drop_file(shard)
        self._let_go(shard)
        if self._budget.waiting:
            self.wake_up()
        self._tidy(self._dirty_heap, clean=False)
        self._tidy(self._clean_heap, clean=True)

    def freed(self, shard: Shard) -> None:
        """Delete the spill file of a shard that was freed while pinned, because it is never read back."""
        if shard.extent is not None and shard.moving is None and isinstance(shard.file, SpillFile):
            self._drop_file(shard)
        self.wake_up()

    def _let_go(self, shard: Shard) -> None:
        extent, held, shared = shard.extent, shard.held, shard.shared
        self._stored.remove(shard)
        shard.extent = shard.holes = None
        shard.shared = False
        self._stored.add(shard)  # before other bytes are admitted
        if extent is not None and shared:
            gone = self._small.give(extent)
            if gone:
                self._budget.release(gone)
        elif extent is not None:
            self._arena.release(extent, extent.size - held)
            self._budget.release(held)

    def punch(self, shard: Shard, columns: Iterable[int], rows: RowIndices) -> None:
        """Return the memory of these freed rows of a dirty shard to the host, now or when its last pin is dropped. A
        shard that is on disk too gets no holes, because all of its memory can be taken."""
        extent = shard.extent
        shard.unpunched = self._pins.holds(shard.number)
        if shard.unpunched or extent is None or shard.file is not None or shard.moving is not None:
            return
        if shard.shared or shard.live is None:  # shared pages are returned with the last shard in them
            return
        layout = check_layout(shard.layout, shard.size).layout
        with self._arena.view(extent) as view:
            memory = np.frombuffer(view, dtype=np.uint8)
            parts = [each for column in set(columns) for each in dead_pages(layout, column, shard.live, rows, memory)]
            del memory
        shard.holes = shard.holes or RangeSet()
        for start, end in parts:
            nbytes = shard.holes.add(start, end)
            if nbytes:
                self._arena.punch(extent, start, end, nbytes)
                self._stored.punched(nbytes)
                self._budget.release(nbytes)

    def _drop_file(self, shard: Shard) -> None:
        if shard.file is not None:
            if isinstance(shard.file, SpillFile):
                self._disk.remove(shard.file)
            elif isinstance(shard.file, DurableShard):
                shard.file.free()
            self._set_file(shard, None)

    def _set_file(self, shard: Shard, file: SpillFile | DurableShard | None) -> None:
        self._stored.remove(shard)
        shard.file = file
        self._stored.add(shard)

    def persisted(self, shard: Shard, durable: DurableShard) -> None:
        """Note that the shard has durable bytes on disk: it is clean from now on."""
        if isinstance(shard.file, SpillFile):
            self._disk.remove(shard.file)
        self._set_file(shard, durable)
        self.wake_up()

    def was_read(self, shard: Shard) -> None:
        """Release the pages that reading the whole extent of a shard has mapped here, or created in its holes."""
        extent = shard.extent
        if extent is not None and not shard.shared:
            self._arena.forget(extent, 0, extent.size)
            for start, end in shard.holes or ():
                self._arena.punch(extent, start, end, 0)

    # Reading back

    async def restore(self, shards: Iterable[Shard], deadline: Deadline) -> None:
        """Begin to read back the shards that are on disk, each once the budget grants its room. The shard's `moving` is
        done when its read has ended. Raises Backpressure at the deadline; reads that have begun go on.

        Room is requested for one shard at a time: the next may need the disk space that the first exchange frees.
        """
        for shard in shards:
            if shard.extent is None and shard.moving is None and shard.damage is None:
                await self._budget.reserve(shard.room, deadline, "restore")
                shard.moving = self._background.spawn(self._read(shard))

    async def _read(self, shard: Shard) -> None:
        """Read the shard into memory that the budget has granted.

        A DataplaneError of the read is kept in `shard.damage`. After an OSError (no memory, or the read failed) the
        shard is unchanged, and `Disk.error` has the reason.
        """
        try:
            extent = self._arena.allocate(OWN, shard.room)
        except OSError as error:
            self._disk.refused("reading back", error)
            self._budget.release(shard.room)
            self._settle(shard)
            return
        try:
            if shard.file is None:
                raise Freed(f"shard {shard.number} was freed", shard=shard.number)
            with self._arena.view(extent) as view:
                if isinstance(shard.file, SpillFile):
                    await self._disk.read(shard.file, view, lambda start, size: self._arena.forget(extent, start, size))
                else:
                    await shard.file.read(view)
            self._disk.answered("reading back")
            self._came_back(shard, extent)
        except DataplaneError as error:
            shard.damage = error
        except OSError as error:
            self._disk.refused("reading back", error)
        finally:
            if shard.extent is None:
                self._arena.release(extent)
                self._budget.release(extent.size)
            self._settle(shard)

    def fill(self, shard: Shard, payload: bytes) -> None:
        """Write received bytes of a shard with a file or backing into memory that the budget has granted."""
        try:
            extent = self._arena.allocate(OWN, shard.room)
        except OSError:  # the shard is read when it is pinned
            self._budget.release(shard.room)
            return
        with self._arena.view(extent) as view:
            view[:] = payload.ljust(extent.size, b"\0")
        self._came_back(shard, extent)
        self.used(shard)

    def _came_back(self, shard: Shard, extent: Extent) -> None:
        self._stored.remove(shard)
        shard.extent = extent
        self._stored.add(shard)

    def _settle(self, shard: Shard) -> None:
        """End a move of the shard, remove what a free left behind meanwhile, and wake `run`."""
        shard.moving = None
        if shard.freed and not self._pins.holds(shard.number):
            self.discard(shard)
        elif shard.freed:
            self.freed(shard)
        elif shard.extent is not None:
            self._push(shard)
        self.wake_up()

    # Making room

    def _push(self, shard: Shard) -> None:
        heap = self._clean_heap if shard.clean else self._dirty_heap
        heapq.heappush(heap, (-shard.next_use, shard.number))
        self._tidy(heap, clean=shard.clean)

    def _tidy(self, heap: list[tuple[int, int]], *, clean: bool) -> None:
        """Rebuild the heap if most entries are stale: each use leaves a stale entry, and so does each removed shard."""
        if len(heap) > 2 * len(self._shards) + _STALE * bool(self._shards):
            there = (s for s in self._shards.values() if s.extent is not None and s.clean == clean)
            heap[:] = [(-s.next_use, s.number) for s in there]
            heapq.heapify(heap)

    def _pop(self, *, clean: bool) -> Shard | None:
        """Take the shard that is read furthest in the future from those whose memory can be taken."""
        heap = self._clean_heap if clean else self._dirty_heap
        while heap:
            next_use, number = heapq.heappop(heap)
            shard = self._shards.get(number)
            if (
                shard is not None
                and shard.next_use == -next_use
                and shard.extent is not None
                and shard.clean == clean
                and shard.moving is None
                and not self._pins.holds(number)
            ):
                return shard
        return None

    async def run(self) -> None:
        """Make room whenever it is needed, until cancelled."""
        while True:
            await self._wake.wait()
            self._budget.grant()  # requests that waited for fewer stored bytes
            self._wake.clear()
            self._make_room()
            need = (self._budget.waiting or self._ahead) and not self._batch
            if ((need and self._disk.room < self._disk.quota) or self._refused) and not self._retrying:
                self._retrying = True
                self._background.spawn(self._retry())

    def _make_room(self) -> None:
        """Take the memory of clean shards for waiting requests. Then, if needed, begin to write a batch of dirty ones.
        Their memory is taken once the whole batch is written, so that the furthest reads go first. After `_LATE_S` a
        hanging write delays only further writes."""
        now_s = asyncio.get_running_loop().time()
        if self._batch and now_s < self._late_s:
            return
        while self._budget.shortfall:
            clean = self._pop(clean=True)
            if clean is None:
                break
            self._let_go(clean)
        if self._batch:
            return
        dirty = self._budget.used - self._stored.clean
        self._ahead = dirty > (self._low if self._ahead else self._high)
        need = max(self._budget.shortfall, dirty - self._low if self._ahead else 0)
        if self._disk.error and self._budget.waiting:
            need = max(need, 1)  # a write shows whether the disk works again
        if not need:
            self.disk_full = self._disk.short = False
        for shard in self._victims(need) if need and not self._refused else []:
            shard.moving = asyncio.get_running_loop().create_future()
            task = self._background.spawn(self._save(shard))
            self._batch.add(task)
            task.add_done_callback(self._saved)
        if self._batch:
            self._late_s = now_s + _LATE_S
            asyncio.get_running_loop().call_later(_LATE_S, self.wake_up)

    async def _save(self, shard: Shard) -> None:
        try:
            await self._write(shard)
        except OSError:  # the disk refused: its error is in the statistics, and in every Backpressure
            self._refused = True

    def _saved(self, task: asyncio.Task[None]) -> None:
        self._batch.discard(task)
        self.wake_up()

    async def _retry(self) -> None:
        """Measure the disk after `_RETRY_S`, and write to it again."""
        await asyncio.sleep(_RETRY_S)
        await self._disk.measure()
        self._refused = self._retrying = False
        self.wake_up()

    def _victims(self, need: int) -> list[Shard]:
        """Dirty shards to write, those with the furthest reads first: of `need` bytes, or enough for a batch."""
        victims: list[Shard] = []
        sizes: list[int] = []
        freed = 0
        spilled = self._spilled()
        self.disk_full = self._disk.short = False
        while freed < min(need, _BATCH_BYTES) and len(victims) < _BATCH_SHARDS:
            shard = self._pop(clean=False)
            if shard is None:
                break
            if not self._fits_on_disk([*sizes, shard.room], shard.next_use, spilled):
                self._push(shard)
                self.disk_full = not self._disk.fits([*sizes, shard.room], later=True)
                self._disk.short = self.disk_full and self._disk.room < self._disk.quota
                break
            victims.append(shard)
            sizes.append(shard.room)
            freed += shard.size
        return victims

    def _spilled(self) -> Iterator[Shard]:
        """The shards in memory and in a spill file, those with the nearest reads first; sorted when the first is
        requested."""
        found = (shard for shard in self._shards.values() if shard.clean and isinstance(shard.file, SpillFile))
        yield from sorted(found, key=lambda shard: shard.next_use)

    def _fits_on_disk(self, sizes: Sequence[int], next_use: int, spilled: Iterator[Shard]) -> bool:
        """Whether the disk has room for these sizes. If not, drop files of the next shards of `spilled` until it will
        have room once they are deleted.

        Only shards that are pinned, or read before `next_use`, lose their file: otherwise two shards could replace each
        other forever. A shard that was passed over need not be looked at again, because `next_use` only decreases.
        """
        while not self._disk.fits(sizes, later=True) and (shard := next(spilled, None)) is not None:
            if shard.moving is None and (shard.next_use < next_use or self._pins.holds(shard.number)):
                self._drop_file(shard)
                self._push(shard)
        return self._disk.fits(sizes)

    async def _write(self, shard: Shard) -> None:
        """Make the shard clean. Raises OSError if the disk refuses."""
        extent, moving = shard.extent, shard.moving
        assert extent is not None, "it is being moved"
        assert moving is not None, "it is being moved"
        try:
            shared = shard.shared
            with memoryview(aligned(self._arena.read(extent))) if shared else self._arena.view(extent) as view:
                file = await self._disk.write(
                    shard.number, view, lambda start, size: None if shared else self._arena.forget(extent, start, size)
                )
            self._set_file(shard, file)
        finally:
            for start, end in shard.holes or ():  # reading them made pages there
                self._arena.punch(extent, start, end, 0)
            moving.set_result(None)
            self._settle(shard)

    async def aclose(self) -> None:
        """Cancel restores and writes, and wait until they have ended. A shard that was being restored stays on disk."""
        await self._background.aclose()
