"""Collects rows that arrive one by one into the columns of one block.

Rows of one schema are either written consecutively as they arrive, into memory that is reused (`RowMemory`), or kept
and joined when the block is appended (`joined`). A row of an agent is a few arrays and lists of numbers. Writing each
byte once, at its final place, takes half the time of copying each array and joining thousands of copies. Reused memory
avoids a page fault for each row.

Invariants: nothing is converted. Columns are joined only if their fields are equal, so each row is read as if it had
been stored alone. A refused row changes nothing. The caller may change its arrays after `take` or `owned`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from dataplane.batch import _lists
from dataplane.batch.dtypes import is_bits, storage
from dataplane.batch.field import Field
from dataplane.batch.infer import FLOATS, INTS
from dataplane.batch.layout import Bytes, Index
from dataplane.batch.values import Rectangle, RowRun, RowSource, Values, bounds_of, dense, offsets_of, ragged_run

_LEAST = 16 << 10  # bytes of a column's first memory


class RowSchema:
    """The names and fields of columns, taken from a first row."""

    def __init__(self, columns: Sequence[tuple[str, Values]]) -> None:
        self._fields = [(name, values.field) for name, values in columns]
        self.alone = any(_indexed(values) for _, values in columns)
        """Whether rows cannot be joined, since a column is indexed."""
        self.simple = not self.alone and self.gathered() is not None
        """Whether `gathered` returns memory for the rows."""

    def gathered(self) -> RowMemory | None:
        """New memory for rows of this schema, as `RowMemory.of`."""
        return RowMemory.of(self._fields)

    def joined(self, several: Sequence[Sequence[Values]]) -> Mapping[str, Values]:
        """The columns of all rows. `several`: the values of each row, in the schema's order."""
        parts = zip(*several, strict=True)
        return {name: joined(of) for (name, _), of in zip(self._fields, parts, strict=True)}


def _indexed(values: Values) -> bool:
    return values.index is not None or any(_indexed(child) for child in values.children)


def owned(values: Values) -> Values:
    """The same values in new memory."""
    data = values.data
    if data is not None:
        data = _source(values.field, values.rows, data.copied(), values.offsets)
    children = tuple(map(owned, values.children)) if values.children else ()
    return Values(
        values.field, values.rows, data, values.offsets, values.shapes, values.presence, children, values.index
    )


def joined(several: Sequence[Values]) -> Values:
    """One column of all rows. The fields of all values are equal, and none has an index (`Values.index`)."""
    first = several[0]
    if len(several) == 1:
        return first
    rows, data, offsets, shapes = sum([values.rows for values in several]), None, None, None
    if first.offsets is not None:
        lengths = [np.diff(values.offsets) for values in several if values.offsets is not None]
        offsets = offsets_of(np.concatenate(lengths))
    if first.shapes is not None:
        shapes = np.concatenate([values.shapes for values in several if values.shapes is not None])
    if first.data is not None:
        runs = [values.data.run() for values in several if values.data is not None]
        data = _source(first.field, rows, np.concatenate(runs), offsets)
    presence = [np.concatenate(flags) for flags in zip(*[values.presence for values in several], strict=True)]
    children = [joined(of) for of in zip(*[values.children for values in several], strict=True)]
    return Values(first.field, rows, data, offsets, shapes, tuple(presence), tuple(children))


def _source(field: Field, rows: int, data: Bytes, offsets: Index | None) -> RowSource:
    """A source of consecutive rows with the bytes `data`."""
    if offsets is not None:
        return RowRun(data, bounds_of(field, offsets))
    shape = [dimension for dimension in field.shape if dimension is not None]
    return Rectangle(data.view(storage(field.dtype)).reshape(rows, *shape))


class RowMemory:
    """Rows of several columns, written consecutively into memory that grows."""

    def __init__(self, columns: Sequence[tuple[str, _DenseMemory | _NumbersMemory]]) -> None:
        self._names = tuple([name for name, _ in columns])
        self._columns = [column for _, column in columns]
        self.rows = 0
        """The number of rows taken."""
        self.nbytes = 0
        """The bytes of the values taken."""

    @classmethod
    def of(cls, fields: Sequence[tuple[str, Field]]) -> RowMemory | None:
        """Memory for rows of these columns; None if a column is more than an array or lists of numbers."""
        columns = [(name, _column_memory(field)) for name, field in fields]
        found = [(name, column) for name, column in columns if column is not None]
        return cls(found) if found and len(found) == len(columns) else None

    def take(self, given: Any, most: int) -> int:
        """Take columns with equal row counts, of at most `most` bytes. Returns the row count. Returns 0, and takes
        nothing, for more bytes, or if a quick check does not show that the columns are of this schema."""
        if type(given) is not dict or tuple(given) != self._names:
            return 0
        rows = nbytes = 0
        for column, values in zip(self._columns, given.values(), strict=True):
            found = column.take(values)
            if not found or (rows and found != rows):
                break
            rows = found
            nbytes += column.nbytes
        else:
            if nbytes - self.nbytes <= most:
                self.rows, self.nbytes = self.rows + rows, nbytes
                return rows
        self.cut(self.rows)
        return 0

    def columns(self, start: int, stop: int) -> Mapping[str, Values]:
        """The columns of these rows, in place."""
        named = zip(self._names, self._columns, strict=True)
        return {name: column.values(start, stop) for name, column in named}

    def cut(self, rows: int) -> None:
        """Keep only the first `rows` rows, and the memory. Later rows overwrite results of `columns` for the others."""
        for column in self._columns:
            column.cut(rows)
        self.rows, self.nbytes = rows, sum([column.nbytes for column in self._columns])


