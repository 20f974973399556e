"""Concatenates references: the rows of each follow those of the previous one.

Columns share a frame in the result if they share one in every reference, as in references that derive from one. If all
references with rows have an origin, the result has one too. The work is proportional to the number of references and
columns; it grows with their rows only if a frame has an order, a cut or joined rows, or many short parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dataplane.batch import ref_codec
from dataplane.batch.field import EMPTY_LISTS, Field, merge_fields
from dataplane.batch.frame import ColumnPlace, Frame, join
from dataplane.batch.ref import BatchRef
from dataplane.batch.ref_codec import together
from dataplane.errors import Misuse, SchemaMismatch


def concat(refs: Iterable[BatchRef]) -> BatchRef:
    """The rows of all references, one reference after the other; columns in the order of the first.

    All have the same columns. Dense columns must agree in dtype and shape. A ragged column of the result may vary in
    more dimensions than in any reference, and a struct has the keys of all. Raises SchemaMismatch, naming the column,
    Misuse for no reference or another value, and LimitExceeded for too many different cuts.
    """
    if not isinstance(refs, Iterable):
        raise Misuse(f"references are concatenated, not {type(refs).__name__}")
    several = list(refs)
    if not several:
        raise Misuse("there is nothing to concatenate: no reference was given")
    for ref in several:
        if not isinstance(ref, BatchRef):
            raise Misuse(f"references are concatenated, not {type(ref).__name__}")
    if len(several) == 1:
        return several[0]
    fields = _fields(several)
    filled = [ref for ref in several if len(ref)] or several[:1]
    together: dict[tuple[int, ...], list[str]] = {}  # columns by their frames, one for each reference
    for name in fields:
        together.setdefault(tuple([ref._columns[name].frame for ref in filled]), []).append(name)
    frames: list[Frame] = []
    columns: dict[str, ColumnPlace] = {}
    for chosen, names in together.items():
        picked = []
        for ref, index in zip(filled, chosen, strict=True):
            picked.append(ref._frames[index].pick([ref._columns[name].slot for name in names]))
        columns.update({name: ColumnPlace(fields[name], len(frames), slot) for slot, name in enumerate(names)})
        frames.append(join(picked))
    ordered = {name: columns[name] for name in fields}
    origins = [ref._origin for ref in filled if ref._origin is not None]
    origin = join(origins) if len(origins) == len(filled) else None
    traces = ref_codec.together(*(ref.traces for ref in filled))
    return BatchRef(sum(ref._rows for ref in filled), ordered, tuple(frames), origin, traces)


def _fields(refs: Sequence[BatchRef]) -> dict[str, Field]:
    """The fields of all, in the order of the first. Raises SchemaMismatch for different columns or types."""
    first = refs[0]._columns
    for number, ref in enumerate(refs):
        odd = first.keys() ^ ref._columns.keys()
        if odd:
            name = min(odd)
            expected, found = ("no such column", "one") if name not in first else (repr(first[name].field), "none")
            own = [", ".join(name for name in each if name in odd) for each in (first, ref._columns)]
            alone = [f"{which} alone has {names}" for which, names in zip((0, number), own, strict=True) if names]
            raise SchemaMismatch(
                f"batches 0 and {number} do not have the same columns: {', and '.join(alone)}",
                column=name,
                expected=expected,
                found=found,
            )
    return {name: merge_fields(name, [ref._columns[name].field for ref in refs]) for name in first}


def joins(field: Field) -> bool:
    """Whether pieces of a row are concatenated in a column of this field; else the last piece is the row's value."""
    return field.kind == "ragged" and field.varying == 1


def joined(pieces: Sequence[BatchRef]) -> BatchRef:
    """Join these pieces, each a reference of one row, into one row, in order. Raises SchemaMismatch if the pieces of a
    column differ in kind, dtype or item shape, Misuse if a piece is sliced."""
    if any(piece.is_sliced() for piece in pieces):
        raise Misuse("a piece of a row that is in progress is no slice of a row: put what it means")
    names = dict.fromkeys(name for piece in pieces for name in piece.columns)
    alike: dict[tuple[tuple[int, int], ...], list[str]] = {}  # columns by their pieces, with the frame in each piece
    fields: dict[str, Field] = {}
    for name in names:
        having = [number for number, piece in enumerate(pieces) if name in piece.columns]
        merged = require_alike(name, [pieces[number].schema[name] for number in having])
        used = having if joins(merged) else having[-1:]
        fields[name] = merged if joins(merged) else pieces[used[0]].schema[name]
        alike.setdefault(tuple((number, pieces[number]._columns[name].frame) for number in used), []).append(name)
    frames: list[Frame] = []
    places: dict[str, ColumnPlace] = {}
    for used_frames, several in alike.items():
        picked = []
        for number, frame in used_frames:
            piece = pieces[number]
            picked.append(piece._frames[frame].pick([piece._columns[name].slot for name in several]).listed)
        places.update({name: ColumnPlace(fields[name], len(frames), slot) for slot, name in enumerate(several)})
        listed = join(picked)
        frames.append(listed.joined(np.array([0, listed.rows])))
    traces = together(*(piece.traces for piece in pieces))
    return BatchRef(1, {name: places[name] for name in names}, tuple(frames), None, traces)


def require_alike(name: str, fields: Sequence[Field]) -> Field:
    """The field of a column whose pieces have these fields. Raises SchemaMismatch if they do not merge, or if pieces
    that are concatenated differ in item shape."""
    merged = merge_fields(name, fields)
    if any(joins(field) for field in fields if field != EMPTY_LISTS) and not joins(merged):
        raise SchemaMismatch(
            f"column {name!r}: pieces of one row differ in more than their first dimension",
            column=name,
            expected=repr(fields[0]),
            found=repr(next(each for each in fields if each != fields[0])),
        )
    return merged
