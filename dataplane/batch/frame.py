"""The stored rows that the columns of a reference refer to: one selection, shared by columns that were stored together.

A `Frame` has one or more columns over `parts`. A part is a selection (`RowIndices`) of rows of one stored block. It has
a cell for each column of the frame: the place where this column of the block is stored. The listed rows of a frame are
the rows of its parts, concatenated; with an `order`, listed row i is row `order[i]` of those. Each listed row is a row
of the frame, unless there are `bounds`. With a `cut`, each row is the slice that the cut leaves (`batch.cuts`); arrays
in a cut are in the order of the frame's rows, not of the parts.

Invariants: no part is empty, and an order contains each row of the parts. So a frame refers to exactly the rows of its
parts.

`order` is for rows that are picked from many parts in a mixed order, such as a shuffle of the rows of many workers:
without it, each row would be a part, with Python objects for each. Rows in long runs are parts instead, since a part
takes a few bytes independent of its length. `RUN` is the length of runs that decides between the two.

A row that was made piece by piece (`concat.joined`) is several stored rows joined end to end. Then `bounds` gives the
range of listed rows that make up each row.

The origin of a reference is a frame too, but its parts name streams instead of shards. A part has one cell, with the
id of the stream (8 bytes) in place of a node, and the number of the delivery in place of a shard's number. So an origin
is sliced, picked and repeated in the same way as the rows. A reference and its origin may come from any process, so no
more is known of an origin than that it is a valid frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.batch import cuts
from dataplane.batch.cuts import NOTHING, Cut
from dataplane.batch.field import Field
from dataplane.batch.rows import Index, RowIndices
from dataplane.errors import SchemaMismatch

T = TypeVar("T")

#: The least rows of a range that gets a part of its own. A part takes some 30 bytes in an encoded ref, and a row number
#: one or two.
RUN = 32


class ShardRef(NamedTuple):
    """A shard: the id of the node that stores it (8 bytes), its number on that node, and its row count."""

    node: bytes
    id: int
    rows: int


class Cell(NamedTuple):
    """One stored column: the `ordinal`-th of its shard, of `nbytes` logical bytes in all."""

    shard: ShardRef
    ordinal: int
    nbytes: int


class BlockRows(NamedTuple):
    """Selected rows of one stored block: the cell of each column of the frame, and the row numbers."""

    cells: tuple[Cell, ...]
    rows: RowIndices


class ColumnPlace(NamedTuple):
    """A column of a reference: its field, the index of its frame, and the slot of its cells in the frame's parts."""

    field: Field
    frame: int
    slot: int


def place_of(columns: Mapping[str, T], name: Any) -> T:
    """The value of the column with this name. Raises SchemaMismatch, naming the existing columns, if there is none."""
    try:
        return columns[name]
    except (KeyError, TypeError):
        there = ", ".join(columns)
        hint = "" if isinstance(name, str) else '; names are given one by one: select("a", "b")'
        raise SchemaMismatch(
            f"there is no column {name!r}; there are {there}{hint}",
            column=str(name),
            expected=f"one of {there}",
            found=repr(name),
        ) from None


