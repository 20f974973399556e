"""Which pages of a shard nobody can ask for any more, after some of its rows were freed.

A row's values lie in one run of each buffer of its column, and rows that follow one another do so there too. So rows
that are freed are a few runs of bytes, and the whole pages of those are of no use to anybody. Tables (row offsets,
shapes, presence flags) stay: who reads the rest needs them. So do values of an indexed column, where rows share them.

What always holds: a page that is named has values of freed rows alone. Tables are read from memory that a hostile
process may still write to, so what they say is cut to the buffer that it is about.
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
    """The (start, end) in the shard's `memory` of whole pages of freed values, around these rows of these columns, of
    which `live` [column, row] says that they are freed. Those may be named that were before."""
    for ordinal in columns:
        column = layout.columns[ordinal][1]
        for start, end in _values(column, _runs(~live[ordinal], rows), memory):
            first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            if first < last:
                yield first, last


def _runs(dead: npt.NDArray[np.bool_], rows: Rows) -> Runs:
    """The runs of dead rows that some of these rows are in."""
    edges = np.flatnonzero(np.diff(dead, prepend=False, append=False)).reshape(-1, 2)
    within = np.unique(np.searchsorted(edges[:, 0], rows.array(), side="right") - 1)
    return [(start, end) for start, end in edges[within[within >= 0]].tolist()]


def _values(column: ColumnLayout, runs: Runs, memory: Bytes) -> Iterator[tuple[int, int]]:
    """Where the values of these runs of rows are, in bytes of the memory."""
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
