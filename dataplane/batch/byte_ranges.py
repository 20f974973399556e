"""The byte ranges of a shard that have to be read or sent for some rows of some columns.

A column's tables (offsets, shapes, indexes, presence) locate its rows. They are small, and included as a whole, since
they are checked as a whole. Of the values, only those of the rows are included. Ranges are (start, stop) in the extent.
They are ascending and disjoint, except those of `row_values`; ranges with a small gap between them are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from dataplane.batch import cuts
from dataplane.batch.cuts import NOTHING, Cut
from dataplane.batch.field import EMPTY_LISTS, Field
from dataplane.batch.layout import Bytes, ColumnLayout, Index, ShardLayout
from dataplane.batch.rows import RowIndices

ByteRanges: TypeAlias = list[tuple[int, int]]

_GAP = 512  # bytes: including a gap of this size costs less than another range, 1.5 us (decision 0019)


def merged(ranges: Iterable[tuple[int, int]] | Index, gap: int = _GAP) -> ByteRanges:
    """The ranges in ascending order, without overlaps. Ranges with a gap of at most `gap` bytes become one."""
    array = ranges if isinstance(ranges, np.ndarray) else np.array(list(ranges), np.int64).reshape(-1, 2)
    array = array[array[:, 0] < array[:, 1]]
    if len(array) < 2:
        return [(start, stop) for start, stop in array.tolist()]
    array = array[np.argsort(array[:, 0], kind="stable")]
    reached = np.maximum.accumulate(array[:, 1])
    breaks = np.flatnonzero(array[1:, 0] > reached[:-1] + gap)
    starts = array[np.concatenate(([0], breaks + 1)), 0]
    stops = reached[np.concatenate((breaks, [len(array) - 1]))]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def without(wanted: ByteRanges, there: ByteRanges) -> ByteRanges:
    """The parts of `wanted` that `there` does not cover. Both are ascending and disjoint."""
    made: ByteRanges = []
    first = 0
    for start, stop in wanted:
        while first < len(there) and there[first][1] <= start:
            first += 1
        i = first
        while i < len(there) and there[i][0] < stop:
            if start < there[i][0]:
                made.append((start, there[i][0]))
            start = max(start, there[i][1])
            i += 1
        if start < stop:
            made.append((start, stop))
    return made


def rounded(ranges: ByteRanges, unit: int, size: int) -> ByteRanges:
    """The ranges, widened to multiples of `unit` in a memory of `size` bytes."""
    return merged(((a // unit * unit, min(size, -(-b // unit) * unit)) for a, b in ranges), gap=0)


def total(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def tables(layout: ShardLayout) -> ByteRanges:
    return merged(each for _, column in layout.columns for each in _tables(column))


def _tables(column: ColumnLayout) -> ByteRanges:
    kind = column.field.kind
    found = [(offset, offset + size) for offset, size in column.buffers]
    if kind == "dense":
        found = found[1:]
    elif kind != "struct":
        del found[1]  # the values
    return found + [each for child in column.children for each in _tables(child)]


def is_sliceable(field: Field, cut: Sequence[Sequence[object]]) -> bool:
    """Whether rows of the field have all dimensions of the steps of an encoded cut."""
    if field.kind == "struct" and cut:
        return all(is_sliceable(child, cut) for _, child in field.children)
    return (
        not cut
        or field == EMPTY_LISTS
        or (field.kind in ("dense", "ragged") and all(step[1] in range(len(field.shape)) for step in cut))
    )


def values(
    layout: ShardLayout, ordinals: Sequence[int], rows: RowIndices, memory: Bytes, cut: Cut = NOTHING
) -> ByteRanges:
    """The values of these ascending rows of these columns; with a cut, the part that its steps along the first
    dimension leave. `memory` is the extent, whose tables were checked."""
    columns = [layout.columns[ordinal][1] for ordinal in ordinals]
    return merged(each for column in columns for each in row_values(column, rows.array(), memory, cut))


def row_values(
    column: ColumnLayout, rows: Index, memory: Bytes, cut: Cut = NOTHING, *, shared: bool = True
) -> ByteRanges:
    """The values of these ascending rows, or the part that a cut leaves. Without `shared`, indexed columns are left
    out, since other rows may share their values. Ranges are clipped to the buffers: a hostile process may have changed
    the tables since the check."""
    if not len(rows) or (column.indexed and not shared):
        return []
    if column.indexed:
        offset, size = column.buffers[-1]
        index = memory[offset : offset + size].view(np.int64)
        if column.field.kind == "object" and len(np.unique(index)) < column.stored:
            return _all(column)  # rows refer to stored rows that the index does not name
        rows = np.clip(index[rows], 0, column.stored - 1)
        rows = rows if cut else np.unique(rows)
    if column.field.kind == "struct":
        found: ByteRanges = []
        for (offset, size), child in zip(column.buffers, column.children, strict=False):
            there = memory[offset : offset + size].view(np.bool_)
            kept = there[rows]
            rank = np.clip(np.cumsum(there, dtype=np.int64) - 1, 0, max(child.rows - 1, 0))[rows[kept]]
            inner = cuts.take(cut, np.flatnonzero(kept)) if cut else cut
            found += row_values(child, rank if child.rows else rank[:0], memory, inner, shared=shared)
        return found
    base, size = column.buffers[0 if column.field.kind == "dense" else 1]
    starts, stops = _cut_values(column, rows, memory, cut) if cut else _values(column, rows, memory)
    pairs = np.clip(np.stack([starts, stops], axis=1), 0, size) + base
    return [(start, stop) for start, stop in pairs.tolist()]


def _values(column: ColumnLayout, rows: Index, memory: Bytes) -> tuple[Index, Index]:
    """The start and the stop of each run of ascending rows among the values, in bytes."""
    edges = np.flatnonzero(np.diff(rows) != 1) + 1
    begins, ends = rows[np.concatenate(([0], edges))], rows[np.concatenate((edges - 1, [len(rows) - 1]))] + 1
    unit = column.field.item_nbytes
    if column.field.kind == "dense":
        return begins * unit, ends * unit
    table, length = column.buffers[0]
    offsets = memory[table : table + length].view(np.int64)
    return offsets[begins] * unit, offsets[ends] * unit


def _cut_values(column: ColumnLayout, rows: Index, memory: Bytes, cut: Cut) -> tuple[Index, Index]:
    """The start and the stop of each run that a cut's steps along the first dimension leave of a row. Other dimensions
    are included whole: the bytes between are mostly fewer than a range for each would take."""
    shape = column.field.shape
    if column.field.kind == "dense":
        lengths = np.full(len(rows), shape[0] or 0, np.int64)
        units = np.full(len(rows), column.field.item_nbytes // max(shape[0] or 0, 1))
        begins = rows * column.field.item_nbytes
    else:
        table, length = column.buffers[0]
        offsets = memory[table : table + length].view(np.int64)
        item = column.field.item_nbytes
        begins, lengths, units = offsets[rows] * item, offsets[rows + 1] - offsets[rows], np.full(len(rows), item)
        if column.field.varying > 1:
            table, length = column.buffers[2]
            sizes = memory[table : table + length].view(np.int64).reshape(-1, len(shape))[rows]
            lengths, units = sizes[:, 0], sizes[:, 1:].prod(axis=1) * item
    firsts, lasts = cuts.spans(cuts.axes(cut).get(0, cuts.NOTHING), lengths)
    starts, stops = (begins[:, None] + edges * units[:, None] for edges in (firsts, lasts))
    return starts.reshape(-1), stops.reshape(-1)


def _all(column: ColumnLayout) -> ByteRanges:
    own = [(offset, offset + size) for offset, size in column.buffers]
    return own + [each for child in column.children for each in _all(child)]
