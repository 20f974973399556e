"""The node's shared memory: segments, and the extents allocated in them.

A segment is one memfd, larger than the budget and sparse, so that fragmentation costs addresses and not memory.
At any time one client may write to it, its owner, and reuses there what it freed, warm in the file and in its own
page tables; everybody else gets a read-only descriptor. When the owner goes, the next client that needs a segment
adopts it. Segments are never closed while the node lives.

What always holds: `used` (bytes of extents) <= `resident` (bytes with pages behind them) <= `capacity`. An extent
that needs fresh pages when the arena is full takes them from pages that are warm but free, by punching holes.
The arena does not decide who may allocate: the budget does, before, and never admits more than the capacity.

Rejected: names in /dev/shm (they leak, and containers limit it); one segment that all write to (a client could
write over another's sealed shard); one memfd an extent (a descriptor and a cold mapping for each put).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Hashable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from dataplane.config import PAGE
from dataplane.store.extents import FreeList, RangeSet


def pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages; at least one."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


@dataclass(frozen=True, slots=True)
class Extent:
    """One allocation: `size` bytes, whole pages, at `offset` of the segment numbered `segment`."""

    segment: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.size


class Segment:
    """One memfd, mapped here for writing. `fd` may write, `readonly_fd` may not."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        with ExitStack() as undo:
            self.fd = os.memfd_create(f"dataplane-{number}", os.MFD_CLOEXEC)
            undo.callback(os.close, self.fd)
            os.ftruncate(self.fd, size)
            self.readonly_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self.readonly_fd)
            os.fchmod(self.fd, 0o400)  # so that the read-only descriptor cannot be reopened for writing
            self.memory = mmap.mmap(self.fd, size)
            undo.pop_all()
        for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
            with suppress(AttributeError, OSError):  # huge pages are only where the kernel offers them
                self.memory.madvise(getattr(mmap, advice))
        self.free = FreeList(size)
        self.warm = RangeSet()

    def close(self) -> None:
        """Give the descriptors back. The mapping goes when the last view of it does."""
        os.close(self.fd)
        os.close(self.readonly_fd)
        with suppress(BufferError):  # an abandoned view; the process is ending
            self.memory.close()


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Bytes, unless said."""

    capacity: int
    used: int
    resident: int
    segments: int  # a count


class Arena:
    """The segments and their owners. Used from the node's loop alone, but for `view`."""

    def __init__(self, capacity: int) -> None:
        """Raises OSError where the system refuses a segment of that capacity, rather than when it is needed."""
        try:
            Segment(0, 2 * pages(capacity)).close()
        except OSError as error:
            raise OSError(error.errno, f"no shared memory of {capacity} bytes: {error.strerror}") from None
        self.capacity = capacity
        self.used = 0
        self.resident = 0
        self._segments: list[Segment] = []
        self._owned: dict[Hashable, list[Segment]] = {}
        self._orphans: list[Segment] = []

    def __getitem__(self, number: int) -> Segment:
        return self._segments[number]

    def segment_for(self, owner: Hashable, size: int) -> Segment:
        """A segment of `owner`'s with `size` free addresses in a row: its own, an orphan, or a new one."""
        owned = self._owned.setdefault(owner, [])
        for segment in reversed(owned):
            if any(end - start >= size for start, end in segment.free):
                return segment
        while self._orphans:
            segment = self._orphans.pop()
            owned.append(segment)
            if any(end - start >= size for start, end in segment.free):
                return segment
        segment = Segment(len(self._segments), 2 * max(pages(self.capacity), size))
        self._segments.append(segment)
        owned.append(segment)
        return segment

    def allocate(self, owner: Hashable, nbytes: int) -> Extent:
        """An extent of at least `nbytes` in a segment of `owner`'s. Its bytes are those of whoever had it before.

        Raises MemoryError where that would exceed the capacity; the budget sees to it that it never does. Raises
        OSError where the system refuses a new segment: out of descriptors, most likely. Nothing is allocated then.
        """
        size = pages(nbytes)
        if self.used + size > self.capacity:
            raise MemoryError(f"{size} bytes on top of {self.used} exceed the arena's {self.capacity}")
        for segment in reversed(self._owned.get(owner, ())):
            offset = segment.free.take(size)
            if offset is not None:
                break
        else:
            segment = self.segment_for(owner, size)
            offset = segment.free.take(size)
            if offset is None:
                raise MemoryError(f"segment {segment.number} has no {size} bytes in a row")
        extent = Extent(segment.number, offset, size)
        self.used += size
        self._warm_up(segment, extent.offset, extent.end)
        return extent

    def _warm_up(self, segment: Segment, start: int, end: int) -> None:
        missing = end - start - segment.warm.covered(start, end)
        if missing:
            self._punch_free(self.resident + missing - self.capacity)
            segment.warm.add(start, end)
            self.resident += missing

    def release(self, extent: Extent, hollow: int = 0) -> None:
        """Make the extent free, of which so many bytes were hollowed. Its pages stay warm."""
        self._segments[extent.segment].free.give(extent.offset, extent.size)
        self.used -= extent.size - hollow

    def hollow(self, extent: Extent, start: int, end: int, nbytes: int) -> None:
        """Give the pages of a part of the extent back to the host, of which `nbytes` were not given back before. Its
        addresses stay taken, and read as zeros."""
        self.used -= nbytes
        self._punch(self._segments[extent.segment], extent.offset + start, extent.offset + end)

    def quarantine(self, extent: Extent) -> None:
        """Take the extent's memory back but not its addresses: a stopped client may still write there."""
        self.used -= extent.size
        self._punch(self._segments[extent.segment], extent.offset, extent.end)

    def readmit(self, extent: Extent) -> None:
        """End a quarantine: nobody writes there any more."""
        segment = self._segments[extent.segment]
        segment.memory.madvise(mmap.MADV_REMOVE, extent.offset, extent.size)
        segment.free.give(extent.offset, extent.size)

    def prewarm(self, owner: Hashable, nbytes: int) -> tuple[Segment, int]:
        """A segment for `owner`, and how many bytes at its start it may make ready. They count as resident."""
        segment = self.segment_for(owner, PAGE)
        free = next((end for start, end in segment.free if start == 0), 0)
        room = self.capacity - self.resident + segment.warm.covered(0, free)
        nbytes = min(nbytes, free, room) // PAGE * PAGE
        if nbytes:
            self._warm_up(segment, 0, nbytes)
        return segment, nbytes

    @property
    def abandoned(self) -> bool:
        """Whether a segment waits for a new owner."""
        return bool(self._orphans)

    def orphan(self, owner: Hashable) -> None:
        """The owner has gone. Its shards stay; its segments wait for the next that needs one."""
        self._orphans.extend(self._owned.pop(owner, ()))

    def view(self, extent: Extent) -> memoryview:
        """The extent's bytes, writable. Release it before the node closes the arena."""
        return memoryview(self._segments[extent.segment].memory)[extent.offset : extent.end]

    def forget(self, extent: Extent, start: int, size: int) -> None:
        """Unmap a part of the extent from this process (not from the file), so that its pages count once."""
        self._segments[extent.segment].memory.madvise(mmap.MADV_DONTNEED, extent.offset + start, size)

    def _punch_free(self, nbytes: int) -> None:
        """Give at least `nbytes` of pages that no extent uses back to the host, orphans' and high addresses first."""
        if nbytes <= 0:
            return
        owned = [segment for segments in self._owned.values() for segment in segments]
        for segment in (*self._orphans, *owned):
            for start, end in sorted(segment.free, reverse=True):
                for a, b in reversed(segment.warm.within(start, end)):
                    cut = max(a, b - nbytes)
                    nbytes -= self._punch(segment, cut, b)
                    if nbytes <= 0:
                        return

    def _punch(self, segment: Segment, start: int, end: int) -> int:
        segment.memory.madvise(mmap.MADV_REMOVE, start, end - start)
        removed = segment.warm.remove(start, end)
        self.resident -= removed
        return removed

    def statistics(self) -> ArenaStatistics:
        """The arena's figures now."""
        return ArenaStatistics(self.capacity, self.used, self.resident, len(self._segments))

    def close(self) -> None:
        """Close every segment. Clients that map one keep its bytes until they unmap it."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._owned.clear()
        self._orphans.clear()
