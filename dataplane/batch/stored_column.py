"""Stored columns in a reader: pieces of shards, which are opened once, and whose tables are checked before they are
used.

A column that is read consists of the rows of a few pieces, concatenated or in another order. `SelectedRows` represents
both: contiguous rows are read without a copy, all others as (piece, row) pairs.

Many small shards with the same outline (`layout`) are read as one `Stack`. If a few hundred rows were put one by one,
each is a shard, and opening each column of each shard takes longer than copying its bytes. A stack copies whole buffers
at the first use. Its tables are checked on the copy, which no other process can change. Private values are another
copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from dataplane.batch import cuts
from dataplane.batch.cuts import NOTHING, Cut
from dataplane.batch.dtypes import split
from dataplane.batch.field import EMPTY_LISTS, Field, most_items, refuse
from dataplane.batch.layout import (
    Bytes,
    ColumnHeader,
    ColumnLayout,
    ColumnTables,
    Index,
    Numbers,
    Outline,
    check_shapes,
    tables,
    width,
)
from dataplane.batch.rows import RowIndices
from dataplane.batch.values import offsets_of

_NUMBERS = ("dense", "ragged")


class ExtentMemory(Protocol):
    """The bytes of one extent. Any thread may call the methods. While a result lives, its bytes stay in place."""

    def read(self, offset: int, nbytes: int) -> Bytes:
        """A read-only view of these bytes, uint8."""

    def private(self, offset: int, nbytes: int) -> Bytes:
        """A writable view of these bytes, uint8. Its writes are seen by all views of `private`, and by no other process
        (copy on write)."""

    def own(self, offset: int, nbytes: int) -> Bytes:
        """A writable view of these bytes, uint8, in a mapping or copy of its own: no other view sees its writes. Raises
        LimitExceeded if the process can have no further mapping."""


class StoredPiece(NamedTuple):
    """Rows of a column as it is stored in one extent."""

    layout: ColumnLayout
    memory: ExtentMemory
    rows: RowIndices


class StoredColumn:
    """One stored column, opened. At the first use, its tables are copied and checked, and its values mapped."""

    def __init__(self, name: str, layout: ColumnLayout, memory: ExtentMemory) -> None:
        self.name = name
        self.layout = layout
        self._memory = memory

    @cached_property
    def tables(self) -> ColumnTables:
        """Checked copies of the tables of the rows. Raises Corrupt if they are invalid."""
        return tables(self.name, self.layout, self._memory.read)

    @cached_property
    def values(self) -> Bytes:
        """The bytes of the values, read-only."""
        return self._values(private=False)

    @cached_property
    def private(self) -> Bytes:
        """The bytes of the values, writable: the same memory each time, so that tensors of a column share it."""
        return self._values(private=True)

    def read(self, start: int, stop: int) -> Bytes:
        """These bytes of the values, read-only."""
        data = self._memory.read(self._place[0] + start, stop - start)
        if len(data) != stop - start:
            raise refuse(self.name, f"{len(data)} bytes, not {stop - start}")
        return data

    def there(self, start: int, stop: int, device: Any) -> Any:
        """These bytes of the values as a tensor on `device`, in place; None if they are not on this device already."""
        there = getattr(self._memory, "there", None)
        offset, _ = self._place
        return None if there is None else there(offset + start, stop - start, device)

    def own(self, start: int, stop: int) -> Bytes:
        """A writable view of these bytes of the values, whose writes no other view sees. Raises LimitExceeded."""
        offset, _ = self._place
        return self._memory.own(offset + start, stop - start)

    @cached_property
    def children(self) -> tuple[StoredColumn, ...]:
        """The columns of a struct's keys, in order."""
        pairs = zip(self.layout.field.children, self.layout.children, strict=True)
        return tuple(StoredColumn(f"{self.name}.{key}", child, self._memory) for (key, _), child in pairs)

    def unindexed(self) -> StoredColumn:
        """The column of the stored rows, without an index. Not for objects, whose rows refer to others."""
        layout = self.layout
        if not layout.indexed:
            return self
        once = ColumnLayout(layout.field, layout.stored, layout.stored, layout.buffers[:-1], layout.children)
        return StoredColumn(self.name, once, self._memory)

    def _values(self, private: bool) -> Bytes:
        offset, nbytes = self._place
        data = self._memory.private(offset, nbytes) if private else self._memory.read(offset, nbytes)
        if len(data) != nbytes:
            raise refuse(self.name, f"{len(data)} bytes at {offset}, not {nbytes}")
        return data

    @property
    def _place(self) -> tuple[int, int]:
        """The offset of the values in the extent, and their size in bytes."""
        return self.layout.buffers[0 if self.layout.field.kind == "dense" else 1]


