"""Columns that came one by one, as one column: the rows of each after those of the one before.

What is alike is looked at once: a `Form` is made from columns, and takes others of the same names, types and shapes
without making anything of them but a copy.

What always holds: nothing is converted. Columns are of one form where their fields are equal, so that every row comes
out as it would by itself. What a form has taken may be changed by who gave it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.batch.buffers import Rectangle, RowSource, Run
from dataplane.batch.dtypes import is_bits, storage
from dataplane.batch.field import Field
from dataplane.batch.infer import FLOATS, INTS, numbers_of
from dataplane.batch.layout import Bytes, Index
from dataplane.batch.values import Values, bounds_of, dense, ragged_run


class Taken(NamedTuple):
    """What a form has taken: how many rows, how many bytes, and of each column a part."""

    rows: int
    nbytes: int
    parts: list[Any]


class _Columns(Protocol):
    """One column of a form."""

    def take(self, given: Any, most: int) -> tuple[int, int, Any] | None:
        """How many rows, how many bytes, at most so many, and a copy; None for what is not seen at once to be alike."""

    def values(self, parts: Sequence[Any]) -> Values:
        """The column of all rows."""


class Form:
    """Columns of these names and fields."""

    def __init__(self, columns: Sequence[tuple[str, Values]]) -> None:
        self.names = tuple([name for name, _ in columns])
        self._columns = [_column(values) for _, values in columns]
        self.alone = any(_indexed(values) for _, values in columns)
        """Whether what it takes can not be joined with other."""

    def take(self, given: Any, most: int = sys.maxsize) -> Taken | None:
        """The columns, if they are seen at once to be of this form, of as many rows each, and at most so many bytes."""
        if type(given) is not dict or tuple(given) != self.names:
            return None
        parts, rows, nbytes = [], -1, 0
        for column, values in zip(self._columns, given.values(), strict=True):
            found = column.take(values, most - nbytes)
            if found is None or (rows >= 0 and rows != found[0]):
                return None
            rows, nbytes = found[0], nbytes + found[1]
            parts.append(found[2])
        return Taken(rows, nbytes, parts) if rows > 0 else None

    def take_values(self, columns: Sequence[tuple[str, Values]]) -> Taken:
        """Columns that have its names and fields."""
        parts = [owned(values) for _, values in columns]
        return Taken(parts[0].rows, sum([values.nbytes for values in parts]), parts)

    def joined(self, several: Sequence[Taken]) -> Mapping[str, Values]:
        """The columns of all rows."""
        parts = zip(*[taken.parts for taken in several], strict=True)
        return {name: column.values(of) for name, column, of in zip(self.names, self._columns, parts, strict=True)}


class _Any:
    def take(self, given: Any, most: int) -> tuple[int, int, Any] | None:
        return None

    def values(self, parts: Sequence[Values]) -> Values:
        return joined(parts)


class _Dense:
    """Arrays of one dtype, whose rows have one shape."""

    def __init__(self, field: Field) -> None:
        self._dtype = storage(field.dtype)
        self._shape = field.shape

    def take(self, given: Any, most: int) -> tuple[int, int, Any] | None:
        if type(given) is not np.ndarray or given.dtype != self._dtype or given.shape[1:] != self._shape:
            return None
        return (len(given), given.nbytes, given.copy()) if given.ndim and given.nbytes <= most else None

    def values(self, parts: Sequence[npt.NDArray[Any] | Values]) -> Values:
        if all(type(part) is np.ndarray for part in parts):
            return dense("", np.concatenate(parts) if len(parts) > 1 else parts[0])  # type: ignore[arg-type]
        return joined([dense("", part) if isinstance(part, np.ndarray) else part for part in parts])


class _Numbers:
    """Lists of ints, or of floats."""

    def __init__(self, field: Field) -> None:
        self._field = field

    def take(self, given: Any, most: int) -> tuple[int, int, Any] | None:
        if type(given) is not list or set(map(type, given)) != {list} or 8 * sum(map(len, given)) > most:
            return None
        found = numbers_of(given)
        if found is None or found[0] is not (self._field is FLOATS):
            return None
        return len(given), len(found[1]), found

    def values(self, parts: Sequence[tuple[bool, bytes, bytes] | Values]) -> Values:
        if any(isinstance(part, Values) for part in parts):
            return joined([part if isinstance(part, Values) else self._run([part]) for part in parts])
        return self._run(parts)  # type: ignore[arg-type]

    def _run(self, parts: Sequence[tuple[bool, bytes, bytes]]) -> Values:
        packed = b"".join([numbers for _, numbers, _ in parts])
        offsets = [np.frombuffer(each, np.int64) for _, _, each in parts]
        return ragged_run(self._field, np.frombuffer(packed, np.uint8), _offsets(offsets))


def _column(values: Values) -> _Columns:
    field = values.field
    if field.kind == "dense" and not is_bits(field.dtype):
        return _Dense(field)
    for known in (INTS, FLOATS):
        if field == known:
            return _Numbers(known)
    return _Any()


def _indexed(values: Values) -> bool:
    return values.index is not None or any(_indexed(child) for child in values.children)


def owned(values: Values) -> Values:
    """The same values in memory of their own."""
    data = values.data
    if isinstance(data, Rectangle):
        data = Rectangle(data.array.copy())
    elif isinstance(data, Run):
        data = Run(data.data.copy(), data.bounds)
    elif data is not None:
        data = _source(values.field, values.rows, _written(data), values.offsets)
    children = tuple(map(owned, values.children)) if values.children else ()
    return Values(
        values.field, values.rows, data, values.offsets, values.shapes, values.presence, children, values.index
    )


def joined(several: Sequence[Values]) -> Values:
    """One column of all rows. The fields of all are equal, and none has an index (`Values.index`)."""
    first = several[0]
    if len(several) == 1:
        return first
    rows, data, offsets, shapes = sum([values.rows for values in several]), None, None, None
    if first.offsets is not None:
        offsets = _offsets([values.offsets for values in several if values.offsets is not None])
    if first.shapes is not None:
        shapes = np.concatenate([values.shapes for values in several if values.shapes is not None])
    if first.data is not None:
        runs = [_bytes(values.data) for values in several if values.data is not None]
        data = _source(first.field, rows, np.concatenate(runs), offsets)
    presence = [np.concatenate(flags) for flags in zip(*[values.presence for values in several], strict=True)]
    children = [joined(of) for of in zip(*[values.children for values in several], strict=True)]
    return Values(first.field, rows, data, offsets, shapes, tuple(presence), tuple(children))


def _offsets(several: Sequence[Index]) -> Index:
    """The offsets of the rows of several columns, one behind another."""
    if len(several) == 1:
        return several[0]
    counts = [len(each) - 1 for each in several]
    offsets = np.zeros(sum(counts) + 1, np.int64)
    np.concatenate([each[1:] for each in several], out=offsets[1:])
    bases = np.cumsum([each[-1] for each in several[:-1]])
    offsets[1 + counts[0] :] += np.repeat(bases, counts[1:])
    return offsets


def _source(field: Field, rows: int, data: Bytes, offsets: Index | None) -> RowSource:
    """Rows that lie one behind another."""
    if offsets is not None:
        return Run(data, bounds_of(field, offsets))
    shape = [dimension for dimension in field.shape if dimension is not None]
    return Rectangle(data.view(storage(field.dtype)).reshape(rows, *shape))


def _bytes(data: RowSource) -> Bytes:
    return data.data if isinstance(data, Run) else _written(data)


def _written(data: RowSource) -> Bytes:
    memory = np.empty(data.nbytes, np.uint8)
    for job in data.jobs(memory, max(1, len(memory))):
        job()
    return memory
