"""A column's values before they are stored: one type for every kind of input.

All inputs are converted to `Values`, from which `batch.put_plan` plans. `Values` refer to the caller's memory where
possible. Offsets, encoded text, MessagePack, and numbers from Python lists are in new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch import _memory
from dataplane.batch.dtypes import name_of, storage
from dataplane.batch.field import MAX_NDIM, Field, Kind
from dataplane.batch.layout import Bytes, Index
from dataplane.errors import SchemaMismatch

# The sources of a column's bytes, and the jobs that copy them to their destination.
#
# A `RowSource` is the rows of one column's values. It has their size, the jobs that copy all of them, the bytes of a
# single row, and a selection of rows (`take`). A `Job` is a function without arguments that does one copy, independent
# of all others. NumPy releases the GIL while it copies, so jobs may run in several threads at once, and large copies
# are split into several jobs. A job reads its source when it runs, so the source must not change before.
#
# Large copies bypass the processor's caches (the extension `_memory`), since other processes will read them. Small
# copies stay in the caches for the next reader.
#
# Rejected: a separate copy for each row. For a thousand rows of a few KiB the calls then take more time than the bytes;
# concatenation into the destination does the same work in one call.

Job = Callable[[], Any]

_SMALL_ROW = 1024  # bytes: for smaller rows, joining byte strings is faster than making an array of each
_STREAMED = 4 << 20  # the least bytes of a copy that bypasses the caches: about a core's own cache


def copy(target: Bytes, source: Bytes) -> None:
    """Write `source` into `target`, which has the same length."""
    if len(target) < _STREAMED:
        np.copyto(target, source)
    else:
        _memory.join(target, (source,))


def join(target: Bytes, rows: Sequence[npt.NDArray[Any]], item_shape: tuple[int, ...] | None = None) -> None:
    """Write the concatenation of arrays of one dtype into `target`, which has the same length. `item_shape`: the shape
    after the first dimension, or None if the arrays differ in it."""
    if len(target) >= _STREAMED:
        with suppress(BufferError, ValueError):  # a row with strides, or of a dtype without buffers, as datetime64
            _memory.join(target, tuple(rows))
            return
    into = target.view(rows[0].dtype)
    if item_shape is None:
        np.concatenate([row.reshape(-1) for row in rows], out=into)
    else:
        np.concatenate(rows, out=into.reshape(-1, *item_shape))


def flat_jobs(source: Bytes, memory: Bytes, piece: int) -> Iterator[Job]:
    """Copies of one run of bytes into another of the same length, `piece` bytes each."""
    for start in range(0, len(source), piece):
        yield partial(copy, memory[start : start + piece], source[start : start + piece])


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The bytes of an array, 1-D, in place if it is contiguous."""
    if not array.size:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def objects_of(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """A 1-D array of these objects. NumPy itself would take lists of equal length for a second dimension."""
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def offsets_of(lengths: npt.ArrayLike) -> Index:
    """The offsets of rows with these lengths, from 0, int64 [rows + 1]."""
    counts = np.asarray(lengths, np.int64)
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def gathered(offsets: Index, index: Index) -> Index:
    """The offsets of the rows `index`, concatenated."""
    return offsets_of(np.diff(offsets)[index])


def groups(bounds: Index, piece: int) -> list[tuple[int, int]]:
    """Ranges (start, stop) of rows with about `piece` bytes each; row i has the bytes bounds[i]:bounds[i + 1]."""
    total = int(bounds[-1])
    if total <= piece:
        return [(0, len(bounds) - 1)]
    cuts = np.searchsorted(bounds, np.arange(piece, total, piece))
    edges = np.unique(np.concatenate(([0], cuts, [len(bounds) - 1]))).tolist()
    return list(pairwise(edges))


class RowSource(msgspec.Struct, frozen=True, eq=False):
    """The values of a column's rows."""

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        raise NotImplementedError

    @property
    def in_place(self) -> bool:
        """Whether `row` copies nothing."""
        return True

    @property
    def device(self) -> Any:
        """The device of the rows; None if all are in host memory."""
        return None

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        """Copies that together fill `memory`, which is `nbytes` long, in pieces of about `piece` bytes."""
        raise NotImplementedError

    def row(self, i: int) -> Any:
        """The bytes of row `i`, as an object with the buffer protocol."""
        raise NotImplementedError

    def identity(self, i: int) -> Hashable:
        """A value that two rows share only if they are the same memory; None if unknown."""
        return None

    def take(self, index: Index) -> RowSource:
        """The rows at these positions. Copies nothing but rows of one torch tensor."""
        raise NotImplementedError

    def copied(self) -> Bytes:
        """The concatenated bytes of all rows, in new memory, copied by this thread."""
        memory = np.empty(self.nbytes, np.uint8)
        for job in self.jobs(memory, max(1, len(memory))):
            job()
        return memory

    def run(self) -> Bytes:
        """The bytes of all rows as one contiguous array: a view if they are contiguous already, else a copy."""
        return self.copied()


class Rectangle(RowSource, frozen=True, eq=False):
    """Rows of equal shape: those of `array`, [rows, *shape] of any strides. With an `index`, its rows at these
    positions, which may repeat."""

    array: npt.NDArray[Any]
    index: Index | None = None

    @property
    def nbytes(self) -> int:
        return self.array.nbytes if self.index is None else self.array[:1].nbytes * len(self.index)

    @property
    def in_place(self) -> bool:
        return self.array[:1].flags.c_contiguous

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        array, index, nbytes = self.array, self.index, self.nbytes
        if index is None and array.flags.c_contiguous:
            yield from flat_jobs(as_bytes(array), memory, piece)
        elif nbytes:
            rows = len(array) if index is None else len(index)
            target = memory.view(array.dtype).reshape(rows, *array.shape[1:])
            step = max(1, piece * rows // nbytes)
            for start in range(0, rows, step):
                part = target[start : start + step]
                if index is None:
                    yield partial(np.copyto, part, array[start : start + step])
                else:  # "clip" because "raise" copies through a buffer; the index is in range
                    yield partial(np.take, array, index[start : start + step], 0, part, "clip")

    def row(self, i: int) -> Bytes:
        return as_bytes(self.array[i if self.index is None else self.index[i]])

    def identity(self, i: int) -> Hashable:
        if self.index is not None:
            return int(self.index[i])
        return 0 if self.array.strides[0] == 0 else None  # a broadcast row is one row

    def take(self, index: Index) -> RowSource:
        return Rectangle(self.array, index if self.index is None else self.index[index])

    def run(self) -> Bytes:
        return as_bytes(self.array) if self.index is None and self.array.flags.c_contiguous else self.copied()


class RowRun(RowSource, frozen=True, eq=False):
    """Consecutive rows of any length in `data`; row i has the bytes bounds[i]:bounds[i + 1]."""

    data: Bytes
    bounds: Index

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        return flat_jobs(self.data, memory, piece)

    def row(self, i: int) -> Bytes:
        return self.data[self.bounds[i] : self.bounds[i + 1]]

    def take(self, index: Index) -> RowSource:
        return Joined(tuple(self.row(i) for i in index.tolist()), gathered(self.bounds, index))

    def run(self) -> Bytes:
        return self.data


class Joined(RowSource, frozen=True, eq=False):
    """Rows that are separate arrays of one dtype; row i will have the bytes bounds[i]:bounds[i + 1].

    `item_shape`: the shape of all rows after their first dimension; None if they differ.
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


class ByteRows(RowSource, frozen=True, eq=False):
    """Rows that are byte strings: piece k is written to memory[edges[k]:edges[k + 1]]. Row i is piece i; or, with
    `firsts`, the concatenated pieces firsts[i]:firsts[i + 1]."""

    pieces: Sequence[Any]
    edges: Index
    firsts: Index | None = None

    @property
    def nbytes(self) -> int:
        return int(self.edges[-1])

    @property
    def in_place(self) -> bool:
        return self.firsts is None

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        for first, last in groups(self.edges, piece):
            part = memory[self.edges[first] : self.edges[last]]
            if len(part):
                yield partial(self._join, part, first, last)

    def _join(self, memory: Bytes, first: int, last: int) -> None:
        pieces = self.pieces[first:last]
        if len(memory) < _SMALL_ROW * len(pieces):
            memory[:] = np.frombuffer(b"".join(pieces), np.uint8)
        else:
            join(memory, [np.frombuffer(piece, np.uint8) for piece in pieces])

    def row(self, i: int) -> Any:
        return self.pieces[i] if self.firsts is None else b"".join(self._pieces(i))

    def _pieces(self, i: int) -> Sequence[Any]:
        return self.pieces[i : i + 1] if self.firsts is None else self.pieces[self.firsts[i] : self.firsts[i + 1]]

    def identity(self, i: int) -> Hashable:
        return id(self.pieces[i]) if self.firsts is None else None

    def take(self, index: Index) -> RowSource:
        rows = [self._pieces(i) for i in index.tolist()]
        pieces = tuple(piece for row in rows for piece in row)
        firsts = None if self.firsts is None else offsets_of(list(map(len, rows)))
        return ByteRows(pieces, offsets_of(list(map(len, pieces))), firsts)


class Values(msgspec.Struct, frozen=True, eq=False):
    """`rows` rows of a column. `data`: the values of every kind but struct. `offsets`, `shapes`: as in the layout.
    `presence`, `children`: for each key of a struct, flags of the rows that have it, and its values. `index`, for
    object columns only (`object_rows`): the stored row of each row; data and offsets are then of stored rows."""

    field: Field
    rows: int
    data: RowSource | None = None
    offsets: Index | None = None
    shapes: Index | None = None
    presence: tuple[npt.NDArray[np.bool_], ...] = ()
    children: tuple[Values, ...] = ()
    index: Index | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the values themselves, without offsets, shapes and presence flags."""
        return (self.data.nbytes if self.data is not None else 0) + sum(child.nbytes for child in self.children)

    def take(self, index: Index) -> Values:
        """The rows at these positions, in this order. An indexed column keeps all stored rows."""
        if self.index is not None:
            return msgspec.structs.replace(self, rows=len(index), index=self.index[index])
        return Values(
            self.field,
            len(index),
            None if self.data is None else self.data.take(index),
            None if self.offsets is None else gathered(self.offsets, index),
            None if self.shapes is None else self.shapes[index],
            tuple(flags[index] for flags in self.presence),
            tuple(
                child.take((np.cumsum(flags) - 1)[index[flags[index]]])
                for flags, child in zip(self.presence, self.children, strict=True)
            ),
        )


def mismatch(column: str, message: str, *, row: int = -1, expected: str = "", found: str = "") -> SchemaMismatch:
    """The error for values that do not form a column."""
    return SchemaMismatch(_where(column, row) + message, column=column, row=row, expected=expected, found=found)


def mismatch_in(error: SchemaMismatch, column: str, rows: Sequence[int]) -> SchemaMismatch:
    """Translate an error about a part of a column into one about the whole column. `rows`: for each row of the part,
    its number in the column."""
    message = str(error).removeprefix(_where(error.column, error.row))
    row = rows[error.row] if error.row >= 0 else -1
    return mismatch(column, message, row=row, expected=error.expected, found=error.found)


def _where(column: str, row: int) -> str:
    return f"column {column!r}" + (f", row {row}" if row >= 0 else "") + ": "


def typed_field(column: str, kind: Kind, dtype: str, shape: Sequence[int | None]) -> Field:
    """A dense or ragged field. Raises SchemaMismatch if it has too many dimensions."""
    if len(shape) > MAX_NDIM:
        raise mismatch(column, "too many dimensions", expected=f"at most {MAX_NDIM} a row", found=f"{len(shape)} a row")
    return Field(kind, dtype, tuple(shape))


def dtype_name(column: str, dtype: np.dtype[Any]) -> str:
    """The name of the dtype. Raises SchemaMismatch if a column cannot hold it."""
    name = name_of(dtype)
    if name is None:
        hint = "long double differs between hosts, use float64" if dtype.kind in "fc" else "use plain numbers"
        raise mismatch(column, f"NumPy's {dtype} cannot be stored: {hint}", expected="numbers", found=str(dtype))
    return name


def dense(column: str, array: npt.NDArray[Any], dtype: str = "") -> Values:
    """A dense column of an array [rows, *shape] of any strides. `dtype`: the dtype's name, if the array has its bits.
    Raises SchemaMismatch."""
    name = dtype or dtype_name(column, array.dtype)
    bits = storage(name)
    if array.dtype != bits:
        array = array.view(bits)
    return Values(typed_field(column, "dense", name, array.shape[1:]), len(array), Rectangle(array))


def leading(shapes: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    """The field shape of ragged rows: None for the first dimension, and up to the last one in which rows differ."""
    first = tuple(shapes[0])
    if len(first) == 1:
        return (None,)
    table = np.array(shapes, np.int64)
    differing = np.flatnonzero((table != table[0]).any(axis=0))
    varying = int(differing[-1]) + 1 if len(differing) else 1
    return (None,) * varying + first[varying:]


def ragged(column: str, dtype: str, shapes: Sequence[Sequence[int]], shape: tuple[int | None, ...]) -> Values:
    """A ragged column without its data: field, offsets and, if needed, shapes."""
    field = typed_field(column, "ragged", dtype, shape)
    if len(shape) == 1:
        return Values(field, len(shapes), None, offsets_of([length for (length,) in shapes]))
    table = np.array(shapes, np.int64).reshape(len(shapes), len(shape))
    if field.varying == 1:
        return Values(field, len(shapes), None, offsets_of(table[:, 0]))
    return Values(field, len(shapes), None, offsets_of(table.prod(axis=1)), table)


def bounds_of(field: Field, offsets: Index) -> Index:
    """Row offsets in bytes."""
    unit = field.item_nbytes
    return offsets if unit == 1 else offsets * unit


def ragged_rows(
    column: str, dtype: str, rows: Sequence[npt.NDArray[Any]], shape: tuple[int | None, ...] = ()
) -> Values:
    """A ragged column of arrays of equal dtype and number of dimensions. `dtype`: the name of the dtype under which
    they are stored. `shape`: the shape of the field, computed by default."""
    shapes = [row.shape for row in rows]
    head = ragged(column, dtype, shapes, shape or leading(shapes))
    assert head.offsets is not None
    item_shape = None if head.field.varying > 1 else head.field.item_shape
    bounds = bounds_of(head.field, head.offsets)
    return msgspec.structs.replace(head, data=Joined(rows, bounds, item_shape))


def ragged_run(field: Field, values: npt.NDArray[Any], offsets: Index, shapes: Index | None = None) -> Values:
    """A ragged column of consecutive rows, whose items are `values`, contiguous."""
    return Values(field, len(offsets) - 1, RowRun(as_bytes(values), bounds_of(field, offsets)), offsets, shapes)


def ragged_items(
    column: str, dtype: str, shapes: Sequence[Sequence[int]], shape: tuple[int | None, ...], values: npt.NDArray[Any]
) -> Values:
    """A ragged column of consecutive rows with these `shapes` and these items. `shape`: that of the field."""
    head = ragged(column, dtype, shapes, shape)
    assert head.offsets is not None
    return ragged_run(head.field, values, head.offsets, head.shapes)


def byte_rows(kind: Kind, rows: Sequence[Any]) -> Values:
    """A text, bytes or object column whose rows are byte strings that are already encoded."""
    offsets = offsets_of(list(map(len, rows)))
    return Values(Field(kind), len(rows), ByteRows(rows, offsets), offsets)


def byte_run(kind: Kind, data: Bytes, offsets: Index) -> Values:
    """A text, bytes or object column of consecutive rows that are already encoded."""
    return Values(Field(kind), len(offsets) - 1, RowRun(data, offsets), offsets)


def struct(
    keys: Sequence[str], presence: Sequence[npt.NDArray[np.bool_]], children: Sequence[Values], rows: int
) -> Values:
    """A struct column; child k has one row for each row where presence[k] is true."""
    field = Field("struct", children=tuple((key, child.field) for key, child in zip(keys, children, strict=True)))
    return Values(field, rows, presence=tuple(presence), children=tuple(children))
