"""Many small shards that lie alike, read as one: each column's pieces copied one behind another, in one pass.

Put row by row, a batch of a few hundred rows is as many shards, and to open each column of each by itself costs more
than its bytes do. A stack copies whole pieces, at the first use, and gives a stored column like any other, so that
views are made of it as of one put.

Invariants: tables are checked on the copy, as `layout.tables` checks them; a copy is this process's alone, and
what is written to a private one is not seen in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from dataplane.batch.field import most_items, refuse
from dataplane.batch.layout import (
    Bytes,
    ColumnHeader,
    Index,
    Numbers,
    Outline,
    Tables,
    check_shapes,
    width,
)
from dataplane.batch.row_sources import offsets_of
from dataplane.batch.stored_column import Copied, Stored


class Scattered:
    """The bytes of shards that lie in a few arrays: of each shard which array that is, and where it begins there."""

    def __init__(self, memories: Sequence[Bytes], which: Index, bases: Index) -> None:
        self._memories = memories
        self._which = which
        self._bases = bases

    @classmethod
    def of(cls, shards: Sequence[Bytes]) -> Scattered:
        """Shards that are an array each."""
        return cls(shards, np.arange(len(shards)), np.zeros(len(shards), np.int64))

    def gathered(self, starts: Index, sizes: Index) -> Bytes:
        """A part of each shard, one behind another, copied."""
        begins = self._bases + starts
        if len(self._memories) == 1:
            even = _even(self._memories[0], begins, sizes)
            if even is not None:
                return even
        edges = zip(self._which.tolist(), begins.tolist(), (begins + sizes).tolist(), strict=True)
        memories = self._memories
        return np.concatenate([memories[at][a:b] for at, a, b in edges])


def _even(memory: Bytes, begins: Index, sizes: Index) -> Bytes | None:
    """Parts of one size that lie at one distance from each other, copied in one go; None where these do not."""
    if len(begins) < 2 or not (sizes == sizes[0]).all():
        return None
    size, steps = int(sizes[0]), np.diff(begins)
    step = int(steps[0])
    if step < max(size, 1) or not (steps == step).all():
        return None
    run = memory[int(begins[0]) : int(begins[-1]) + size]
    return as_strided(run, (len(begins), size), (step, 1), writeable=False).copy().reshape(-1)


class Stack:
    """Shards of one outline, which were checked: their numbers, a row each, and their bytes."""

    def __init__(self, outline: Outline, table: Numbers, shards: Scattered) -> None:
        self._outline = outline
        self._table = table
        self._shards = shards

    @property
    def rows(self) -> Index:
        """The rows of each shard."""
        found: Index = self._table[:, 0]
        return found

    def nbytes(self, ordinal: int) -> int:
        """The bytes of all buffers of a column."""
        start = self._outline.starts[ordinal]
        return int(self._table[:, _sizes(self._outline.columns[ordinal][1], start)].sum())

    def column(self, name: str, ordinal: int) -> Stacked:
        """A column of all shards, one behind another; it is not indexed."""
        each, start = self._outline.columns[ordinal][1], self._outline.starts[ordinal]
        return Stacked(name, each, start, self._table, self._shards)


class Stacked(Copied):
    """A column of a stack."""

    def __init__(self, name: str, each: ColumnHeader, start: int, table: Numbers, shards: Scattered) -> None:
        self._form = each
        self._start = start
        self._table = table
        self._shards = shards
        super().__init__(name, each.field, int(self._stored.sum()))

    @property
    def _stored(self) -> Index:
        stored: Index = self._table[:, self._start + 1]
        return stored

    @cached_property
    def tables(self) -> Tables:
        """As of any stored column."""
        own = self._form.field
        if own.kind == "struct":
            return Tables(None, None, tuple(map(self._presence, range(len(own.children)))), None)
        if own.kind == "dense":
            return Tables(None, None, (), None)
        offsets, shapes = self._offsets(), None
        if own.varying > 1:
            shapes = self._gathered(2).view(np.int64).reshape(-1, len(own.shape))
            check_shapes(self.name, shapes, offsets, own)
        return Tables(offsets, shapes, (), None)

    @cached_property
    def children(self) -> tuple[Stored, ...]:
        """The columns of a struct's keys, in their order."""
        found, start = [], self._start + 2 + 2 * self._form.buffers
        for (key, _), child in zip(self._form.field.children, self._form.children, strict=True):
            found.append(Stacked(f"{self.name}.{key}", child, start, self._table, self._shards))
            start += width(child)
        return tuple(found)

    def _values(self, private: bool) -> Bytes:
        values = self._gathered(0 if self._form.field.kind == "dense" else 1)
        values.setflags(write=private)
        return values

    def _gathered(self, buffer: int) -> npt.NDArray[Any]:
        """A buffer of all shards, one behind another."""
        at = self._start + 2 + 2 * buffer
        return self._shards.gathered(self._table[:, at], self._table[:, at + 1])

    def _offsets(self) -> Index:
        """The offsets of all rows, from those that each shard counts from its own beginning."""
        own, raw = self._form.field, self._gathered(0).view(np.int64)
        ends = np.cumsum(self._stored + 1)
        last, unit = raw[ends - 1], own.item_nbytes
        inside = np.ones(len(raw) - 1, np.bool_)  # where one offset and the next are of the same shard
        inside[ends[:-1] - 1] = False
        first = raw[np.concatenate(([0], ends[:-1]))]
        if first.any() or bool(((raw[1:] < raw[:-1]) & inside).any()):
            raise refuse(self.name, "row offsets do not rise from 0")
        most = most_items(own)
        if bool((last > most).any()) or bool((last * unit != self._table[:, self._start + 5]).any()):
            raise refuse(self.name, f"row offsets do not end at the values', in items of {unit} bytes")
        return offsets_of(np.diff(raw)[inside])

    def _presence(self, key: int) -> npt.NDArray[np.bool_]:
        """Which rows have a key of a struct."""
        flags, stored = self._gathered(key), self._stored
        there: Index = self._table[:, self._child_rows(key)]
        if len(flags) and int(flags.max()) > 1:
            raise refuse(self.name, "a presence flag that is neither 0 nor 1")
        sums, ends = np.concatenate(([0], np.cumsum(flags, dtype=np.int64))), np.cumsum(stored)
        if bool((sums[ends] - sums[ends - stored] != there).any()):
            raise refuse(self.name, "a child has other rows than are present")
        return flags.view(np.bool_)

    def _child_rows(self, key: int) -> int:
        start = self._start + 2 + 2 * self._form.buffers
        return start + sum(width(child) for child in self._form.children[:key])


def _sizes(each: ColumnHeader, start: int) -> list[int]:
    """Which numbers are the bytes of its buffers and its children's."""
    found, end = [start + 3 + 2 * at for at in range(each.buffers)], start + 2 + 2 * each.buffers
    for child in each.children:
        found += _sizes(child, end)
        end += width(child)
    return found