@dataclass(frozen=True, slots=True)
class Frame:
    """Rows over parts. `order`: None, or the position of each listed row among the rows of the parts. `bounds`: None,
    or row i joins the listed rows from `bounds[i]` up to `bounds[i + 1]` (at least one). `cut`: the slice of each row.
    """

    parts: tuple[BlockRows, ...]
    order: RowIndices | None = None
    bounds: RowIndices | None = None
    cut: Cut = NOTHING

    @property
    def rows(self) -> int:
        if self.bounds is not None:
            return len(self.bounds) - 1
        return sum(len(part.rows) for part in self.parts) if self.order is None else len(self.order)

    @property
    def listed(self) -> Frame:
        """The rows before they are joined."""
        return self if self.bounds is None else Frame(self.parts, self.order)

    @property
    def width(self) -> int:
        """The number of cells in each part; 0 without parts."""
        return len(self.parts[0].cells) if self.parts else 0

    def slice(self, start: int, stop: int) -> Frame:
        """The rows from `start` up to `stop`, both within the frame."""
        if start == stop:
            return Frame(())
        if self.cut:
            return self.whole().slice(start, stop).with_cut(cuts.take(self.cut, slice(start, stop)))
        if self.bounds is not None:
            bounds = self.bounds.array()[start : stop + 1]
            return self.listed.slice(int(bounds[0]), int(bounds[-1])).joined(bounds - bounds[0])
        if self.order is not None:
            return _gather(self.parts, self.order.array()[start:stop])
        kept = []
        first = 0
        for part in self.parts:
            last = first + len(part.rows)
            if start < last and first < stop:
                inside = start <= first and last <= stop
                within = RowIndices(max(start - first, 0), min(stop, last) - first)
                kept.append(part if inside else BlockRows(part.cells, part.rows.take(within)))
            first = last
        return Frame(tuple(kept))

    def take(self, positions: Index) -> Frame:
        """The rows at `positions`, each within the frame."""
        if not len(positions):
            return Frame(())
        if self.cut:
            return self.whole().take(positions).with_cut(cuts.take(self.cut, positions))
        if self.bounds is not None:
            bounds = self.bounds.array()
            lengths = np.diff(bounds)[positions]
            ends = np.cumsum(lengths)
            inner = np.arange(int(ends[-1])) + np.repeat(bounds[positions] - (ends - lengths), lengths)
            return self.listed.take(inner).joined(np.concatenate(([0], ends)))
        if self.order is not None:
            return _gather(self.parts, self.order.array()[positions])
        if len(self.parts) == 1:
            part = self.parts[0]
            return Frame((BlockRows(part.cells, part.rows.take(RowIndices.index(positions))),))
        return _gather(self.parts, positions)

    def repeat(self, times: int) -> Frame:
        """Each row `times` in succession, at least once."""
        if times == 1:
            return self
        if self.cut or self.bounds is not None:
            return self.take(np.repeat(np.arange(self.rows), times))
        if self.order is not None:
            return Frame(self.parts, RowIndices.index(np.repeat(self.order.array(), times)))
        repeated = (BlockRows(part.cells, RowIndices.index(np.repeat(part.rows.array(), times))) for part in self.parts)
        return Frame(tuple(repeated))

    def whole(self) -> Frame:
        """The frame without its cut."""
        return Frame(self.parts, self.order, self.bounds)

    def with_cut(self, cut: Cut) -> Frame:
        return Frame(self.parts, self.order, self.bounds, cut)

    def numbered(self, number: Callable[[ShardRef], int]) -> Frame:
        """The same rows, with `number(shard)` as the number of each shard."""

        def named(cell: Cell) -> Cell:
            return cell._replace(shard=cell.shard._replace(id=number(cell.shard)))

        parts = tuple([BlockRows(tuple(map(named, part.cells)), part.rows) for part in self.parts])
        return Frame(parts, self.order, self.bounds, self.cut)

    def joined(self, bounds: Index) -> Frame:
        """A frame whose row i joins rows `bounds[i]` up to `bounds[i + 1]` of this one. Returns this frame if the
        bounds join no rows."""
        return self if len(bounds) - 1 == self.rows else Frame(self.parts, self.order, RowIndices.index(bounds))

    def pick(self, slots: Sequence[int]) -> Frame:
        """The same rows of the columns at `slots` alone."""
        picked = (BlockRows(tuple([part.cells[slot] for slot in slots]), part.rows) for part in self.parts)
        return Frame(tuple(picked), self.order, self.bounds, self.cut)

    def beside(self, other: Frame) -> Frame | None:
        """One frame of the columns of both, or None if their selections differ."""
        alike = len(self.parts) == len(other.parts) and (self.order, self.bounds) == (other.order, other.bounds)
        alike = alike and cuts.equal(self.cut, other.cut)
        if not (alike and all(a.rows == b.rows for a, b in zip(self.parts, other.parts, strict=True))):
            return None
        both = (BlockRows(a.cells + b.cells, a.rows) for a, b in zip(self.parts, other.parts, strict=True))
        return Frame(tuple(both), self.order, self.bounds, self.cut)

    def counts(self) -> list[int]:
        """For each part, how many of the listed rows are its rows."""
        lengths = [len(part.rows) for part in self.parts]
        if self.order is None:
            return lengths
        owner = np.searchsorted(np.cumsum(lengths), self.order.array(), side="right")
        counts: list[int] = np.bincount(owner, minlength=len(lengths)).tolist()
        return counts

    def in_order(self) -> tuple[BlockRows, ...]:
        """Parts whose concatenated rows are the listed rows: with an order, one part for each run."""
        if self.order is None:
            return self.parts
        owner, numbers = _locate(self.parts, self.order.array())
        return _runs(self.parts, owner, numbers)

    def distinct(self) -> tuple[Frame, Index | None]:
        """The distinct rows of the frame, and the position of each row among them. Rows with different cuts are
        distinct. Returns the frame itself and None if no row repeats, or if rows are joined."""
        if self.bounds is not None:
            return self, None
        owner, numbers = self._located()
        told = [number for step in self.cut for number in step.numbers if not isinstance(number, int)]
        keys = np.stack([*told, numbers, _canonical(self.parts)[owner]])
        ascending = np.lexsort(keys)
        new = np.ones(len(numbers), np.bool_)
        new[1:] = (np.diff(keys[:, ascending]) != 0).any(axis=0)
        if new.all():
            return self, None
        index = np.empty(len(numbers), np.int64)
        index[ascending] = np.cumsum(new) - 1
        return self.take(ascending[new]), index

    def wanted(self) -> list[tuple[tuple[Cell, ...], RowIndices, Cut]]:
        """The rows to read. For each part: its cells, its row numbers, ascending, and their cut (none for joined rows).
        A row with two cuts comes twice."""
        if self.bounds is not None or cuts.is_even(self.cut):  # a joined row's start is not known here
            cut = self.cut if self.bounds is None else NOTHING
            return [(part.cells, part.rows.distinct()[0], cut) for part in self.parts]
        owner, numbers = self._located()
        found = []
        for index, part in enumerate(self.parts):
            chosen = np.flatnonzero(owner == index)
            chosen = chosen[np.argsort(numbers[chosen], kind="stable")]
            found.append((part.cells, RowIndices.index(numbers[chosen]), cuts.take(self.cut, chosen)))
        return found

    def means(self, other: Frame, slots: Iterable[tuple[int, int]]) -> bool:
        """Whether, for each (slot here, slot there), both frames have the same rows of the same stored column."""
        pairs = list(slots)
        if self.bounds != other.bounds or not cuts.equal(self.cut, other.cut):
            return False
        if self.order == other.order and len(self.parts) == len(other.parts):
            both = list(zip(self.parts, other.parts, strict=True))
            if all(a.rows == b.rows and _same(a, b, pairs) for a, b in both):
                return True
        owner, numbers = self._located()
        their_owner, their_numbers = other._located()
        if not np.array_equal(numbers, their_numbers) or not len(numbers):
            return len(numbers) == len(their_numbers) == 0
        met = np.unique(np.stack([owner, their_owner]), axis=1).T.tolist()
        return all(_same(self.parts[a], other.parts[b], pairs) for a, b in met)

    def _located(self) -> tuple[Index, Index]:
        """For each listed row, the index of its part and its row number in the stored block."""
        if self.order is not None:
            return _locate(self.parts, self.order.array())
        lengths = [len(part.rows) for part in self.parts]
        numbers = [part.rows.array() for part in self.parts]
        return np.repeat(np.arange(len(lengths)), lengths), np.concatenate([np.empty(0, np.int64), *numbers])


