"""Where a buffer's bytes come from, and the copies that put them into their place.

A `Rows` source knows the rows of one column's values: how many bytes they are, how to copy them all, which bytes
one row is, and how to keep a few of them. A copy is a `Job`: a call without arguments, independent of every
other. NumPy copies release the GIL, so jobs may run in several threads at once, and what is large is cut into
pieces. A job reads its source when it runs, so the source must not change before.

Rejected: a copy a row. A thousand rows of a few KiB then cost more in calls than in bytes; concatenation into the
destination does the same work in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.copying import copy, join
from dataplane.batch.layout import Bytes, Index

Job = Callable[[], Any]

_SMALL_ROW = 1024  # below this many bytes a row, joining byte strings beats an array header for each


class RowSource(Protocol):
    """The values of a column's rows."""

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        """Copies that together fill `memory`, `nbytes` long, in pieces of about `piece` bytes."""

    def row(self, i: int) -> Any:
        """The bytes of row `i`, as something with the buffer protocol."""

    @property
    def in_place(self) -> bool:
        """Whether `row` copies nothing."""

    def identity(self, i: int) -> Hashable:
        """Equal for two rows only where they are the same memory; None where that is not known."""

    def take(self, index: Index) -> RowSource:
        """The rows at these positions; nothing is copied yet."""


