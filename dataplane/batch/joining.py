"""Columns that came one by one, as one column: the rows of each after those of the one before.

Invariants: nothing is converted. Columns are of one form where their fields are equal, so that every row comes
out as it would by itself. What a form has taken may be changed by who gave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dataplane.batch.dtypes import storage
from dataplane.batch.field import Field
from dataplane.batch.gathering import Gathered
from dataplane.batch.layout import Bytes, Index
from dataplane.batch.row_sources import Rectangle, RowSource, Run
from dataplane.batch.values import Values, bounds_of


class Taken(NamedTuple):
    """What a form has taken: how many rows, how many bytes, and each column."""

    rows: int
    nbytes: int
    columns: list[Values]


class Form:
    """Columns of these names and fields."""

    def __init__(self, columns: Sequence[tuple[str, Values]]) -> None:
        self._fields = [(name, values.field) for name, values in columns]
        self.alone = any(_indexed(values) for _, values in columns)
        """Whether what it takes can not be joined with other."""
        self.simple = not self.alone and self.gathered() is not None
        """Whether rows can be `gathered` as they come."""

    def gathered(self) -> Gathered | None:
        """Memory for rows of this form, if it is simple."""
        return Gathered.of(self._fields)

    def take(self, columns: Sequence[tuple[str, Values]]) -> Taken:
        """Columns that have its names and fields."""
        parts = [owned(values) for _, values in columns]
        return Taken(parts[0].rows, sum([values.nbytes for values in parts]), parts)

    def joined(self, several: Sequence[Sequence[Values]]) -> Mapping[str, Values]:
        """The columns of all rows."""
        parts = zip(*several, strict=True)
        return {name: joined(of) for (name, _), of in zip(self._fields, parts, strict=True)}


def _indexed(values: Values) -> bool:
    return values.index is not None or any(_indexed(child) for child in values.children)


def owned(values: Values) -> Values:
    """The same values in memory of their own."""
    data = values.data
    if data is not None:
        data = _source(values.field, values.rows, data.copied(), values.offsets)
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
        runs = [values.data.run() for values in several if values.data is not None]
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
