"""Reads slices inside rows: the part that a `Cut` leaves of each row, in place if it is one run.

Invariants: the result is that of cutting each row by itself, in the column's dtype. Of a ragged row, only the bytes
from the first to the last run of its first dimension are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch import cuts
from dataplane.batch.cuts import Cut, Index
from dataplane.batch.dtypes import storage
from dataplane.batch.field import Field, refuse
from dataplane.batch.layout import Bytes
from dataplane.batch.stored_column import SelectedRows, StoredColumn
from dataplane.batch.values import offsets_of

Array = npt.NDArray[Any]
Fetch = Callable[[StoredColumn, int, int], Bytes]
"""Returns the bytes from a start up to a stop of a stored column's values."""


class _Group(NamedTuple):
    """Rows of one stored column: their positions in the result, their starts as in `placed`, their shapes [rows, dims],
    and their cut."""

    stored: StoredColumn
    positions: Index
    starts: Index
    shapes: Index
    cut: Cut


def rows(reading: SelectedRows, field: Field, fetch: Fetch | None = None) -> list[Array]:
    """Each row as an array over the stored values (then read-only), or over the bytes that `fetch` returns. A row of
    several runs, or of a narrower dtype, is a copy."""
    found: list[Any] = [None] * reading.rows
    for group in _groups(reading):
        for position, row in zip(group.positions.tolist(), _rows(group, fetch), strict=True):
            if row.shape[field.varying :] != field.shape[field.varying :]:
                raise _other(group.stored, field)
            found[position] = _as(row, field, writable=fetch is not None)
    return found


def _other(stored: StoredColumn, field: Field) -> Exception:
    return refuse(stored.name, f"a row that is cut is not one of {field!r}")


def packed(reading: SelectedRows, field: Field) -> tuple[Array, Index, Index | None]:
    """All rows, concatenated: their items, the offset of each row, and their shapes if `field` needs them."""
    offsets, shapes = tables(reading, field)
    parts: list[Any] = [None] * reading.rows
    for group in _groups(reading):
        for position, row in zip(group.positions.tolist(), _rows(group, None, join=False), strict=True):
            parts[position] = row
    out = np.empty((int(offsets[-1]), *field.item_shape), storage(field.dtype))
    flat = [piece if shapes is None else piece.reshape(-1) for row in parts for piece in row]
    if flat and out.size:
        np.concatenate(flat, out=out)
    return out, offsets, shapes


def tables(reading: SelectedRows, field: Field) -> tuple[Index, Index | None]:
    """The offsets of the concatenated rows, and their shapes if `field` needs them. Raises Corrupt if a row does not
    fit the field."""
    shapes = np.empty((reading.rows, len(field.shape)), np.int64)
    for group in _groups(reading):
        cut = group.shapes.copy()
        for axis, steps in cuts.axes(group.cut).items():
            begins, ends = cuts.spans(steps, cut[:, axis])
            cut[:, axis] = (ends - begins).sum(axis=1)
        if bool((cut[:, field.varying :] != np.array(field.shape[field.varying :], np.int64)).any()):
            raise _other(group.stored, field)
        shapes[group.positions] = cut
    if field.varying > 1:
        return offsets_of(shapes.prod(axis=1)), shapes
    return offsets_of(shapes[:, 0]), None


def dense(reading: SelectedRows, field: Field, *, private: bool) -> Array:
    """The rows as an array [rows, *shape]. It is a view if the rows are one run in the field's dtype, and the cut
    leaves the same run of each row. A view is read-only unless `private`."""
    parts, shape, dtype = reading.parts, field.item_shape, storage(field.dtype)
    if not cuts.is_even(reading.cut):
        each = rows(reading, field)
        return np.stack(each) if each else np.empty((0, *shape), dtype)
    if len(parts) == 1 and reading.order is None and parts[0].rows.slice is not None:
        view = _block(parts[0].stored, reading.cut, private=private)[parts[0].rows.slice]
        return view if view.dtype == dtype else view.astype(dtype)
    out = np.empty((reading.rows, *shape), dtype)
    part, index = reading.places()
    for number, (stored, _) in enumerate(parts):
        inside = np.flatnonzero(part == number)
        out[inside] = _block(stored, reading.cut, private=False)[index[inside]]
    return out


