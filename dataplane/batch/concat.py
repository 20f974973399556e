"""References one below the other: the rows of each after those of the one before.

References of one origin have their columns in the same frames, and keep them together. Those of others may
not, so columns stay in one frame as far as they share one in every reference. Where all have an origin, so has
what they make. The work is proportional to
the number of references and their columns, not to their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dataplane.batch import refcodec
from dataplane.batch.field import Field
from dataplane.batch.frame import Cell, Frame, Part, Place, join
from dataplane.batch.ref import BatchRef
from dataplane.batch.rows import Rows
from dataplane.batch.schema import merge_fields
from dataplane.errors import Misuse, SchemaMismatch


def concat(refs: Iterable[BatchRef]) -> BatchRef:
    """The rows of each reference after those of the one before; columns in the order of the first.

    All have the same columns. Dense ones agree in dtype and shape; the rows of ragged ones may differ in more
    dimensions afterwards than before, and structs have the keys of all. Raises SchemaMismatch naming the column,
    and Misuse where there is no reference.
    """
    if not isinstance(refs, Iterable):
        raise Misuse(f"references are concatenated, not {type(refs).__name__}")
    several = list(refs)
    if not several:
        raise Misuse("there is nothing to concatenate: no reference was given")
    for ref in several:
        _require_ref(ref)
    if len(several) == 1:
        return several[0]
    fields = _fields(several)
    filled = [ref for ref in several if len(ref)] or several[:1]
    together: dict[tuple[int, ...], list[str]] = {}  # columns that share a frame in every reference
    for name in fields:
        together.setdefault(tuple([ref._columns[name].frame for ref in filled]), []).append(name)
    frames: list[Frame] = []
    columns: dict[str, Place] = {}
    for chosen, names in together.items():
        picked = []
        for ref, index in zip(filled, chosen, strict=True):
            picked.append(ref._frames[index].pick([ref._columns[name].slot for name in names]))
        columns.update({name: Place(fields[name], len(frames), slot) for slot, name in enumerate(names)})
        frames.append(join(picked))
    ordered = {name: columns[name] for name in fields}
    origins = [ref._origin for ref in filled if ref._origin is not None]
    origin = join(origins) if len(origins) == len(filled) else None
    traces = refcodec.together(*(ref.traces for ref in filled))
    return BatchRef(sum(ref._rows for ref in filled), ordered, tuple(frames), origin, traces)


def of_rows(columns: Sequence[tuple[str, Iterable[Field], Sequence[Cell]]], rows: Sequence[int]) -> BatchRef:
    """The reference whose row i is, of each column, row `rows[i]` of its i-th cell. `columns` are name, the fields of
    cells, and cells. Raises SchemaMismatch as `concat`."""
    places = {name: Place(merge_fields(name, fields), 0, slot) for slot, (name, fields, _) in enumerate(columns)}
    beside = zip(*[cells for _, _, cells in columns], strict=True)
    parts = tuple([Part(cells, Rows(row, row + 1)) for cells, row in zip(beside, rows, strict=True)])
    return BatchRef(len(rows), places, (Frame(parts),))


def described(ref: BatchRef) -> tuple[bytes, list[tuple[str, Field, int, int, int]]]:
    """What `BatchRef.of` was given: the node, and of each column name, field, logical bytes, shard and ordinal. Of a
    reference with rows, as a put gives it."""
    found = []
    for name, (field, frame, slot) in ref._columns.items():
        shard, ordinal, nbytes = ref._frames[frame].parts[0].cells[slot]
        found.append((name, field, nbytes, shard.id, ordinal))
    return shard.node, found


def _require_ref(ref: Any) -> None:
    if not isinstance(ref, BatchRef):
        raise Misuse(f"references are concatenated, not {type(ref).__name__}")


def _fields(refs: Sequence[BatchRef]) -> dict[str, Field]:
    """The fields of all, in the order of the first. Raises SchemaMismatch where they are not the same columns."""
    first = refs[0]._columns
    for number, ref in enumerate(refs):
        odd = first.keys() ^ ref._columns.keys()
        if odd:
            name = min(odd)
            expected, found = ("no such column", "one") if name not in first else (repr(first[name].field), "none")
            raise SchemaMismatch(
                f"batches 0 and {number} do not have the same columns; one alone has {', '.join(sorted(odd))}",
                column=name,
                expected=expected,
                found=found,
            )
    return {name: merge_fields(name, [ref._columns[name].field for ref in refs]) for name in first}
