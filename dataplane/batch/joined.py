"""A row made piece by piece: rows of several references read as one.

The pieces stay where they are. A ragged column of the row is the pieces' one after another, along the first dimension;
of any other column, and of one that varies in more dimensions, the last piece that has it counts. Which stored rows a
row is joined from is part of the reference (`Frame.bounds`), so joined rows are sliced, picked, sent and freed as any
other. They are copied once as they are read, into memory of the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.batch import reading
from dataplane.batch.batch import Column
from dataplane.batch.columns import Plan, planned_column
from dataplane.batch.cuts import NOTHING, Cut
from dataplane.batch.field import Field
from dataplane.batch.frame import Frame, Place, join
from dataplane.batch.layout import Index
from dataplane.batch.local import materialise
from dataplane.batch.ref import BatchRef
from dataplane.batch.refcodec import together
from dataplane.batch.schema import merge_fields
from dataplane.batch.values import ragged_run
from dataplane.errors import Misuse, SchemaMismatch


def joins(field: Field) -> bool:
    """Whether pieces of such a column are joined; else the last one counts."""
    return field.kind == "ragged" and field.varying == 1


def joined(pieces: Sequence[BatchRef]) -> BatchRef:
    """The row whose pieces these are, each a reference of one row, in their order. Columns in the order in which they
    came. Raises SchemaMismatch where pieces of a column are not of one kind, dtype and item shape, Misuse where one is
    of parts of rows."""
    if any(piece.is_sliced() for piece in pieces):
        raise Misuse("a piece of a row that is in progress is no slice of a row: put what it means")
    names = dict.fromkeys(name for piece in pieces for name in piece.columns)
    alike: dict[
        tuple[tuple[int, int], ...], list[str]
    ] = {}  # columns of the same pieces, and in each of the same frame
    fields: dict[str, Field] = {}
    for name in names:
        having = [number for number, piece in enumerate(pieces) if name in piece.columns]
        merged = require_alike(name, [pieces[number].schema[name] for number in having])
        used = having if joins(merged) else having[-1:]
        fields[name] = merged if joins(merged) else pieces[used[0]].schema[name]
        alike.setdefault(tuple((number, pieces[number]._columns[name].frame) for number in used), []).append(name)
    frames: list[Frame] = []
    places: dict[str, Place] = {}
    for used_frames, several in alike.items():
        picked = []
        for number, frame in used_frames:
            piece = pieces[number]
            picked.append(piece._frames[frame].pick([piece._columns[name].slot for name in several]).listed)
        places.update({name: Place(fields[name], len(frames), slot) for slot, name in enumerate(several)})
        listed = join(picked)
        frames.append(listed.joined(np.array([0, listed.rows])))
    traces = together(*(piece.traces for piece in pieces))
    return BatchRef(1, {name: places[name] for name in names}, tuple(frames), None, traces)


def require_alike(name: str, fields: Sequence[Field]) -> Field:
    """The field of a column that pieces have. Raises SchemaMismatch where they are not of one kind and dtype or, where
    they are joined, of one item shape."""
    merged = merge_fields(name, fields)
    if any(map(joins, fields)) and not joins(merged):
        raise SchemaMismatch(
            f"column {name!r}: pieces of one row differ in more than their first dimension",
            column=name,
            expected=repr(fields[0]),
            found=repr(next(each for each in fields if each != fields[0])),
        )
    return merged


def joined_column(column: Column, bounds: Index, cut: Cut = NOTHING) -> Column:
    """The rows `bounds[i]` up to `bounds[i + 1]` of a ragged column joined, for each i, and what a cut leaves of them:
    a copy."""
    items = reading.items(column.reading, column.field)
    shapes = None if items.shapes is None else items.shapes[bounds[:-1]].copy()
    if shapes is not None and items.shapes is not None:
        shapes[:, 0] = np.add.reduceat(items.shapes[:, 0], bounds[:-1])
    values = ragged_run(column.field, items.values, items.offsets[bounds], shapes)
    whole = materialise(Plan(values.rows, (planned_column(column.name, values),)))[column.name]
    return Column._of_cut(column.name, column.field, whole._selections, whole._order, cut) if cut else whole