def _block(stored: StoredColumn, cut: Cut, *, private: bool) -> Array:
    """All stored rows of a dense column, each cut alike: a view if the cut leaves one run."""
    field = stored.layout.field
    values = (stored.private if private else stored.values).view(storage(field.dtype))
    block = values.reshape(stored.layout.stored, *field.item_shape)
    for axis, steps in cuts.axes(cut).items():
        begins, ends = cuts.spans(steps, np.array([block.shape[axis + 1]], np.int64))
        block = _joined(block, axis + 1, list(zip(begins[0].tolist(), ends[0].tolist(), strict=True)))
    return block


def _joined(array: Array, axis: int, runs: list[tuple[int, int]]) -> Array:
    """These runs of a dimension, concatenated; a view if it is one run."""
    found = _parts(array, axis, runs)
    return found[0] if len(found) == 1 else np.concatenate(found, axis=axis)


def _parts(array: Array, axis: int, runs: list[tuple[int, int]]) -> list[Array]:
    some = [run for run in runs if run[0] < run[1]] or runs[:1]
    ahead = (slice(None),) * axis
    return [array[(*ahead, slice(begin, end))] for begin, end in some]


def _as(row: Array, field: Field, *, writable: bool) -> Array:
    dtype = storage(field.dtype)
    if row.dtype != dtype:
        row = row.astype(dtype)
    if not writable and row.flags.writeable:
        row = row.view()
        row.setflags(write=False)
    return row


def _groups(reading: SelectedRows) -> Iterator[_Group]:
    part, index = reading.places()
    for number, (stored, _) in enumerate(reading.parts):
        positions = np.flatnonzero(part == number)
        if len(positions):
            starts, shapes = placed(stored, index[positions])
            yield _Group(stored, positions, starts, shapes, cuts.take(reading.cut, positions))


def placed(stored: StoredColumn, index: Index) -> tuple[Index, Index]:
    """The start of each of these rows in items of the first dimension, or in elements if more dimensions vary; and
    their shapes, int64 [rows, dims]."""
    field, tables = stored.layout.field, stored.tables
    if tables.shapes is not None and tables.offsets is not None:
        return tables.offsets[index], tables.shapes[index]
    shapes = np.empty((len(index), len(field.shape)), np.int64)
    if tables.offsets is None:
        shapes[:] = [size or 0 for size in field.shape]
        return index * shapes[:, 0], shapes
    starts = tables.offsets[index]
    shapes[:, 0] = tables.offsets[index + 1] - starts
    shapes[:, 1:] = field.item_shape
    return starts, shapes


def _rows(group: _Group, fetch: Fetch | None, *, join: bool = True) -> Iterator[Any]:
    """The part of each row that the cut leaves: an array; without `join`, a list of arrays along dimension 0."""
    stored, _, starts, shapes, cut = group
    field = stored.layout.field
    dtype, varies = storage(field.dtype), stored.tables.shapes is not None
    inner = tuple(size or 0 for size in field.shape[1:])
    unit = dtype.itemsize if varies else dtype.itemsize * int(np.prod(inner, dtype=np.int64))
    by_axis = cuts.axes(cut)
    along = {axis: cuts.spans(steps, shapes[:, axis]) for axis, steps in by_axis.items()}
    first = _listed(along.pop(0)) if 0 in along else [[(0, length)] for length in shapes[:, 0].tolist()]
    others = {axis: _listed(spans) for axis, spans in along.items()}
    for i, (start, shape, runs) in enumerate(zip(starts.tolist(), shapes.tolist(), first, strict=True)):
        if varies:
            inner = tuple(shape[1:])
            item = int(np.prod(inner, dtype=np.int64))
            base, step = start * unit, unit * item
        else:
            base, step = start * unit, unit
        runs = [run for run in runs if run[0] < run[1]] or [(0, 0)]
        low, high = runs[0][0], max(end for _, end in runs)
        begin, end = base + low * step, base + high * step
        data = stored.values[begin:end] if fetch is None else fetch(stored, begin, end)
        if len(data) != end - begin:
            raise refuse(stored.name, f"{len(data)} bytes of a row, not {end - begin}")
        row = data.view(dtype).reshape(high - low, *inner)
        for axis, listed in others.items():
            row = _joined(row, axis, listed[i])
        pieces = _parts(row, 0, [(a - low, b - low) for a, b in runs])
        yield pieces if not join else pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _listed(spans: tuple[Index, Index]) -> list[list[tuple[int, int]]]:
    begins, ends = spans
    return [list(zip(a, b, strict=True)) for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
