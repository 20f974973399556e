"""The cells of a shard that still exist after some were freed, and the pages that hold only freed ones.

A column is cut into blocks of `BLOCK` rows. A block that was freed in part has a bit for each row; a whole or freed
block costs nothing. So a shard costs at most a bit for each cell, and mostly far less.

The values of consecutive rows are one byte range in each buffer of their column. So freed rows are a few byte ranges,
whose whole pages can be returned to the host (`dead_pages`). Tables (row offsets, shapes, presence flags) stay, because
other rows are read with them. The values of an indexed column stay too, because rows share them.

Invariants: a freed cell never exists again; a returned page has values of freed rows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane.batch.byte_ranges import ByteRanges, merged, row_values
from dataplane.batch.layout import Bytes, ShardLayout
from dataplane.batch.rows import Index, RowIndices
from dataplane.config import PAGE

BLOCK = 1 << 16

LiveBlock: TypeAlias = tuple[int, int, bytes]
"""A column, the number of a block in which rows were freed, and packed bits: 1 for each row of the block that was not
freed. The bits are empty if all rows were freed."""

_ENTRY = 16  # the most bytes of a block in a message, without its bits

Flags = npt.NDArray[np.bool_]
Place = slice | Index


class LiveCells:
    """The existing cells of `columns` by `rows`; at first all."""

    __slots__ = ("_blocks", "_freed", "columns", "rows")

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.rows = rows
        self._freed = 0  # blocks of which no row is live
        self._blocks: dict[tuple[int, int], npt.NDArray[np.uint8] | None] = {}
        """By column and block: packed bits of live rows; None if no row is live, no entry if all are."""

    @classmethod
    def of(cls, blocks: Sequence[LiveBlock], columns: int, rows: int) -> LiveCells:
        """Build the cells from `blocks` of such a shard. Raises ValueError for blocks that the shard cannot have."""
        live = cls(columns, rows)
        for column, block, bits in blocks:
            if not (0 <= column < columns and 0 <= block * BLOCK < rows) or (column, block) in live._blocks:
                raise ValueError(f"no block {block} of column {column}, for {columns} columns of {rows} rows")
            size = live._size(block)
            if len(bits) not in (0, -(-size // 8)):
                raise ValueError(f"{len(bits)} bytes for a block of {size} rows")
            live._blocks[column, block] = np.frombuffer(bits, np.uint8) if bits else None
            live._freed += not bits
        return live

    @property
    def blocks(self) -> list[LiveBlock]:
        return [(*key, b"" if bits is None else bits.tobytes()) for key, bits in self._blocks.items()]

    @property
    def nbytes(self) -> int:
        """The approximate bytes of `blocks` in a message."""
        return sum(_ENTRY + (0 if bits is None else bits.nbytes) for bits in self._blocks.values())

    def __bool__(self) -> bool:
        return self._freed < self.columns * -(-self.rows // BLOCK)

    def free(self, columns: Sequence[int], rows: RowIndices) -> None:
        """Mark these cells as freed. Cells freed before are ignored."""
        for block, inside in by_block(rows):
            for column in set(columns):
                self._free(column, block, inside)

    def _free(self, column: int, block: int, inside: Place) -> None:
        flags = self._block(column, block)
        flags[inside] = False
        left = np.packbits(flags) if flags.any() else None
        self._freed += left is None and self._blocks.get((column, block), _ALL) is not None
        self._blocks[column, block] = left

    def _size(self, block: int) -> int:
        return min(BLOCK, self.rows - block * BLOCK)

    def _block(self, column: int, block: int) -> Flags:
        size = self._size(block)
        bits = self._blocks.get((column, block), _ALL)
        if bits is _ALL:
            return np.ones(size, np.bool_)
        if bits is None:
            return np.zeros(size, np.bool_)
        return np.unpackbits(bits, count=size).view(np.bool_)

    def all(self, column: int, rows: RowIndices) -> bool:
        """Whether all of these rows of the column exist."""
        return not len(self.freed([column], rows))

    def freed(self, columns: Sequence[int], rows: RowIndices) -> Index:
        """The rows among these, ascending, that were freed in at least one of the columns."""
        found = []
        for block, inside in by_block(rows):
            for column in columns:
                flags = self._block(column, block)[inside] if (column, block) in self._blocks else _ALL
                if not flags.all():
                    gone = np.flatnonzero(~flags)
                    found.append(block * BLOCK + (inside.start + gone if isinstance(inside, slice) else inside[gone]))
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def flags(self, column: int, first: int, stop: int) -> Flags:
        """Flags of these rows of the column: whether each exists."""
        found = np.ones(stop - first, np.bool_)
        for block in range(first // BLOCK, -(-stop // BLOCK)):
            if (column, block) in self._blocks:
                start = block * BLOCK
                a, b = max(first, start), min(stop, start + BLOCK)
                found[a - first : b - first] = self._block(column, block)[a - start : b - start]
        return found

    def dead_around(self, column: int, rows: RowIndices, reach: int) -> Index:
        """The freed rows, ascending, of all runs of freed rows that contain one of `rows`. Runs are cut `reach` rows
        before the first and after the last of `rows`."""
        first, stop = max(0, rows.start - reach), min(self.rows, rows.stop + reach)
        edges = np.flatnonzero(np.diff(~self.flags(column, first, stop), prepend=False, append=False)).reshape(-1, 2)
        within = np.unique(np.searchsorted(edges[:, 0], rows.array() - first, side="right") - 1)
        runs = edges[within[within >= 0]] + first
        return np.concatenate([np.empty(0, np.int64), *(np.arange(*run) for run in runs.tolist())])


_ALL: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


def by_block(rows: RowIndices) -> Iterator[tuple[int, Place]]:
    """Iterate over the blocks that contain some of these rows, as (block, unique positions of the rows in it)."""
    if not len(rows):
        return
    blocks = range(rows.start // BLOCK, -(-rows.stop // BLOCK))
    if rows.slice is not None:
        for block in blocks:
            start = block * BLOCK
            yield block, slice(max(rows.start - start, 0), min(rows.stop - start, BLOCK))
        return
    index = rows.array()
    if not (index[1:] > index[:-1]).all():
        index = np.unique(index)
    edges = np.searchsorted(index, np.array(blocks) * BLOCK)
    for block, start, stop in zip(blocks, edges, [*edges[1:], len(index)], strict=True):
        if start < stop:
            yield block, index[start:stop] - block * BLOCK


def dead_pages(layout: ShardLayout, column: int, live: LiveCells, rows: RowIndices, memory: Bytes) -> ByteRanges:
    """Return the (start, end), in the shard's `memory`, of whole pages that have only freed values, around these freed
    rows of a column. The pages may include some that were returned before."""
    stored = layout.columns[column][1]
    unit = stored.field.item_nbytes if stored.field.kind == "dense" else 0
    dead = live.dead_around(column, rows, -(-PAGE // unit) if unit else live.rows)
    if unit * len(dead) < PAGE and unit:
        return []  # the most frequent case
    values = merged(row_values(stored, dead, memory, shared=False), gap=0)
    pages = [(-(-start // PAGE) * PAGE, end // PAGE * PAGE) for start, end in values]
    return [(first, last) for first, last in pages if first < last]
