"""The shared memory of a node: segments (`store.segment`), and the extents allocated in them.

A segment belongs to one client, or to the node. Only its owner and the node may write to it. The owner reuses freed
extents in it, because their pages are warm: in the file, and in the owner's page tables. A segment is created when its
owner needs addresses. It is as large as all of the owner's segments together, so that there are few. It is sparse, so
fragmentation costs addresses and not memory.

Invariants: `used` (bytes of extents) <= `resident` (bytes with pages) <= `capacity`. When the arena is full, an extent
that needs fresh pages takes them from warm free pages, by punching holes. No client can write to bytes of another: a
segment is retired when its owner goes. Its free pages return to the host at once, and the others when their extents are
freed. The budget admits every allocation first, and never more than the capacity.

Rejected: names in /dev/shm (they leak, and containers limit it); one segment that all clients write to (one could
overwrite a sealed shard of another); one memfd for each extent (a descriptor and a cold mapping for each put);
giving the segment of a client that has gone to the next one (its connection has ended, but its process may live on).
"""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from dataplane.config import PAGE
from dataplane.store.segment import ArenaSegment

log = logging.getLogger(__name__)

_LEAST, _MOST = 16 << 20, 64 << 30
"""The least and the most bytes of addresses of a segment. A larger extent gets a larger segment."""

_FREELY = 1 << 30
"""The bytes of addresses that may be mapped even if the capacity is smaller."""


OWN = "node"
"""The owner of extents that the node itself writes: restored shards, and small ones that came in a message."""


def pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages; at least one page."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


