"""Finds the pages of a shard that nobody can read any more after some of its rows were freed.

The values of a row are one run in each buffer of its column, and so are those of consecutive rows. So freed rows are a
few byte ranges, whose whole pages can be given back. Tables (row offsets, shapes, presence flags) stay: reading the
other rows needs them. So do the values of an indexed column, where rows share them.

Invariant: a returned page has values of freed rows only. Tables are read from memory that a hostile process may
still write to, so what they say is clipped to the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from dataplane.batch.layout import Bytes, Index, ShardLayout
from dataplane.batch.rows import Rows
from dataplane.batch.stretches import merged, row_values
from dataplane.config import PAGE


def dead_pages(
    layout: ShardLayout, live: npt.NDArray[np.bool_], columns: Iterable[int], rows: Rows, memory: Bytes
) -> Iterator[tuple[int, int]]:
    """The (start, end) in the shard's `memory` of whole pages of freed values around these rows of these columns,
    which are freed according to `live` [column, row]. May return pages again."""
    for ordinal in columns:
        dead = _dead(~live[ordinal], rows)
        for start, end in merged(row_values(layout.columns[ordinal][1], dead, memory, shared=False), gap=0):
            first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            if first < last:
                yield first, last


def _dead(dead: npt.NDArray[np.bool_], rows: Rows) -> Index:
    """The freed rows of the runs of such that contain some of these rows."""
    edges = np.flatnonzero(np.diff(dead, prepend=False, append=False)).reshape(-1, 2)
    within = np.unique(np.searchsorted(edges[:, 0], rows.array(), side="right") - 1)
    return np.concatenate([np.empty(0, np.int64), *(np.arange(*edges[run]) for run in within[within >= 0])])