class Copied(StoredColumn):
    """A column that was assembled in this process: all of its bytes are in `values`, in private memory."""

    def __init__(self, name: str, field: Field, rows: int) -> None:
        self.name = name
        self.layout = ColumnLayout(field, rows, rows, ())

    def read(self, start: int, stop: int) -> Bytes:
        return self.values[start:stop]

    def there(self, start: int, stop: int, device: Any) -> Any:
        return None

    def own(self, start: int, stop: int) -> Bytes:
        return self.values[start:stop].copy()


class Selection(NamedTuple):
    """Rows of a stored column, numbered as before its index is applied."""

    stored: StoredColumn
    rows: RowIndices


def opened(name: str, field: Field, pieces: Sequence[StoredPiece], cut: Cut = NOTHING) -> tuple[Selection, ...]:
    """The pieces, whose layouts were checked, as selections for a column whose rows have this field after the cut.
    Raises Corrupt if a piece does not fit."""
    selections = []
    for layout, memory, rows in pieces:
        check_fits(name, layout.field, field, cut)
        if len(rows) and rows.stop > layout.rows:
            raise refuse(name, f"row {rows.stop - 1} of a shard with {layout.rows}")
        selections.append(Selection(StoredColumn(name, layout, memory), rows))
    return tuple(selections)


def check_fits(name: str, part: Field, whole: Field, cut: Cut = NOTHING) -> None:
    """Raises Corrupt if rows of `part` do not fit `whole` after the cut."""
    if (cut or part != whole) and not _fits(part, whole, cuts.axes(cut)):
        raise refuse(name, f"a shard holds {part!r} where {whole!r} was put")


def _fits(part: Field, whole: Field, by_axis: Mapping[int, Cut]) -> bool:
    """Whether rows of `part` are rows of `whole`, which may vary in more dimensions and have more keys."""
    if part == EMPTY_LISTS:
        return whole.kind in ("ragged", "object")
    if part.kind == whole.kind == "struct":
        keys = dict(whole.children)
        return all(name in keys and _fits(child, keys[name], by_axis) for name, child in part.children)
    numbers = part.kind in _NUMBERS and whole.kind in _NUMBERS and max(by_axis, default=-1) < len(part.shape)
    if not (numbers if by_axis else part.kind == whole.kind):
        return False
    if split(part.dtype)[0] != whole.dtype or len(part.shape) != len(whole.shape):
        return False
    for axis, (own, size) in enumerate(zip(part.shape, whole.shape, strict=True)):
        steps = by_axis.get(axis, NOTHING)
        if size is None or not cuts.is_even(steps):
            continue  # checked for each row when it is read
        if own is None or (cuts.length(steps, own) if steps else own) != size:
            return False
    return True


class SelectedRows:
    """The rows of several selections, concatenated. With an `order`, row i is row `order[i]` of those.

    `parts`: the selections that have rows, numbered by stored rows (after the index). `cut`: the slice of each row that
    is read.
    """

    def __init__(self, selections: tuple[Selection, ...], order: Index | None, cut: Cut = NOTHING) -> None:
        self.parts = tuple(Selection(stored, resolved(stored, rows)) for stored, rows in selections if len(rows))
        self.selections = selections
        self.order = order
        self.cut = cut
        self.rows = sum(len(part.rows) for part in self.parts) if order is None else len(order)

    @cached_property
    def run(self) -> tuple[StoredColumn, slice] | None:
        """The stored column and the slice of its rows, if the rows are one range without a cut; else None."""
        if len(self.parts) != 1 or self.order is not None or self.cut:
            return None
        stored, rows = self.parts[0]
        return None if rows.slice is None else (stored, rows.slice)

    @cached_property
    def bounds(self) -> Index:
        """The start of each part among the rows before they are ordered, and the end of the last."""
        return np.cumsum([0, *(len(part.rows) for part in self.parts)], dtype=np.int64)

    def places(self) -> tuple[npt.NDArray[np.int64], Index]:
        """For each row, in order: the index of its part, and its row number in the stored column."""
        part = np.repeat(np.arange(len(self.parts)), np.diff(self.bounds))
        rows = np.concatenate([np.empty(0, np.int64), *(part.rows.array() for part in self.parts)])
        return (part, rows) if self.order is None else (part[self.order], rows[self.order])


def resolved(stored: StoredColumn, rows: RowIndices) -> RowIndices:
    """The numbers of the stored rows, by the column's index."""
    if not stored.layout.indexed:
        return rows
    index = stored.tables.stored_row
    assert index is not None
    return RowIndices.index(index[rows.slice] if rows.slice is not None else index[rows.array()])