def join(frames: Sequence[Frame]) -> Frame:
    """The rows of all frames, one frame after the other; all have the same columns in the same slots."""
    if any(frame.cut for frame in frames):
        cut = cuts.joined([(frame.rows, frame.cut) for frame in frames])
        return join([frame.whole() for frame in frames]).with_cut(cut)
    if any(frame.bounds is not None for frame in frames):
        lengths = [np.diff(np.arange(f.rows + 1) if f.bounds is None else f.bounds.array()) for f in frames]
        return join([frame.listed for frame in frames]).joined(np.cumsum([0, *np.concatenate(lengths)]))
    parts = tuple([part for frame in frames for part in frame.parts])
    if all(frame.order is None for frame in frames):
        merged = _merged(parts)
        rows = sum(len(part.rows) for part in merged)
        if _worth_parts(len(merged), rows) or len(merged) <= 2 * len({part.cells for part in merged}):
            return Frame(merged)
        return _gather(merged, np.arange(rows, dtype=np.int64))
    orders, first = [], 0
    for frame in frames:
        length = sum(len(part.rows) for part in frame.parts)
        order = np.arange(length, dtype=np.int64) if frame.order is None else frame.order.array()
        orders.append(order + first)
        first += length
    return _gather(parts, np.concatenate(orders))


def _same(a: BlockRows, b: BlockRows, slots: Iterable[tuple[int, int]]) -> bool:
    return all(a.cells[i] is b.cells[j] or a.cells[i][:2] == b.cells[j][:2] for i, j in slots)


def _worth_parts(runs: int, rows: int) -> bool:
    return runs <= 2 or runs * RUN <= rows


def _merged(parts: Iterable[BlockRows]) -> tuple[BlockRows, ...]:
    """The same rows in fewer parts: neighbours with the same cells are merged if their rows touch or are few."""
    out: list[BlockRows] = []
    for cells, group in groupby(parts, key=lambda part: part.cells):
        touching: list[RowIndices] = []
        for _, rows in group:
            last = touching[-1].slice if touching else None
            if last is not None and rows.slice is not None and last.stop == rows.start:
                touching[-1] = RowIndices(last.start, rows.stop)
            else:
                touching.append(rows)
        for is_long, several in groupby(touching, key=lambda rows: rows.slice is not None and len(rows) >= RUN):
            pieces = list(several)
            if is_long or len(pieces) == 1:
                out.extend(BlockRows(cells, rows) for rows in pieces)
            else:
                out.append(BlockRows(cells, RowIndices.index(np.concatenate([rows.array() for rows in pieces]))))
    return tuple(out)


