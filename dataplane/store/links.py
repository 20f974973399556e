"""The owners of the cells of a shard with several owners.

Each owner has cells under a link of its own (`batch.locations`). The first owner has the shard's live cells, each other
owner the cells that it retained. A cell is dead once its last owner has freed it.

Invariants: freeing cells that an owner does not have does nothing, so a free may be repeated; each dead cell is
reported once.

Cells are kept in blocks of `live_cells.BLOCK` rows of a column. A link costs one bit for each row of its blocks. A
block in which any link was made costs four bytes more for each row, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dataplane.batch.locations import MAX_LINK
from dataplane.batch.rows import RowIndices
from dataplane.errors import LimitExceeded
from dataplane.store.live_cells import BLOCK, Flags, LiveCells, by_block

_LINK = 512  # bytes of a link without the bits of its cells
_BLOCK = 128  # bytes of a block of a link, or of the owner counts, without its values

Selected = Sequence[tuple[Sequence[int], RowIndices]]
"""Cells: pairs of columns, by ordinal, and rows of each of these columns."""

_Place = tuple[int, int]  # a column and a block of its rows


@dataclass(slots=True)
class _Link:
    """One owner: its cells, as packed bits for each block in which it has cells."""

    holder: str
    bits: dict[_Place, npt.NDArray[np.uint8]] = field(default_factory=dict)
    nbytes: int = _LINK


class Links:
    """The owners of one shard of `columns` by `rows`. `live`: the cells of the first owner; None: all. `next_link`: the
    number of the next link, which no earlier link of the shard had."""

    def __init__(self, columns: int, rows: int, live: LiveCells | None, holder: str, next_link: int) -> None:
        self._columns = columns
        self._rows = rows
        self.next_link = next_link
        self._owners: dict[_Place, npt.NDArray[np.int32]] = {}
        """The number of owners of each row, for blocks in which a link was made. In other blocks the first owner is the
        only one."""
        first = _Link(holder)
        sizes = [self._size(block) for block in range(-(-rows // BLOCK))]
        whole = [np.packbits(np.ones(size, np.bool_)) for size in sizes]  # shared by the columns: bits do not change
        for column in range(columns):
            for block, size in enumerate(sizes):
                if live is None:
                    first.bits[column, block] = whole[block]
                    first.nbytes += _BLOCK + size // 8
                else:
                    self._set(first, (column, block), live.flags(column, block * BLOCK, block * BLOCK + size))
        self._links = {0: first}
        self.nbytes = first.nbytes
        """The approximate memory of the links in bytes."""

    def __len__(self) -> int:
        return len(self._links)

    def holder(self, link: int) -> str | None:
        """The client that created the link; None for an unknown link."""
        found = self._links.get(link)
        return None if found is None else found.holder

    def _size(self, block: int) -> int:
        return min(BLOCK, self._rows - block * BLOCK)

    def cost(self, selected: Selected) -> int:
        """An upper bound of the memory in bytes of a link to these cells."""
        places = {(column, block) for columns, rows in selected for block, _ in by_block(rows) for column in columns}
        return _LINK + sum(2 * _BLOCK + 5 * self._size(block) for _, block in places)

    def retain(self, selected: Selected, holder: str, link: int | None = None) -> int:
        """Add a link to these cells, each of which has an owner. Returns the link's number. `link`: the number to use,
        as given by the node that first stored the shard; if that link exists, nothing changes. None: the next number.
        Raises LimitExceeded if no numbers are left."""
        link = self.next_link if link is None else link
        if link > MAX_LINK:
            what = "links to a shard"
            raise LimitExceeded(f"{MAX_LINK} {what} were made: put its rows anew", what=what, limit=MAX_LINK)
        if link in self._links:
            return link
        flags: dict[_Place, Flags] = {}
        for columns, rows in selected:
            for block, inside in by_block(rows):
                for column in columns:
                    found = flags.setdefault((column, block), np.zeros(self._size(block), np.bool_))
                    found[inside] = True
        made = _Link(holder)
        for place, chosen in flags.items():
            self._set(made, place, chosen)
            self._count(place)[chosen] += 1
        self.next_link = max(self.next_link, link + 1)
        self._links[link] = made
        self.nbytes += made.nbytes
        return link

    def _set(self, link: _Link, place: _Place, flags: Flags) -> None:
        if flags.any():
            if place not in link.bits:
                link.nbytes += _BLOCK + len(flags) // 8
            link.bits[place] = np.packbits(flags)
        else:
            link.bits.pop(place, None)

    def _count(self, place: _Place) -> npt.NDArray[np.int32]:
        owners = self._owners.get(place)
        if owners is None:
            owners = self._owners[place] = self._flags(0, place).astype(np.int32)
            self.nbytes += _BLOCK + owners.nbytes
        return owners

    def _flags(self, link: int, place: _Place) -> Flags:
        """A copy of a link's flags of a block: whether it has each row."""
        found = self._links.get(link)
        bits = None if found is None else found.bits.get(place)
        size = self._size(place[1])
        return np.zeros(size, np.bool_) if bits is None else np.unpackbits(bits, count=size).view(np.bool_)

    def have(self, link: int, columns: Iterable[int], rows: RowIndices) -> bool:
        """Whether the link has all of these cells."""
        return all(
            bool(self._flags(link, (column, block))[inside].all())
            for column in columns
            for block, inside in by_block(rows)
        )

    def selected(self, link: int) -> Selected:
        """The cells of a link; none for an unknown link."""
        bits = {} if link not in self._links else self._links[link].bits
        return [
            ([column], RowIndices.index(np.flatnonzero(self._flags(link, (column, block))) + block * BLOCK))
            for column, block in bits
        ]

    def free(self, link: int, selected: Selected | None = None) -> list[tuple[int, RowIndices]]:
        """Free these cells of the link (None: all). Returns the cells that died, as rows of columns."""
        found = self._links.get(link)
        if found is None:
            return []
        died = []
        for place, inside in [(place, slice(None)) for place in found.bits] if selected is None else _places(selected):
            had = self._flags(link, place)
            left = had.copy()
            left[inside] = False
            gone = had & ~left
            if gone.any():
                self._set(found, place, left)
                dead = np.flatnonzero(self._dead(place, gone))
                if len(dead):
                    died.append((place[0], RowIndices.index(dead + place[1] * BLOCK)))
        if not found.bits:
            del self._links[link]
            self.nbytes -= found.nbytes
        return died

    def _dead(self, place: _Place, gone: Flags) -> Flags:
        """Flags of the rows in `gone`, which one owner has freed, that have no other owner."""
        owners = self._owners.get(place)
        if owners is None:
            return gone
        owners[gone] -= 1
        dead: Flags = gone & (owners == 0)
        return dead


def _places(selected: Selected) -> list[tuple[_Place, slice | npt.NDArray[np.int64]]]:
    return [
        ((column, block), inside)
        for columns, rows in selected
        for block, inside in by_block(rows)
        for column in set(columns)
    ]
