"""Which bytes of a shard some rows of some columns are: what has to be read, or sent, for them and nothing else.

A column's tables (offsets, shapes, indexes, presence) say where its rows are; they are few bytes, and are wanted whole,
since they are checked whole. Of the values, those of the rows. Stretches are (start, stop) in the extent, ascending and
apart from each other; those that nearly touch are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from dataplane.batch.layout import Bytes, ColumnLayout, Index, ShardLayout
from dataplane.batch.rows import Rows

Stretches: TypeAlias = list[tuple[int, int]]

_GAP = 512  # bytes between two stretches that cost less to take along than to name and gather: 1.5 us, see 0019


def merged(stretches: Iterable[tuple[int, int]], gap: int = _GAP) -> Stretches:
    """The same in order, each once, neighbours as one."""
    array = np.array(list(stretches), np.int64).reshape(-1, 2)
    array = array[array[:, 0] < array[:, 1]]
    if len(array) < 2:
        return [(start, stop) for start, stop in array.tolist()]
    array = array[np.argsort(array[:, 0], kind="stable")]
    reached = np.maximum.accumulate(array[:, 1])
    breaks = np.flatnonzero(array[1:, 0] > reached[:-1] + gap)
    starts = array[np.concatenate(([0], breaks + 1)), 0]
    stops = reached[np.concatenate((breaks, [len(array) - 1]))]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def without(wanted: Stretches, there: Stretches) -> Stretches:
    """What of the wanted is not there."""
    made: Stretches = []
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


def rounded(stretches: Stretches, unit: int, size: int) -> Stretches:
    """The same, in whole units of a memory of that size."""
    return merged(((a // unit * unit, min(size, -(-b // unit) * unit)) for a, b in stretches), gap=0)


def total(stretches: Iterable[tuple[int, int]]) -> int:
    """Their bytes."""
    return sum(stop - start for start, stop in stretches)


def tables(layout: ShardLayout) -> Stretches:
    """The tables of all columns."""
    return merged(stretch for _, column in layout.columns for stretch in _tables(column))


def _tables(column: ColumnLayout) -> Stretches:
    kind = column.field.kind
    found = [(offset, offset + size) for offset, size in column.buffers]
    if kind == "dense":
        found = found[1:]
    elif kind != "struct":
        del found[1]  # the values
    return found + [stretch for child in column.children for stretch in _tables(child)]


def values(layout: ShardLayout, ordinals: Sequence[int], rows: Rows, memory: Bytes) -> Stretches:
    """The values of these rows, ascending, of these columns. `memory` is the extent, with tables that are sound."""
    return merged(stretch for ordinal in ordinals for stretch in _values(layout.columns[ordinal][1], rows, memory))


def _values(column: ColumnLayout, rows: Rows, memory: Bytes) -> Stretches:
    kind = column.field.kind
    if kind == "struct" or not len(rows):
        return _all(column) if len(rows) else []
    if column.indexed:
        offset, size = column.buffers[-1]
        index = memory[offset : offset + size].view(np.int64)
        if kind == "object" and len(np.unique(index)) < column.stored:  # rows mean others that none of the index is
            return _all(column)
        rows = Rows.index(np.unique(index[rows.slice or rows.array()]))
    begins, ends = _runs(rows)
    if kind == "dense":
        base, size = column.buffers[0]
        step = size // column.stored if column.stored else 0
        return [(base + a * step, base + b * step) for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
    (table, length), (base, size) = column.buffers[0], column.buffers[1]
    offsets = memory[table : table + length].view(np.int64)
    unit = size // int(offsets[-1]) if int(offsets[-1]) else 0
    # Cut to the values: what was sound when it was checked may have been changed since by a hostile process.
    starts, stops = (np.clip(offsets[edges] * unit, 0, size) + base for edges in (begins, ends))
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _all(column: ColumnLayout) -> Stretches:
    own = [(offset, offset + size) for offset, size in column.buffers]
    return own + [stretch for child in column.children for stretch in _all(child)]


def _runs(rows: Rows) -> tuple[Index, Index]:
    """Ascending rows as runs: where each begins, and where it ends."""
    if rows.slice is not None:
        return np.array([rows.start]), np.array([rows.stop])
    array = rows.array()
    edges = np.flatnonzero(np.diff(array) != 1) + 1
    return array[np.concatenate(([0], edges))], array[np.concatenate((edges - 1, [len(array) - 1]))] + 1
