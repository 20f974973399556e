"""Gathers the values of selected rows (`SelectedRows`): in place if they are contiguous, else by a copy with NumPy.

The result has one form for each kind of column, however the rows are stored: an array for dense rows; items with
offsets for ragged rows, text, bytes and objects. NumPy, torch, Arrow and Python views are created from this form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch import cuts, gather_slices, object_rows
from dataplane.batch.cuts import NOTHING, Cut
from dataplane.batch.dtypes import storage
from dataplane.batch.field import EMPTY_LISTS, Field, refuse, typed
from dataplane.batch.layout import Bytes, ColumnTables, Index
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import Copied, SelectedRows, Selection, StoredColumn
from dataplane.batch.values import offsets_of
from dataplane.errors import LimitExceeded

_BYTE = np.dtype(np.uint8)

_INTS = typed(EMPTY_LISTS)
_EMPTY_LIST = 0x90  # in MessagePack

_LARGE_ROW = 256 << 10
"""The size of a row in bytes from which mapping it takes less time than copying it."""

_MOST_IN_PLACE = 4096
"""The most rows of a column that get a mapping each. Linux lets a process have some 65,000 mappings."""


def reading_of(
    field: Field, selections: tuple[Selection, ...], order: Index | None, cut: Cut = NOTHING
) -> SelectedRows:
    """The selected rows as rows of this field. Integers that are stored in a narrower dtype are widened; with a `cut`,
    only the slices are. Empty lists become rows of the field. No value is read yet."""
    if field.kind in ("dense", "ragged", "object"):
        selections = tuple([_fitted(field, selection, cut) for selection in selections])
    return SelectedRows(selections, order, cut)


def _fitted(field: Field, selection: Selection, cut: Cut) -> Selection:
    own, name, rows = selection.stored.layout.field, selection.stored.name, len(selection.rows)
    converted: Copied
    if own == EMPTY_LISTS and field != _INTS:
        converted = _Emptied(name, field, rows)
    elif field.dtype and not cut and own.dtype != field.dtype and storage(own.dtype) != storage(field.dtype):
        converted = _Widened(selection, field.dtype)
    else:
        return selection
    return Selection(converted, RowIndices.range(0, rows))


class _Emptied(Copied):
    """Rows of a ragged or object column that are empty lists."""

    @cached_property
    def tables(self) -> ColumnTables:
        field, rows = self.layout.field, self.layout.rows
        if field.kind == "object":  # a byte of MessagePack each
            return ColumnTables(np.arange(rows + 1), None, (), None)
        shape = [dim or 0 for dim in field.shape]
        shapes = np.tile(np.array(shape, np.int64), (rows, 1)) if field.varying > 1 else None
        return ColumnTables(np.zeros(rows + 1, np.int64), shapes, (), None)

    def _values(self, private: bool) -> Bytes:
        return np.full(self.layout.rows if self.layout.field.kind == "object" else 0, _EMPTY_LIST, np.uint8)


class _Widened(Copied):
    """Selected rows of a stored column, converted to a wider dtype when their values are accessed."""

    def __init__(self, selection: Selection, dtype: str) -> None:
        self._field = selection.stored.layout.field
        super().__init__(selection.stored.name, Field(self._field.kind, dtype, self._field.shape), len(selection.rows))
        self._narrow = SelectedRows((selection,), None)

    @cached_property
    def tables(self) -> ColumnTables:
        if self._field.kind == "dense":
            return ColumnTables(None, None, (), None)
        return ColumnTables(*tables(self._narrow, self._field), (), None)

    def _values(self, private: bool) -> Bytes:
        if self._field.kind == "dense":
            narrow = dense(self._narrow, self._field)
        else:
            narrow = items(self._narrow, self._field).values
        wide = narrow.astype(storage(self.layout.field.dtype)).reshape(-1).view(np.uint8)
        wide.setflags(write=private)
        return wide


class Items(NamedTuple):
    """Rows of any length: row i is values[offsets[i]:offsets[i + 1]], in the shape shapes[i] if shapes are given."""

    values: npt.NDArray[Any]
    offsets: Index
    shapes: Index | None


@lru_cache(maxsize=1024)
def _item(field: Field) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """The storage type, the shape and the bytes of a dense row or a ragged item."""
    return storage(field.dtype), field.item_shape, field.item_nbytes


def dense(reading: SelectedRows, field: Field, *, private: bool = False) -> npt.NDArray[Any]:
    """The rows as an array [rows, *shape] of the storage type: read-only, unless `private` or a copy."""
    dtype, shape, unit = _item(field)
    if reading.cut:
        return gather_slices.dense(reading, field, private=private)
    if not unit or not reading.rows:
        return np.empty((reading.rows, *shape), dtype)
    if (run := reading.run) is not None:
        one, span = run
        data = one.private if private else one.values
        return data[span.start * unit : span.stop * unit].view(dtype).reshape(-1, *shape)
    out = np.empty((reading.rows, unit), np.uint8)
    if reading.order is not None:
        part, index = reading.places()
        for stored, inside in _by_part(reading, part):
            out[inside] = stored.values.reshape(-1, unit)[index[inside]]
        return out.reshape(-1).view(dtype).reshape(-1, *shape)
    for i, (stored, rows) in enumerate(reading.parts):
        source = stored.values.reshape(-1, unit)
        target = out[reading.bounds[i] : reading.bounds[i + 1]]
        if rows.slice is not None:
            np.copyto(target, source[rows.slice])
        else:  # "clip" because "raise" copies through a buffer; the rows are in range
            np.take(source, rows.array(), axis=0, out=target, mode="clip")
    return out.reshape(-1).view(dtype).reshape(-1, *shape)


def stored_field(reading: SelectedRows, field: Field) -> Field:
    """`EMPTY_LISTS` if these rows are stored as lists that are all empty, else `field`."""
    stored = [selection.stored.layout.field for selection in reading.selections]
    return EMPTY_LISTS if stored and all(own == EMPTY_LISTS for own in stored) else field


def in_place(selection: Selection, field: Field) -> npt.NDArray[Any] | None:
    """Dense rows as a read-only view [rows, *shape]; None unless they are one run of stored rows of this dtype."""
    stored, rows = selection
    span, (dtype, shape, unit) = rows.slice, _item(field)
    if (
        span is None
        or stored.layout.indexed
        or not unit
        or span.start == span.stop
        or stored.layout.field.dtype != field.dtype
    ):
        return None
    return read_only(stored.read(span.start * unit, span.stop * unit).view(dtype).reshape(-1, *shape))


def _by_part(reading: SelectedRows, part: Index) -> list[tuple[StoredColumn, Index]]:
    """The stored column of each part, and the positions of its rows in the result. `part`: the number of the part of
    each position."""
    positions = np.argsort(part, kind="stable")
    edges = np.searchsorted(part[positions], np.arange(len(reading.parts) + 1)).tolist()
    return [(one.stored, positions[a:b]) for one, (a, b) in zip(reading.parts, pairwise(edges), strict=True)]


def items(reading: SelectedRows, field: Field, *, private: bool = False) -> Items:
    """The rows of a ragged, text, bytes or object column. `field` may vary in more dimensions than stored fields."""
    if reading.cut:
        return Items(*gather_slices.packed(reading, field))
    dtype = storage(field.dtype) if field.dtype else _BYTE
    shape, unit = field.item_shape, field.item_nbytes
    if (run := reading.run) is not None and run[0].layout.field.varying == field.varying:
        stored, rows = run
        offsets, shapes = _offsets(stored)[rows.start : rows.stop + 1], stored.tables.shapes
        first, last = int(offsets[0]), int(offsets[-1])
        data = (stored.private if private else stored.values)[first * unit : last * unit]
        values = _shaped(data, dtype, last - first, shape)
        return Items(values, offsets - first, None if shapes is None else shapes[rows])  # new offsets, for the caller
    lengths, runs = _runs(reading)
    total = int(lengths.sum())
    joined = np.empty(total, np.uint8)
    if total:
        np.concatenate(runs, out=joined)
    shapes = _shapes(reading, field) if field.varying > 1 else None
    counts = lengths // unit if unit else _lengths(reading)
    offsets = offsets_of(counts)
    return Items(_shaped(joined, dtype, int(offsets[-1]), shape), offsets, shapes)


def rows_of(reading: SelectedRows, field: Field) -> list[npt.NDArray[Any]]:
    """Each row of a ragged column as a read-only array, in place unless it is widened or cut in several runs."""
    if reading.cut:
        return gather_slices.rows(reading, field)
    dtype = storage(field.dtype)
    per_part = [_part_rows(stored, rows, dtype) for stored, rows in reading.parts]
    rows = [row for part in per_part for row in part]
    return rows if reading.order is None else [rows[i] for i in reading.order.tolist()]


def own_rows(reading: SelectedRows, field: Field) -> list[npt.NDArray[Any]] | None:
    """Each row of a ragged column as a writable array that shares no memory with another row's. Large rows are mapped
    in place, and a page is copied when it is first written to. None if the rows are contiguous, more than
    `_MOST_IN_PLACE`, or smaller than `_LARGE_ROW` on average: use `items` then."""
    if reading.run is not None or not 0 < reading.rows <= _MOST_IN_PLACE:
        return None
    if nbytes(reading, field) < _LARGE_ROW * reading.rows:
        return None
    return gather_slices.rows(reading, field, _own_row)


def _own_row(stored: StoredColumn, start: int, stop: int) -> Bytes:
    if stop - start >= _LARGE_ROW:
        with suppress(LimitExceeded):  # only mappings ran out; there is memory for a copy
            return stored.own(start, stop)
    return stored.values[start:stop].copy()


def _lookup(stored: StoredColumn) -> object_rows.Lookup:
    """A function that returns a copy of a stored row by its number. Each copy is made once, at the first request."""

    @cache
    def row_of(number: int) -> bytes:
        if not 0 <= number < stored.layout.stored:
            raise ValueError(f"a part in row {number} of {stored.layout.stored} stored")
        (row,) = _part_rows(stored, RowIndices.range(number, number + 1), _BYTE)
        return row.tobytes()

    return row_of


def objects(reading: SelectedRows) -> Iterator[tuple[Bytes, object_rows.Lookup]]:
    """Each row of an object column, in place, with a lookup of the parts that it shares with other rows."""
    lookups = {id(stored): _lookup(stored) for stored, _ in reading.parts}
    for stored, row in _in_order_rows(reading):
        yield row, lookups[id(stored)]


def is_plain(reading: SelectedRows) -> bool:
    """Whether no row refers to parts that other rows share."""
    return not any(stored.layout.indexed for stored, _ in reading.parts)


def whole(name: str, reading: SelectedRows) -> list[Any]:
    """Each row of an object column as bytes that refer to no other rows. Raises Corrupt."""
    try:
        return [object_rows.whole(row, lookup) for row, lookup in objects(reading)]
    except ValueError as error:
        raise refuse(name, f"a row is not an encoded value: {error}") from error


def spans(reading: SelectedRows) -> list[Bytes]:
    """Each row of a text or bytes column as a read-only run of bytes. No copies."""
    return [row for _, row in _in_order_rows(reading)]


def _in_order_rows(reading: SelectedRows) -> Iterator[tuple[StoredColumn, Bytes]]:
    """Each row as a view of its bytes, with its stored column. Unless an order picks fewer than half of the rows, they
    are read part by part and then ordered: switching to a part takes ten times as long as reading a row."""
    order = reading.order
    if order is None or sum(len(rows) for _, rows in reading.parts) > 2 * len(order):
        for stored, rows in in_order(reading):
            yield from ((stored, row) for row in _part_rows(stored, rows, _BYTE))
        return
    found = [(stored, row) for stored, rows in reading.parts for row in _part_rows(stored, rows, _BYTE)]
    yield from (found[at] for at in order.tolist())


def tables(reading: SelectedRows, field: Field) -> tuple[Index, Index | None]:
    """The offsets of the concatenated rows, and their shapes if `field` needs them."""
    if reading.cut:
        return gather_slices.tables(reading, field)
    shapes = _shapes(reading, field) if field.varying > 1 else None
    return offsets_of(_lengths(reading) if shapes is None else shapes.prod(axis=1)), shapes


def in_order(reading: SelectedRows) -> tuple[Selection, ...]:
    """The parts, split and arranged so that their rows, one after the other, are the rows of `reading` in its order."""
    if reading.order is None:
        return reading.parts
    part, rows = reading.places()
    edges = np.flatnonzero(np.diff(part)) + 1
    return tuple(
        Selection(reading.parts[int(part[chunk[0]])].stored, RowIndices.index(rows[chunk]))
        for chunk in np.split(np.arange(len(part)), edges)
        if len(chunk)
    )


def presence(reading: SelectedRows, key: str, field: Field) -> tuple[npt.NDArray[np.bool_], SelectedRows]:
    """For a key of a struct column: flags of the rows that have it, and its values as rows of `field`."""
    present, selections, order = keyed(reading, key)
    cut = reading.cut if present.all() else cuts.take(reading.cut, np.flatnonzero(present))
    return present, reading_of(field, selections, order, cut)


def keyed(reading: SelectedRows, key: str) -> tuple[npt.NDArray[np.bool_], tuple[Selection, ...], Index | None]:
    """For a key of a struct column: flags of the rows that have it, and the selections and the order of its values."""
    flags, selections = [np.empty(0, np.bool_)], []
    for stored, rows in reading.parts:
        position = next((i for i, (name, _) in enumerate(stored.layout.field.children) if name == key), None)
        if position is None:
            flags.append(np.zeros(len(rows), np.bool_))
            continue
        own = stored.tables.presence[position]
        if own.all():  # every row has the key: the child's rows are the column's, and stay in one run
            flags.append(np.ones(len(rows), np.bool_))
            selections.append(Selection(stored.children[position], rows))
            continue
        chosen = rows.array()
        flags.append(own[chosen])
        rank = np.cumsum(own) - 1
        selections.append(Selection(stored.children[position], RowIndices.index(rank[chosen[flags[-1]]])))
    present = np.concatenate(flags)
    if reading.order is None:
        return present, tuple(selections), None
    if present.all():
        return present[reading.order], tuple(selections), reading.order
    rank = np.cumsum(present) - 1
    return present[reading.order], tuple(selections), rank[reading.order[present[reading.order]]]


def nbytes(reading: SelectedRows, field: Field) -> int:
    """The bytes of the rows' values; a repeated row is counted each time."""
    if field.kind == "dense":
        return reading.rows * field.item_nbytes
    if field.kind == "struct":
        total = 0
        for key, child in field.children:
            total += nbytes(presence(reading, key, child)[1], child)
        return total
    if reading.cut:
        return int(gather_slices.tables(reading, field)[0][-1]) * field.item_nbytes
    return int(_lengths(reading, scaled=True).sum())


