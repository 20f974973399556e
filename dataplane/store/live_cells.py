"""The cells of a shard that still exist after some were freed, and the pages that hold only freed ones.

A column is cut into blocks of `BLOCK` rows. A block that was freed in part has a bit for each row; a whole or freed
block costs nothing. So a shard costs at most a bit for each cell, and mostly far less.

The values of a row are one run in each buffer of its column, and so are those of consecutive rows. So freed rows are a
few byte ranges, whose whole pages can be given back (`dead_pages`). Tables (row offsets, shapes, presence flags) stay:
reading the other rows needs them. So do the values of an indexed column, where rows share them.

Invariants: a freed cell never exists again; a returned page has values of freed rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dataplane.batch.byte_ranges import merged, row_values
from dataplane.batch.layout import Bytes, ShardLayout
from dataplane.batch.rows import Index, RowIndices
from dataplane.config import PAGE

BLOCK = 1 << 16

APART = 64 << 10
"""The number of bytes from which on the live bits of a shard are sent separately."""

Flags = npt.NDArray[np.bool_]
Place = slice | Index


class LiveCells:
    """The existing cells of `columns` by `rows`; at first all."""

    __slots__ = ("_blocks", "_left", "columns", "rows")

    def __init__(self, columns: int, rows: int) -> None:
        self.columns = columns
        self.rows = rows
        self._left = columns * rows
        self._blocks: dict[tuple[int, int], npt.NDArray[np.uint8] | None] = {}
        """By column and block: packed bits of live rows; None if no row is live, no entry if all are."""

    @classmethod
    def decode(cls, bits: bytes, columns: int, rows: int) -> LiveCells:
        """The inverse of `encode`. Raises ValueError for another number of bits."""
        if len(bits) != -(-rows * columns // 8):
            raise ValueError(f"{len(bits)} bytes for {columns} columns of {rows} rows")
        live = cls(columns, rows)
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=rows * columns).view(np.bool_).reshape(columns, rows)
        for column, of in enumerate(flags):
            live.set(column, 0, of)
        return live

    def encode(self) -> bytes:
        """A bit for each cell, row-major."""
        flags = [self.flags(column, 0, self.rows) for column in range(self.columns)]
        return np.packbits(np.concatenate(flags)).tobytes() if flags else b""

    @property
    def encoded(self) -> int:
        """The number of bytes that `encode` returns."""
        return -(-self.rows * self.columns // 8)

    @property
    def large(self) -> bool:
        """Whether the bits are so many that they are sent separately, for the columns and rows that are read."""
        return self.encoded > APART

    @property
    def nbytes(self) -> int:
        """The memory of the bits."""
        return sum(bits.nbytes for bits in self._blocks.values() if bits is not None)

    def __bool__(self) -> bool:
        """Whether any cell exists."""
        return self._left > 0

    def free(self, columns: Sequence[int], rows: RowIndices) -> None:
        """Free these existing cells."""
        for block, inside in by_block(rows):
            for column in set(columns):
                self._free(column, block, inside)

    def _free(self, column: int, block: int, inside: Place) -> None:
        flags = self._block(column, block)
        self._left -= int(np.count_nonzero(flags[inside]))
        flags[inside] = False
        self._keep(column, block, flags)

    def _keep(self, column: int, block: int, flags: Flags) -> None:
        if flags.any():
            self._blocks[column, block] = np.packbits(flags)
        else:
            self._blocks[column, block] = None

    def _size(self, block: int) -> int:
        return min(BLOCK, self.rows - block * BLOCK)

    def _block(self, column: int, block: int) -> Flags:
        """The flags of a block; a copy."""
        size = self._size(block)
        bits = self._blocks.get((column, block), _ALL)
        if bits is _ALL:
            return np.ones(size, np.bool_)
        if bits is None:
            return np.zeros(size, np.bool_)
        return np.unpackbits(bits, count=size).view(np.bool_)

    def set(self, column: int, first: int, flags: Flags) -> None:
        """Set the flags of rows of a column of which nothing was freed yet, from `first` on, a whole number of
        blocks."""
        for start in range(0, len(flags), BLOCK):
            of = flags[start : start + BLOCK]
            if not of.all():
                self._keep(column, (first + start) // BLOCK, of)
                self._left -= len(of) - int(np.count_nonzero(of))

    def all(self, column: int, rows: RowIndices) -> bool:
        """Whether all of these rows of the column exist."""
        for block, inside in by_block(rows):
            if (column, block) in self._blocks and not self._block(column, block)[inside].all():
                return False
        return True

    def flags(self, column: int, first: int, stop: int) -> Flags:
        """Flags of these rows of the column: whether each exists."""
        found = np.ones(stop - first, np.bool_)
        for block in range(first // BLOCK, -(-stop // BLOCK)):
            if (column, block) in self._blocks:
                start = block * BLOCK
                a, b = max(first, start), min(stop, start + BLOCK)
                found[a - first : b - first] = self._block(column, block)[a - start : b - start]
        return found

    def dead_runs(self, column: int, rows: RowIndices, least: int) -> RowIndices:
        """The first row of each run of at least `least` freed rows around these rows."""
        first, stop = max(0, rows.start - least), min(self.rows, rows.stop + least)
        dead = ~self.flags(column, first, stop)
        edges = np.flatnonzero(dead[1:] != dead[:-1]) + 1
        bounds = np.concatenate([[0], edges, [len(dead)]])
        starts = bounds[:-1][dead[bounds[:-1]] & (np.diff(bounds) >= least)]
        return RowIndices.index(first + starts)

    def bits(self, column: int, first: int, stop: int) -> bytes:
        """The flags as bits; empty if all rows exist."""
        if not any((column, block) in self._blocks for block in range(first // BLOCK, -(-stop // BLOCK))):
            return b""
        return np.packbits(self.flags(column, first, stop)).tobytes()


_ALL: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


def by_block(rows: RowIndices) -> Iterator[tuple[int, Place]]:
    """For each block with some of these rows: its number, and their positions in it, each once."""
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


def dead_pages(
    layout: ShardLayout, live: npt.NDArray[np.bool_], columns: Iterable[int], rows: RowIndices, memory: Bytes
) -> Iterator[tuple[int, int]]:
    """The (start, end) in the shard's `memory` of whole pages of freed values around these rows of these columns,
    which are freed according to `live` [column, row]. May return pages again."""
    for ordinal in columns:
        dead = _dead_rows(~live[ordinal], rows)
        for start, end in merged(row_values(layout.columns[ordinal][1], dead, memory, shared=False), gap=0):
            first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            if first < last:
                yield first, last


def _dead_rows(dead: npt.NDArray[np.bool_], rows: RowIndices) -> Index:
    """The rows of all runs of freed rows that contain some of these rows."""
    edges = np.flatnonzero(np.diff(dead, prepend=False, append=False)).reshape(-1, 2)
    within = np.unique(np.searchsorted(edges[:, 0], rows.array(), side="right") - 1)
    return np.concatenate([np.empty(0, np.int64), *(np.arange(*edges[run]) for run in within[within >= 0])])
