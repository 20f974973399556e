"""A column's values before they are stored: one type for every kind of input.

All inputs are converted to `Values`, the only input of `batch.put_plan`. `Values` refer to the caller's memory where
they can. Offsets, encoded text, MessagePack, and numbers from Python lists are in new memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.dtypes import name_of, storage
from dataplane.batch.field import MAX_NDIM, Field, Kind
from dataplane.batch.layout import Bytes, Index
from dataplane.batch.row_sources import ByteRows, Joined, Rectangle, RowRun, RowSource, as_bytes, gathered, offsets_of
from dataplane.errors import SchemaMismatch


class Values(msgspec.Struct, frozen=True, eq=False):
    """`rows` rows of a column. `data` holds the values of every kind but struct; `offsets` and `shapes` are those
    of the layout; `presence` and `children` are a struct's, one flag a row and key. `index`, for object columns only
    (`object_rows`): the stored row of each row; data and offsets are then those of stored rows."""

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
    """The error of a part of a column, as an error of the column. `rows`: the column's rows in the part."""
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


def dtype_name(column: str, dtype: np.dtype[Any], row: int = -1) -> str:
    """The name of the dtype. Raises SchemaMismatch if a column cannot hold it."""
    name = name_of(dtype)
    if name is None:
        hint = "long double differs between hosts, use float64" if dtype.kind in "fc" else "use plain numbers"
        raise mismatch(
            column, f"NumPy's {dtype} cannot be stored: {hint}", row=row, expected="numbers", found=str(dtype)
        )
    return name


def dense(column: str, array: npt.NDArray[Any], dtype: str = "") -> Values:
    """A dense column of an array [rows, *shape] of any strides; `dtype` names bits that NumPy has no type for."""
    name = dtype or dtype_name(column, array.dtype)
    bits = storage(name)
    if array.dtype != bits:
        array = array.view(bits)
    return Values(typed_field(column, "dense", name, array.shape[1:]), len(array), Rectangle(array))


def leading(shapes: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    """The shape of one ragged row: None up to the last dimension in which rows differ, always for the first."""
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
    """A ragged column of arrays of equal dtype and number of dimensions; `dtype` names their bits.

    `shape`: that of the field; computed if it is not given.
    """
    shapes = [row.shape for row in rows]
    head = ragged(column, dtype, shapes, shape or leading(shapes))
    assert head.offsets is not None
    item_shape = None if head.field.varying > 1 else head.field.item_shape
    bounds = bounds_of(head.field, head.offsets)
    return msgspec.structs.replace(head, data=Joined(rows, bounds, item_shape))


def ragged_run(field: Field, values: npt.NDArray[Any], offsets: Index, shapes: Index | None = None) -> Values:
    """A ragged column whose rows lie one behind another: `values` are all their items, contiguous."""
    return Values(field, len(offsets) - 1, RowRun(as_bytes(values), bounds_of(field, offsets)), offsets, shapes)


def byte_rows(kind: Kind, rows: Sequence[Any]) -> Values:
    """A text, bytes or object column whose rows are byte strings, encoded already."""
    offsets = offsets_of(list(map(len, rows)))
    return Values(Field(kind), len(rows), ByteRows(rows, offsets), offsets)


def byte_run(kind: Kind, data: Bytes, offsets: Index) -> Values:
    """A text, bytes or object column whose rows lie one behind another, encoded already."""
    return Values(Field(kind), len(offsets) - 1, RowRun(data, offsets), offsets)


def struct(
    keys: Sequence[str], presence: Sequence[npt.NDArray[np.bool_]], children: Sequence[Values], rows: int
) -> Values:
    """A struct column; child k has one row for each row where presence[k] is true."""
    field = Field("struct", children=tuple((key, child.field) for key, child in zip(keys, children, strict=True)))
    return Values(field, rows, presence=tuple(presence), children=tuple(children))