def _shaped(data: Bytes, dtype: np.dtype[Any], count: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return data.view(dtype).reshape(count, *shape)


def _offsets(stored: StoredColumn) -> Index:
    offsets = stored.tables.offsets
    assert offsets is not None
    return offsets


def _part_rows(stored: StoredColumn, rows: RowIndices, dtype: np.dtype[Any]) -> list[npt.NDArray[Any]]:
    """The rows of one part as views, each in its own shape."""
    field, offsets, shapes = stored.layout.field, _offsets(stored), stored.tables.shapes
    values = _shaped(stored.values, dtype, int(offsets[-1]), field.item_shape)
    values.setflags(write=False)
    if rows.slice is not None:
        edges = offsets[rows.start : rows.stop + 1].tolist()
        views = [values[a:b] for a, b in pairwise(edges)]
    else:
        index = rows.array()
        pairs = zip(offsets[index].tolist(), offsets[index + 1].tolist(), strict=True)
        views = [values[a:b] for a, b in pairs]
    if shapes is None:
        return views
    return [view.reshape(shape) for view, shape in zip(views, shapes[rows.array()].tolist(), strict=True)]


def _lengths(reading: SelectedRows, *, scaled: bool = False) -> Index:
    """The length of each row in items, or in bytes if `scaled`."""
    parts = [np.empty(0, np.int64)]
    for stored, rows in reading.parts:
        offsets, index = _offsets(stored), rows.array()
        parts.append((offsets[index + 1] - offsets[index]) * (stored.layout.field.item_nbytes if scaled else 1))
    lengths = np.concatenate(parts)
    return lengths if reading.order is None else lengths[reading.order]


def _shapes(reading: SelectedRows, field: Field) -> Index:
    """The rows' shapes, also of parts that store none because only their first dimension varies."""
    parts = [gather_slices.placed(stored, rows.array())[1] for stored, rows in reading.parts]
    shapes = np.concatenate([np.empty((0, len(field.shape)), np.int64), *parts])
    return shapes if reading.order is None else shapes[reading.order]


def _runs(reading: SelectedRows) -> tuple[Index, list[Bytes]]:
    """The rows' lengths in bytes, and their bytes in as few runs as possible."""
    part, rows = reading.places()
    starts, stops = np.empty_like(rows), np.empty_like(rows)
    for stored, inside in _by_part(reading, part):
        unit = stored.layout.field.item_nbytes
        starts[inside] = _offsets(stored)[rows[inside]] * unit
        stops[inside] = _offsets(stored)[rows[inside] + 1] * unit
    if not len(rows):
        return rows, []
    broken = (part[1:] != part[:-1]) | (starts[1:] != stops[:-1])
    first = np.concatenate(([0], np.flatnonzero(broken) + 1))
    last = np.concatenate((first[1:] - 1, [len(rows) - 1]))
    edges = zip(part[first].tolist(), starts[first].tolist(), stops[last].tolist(), strict=True)
    return stops - starts, [reading.parts[i].stored.values[a:b] for i, a, b in edges]


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array as a view that cannot be written through."""
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array