@dataclass(frozen=True, slots=True)
class Extent:
    """One allocation: `size` bytes, whole pages, at `offset` of the segment numbered `segment`."""

    segment: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Arena:
    """The segments and their owners. Used from the node's event loop only, except `view`."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: the most bytes of extents. Raises OSError if the system refuses a test segment of twice as many:
        a node fails at its start and not at a later put."""
        try:
            ArenaSegment(0, 2 * pages(capacity)).close()
        except OSError as error:
            raise OSError(error.errno, f"no shared memory of {capacity} bytes: {error.strerror}") from None
        self.capacity = capacity
        self.used = 0
        self.resident = 0
        self.mapped = 0
        self.closed = 0
        """The number of closed segments. When it grows, holders of per-segment state tidy up."""
        self._least = min(_LEAST, max(1 << 20, _power(2 * capacity)))
        self._numbers = itertools.count()
        self._segments: dict[int, ArenaSegment] = {}
        self._owned: dict[Hashable, list[ArenaSegment]] = {}
        self._guarded = self._warned = False

    def __getitem__(self, number: int) -> ArenaSegment:
        return self._segments[number]

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def __iter__(self) -> Iterator[ArenaSegment]:
        return iter(list(self._segments.values()))

    # Segments

    def _make(self, owner: Hashable, size: int) -> ArenaSegment:
        """A new segment for the owner, of at least `size` bytes. Raises OSError."""
        owned = self._owned.setdefault(owner, [])
        grown = min(_MOST, sum(segment.size for segment in owned))
        size = _power(max(size, grown, self._least))
        if self.mapped + size > max(4 * self.capacity, _FREELY):
            self._close_idle()
        number = next(self._numbers)
        try:
            segment = ArenaSegment(number, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            self._close_idle()  # for their addresses
            segment = ArenaSegment(number, size)
        if self._guarded:
            self._guard(segment)
        self._segments[number] = segment
        owned.append(segment)
        self.mapped += size
        return segment

    def _close_idle(self) -> None:
        """Close the empty segments of all owners."""
        for segments in self._owned.values():
            for segment in [segment for segment in segments if not segment.extents]:
                segments.remove(segment)
                self._close(segment)

    def _close(self, segment: ArenaSegment) -> None:
        for start, end in segment.warm:
            self._punch(segment, start, end)  # readers may still map the segment
        self.resident -= sum(end - start for start, end in segment.warm)
        self.mapped -= segment.size
        self.closed += 1
        del self._segments[segment.number]
        segment.close()

    def _retire(self, segment: ArenaSegment) -> None:
        """Stop allocating in the segment, return its free pages to the host, and close it once its last extent is
        freed."""
        segment.retired = True
        self._punch_unused(segment)
        if not segment.extents:
            self._close(segment)

    def depart(self, owner: Hashable) -> None:
        """Retire the segments of an owner that has disconnected, because its process may live on and write. Its shards
        stay."""
        for segment in self._owned.pop(owner, ()):
            self._retire(segment)

    def guard(self) -> None:
        """Take a lease on each segment, now and later: the system sends SIGIO when a process opens one for writing. The
        caller's handler of SIGIO calls `harden_opened`."""
        self._guarded = True
        for segment in self:
            self._guard(segment)

    def _guard(self, segment: ArenaSegment) -> None:
        if not segment.guard() and not self._warned:
            self._warned = True
            log.warning("this system has no file leases: processes of this user can open segments for writing")

    def harden_opened(self) -> None:
        """Seal and retire the segments that other processes are opening for writing, and let their `open` return."""
        for segment in self:
            if segment.opened:
                segment.harden()
                log.warning("a process opened segment %d for writing: the segment is sealed now", segment.number)
                for segments in self._owned.values():
                    if segment in segments:
                        segments.remove(segment)
                        self._retire(segment)

    # Extents

    def allocate(self, owner: Hashable, nbytes: int, following: int = 0) -> Extent:
        """Allocate an extent of at least `nbytes` in a segment of the owner. Its content is that of its last use.
        `following`: bytes that the owner allocates next; a new segment is large enough for them too.

        Raises MemoryError if that would exceed the capacity, which the budget prevents. Raises OSError if the system
        refuses a new segment, most likely because no descriptors are left, or free pages cannot be given back. Then
        nothing is allocated.
        """
        size = pages(nbytes)
        if self.used + size > self.capacity:
            raise MemoryError(f"{size} bytes on top of {self.used} exceed the arena's {self.capacity}")
        for segment in self._owned.get(owner, ()):  # the oldest first: free extents there are warm
            offset = segment.free.take(size)
            if offset is not None:
                break
        else:
            segment = self._make(owner, size + following)
            offset = segment.free.take(size)
            if offset is None:
                raise MemoryError(f"segment {segment.number} has no {size} bytes in a row")
        try:
            self._warm_up(segment, offset, offset + size)
        except BaseException:
            segment.free.give(offset, size)
            raise
        segment.extents += 1
        self.used += size
        return Extent(segment.number, offset, size)

    def split(self, extent: Extent) -> None:
        """Split the extent into one extent for each of its pages, to be released one by one."""
        self._segments[extent.segment].extents += extent.size // PAGE - 1

    def extend(self, number: int, start: int, size: int) -> bool:
        """Take `size` bytes of pages at `start` of a segment, as extents of one page each. Returns whether a free range
        of that size begins there. Raises MemoryError beyond the capacity, OSError if the system takes no free pages
        back to make room."""
        segment = self._segments[number]
        if self.used + size > self.capacity:
            raise MemoryError(f"{size} bytes on top of {self.used} exceed the arena's {self.capacity}")
        if not segment.free.take_at(start, size):
            return False
        try:
            self._warm_up(segment, start, start + size)
        except BaseException:
            segment.free.give(start, size)
            raise
        segment.extents += size // PAGE
        self.used += size
        return True

    def _warm_up(self, segment: ArenaSegment, start: int, end: int) -> None:
        missing = end - start - segment.warm.covered(start, end)
        if missing:
            needed = self.resident + missing - self.capacity
            if needed > 0 and self._punch_free(needed) < needed:
                raise OSError(errno.ENOMEM, "the system does not take free pages back")
            segment.warm.add(start, end)
            self.resident += missing

    def release(self, extent: Extent, punched: int = 0) -> None:
        """Free the extent, in which `punched` bytes were punched. Its pages stay warm."""
        segment = self._segments[extent.segment]
        self.used -= extent.size - punched
        segment.free.give(extent.offset, extent.size)
        segment.extents -= 1
        if segment.retired:
            self._punch(segment, extent.offset, extent.end)
            if not segment.extents:
                self._close(segment)

    def punch(self, extent: Extent, start: int, end: int, nbytes: int) -> None:
        """Return the pages from `start` to `end` in the extent to the host. `nbytes`: the bytes among them not returned
        before. The addresses stay allocated and read as zeros."""
        self.used -= nbytes
        self._punch(self._segments[extent.segment], extent.offset + start, extent.offset + end)

    def readmit(self, extent: Extent) -> None:
        """Free an extent that was punched as a whole while a client could still write there."""
        self._segments[extent.segment].punch(extent.offset, extent.end)  # pages written since, which are not counted
        self.release(extent, extent.size)

    def prewarm(self, owner: Hashable, nbytes: int) -> tuple[ArenaSegment, int]:
        """Return a segment of `owner`, and the number of bytes at its start that the owner may prefault. They count as
        resident. Raises OSError if the system refuses a new segment."""
        owned = self._owned.get(owner)
        segment = owned[0] if owned else self._make(owner, nbytes)
        free = next((end for start, end in segment.free if start == 0), 0)
        room = self.capacity - self.resident + segment.warm.covered(0, free)
        nbytes = min(nbytes, free, room) // PAGE * PAGE
        if nbytes:
            self._warm_up(segment, 0, nbytes)
        return segment, nbytes

    def cool(self, owner: Hashable) -> None:
        """Return the free pages of the owner's segments to the host."""
        for segment in self._owned.get(owner, ()):
            self._punch_unused(segment)

    def _punch_unused(self, segment: ArenaSegment) -> None:
        for start, end in segment.free:
            for a, b in segment.warm.within(start, end):
                self._punch(segment, a, b)

    def view(self, extent: Extent) -> memoryview:
        """The bytes of the extent, writable. Release it before the arena is closed."""
        return memoryview(self._segments[extent.segment].memory)[extent.offset : extent.end]

    def read(self, extent: Extent) -> bytes:
        """A copy of the bytes of the extent."""
        return self._segments[extent.segment].memory[extent.offset : extent.end]

    def write(self, extent: Extent, data: bytes) -> None:
        self._segments[extent.segment].memory[extent.offset : extent.end] = data

    def forget(self, extent: Extent, start: int, size: int) -> None:
        """Unmap a part of the extent from this process (not from the file), so that its pages count once."""
        with suppress(OSError):  # the pages count twice until the node's mapping ends
            self._segments[extent.segment].memory.madvise(mmap.MADV_DONTNEED, extent.offset + start, size)

    def _punch_free(self, nbytes: int) -> int:
        """Return `nbytes` of free pages to the host, or all if fewer, high addresses first. Returns their bytes."""
        given = 0
        for segment in self:
            for start, end in sorted(segment.free, reverse=True):
                for a, b in reversed(segment.warm.within(start, end)):
                    given += self._punch(segment, max(a, b - (nbytes - given)), b)
                    if given >= nbytes:
                        return given
        return given

    def _punch(self, segment: ArenaSegment, start: int, end: int) -> int:
        if not segment.punch(start, end):
            return 0
        removed = segment.warm.remove(start, end)
        self.resident -= removed
        return removed

    def close(self) -> None:
        """Close every segment. Clients that map one keep its bytes until they unmap it."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._owned.clear()


def _power(nbytes: int) -> int:
    """The smallest power of two that is at least `nbytes`."""
    return 1 << (nbytes - 1).bit_length()
