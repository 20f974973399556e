"""Stored columns as a reader holds them: pieces of shards, opened once, believed only after their tables are checked.

A column that is read is the rows of a few pieces one after another, or those rows in an order. `Reading` brings
both together: what lies in one run is found without copying, everything else as (piece, row) pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.batch import cuts
from dataplane.batch.cuts import NOTHING, Cut
from dataplane.batch.dtypes import split
from dataplane.batch.field import Field, refuse
from dataplane.batch.layout import Bytes, ColumnLayout, Index, Tables, tables
from dataplane.batch.rows import Rows

_NUMBERS = ("dense", "ragged")


class Memory(Protocol):
    """The bytes of one extent. Any thread may call it. What it gives keeps the bytes in place while it lives."""

    def read(self, offset: int, nbytes: int) -> Bytes:
        """A read-only view of these bytes, uint8."""

    def private(self, offset: int, nbytes: int) -> Bytes:
        """A writable view of these bytes, uint8; what is written stays with whoever holds it (copy on write)."""

    def own(self, offset: int, nbytes: int) -> Bytes:
        """As `private`, but what is written is seen in no other view. Raises LimitExceeded where the process can not
        have another one."""


class Piece(NamedTuple):
    """Rows of a column as it is stored in one extent."""

    layout: ColumnLayout
    memory: Memory
    rows: Rows


class Stored:
    """One stored column, opened. Its tables are copied and checked at the first use, and its values mapped."""

    def __init__(self, name: str, layout: ColumnLayout, memory: Memory) -> None:
        self.name = name
        self.layout = layout
        self._memory = memory

    @cached_property
    def tables(self) -> Tables:
        """Copies of what the bytes say about the rows. Raises Corrupt where it is false."""
        return tables(self.name, self.layout, self._memory.read)

    @cached_property
    def values(self) -> Bytes:
        """The bytes of the values, read-only."""
        return self._values(private=False)

    @cached_property
    def private(self) -> Bytes:
        """The bytes of the values, writable; the same each time, so that two tensors of a column share memory."""
        return self._values(private=True)

    def read(self, start: int, stop: int) -> Bytes:
        """These bytes of the values, read-only."""
        data = self._memory.read(self._place[0] + start, stop - start)
        if len(data) != stop - start:
            raise refuse(self.name, f"{len(data)} bytes, not {stop - start}")
        return data

    def there(self, start: int, stop: int, device: Any) -> Any:
        """These bytes of the values as a tensor in place, where they are on this device already; else None."""
        there = getattr(self._memory, "there", None)
        offset, _ = self._place
        return None if there is None else there(offset + start, stop - start, device)

    def own(self, start: int, stop: int) -> Bytes:
        """These bytes of the values, writable, and seen in no other view. Raises LimitExceeded."""
        offset, _ = self._place
        return self._memory.own(offset + start, stop - start)

    @cached_property
    def children(self) -> tuple[Stored, ...]:
        """The columns of a struct's keys, in their order."""
        pairs = zip(self.layout.field.children, self.layout.children, strict=True)
        return tuple(Stored(f"{self.name}.{key}", child, self._memory) for (key, _), child in pairs)

    def unindexed(self) -> Stored:
        """The same stored rows as a column that has each of them once; not for objects, whose rows name others."""
        layout = self.layout
        if not layout.indexed:
            return self
        once = ColumnLayout(layout.field, layout.stored, layout.stored, layout.buffers[:-1], layout.children)
        return Stored(self.name, once, self._memory)

    def _values(self, private: bool) -> Bytes:
        offset, nbytes = self._place
        data = self._memory.private(offset, nbytes) if private else self._memory.read(offset, nbytes)
        if len(data) != nbytes:
            raise refuse(self.name, f"{len(data)} bytes at {offset}, not {nbytes}")
        return data

    @property
    def _place(self) -> tuple[int, int]:
        """Where the values begin, and their bytes."""
        return self.layout.buffers[0 if self.layout.field.kind == "dense" else 1]


class Copied(Stored):
    """A column that was put together in this process: all of its bytes are in `values`, and its tables are true."""

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
    """Rows of a stored column, its index not yet applied."""

    stored: Stored
    rows: Rows


def opened(name: str, field: Field, pieces: Sequence[Piece], cut: Cut = NOTHING) -> tuple[Selection, ...]:
    """The pieces, whose layouts were checked, as selections for a column whose rows are of this field once they are
    cut. Raises Corrupt where one is no part of such a column."""
    selections = []
    for layout, memory, rows in pieces:
        check_fits(name, layout.field, field, cut)
        if len(rows) and rows.stop > layout.rows:
            raise refuse(name, f"row {rows.stop - 1} of a shard with {layout.rows}")
        selections.append(Selection(Stored(name, layout, memory), rows))
    return tuple(selections)


def check_fits(name: str, part: Field, whole: Field, cut: Cut = NOTHING) -> None:
    """Raises Corrupt where rows of `part`, once they are cut, are no rows of `whole`."""
    if (cut or part != whole) and not _fits(part, whole, cuts.axes(cut)):
        raise refuse(name, f"a shard holds {part!r} where {whole!r} was put")


def _fits(part: Field, whole: Field, by_axis: Mapping[int, Cut]) -> bool:
    """Whether rows of `part` are rows of `whole`, which may vary in more dimensions and have more keys."""
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
            continue  # of each row it is seen when that is read
        if own is None or (cuts.length(steps, own) if steps else own) != size:
            return False
    return True


class Reading:
    """The rows of several selections one after another, in `order` where there is one (positions among them).

    `parts` are the selections with their index applied: rows as they are stored. `cut`: what of each row is meant.
    """

    def __init__(self, selections: tuple[Selection, ...], order: Index | None, cut: Cut = NOTHING) -> None:
        self.parts = tuple(Selection(stored, resolved(stored, rows)) for stored, rows in selections if len(rows))
        self.selections = selections
        self.order = order
        self.cut = cut
        self.rows = sum(len(part.rows) for part in self.parts) if order is None else len(order)

    @cached_property
    def run(self) -> tuple[Stored, slice] | None:
        """The one stored column and the run of its whole rows that this is; None where it is not so simple."""
        if len(self.parts) != 1 or self.order is not None or self.cut:
            return None
        stored, rows = self.parts[0]
        return None if rows.slice is None else (stored, rows.slice)

    @cached_property
    def bounds(self) -> Index:
        """Where each part begins among the rows before they are put in order, and where the last ends."""
        return np.cumsum([0, *(len(part.rows) for part in self.parts)], dtype=np.int64)

    def places(self) -> tuple[npt.NDArray[np.int64], Index]:
        """For each row, in order: which part it is in, and which of its stored rows it is."""
        part = np.repeat(np.arange(len(self.parts)), np.diff(self.bounds))
        rows = np.concatenate([np.empty(0, np.int64), *(part.rows.array() for part in self.parts)])
        return (part, rows) if self.order is None else (part[self.order], rows[self.order])


def resolved(stored: Stored, rows: Rows) -> Rows:
    """The stored rows that these rows are."""
    if not stored.layout.indexed:
        return rows
    index = stored.tables.stored_row
    assert index is not None
    return Rows.index(index[rows.slice] if rows.slice is not None else index[rows.array()])
