"""Integers that are stored in fewer bytes than their column has, as the column's dtype.

Invariants: no more is widened than the rows that are read, and not before their values are looked at; what is
stored in the bytes that the column has is read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch.cuts import NOTHING, Cut
from dataplane.batch.dtypes import is_integer, storage
from dataplane.batch.field import Field
from dataplane.batch.layout import Bytes, ColumnLayout, Index, Tables
from dataplane.batch.pieces import Reading, Selection, Stored, resolved
from dataplane.batch.rows import Rows


def reading_of(field: Field, selections: tuple[Selection, ...], order: Index | None, cut: Cut = NOTHING) -> Reading:
    """The rows of a column of this field: those stored in another dtype as its own, unless a cut is to be made first,
    which widens what it leaves."""
    if field.kind in ("dense", "ragged") and not cut:
        selections = tuple([_fitted(field, selection) for selection in selections])
    return Reading(selections, order, cut)


def narrowest(field: Field, several: Sequence[Stored]) -> Field:
    """The field in the narrowest dtypes of integers that hold what these store of it."""
    return _narrowest(field, [stored.layout.field for stored in several])


def _narrowest(field: Field, parts: Sequence[Field]) -> Field:
    if field.kind == "struct":
        keys = [dict(part.children) for part in parts]
        found = [(k, _narrowest(child, [own[k] for own in keys if k in own])) for k, child in field.children]
        return Field("struct", children=tuple(found))
    if not is_integer(field.dtype) or not parts:
        return field
    dtype = np.result_type(*[storage(part.dtype) for part in parts])
    if dtype.kind not in "iu" or dtype.itemsize >= storage(field.dtype).itemsize:
        return field
    return Field(field.kind, dtype.name, field.shape)


def _fitted(field: Field, selection: Selection) -> Selection:
    stored, rows = selection
    own = stored.layout.field.dtype
    if own == field.dtype or storage(own) == storage(field.dtype):
        return selection
    wide = Widened(stored, resolved(stored, rows), field.dtype)
    return Selection(wide, Rows.range(0, len(rows)))


class Widened(Stored):
    """Rows of a stored column, each as often as it is named, as if they were stored in another dtype."""

    def __init__(self, stored: Stored, rows: Rows, dtype: str) -> None:
        field = stored.layout.field
        self.name = stored.name
        self._stored = stored
        self._rows = rows
        self._dtype = storage(dtype)
        as_read = Field(field.kind, dtype, field.shape)
        self.layout = ColumnLayout(as_read, len(rows), len(rows), ())

    @cached_property
    def tables(self) -> Tables:
        """As of any stored column."""
        of = self._stored.tables
        if of.offsets is None:
            return Tables(None, None, (), None)
        index = self._rows.array()
        offsets = np.zeros(len(index) + 1, np.int64)
        np.cumsum(of.offsets[index + 1] - of.offsets[index], out=offsets[1:])
        return Tables(offsets, None if of.shapes is None else of.shapes[index], (), None)

    def _values(self, private: bool) -> Bytes:
        wide = self._narrow().astype(self._dtype).reshape(-1).view(np.uint8)
        wide.setflags(write=private)
        return wide

    def _narrow(self) -> npt.NDArray[Any]:
        """The values as they are stored, one row behind another."""
        stored, rows, field = self._stored, self._rows, self._stored.layout.field
        narrow, unit = storage(field.dtype), field.item_nbytes
        if not len(rows) or not unit:
            return np.empty(0, narrow)
        offsets = stored.tables.offsets
        if rows.slice is not None:
            first, last = (rows.start, rows.stop) if offsets is None else offsets[[rows.start, rows.stop]].tolist()
            return stored.values[first * unit : last * unit].view(narrow)
        index = rows.array()
        if offsets is None:
            whole = stored.values.reshape(-1, unit)[index]
            return whole.reshape(-1).view(narrow)
        edges = (offsets[np.stack((index, index + 1), axis=1)] * unit).tolist()
        joined = np.concatenate([stored.values[a:b] for a, b in edges])
        return joined.view(narrow)

    def read(self, start: int, stop: int) -> Bytes:
        """See `Stored.read`."""
        return self.values[start:stop]

    def own(self, start: int, stop: int) -> Bytes:
        """See `Stored.own`."""
        return self.values[start:stop].copy()

    def there(self, start: int, stop: int, device: Any) -> Any:
        """See `Stored.there`: on no device."""
        return None