def flat_jobs(source: Bytes, memory: Bytes, piece: int) -> Iterator[Job]:
    """Copies of one run of bytes into another as long."""
    for start in range(0, len(source), piece):
        yield partial(copy, memory[start : start + piece], source[start : start + piece])


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The bytes of an array, 1-D; without a copy where it is contiguous."""
    if not array.size:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def groups(bounds: Index, piece: int) -> list[tuple[int, int]]:
    """Rows in groups (first, last + 1) of about `piece` bytes; row i has the bytes bounds[i]:bounds[i + 1]."""
    total = int(bounds[-1])
    if total <= piece:
        return [(0, len(bounds) - 1)]
    cuts = np.searchsorted(bounds, np.arange(piece, total, piece))
    edges = np.unique(np.concatenate(([0], cuts, [len(bounds) - 1]))).tolist()
    return list(pairwise(edges))


class Rectangle(msgspec.Struct, frozen=True, eq=False):
    """Rows of equal shape: `array` is [rows, *shape], any strides."""

    array: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def in_place(self) -> bool:
        return self.array[:1].flags.c_contiguous

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        array = self.array
        if array.flags.c_contiguous:
            yield from flat_jobs(as_bytes(array), memory, piece)
        elif array.size:
            target = memory.view(array.dtype).reshape(array.shape)
            step = max(1, piece * len(array) // array.nbytes)
            for start in range(0, len(array), step):
                yield partial(np.copyto, target[start : start + step], array[start : start + step])

    def row(self, i: int) -> Bytes:
        return as_bytes(self.array[i])

    def identity(self, i: int) -> Hashable:
        return 0 if self.array.strides[0] == 0 else None  # a broadcast row is one row

    def take(self, index: Index) -> RowSource:
        return Taken(self.array, index)


class Taken(msgspec.Struct, frozen=True, eq=False):
    """The rows `index` of `array` [rows, *shape]; they may repeat."""

    array: npt.NDArray[Any]
    index: Index

    @property
    def nbytes(self) -> int:
        return self.array[:1].nbytes * len(self.index)

    @property
    def in_place(self) -> bool:
        return self.array[:1].flags.c_contiguous

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        array, index = self.array, self.index
        if not self.nbytes:
            return
        target = memory.view(array.dtype).reshape(len(index), *array.shape[1:])
        step = max(1, piece // array[:1].nbytes)
        for start in range(0, len(index), step):
            # "clip" because "raise" makes NumPy copy through a buffer; the index is ours, and in range
            yield partial(np.take, array, index[start : start + step], 0, target[start : start + step], "clip")

    def row(self, i: int) -> Bytes:
        return as_bytes(self.array[self.index[i]])

    def identity(self, i: int) -> Hashable:
        return int(self.index[i])

    def take(self, index: Index) -> RowSource:
        return Taken(self.array, self.index[index])


class Run(msgspec.Struct, frozen=True, eq=False):
    """Rows of any length, one behind another in `data`; row i has the bytes bounds[i]:bounds[i + 1]."""

    data: Bytes
    bounds: Index

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def in_place(self) -> bool:
        return True

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        return flat_jobs(self.data, memory, piece)

    def row(self, i: int) -> Bytes:
        return self.data[self.bounds[i] : self.bounds[i + 1]]

    def identity(self, i: int) -> Hashable:
        return None

    def take(self, index: Index) -> RowSource:
        return Joined(tuple(self.row(i) for i in index.tolist()), gathered(self.bounds, index))


class Joined(msgspec.Struct, frozen=True, eq=False):
    """Rows that are arrays of one dtype, each anywhere; row i will have the bytes bounds[i]:bounds[i + 1].

    `item_shape` is the shape that all rows share behind their first dimension; None: they do not.
    """

    rows: Sequence[npt.NDArray[Any]]
    bounds: Index
    item_shape: tuple[int, ...] | None = ()

    @property
    def nbytes(self) -> int:
        return int(self.bounds[-1])

    @property
    def in_place(self) -> bool:
        return all(row.flags.c_contiguous for row in self.rows)

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        for first, last in groups(self.bounds, piece):
            begin, large, end = self.bounds[[first, last - 1, last]].tolist()
            if end - large > piece and self.rows[last - 1].flags.c_contiguous:  # several threads copy it
                yield from flat_jobs(as_bytes(self.rows[last - 1]), memory[large:end], piece)
                last, end = last - 1, large
            if end > begin:
                yield partial(self._join, memory[begin:end], first, last)

    def _join(self, memory: Bytes, first: int, last: int) -> None:
        join(memory, self.rows[first:last], self.item_shape)

    def row(self, i: int) -> Bytes:
        return as_bytes(self.rows[i])

    def identity(self, i: int) -> Hashable:
        row = self.rows[i]
        return row.__array_interface__["data"][0], row.shape, row.strides

    def take(self, index: Index) -> RowSource:
        rows = tuple(self.rows[i] for i in index.tolist())
        return Joined(rows, gathered(self.bounds, index), self.item_shape)


class JoinedBytes(msgspec.Struct, frozen=True, eq=False):
    """Rows that are byte strings; row i will have the bytes bounds[i]:bounds[i + 1]."""

    rows: Sequence[Any]
    bounds: Index

    @property
    def nbytes(self) -> int:
        return int(self.bounds[-1])

    @property
    def in_place(self) -> bool:
        return True

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        for first, last in groups(self.bounds, piece):
            part = memory[self.bounds[first] : self.bounds[last]]
            if len(part):
                yield partial(self._join, part, first, last)

    def _join(self, memory: Bytes, first: int, last: int) -> None:
        rows = self.rows[first:last]
        if len(memory) < _SMALL_ROW * len(rows):
            memory[:] = np.frombuffer(b"".join(rows), np.uint8)
        else:
            join(memory, [np.frombuffer(row, np.uint8) for row in rows])

    def row(self, i: int) -> Any:
        return self.rows[i]

    def identity(self, i: int) -> Hashable:
        return id(self.rows[i])

    def take(self, index: Index) -> RowSource:
        return JoinedBytes(tuple(self.rows[i] for i in index.tolist()), gathered(self.bounds, index))


class Chained(msgspec.Struct, frozen=True, eq=False):
    """Rows that are byte strings one behind another: row i is `pieces[firsts[i]:firsts[i + 1]]`, and piece k will have
    the bytes edges[k]:edges[k + 1]."""

    pieces: Sequence[Any]
    edges: Index
    firsts: Index

    @property
    def nbytes(self) -> int:
        return int(self.edges[-1])

    @property
    def in_place(self) -> bool:
        return False

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        return JoinedBytes(self.pieces, self.edges).jobs(memory, piece)

    def row(self, i: int) -> Any:
        return b"".join(self.pieces[self.firsts[i] : self.firsts[i + 1]])

    def identity(self, i: int) -> Hashable:
        return None

    def take(self, index: Index) -> RowSource:
        rows = [self.pieces[self.firsts[i] : self.firsts[i + 1]] for i in index.tolist()]
        pieces = tuple(piece for row in rows for piece in row)
        return Chained(pieces, offsets_of(list(map(len, pieces))), offsets_of(list(map(len, rows))))


def offsets_of(lengths: npt.ArrayLike) -> Index:
    """Row offsets, one more than there are lengths, from 0."""
    counts = np.asarray(lengths, np.int64)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def gathered(offsets: Index, index: Index) -> Index:
    """The offsets that the rows `index` have when they lie one behind another."""
    return offsets_of(np.diff(offsets)[index])
