"""The free space and the warm pages of one segment, as ranges of addresses.

`FreeList` returns ranges last-in first-out, since the range freed last is most likely in a cache and in the page tables
of its last user. Neighbouring free ranges are always merged. Ranges are binned by the power of two below their size (as
in TLSF, Masmano et al. 2004), so a fit is found without walking all of them.

`RangeSet` is a set of addresses, for example of the bytes of a segment that have pages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

_TRIES = 32  # ranges of the request's own bin that are tried before a larger bin is cut


class FreeList:
    """The free ranges of the addresses 0 to `size`."""

    def __init__(self, size: int) -> None:
        self._bins: dict[int, dict[int, None]] = {}  # power of two -> starts, in the order they were freed
        self._end_of: dict[int, int] = {}
        self._starts: list[int] = []  # ascending
        self._insert(0, size)

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        insort(self._starts, start)
        self._bins.setdefault((end - start).bit_length(), {})[start] = None

    def _remove(self, start: int) -> int:
        end = self._end_of.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        power = (end - start).bit_length()
        starts = self._bins[power]
        del starts[start]
        if not starts:
            del self._bins[power]
        return end

    def take(self, size: int) -> int | None:
        """Take `size` free addresses. Returns their start; None if no free range is that long."""
        start = self._find(size)
        if start is None:
            return None
        end = self._remove(start)
        if end - start > size:
            self._insert(start + size, end)
        return start

    def take_at(self, start: int, size: int) -> bool:
        """Take `size` addresses at `start`. Returns whether a free range begins at `start` and is that long."""
        end = self._end_of.get(start)
        if end is None or end - start < size:
            return False
        self._remove(start)
        if start + size < end:
            self._insert(start + size, end)
        return True

    def _find(self, size: int) -> int | None:
        own = size.bit_length()
        starts = self._bins.get(own, {})
        for _, start in zip(range(_TRIES), reversed(starts), strict=False):
            if self._end_of[start] - start >= size:
                return start
        larger = [power for power in self._bins if power > own]
        if larger:
            return next(reversed(self._bins[min(larger)]))
        return next((s for s in reversed(starts) if self._end_of[s] - s >= size), None)

    def give(self, start: int, size: int) -> None:
        """Free the range. Raises ValueError if a part of it is free already."""
        end = start + size
        where = bisect_right(self._starts, start)
        before = self._starts[where - 1] if where else None
        after = self._starts[where] if where < len(self._starts) else None
        if (before is not None and self._end_of[before] > start) or (after is not None and after < end):
            raise ValueError(f"of the range {start}:{end} a part is free already")
        if before is not None and self._end_of[before] == start:
            self._remove(before)
            start = before
        if after == end:
            end = self._remove(end)
        self._insert(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over the free ranges, as (start, end), in no order."""
        return iter(list(self._end_of.items()))


class RangeSet:
    """A set of addresses, as disjoint ascending ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def _touching(self, start: int, end: int) -> slice:
        return slice(bisect_left(self._ends, start), bisect_right(self._starts, end))

    def add(self, start: int, end: int) -> int:
        """Add the addresses. Returns how many were missing."""
        added = end - start - self.covered(start, end)
        where = self._touching(start, end)
        if where.start < where.stop:
            start = min(start, self._starts[where.start])
            end = max(end, self._ends[where.stop - 1])
        self._starts[where] = [start]
        self._ends[where] = [end]
        return added

    def remove(self, start: int, end: int) -> int:
        """Remove the addresses. Returns how many were there."""
        removed = self.covered(start, end)
        where = self._touching(start, end)
        held = zip(self._starts[where], self._ends[where], strict=True)
        rest = [(a, b) for s, e in held for a, b in ((s, min(e, start)), (max(s, end), e)) if a < b]
        self._starts[where] = [a for a, _ in rest]
        self._ends[where] = [b for _, b in rest]
        return removed

    def covered(self, start: int, end: int) -> int:
        """The number of addresses in the set."""
        return sum(b - a for a, b in self.within(start, end))

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of the set between `start` and `end`, cut at both."""
        where = self._touching(start, end)
        held = zip(self._starts[where], self._ends[where], strict=True)
        return [(max(a, start), min(b, end)) for a, b in held if max(a, start) < min(b, end)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._ends, strict=True)))