def _locate(parts: Sequence[BlockRows], positions: Index) -> tuple[Index, Index]:
    """For each position among the rows of the parts: the index of its part, and its row number in the stored block."""
    ends = np.cumsum([len(part.rows) for part in parts])
    owner = np.searchsorted(ends, positions, side="right").astype(np.int64, copy=False)
    numbers = np.empty_like(positions)
    by_owner = np.argsort(owner, kind="stable")
    for index, chosen in _split_at_changes(owner[by_owner], by_owner):
        rows = parts[index].rows
        inner = positions[chosen] - (int(ends[index]) - len(rows))
        numbers[chosen] = inner + rows.start if rows.slice is not None else rows.array()[inner]
    return owner, numbers


def _split_at_changes(keys: Index, values: Index) -> Iterable[tuple[int, Index]]:
    """The values in runs of equal keys, each with its key."""
    starts = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    bounds = [0, *starts.tolist(), len(keys)]
    return [(int(keys[a]), values[a:b]) for a, b in pairwise(bounds) if a < b]


def _runs(parts: Sequence[BlockRows], owner: Index, numbers: Index) -> tuple[BlockRows, ...]:
    return tuple(
        [BlockRows(parts[index].cells, RowIndices.index(run)) for index, run in _split_at_changes(owner, numbers)]
    )


def _gather(parts: Sequence[BlockRows], positions: Index) -> Frame:
    """The rows at `positions` among the rows of the parts, as runs or with an order: the form that costs less."""
    if not len(positions):
        return Frame(())
    owner, numbers = _locate(parts, positions)
    owner = _canonical(parts)[owner]
    runs = 1 + int(np.count_nonzero(owner[1:] != owner[:-1]))
    if _worth_parts(runs, len(positions)) or runs <= 2 * len(np.unique(owner)):
        return Frame(_runs(parts, owner, numbers))
    return _woven(parts, owner, numbers)


def _canonical(parts: Sequence[BlockRows]) -> Index:
    """For each part, the index of the first part with the same cells."""
    firsts: dict[tuple[Cell, ...], int] = {}
    return np.array([firsts.setdefault(part.cells, index) for index, part in enumerate(parts)], dtype=np.int64)


def _woven(parts: Sequence[BlockRows], owner: Index, numbers: Index) -> Frame:
    """A frame of these rows with one part of distinct, ascending rows for each owner, and an order."""
    ascending = np.lexsort((numbers, owner))
    owner, numbers = owner[ascending], numbers[ascending]
    new: npt.NDArray[np.bool_] = np.ones(len(owner), dtype=np.bool_)
    new[1:] = (owner[1:] != owner[:-1]) | (numbers[1:] != numbers[:-1])
    order = np.empty_like(owner)
    order[ascending] = np.cumsum(new) - 1
    return Frame(_runs(parts, owner[new], numbers[new]), RowIndices.index(order))


#: The row count of the `ShardRef` that stands for a stream: more than any stream's.
_STREAM_ROWS = 1 << 47

#: The mask that keeps the number of a delivery within an int64.
_MOST_DELIVERY = (1 << 63) - 1


def origin_of(stream: bytes, rows: npt.ArrayLike, hold: int) -> Frame:
    """The origin of these rows (numbers, int64) of a stream, delivered under the number `hold`."""
    part, order = RowIndices.index(rows).distinct()
    cell = Cell(ShardRef(stream, hold, _STREAM_ROWS), 0, 0)
    return Frame((BlockRows((cell,), part),), None if order is None else RowIndices.index(order))


def rows_by_stream(origin: Frame) -> list[tuple[bytes, Index, Index]]:
    """For each stream: its id, the positions of its rows in the reference, ascending, and their numbers in it."""
    streams = [part.cells[0].shard.node for part in origin.parts]
    known = list(dict.fromkeys(streams))
    of = np.repeat([known.index(stream) for stream in streams], [len(part.rows) for part in origin.parts])
    listed = np.concatenate([part.rows.array() for part in origin.parts])
    rows, of = _in_origin_order(origin, listed), _in_origin_order(origin, of)
    found = [(stream, np.flatnonzero(of == number)) for number, stream in enumerate(known)]
    return [(stream, at, rows[at]) for stream, at in found]


def delivery_numbers(origin: Frame) -> Index:
    """The delivery number of each row, in order, int64."""
    listed = [np.full(len(part.rows), part.cells[0].shard.id & _MOST_DELIVERY, np.int64) for part in origin.parts]
    return _in_origin_order(origin, np.concatenate(listed))


def _in_origin_order(origin: Frame, values: Index) -> Index:
    return values if origin.order is None else values[origin.order.array()]