def _column_memory(field: Field) -> _DenseMemory | _NumbersMemory | None:
    if field.kind == "dense" and not is_bits(field.dtype):
        return _DenseMemory(field)
    return _NumbersMemory(field == FLOATS) if field in (INTS, FLOATS) else None


class _DenseMemory:
    """A column of arrays of one dtype whose rows have one shape: the count of its `rows`, and their bytes."""

    def __init__(self, field: Field) -> None:
        self.rows = self.nbytes = 0
        self._dtype = storage(field.dtype)
        self._shape = field.shape
        self._one = (1, *field.shape)  # the shape of a single row, as most are
        self._unit = field.item_nbytes
        self._memory = bytearray(_LEAST)
        self._copies = self._dtype.kind in "biufc"  # NumPy exports no buffer of other dtypes

    def take(self, given: Any) -> int:
        """Take rows, if a quick check shows that they are of this field. Returns their count, or 0."""
        if type(given) is not np.ndarray or (given.dtype is not self._dtype and given.dtype != self._dtype):
            return 0
        rows = 1
        if given.shape != self._one:
            if given.shape[1:] != self._shape or not given.ndim:
                return 0
            rows = len(given)
        start = self.nbytes
        end = start + rows * self._unit
        if end == start:
            return 0
        if end > len(self._memory):
            self._memory = _grown(self._memory, end)
        try:
            if not self._copies:
                raise BufferError
            _lists.copy(given, self._memory, start)
        except (BufferError, ValueError):  # not consecutive, or not of numbers
            self._memory[start:end] = given.tobytes()
        self.nbytes = end
        self.rows += rows
        return rows

    def cut(self, rows: int) -> None:
        """Keep only the first `rows` rows."""
        self.rows, self.nbytes = rows, rows * self._unit

    def values(self, start: int, stop: int) -> Values:
        """These rows, in place."""
        taken = np.frombuffer(self._memory, np.uint8, (stop - start) * self._unit, start * self._unit)
        return dense("", taken.view(self._dtype).reshape(stop - start, *self._shape))


class _NumbersMemory:
    """A column of lists of ints, or of floats, with the methods of `_DenseMemory`."""

    def __init__(self, floats: bool) -> None:
        self.rows = self.nbytes = 0
        self._floats = floats
        self._memory = bytearray(_LEAST)
        self._lengths: list[int] = []

    def take(self, given: Any) -> int:
        if type(given) is not list or not given:
            return 0
        lengths = _lists.write(given, self._memory, self.nbytes, self._floats)
        if lengths is None:
            if set(map(type, given)) != {list}:
                return 0
            end = self.nbytes + 8 * sum(map(len, given))
            if end <= len(self._memory):
                return 0
            self._memory = _grown(self._memory, end)
            return self.take(given)
        items = sum(lengths)
        self._lengths += lengths
        self.nbytes += 8 * items
        self.rows += (rows := len(lengths))
        return rows

    def cut(self, rows: int) -> None:
        del self._lengths[rows:]
        self.rows, self.nbytes = rows, 8 * sum(self._lengths)

    def values(self, start: int, stop: int) -> Values:
        lengths, first = self._lengths[start:stop], 8 * sum(self._lengths[:start])
        offsets = np.array([0, *accumulate(lengths)], np.int64)
        taken = np.frombuffer(self._memory, np.uint8, 8 * int(offsets[-1]), first)
        return ragged_run(FLOATS if self._floats else INTS, taken, offsets)


def _grown(memory: bytearray, needed: int) -> bytearray:
    """New memory of at least twice the bytes, with the old contents. The old memory is kept: views may read it."""
    larger = bytearray(max(needed, 2 * len(memory)))
    larger[: len(memory)] = memory
    return larger
