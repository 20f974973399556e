"""Finds the pages of a shard that nobody can read any more after some of its rows were freed.

The values of a row are one run in each buffer of its column, and so are those of consecutive rows. So freed rows are a
few byte ranges, whose whole pages can be given back. Tables (row offsets, shapes, presence flags) stay: reading the
other rows needs them. So do the values of an indexed column, where rows share them.

Invariant: a returned page has values of freed rows only. Tables are read from memory that a hostile process may
still write to, so what they say is clipped to the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dataplane.batch.layout import Bytes, ColumnLayout, ShardLayout
from dataplane.batch.rows import Rows
from dataplane.config import PAGE

Runs = Sequence[tuple[int, int]]


def dead_pages(
    layout: ShardLayout, live: npt.NDArray[np.bool_], columns: Iterable[int], rows: Rows, memory: Bytes
) -> Iterator[tuple[int, int]]:
    """The (start, end) in the shard's `memory` of whole pages of freed values around these rows of these columns,
    which are freed according to `live` [column, row]. May return pages again."""
    for ordinal in columns:
        column = layout.columns[ordinal][1]
        for start, end in _values(column, _runs(~live[ordinal], rows), memory):
            first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            if first < last:
                yield first, last


def _runs(dead: npt.NDArray[np.bool_], rows: Rows) -> Runs:
    """The runs of freed rows that contain some of these rows."""
    edges = np.flatnonzero(np.diff(dead, prepend=False, append=False)).reshape(-1, 2)
    within = np.unique(np.searchsorted(edges[:, 0], rows.array(), side="right") - 1)
    return [(start, end) for start, end in edges[within[within >= 0]].tolist()]


def _values(column: ColumnLayout, runs: Runs, memory: Bytes) -> Iterator[tuple[int, int]]:
    """The byte ranges of the values of these runs of rows."""
    if column.indexed:
        return
    if column.field.kind == "struct":
        for (offset, size), child in zip(column.buffers, column.children, strict=True):
            before = np.concatenate([[0], np.cumsum(memory[offset : offset + size], dtype=np.int64)])
            inner = [(int(min(before[a], child.rows)), int(min(before[b], child.rows))) for a, b in runs]
            yield from _values(child, inner, memory)
    elif column.field.kind == "dense":
        offset, _ = column.buffers[0]
        item = column.field.item_nbytes
        yield from ((offset + a * item, offset + b * item) for a, b in runs)
    else:
        (table, size), (offset, nbytes) = column.buffers[:2]
        offsets = memory[table : table + size].view(np.int64)
        unit = column.field.item_nbytes
        for a, b in runs:
            start, end = (min(max(int(offsets[row]) * unit, 0), nbytes) for row in (a, b))
            yield offset + start, offset + end
