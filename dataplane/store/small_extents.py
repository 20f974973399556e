"""Pages shared by many small, consecutive shards, in the node's own segments.

A page belongs to the shards that have bytes in it. It is released to the arena with the last of these shards. Until
then the bytes of freed shards in it are not reused. So a long-lived shard keeps only its own pages, 4 KiB each. The
next shard begins where the last one ended, and the following pages are taken as needed, so at most the rest of one page
is unused at the end.

Invariants: each page here has bytes of a shard that was not returned; no byte of a page is written twice before the
page has been returned.

Rejected: blocks of several pages, because one shard would keep all of a block; free lists within a page, which cost
more than they save, because rows are freed in the order in which they came; a page for each client, most of which would
be empty.
"""

from __future__ import annotations

from dataplane.config import PAGE
from dataplane.store.arena import Arena, Extent, pages

MOST = 16 << 10
"""The largest shard that shares pages, in bytes: a larger one wastes little of its last page."""


class SmallExtents:
    """The shared pages of one arena, in segments of `owner`."""

    def __init__(self, arena: Arena, owner: str) -> None:
        self._arena = arena
        self._owner = owner
        self._shards: dict[int, dict[int, int]] = {}  # segment -> offset of a page -> shards in it
        self._segment = -1
        self._at = self._end = 0  # in `_segment`: the start of the next shard, and the end of the last page

    def fits(self, nbytes: int) -> bool:
        """Whether a shard of this size, a multiple of 64, fits without another page."""
        return self._open and self._at + nbytes <= self._end

    @property
    def _open(self) -> bool:
        return self._segment in self._arena and not self._arena[self._segment].retired

    def take(self, size: int) -> Extent:
        """An extent for a shard of this size, a multiple of 64. It takes at most `pages(size)` bytes from the arena.
        Raises as `Arena.allocate`; then nothing is taken."""
        if not (self._open and (self._at + size <= self._end or self._grow(size))):
            extent = self._arena.allocate(self._owner, size)
            self._arena.split(extent)
            self._segment, self._at, self._end = extent.segment, extent.offset, extent.end
        taken = Extent(self._segment, self._at, size)
        self._at += size
        shards = self._shards.setdefault(taken.segment, {})
        for page in _pages(taken):
            shards[page] = shards.get(page, 0) + 1
        return taken

    def _grow(self, size: int) -> bool:
        """Take the following pages, if they are free."""
        more = pages(self._at + size - self._end)
        if not self._arena.extend(self._segment, self._end, more):
            return False
        self._end += more
        return True

    def give(self, extent: Extent) -> int:
        """Release the extent of a shard, and its pages without another shard. Returns the bytes of these pages."""
        shards, gone = self._shards[extent.segment], 0
        for page in _pages(extent):
            left = shards[page] - 1
            if left:
                shards[page] = left
                continue
            del shards[page]
            self._arena.release(Extent(extent.segment, page, PAGE))
            gone += PAGE
            if page == self._end - PAGE and extent.segment == self._segment:
                self._segment = -1
        if not shards:
            del self._shards[extent.segment]
        return gone


def _pages(extent: Extent) -> range:
    return range(extent.offset // PAGE * PAGE, extent.end, PAGE)