class Scattered:
    """The bytes of shards in a few arrays: for each shard, the index of its array and its start there."""

    def __init__(self, memories: Sequence[Bytes], which: Index, bases: Index) -> None:
        self._memories = memories
        self._which = which
        self._bases = bases

    @classmethod
    def of(cls, shards: Sequence[Bytes]) -> Scattered:
        """Shards of which each is an array."""
        return cls(shards, np.arange(len(shards)), np.zeros(len(shards), np.int64))

    def gathered(self, starts: Index, sizes: Index) -> Bytes:
        """A copy of a part of each shard, concatenated. starts, sizes: in bytes."""
        begins = self._bases + starts
        if len(self._memories) == 1:
            even = _even(self._memories[0], begins, sizes)
            if even is not None:
                return even
        edges = zip(self._which.tolist(), begins.tolist(), (begins + sizes).tolist(), strict=True)
        memories = self._memories
        return np.concatenate([memories[at][a:b] for at, a, b in edges])


def _even(memory: Bytes, begins: Index, sizes: Index) -> Bytes | None:
    """A copy of parts that have equal sizes and equal distances, made by one call; None for other parts."""
    if len(begins) < 2 or not (sizes == sizes[0]).all():
        return None
    size, steps = int(sizes[0]), np.diff(begins)
    step = int(steps[0])
    if step < max(size, 1) or not (steps == step).all():
        return None
    run = memory[int(begins[0]) : int(begins[-1]) + size]
    return as_strided(run, (len(begins), size), (step, 1), writeable=False).copy().reshape(-1)


class Stack:
    """Validated shards of one outline: an array with a row of layout numbers for each shard, and the shards' bytes."""

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
        """The bytes of all buffers of a column, in all shards."""
        start = self._outline.starts[ordinal]
        return int(self._table[:, _sizes(self._outline.columns[ordinal][1], start)].sum())

    def column(self, name: str, ordinal: int) -> Stacked:
        """The column of all shards, concatenated, under this name. It must not be indexed."""
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
    def tables(self) -> ColumnTables:
        """The checked tables of all rows. Raises Corrupt."""
        own = self._form.field
        if own.kind == "struct":
            return ColumnTables(None, None, tuple(map(self._presence, range(len(own.children)))), None)
        if own.kind == "dense":
            return ColumnTables(None, None, (), None)
        offsets, shapes = self._offsets(), None
        if own.varying > 1:
            shapes = self._gathered(2).view(np.int64).reshape(-1, len(own.shape))
            check_shapes(self.name, shapes, offsets, own)
        return ColumnTables(offsets, shapes, (), None)

    @cached_property
    def children(self) -> tuple[Stacked, ...]:
        """The columns of a struct's keys, in order."""
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
        """A buffer of all shards, concatenated."""
        at = self._start + 2 + 2 * buffer
        return self._shards.gathered(self._table[:, at], self._table[:, at + 1])

    def _offsets(self) -> Index:
        """The offsets of all rows, from those of each shard, which begin at 0."""
        own, raw = self._form.field, self._gathered(0).view(np.int64)
        ends = np.cumsum(self._stored + 1)
        last, unit = raw[ends - 1], own.item_nbytes
        inside = np.ones(len(raw) - 1, np.bool_)  # whether an offset and the next are of the same shard
        inside[ends[:-1] - 1] = False
        first = raw[np.concatenate(([0], ends[:-1]))]
        if first.any() or bool(((raw[1:] < raw[:-1]) & inside).any()):
            raise refuse(self.name, "row offsets do not rise from 0")
        most = most_items(own)
        if bool((last > most).any()) or bool((last * unit != self._table[:, self._start + 5]).any()):
            raise refuse(self.name, f"row offsets do not end at the values', in items of {unit} bytes")
        return offsets_of(np.diff(raw)[inside])

    def _presence(self, key: int) -> npt.NDArray[np.bool_]:
        """The flags of the rows that have a struct's key."""
        flags, stored = self._gathered(key), self._stored
        there: Index = self._table[:, self.children[key]._start]
        if len(flags) and int(flags.max()) > 1:
            raise refuse(self.name, "a presence flag that is neither 0 nor 1")
        sums, ends = np.concatenate(([0], np.cumsum(flags, dtype=np.int64))), np.cumsum(stored)
        if bool((sums[ends] - sums[ends - stored] != there).any()):
            raise refuse(self.name, "a child has other rows than are present")
        return flags.view(np.bool_)


def _sizes(each: ColumnHeader, start: int) -> list[int]:
    """The positions of the numbers that are sizes of its buffers and of its children's."""
    found, end = [start + 3 + 2 * at for at in range(each.buffers)], start + 2 + 2 * each.buffers
    for child in each.children:
        found += _sizes(child, end)
        end += width(child)
    return found
