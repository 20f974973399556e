"""A shard's bytes without the rows that were freed: the same columns of the same rows, of which fewer are stored.

What remains is laid out as columns are that store each distinct row once (`batch.layout`): an index says of each row
where it is stored. So who names row 17 finds row 17 there, and whoever held a reference needs not be told. The index of
a row that was freed says nothing of use; that it was freed, its shard knows.

What always holds: the bytes of rows that are left are what they were; a layout that is made here passes `check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch.layout import ALIGNMENT, Bytes, ColumnLayout, Index, ShardLayout, Tables, aligned, tables

Flags = npt.NDArray[np.bool_]


class Thinned(NamedTuple):
    """What is left: its layout, `nbytes` in all, and which bytes come where."""

    layout: ShardLayout
    nbytes: int
    parts: list[tuple[int, list[Bytes]]]

    def write(self, memory: Bytes) -> None:
        """Put it at the start of `memory`, which may be where it came from."""
        for offset, pieces in self.parts:
            for piece in pieces:
                memory[offset : offset + len(piece)] = piece
                offset += len(piece)


def thinned(layout: ShardLayout, live: Flags, memory: Bytes) -> Thinned:
    """The columns of a layout that `check` has passed, of whose rows those count that `live` says, by column and row.
    Copies what is left. Raises Corrupt where the bytes are not what the layout says."""
    made = _Made()
    columns = []
    for number, (name, column) in enumerate(layout.columns):
        columns.append((name, made.column(name, column, np.flatnonzero(live[number]), memory)))
    return Thinned(ShardLayout(tuple(columns)), max(made.end, ALIGNMENT), made.parts)


class _Made:
    """Buffers one after another."""

    def __init__(self) -> None:
        self.end = 0
        self.parts: list[tuple[int, list[Bytes]]] = []

    def buffer(self, pieces: Sequence[npt.NDArray[Any]]) -> tuple[int, int]:
        """Where these bytes come; copied, since what is thinned may be written over."""
        offset = self.end
        copied = [np.ascontiguousarray(piece).reshape(-1).view(np.uint8).copy() for piece in pieces]
        self.parts.append((offset, copied))
        size = sum(map(len, copied))
        self.end += aligned(size)
        return offset, size

    def column(self, name: str, column: ColumnLayout, rows: Index, memory: Bytes) -> ColumnLayout:
        """The column with these rows alone."""
        known = tables(name, column, lambda offset, nbytes: memory[offset : offset + nbytes])
        if known.stored_row is None:
            stored, index = rows, np.arange(len(rows))
        else:
            stored, index = np.unique(known.stored_row[rows], return_inverse=True)
        nothing = bool(column.rows) and not len(stored)
        if nothing:  # an index has to name some row
            stored, index = np.zeros(1, np.int64), index[:0]
        buffers, children = self._stored(name, column, known, stored, memory, nothing=nothing)
        places = np.zeros(column.rows, np.int64)
        places[rows] = index
        buffers.append(self.buffer([places]))
        return ColumnLayout(column.field, column.rows, len(stored), tuple(buffers), children, indexed=True)

    def _stored(
        self, name: str, column: ColumnLayout, known: Tables, stored: Index, memory: Bytes, *, nothing: bool = False
    ) -> tuple[list[tuple[int, int]], tuple[ColumnLayout, ...]]:
        """The buffers and children of these stored rows, ascending; of `nothing`, of one row that nobody reads."""
        field = column.field
        if field.kind == "struct":
            return self._struct(name, column, known, stored, memory, nothing=nothing)
        base, unit = column.buffers[0][0], field.item_nbytes
        if field.kind == "dense":
            runs = [(start * unit, stop * unit) for start, stop in _runs(stored)]
            pieces = [memory[base + start : base + stop] for start, stop in runs]
            return [self.buffer([np.zeros(unit, np.uint8)] if nothing else pieces)], ()
        assert known.offsets is not None, "it is ragged"
        if nothing:
            buffers = [self.buffer([np.zeros(2, np.int64)]), self.buffer([])]
            if known.shapes is not None:
                shape = np.zeros((1, len(field.shape)), np.int64)
                shape[:, field.varying :] = np.array(field.shape[field.varying :], np.int64)
                buffers.append(self.buffer([shape]))
            return buffers, ()
        lengths = known.offsets[stored + 1] - known.offsets[stored]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        base = column.buffers[1][0]
        runs = [(int(known.offsets[start]) * unit, int(known.offsets[stop]) * unit) for start, stop in _runs(stored)]
        buffers = [self.buffer([offsets]), self.buffer([memory[base + start : base + stop] for start, stop in runs])]
        if known.shapes is not None:
            buffers.append(self.buffer([known.shapes[stored]]))
        return buffers, ()

    def _struct(
        self, name: str, column: ColumnLayout, known: Tables, stored: Index, memory: Bytes, *, nothing: bool
    ) -> tuple[list[tuple[int, int]], tuple[ColumnLayout, ...]]:
        buffers, children = [], []
        for (key, _), child, presence in zip(column.field.children, column.children, known.presence, strict=True):
            kept = np.zeros(len(stored), np.bool_) if nothing else presence[stored]
            buffers.append(self.buffer([kept]))
            rows = (np.cumsum(presence) - 1)[stored[kept]]
            inner = f"{name}.{key}"
            its = tables(inner, child, lambda offset, nbytes: memory[offset : offset + nbytes])
            its_buffers, its_children = self._stored(inner, child, its, rows, memory)
            children.append(ColumnLayout(child.field, len(rows), len(rows), tuple(its_buffers), its_children))
        return buffers, tuple(children)


def _runs(rows: Index) -> list[tuple[int, int]]:
    """Ascending rows as stretches."""
    if not len(rows):
        return []
    edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(int(rows[start]), int(rows[stop - 1]) + 1) for start, stop in pairwise(edges)]
