"""Assembles columns from pinned shards: piece by piece, or many small pieces in one pass (`Stack`).

The shards of a reply stay a table (`HeldShards`), so that no object is made for each of thousands of small shards. Each
pin that the node granted is dropped once, with the last view of its shards. Small shards share a pin object.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from dataplane.batch import gather, locations
from dataplane.batch.batch import Column
from dataplane.batch.field import Field
from dataplane.batch.frame import Frame
from dataplane.batch.layout import Bytes, ColumnHeader, ColumnTables, Index, Outline
from dataplane.batch.layout_check import CheckedLayout, check_layouts
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import (
    Copied,
    ExtentMemory,
    Scattered,
    Selection,
    Stack,
    StoredPiece,
    check_fits,
    opened,
)
from dataplane.batch.values import as_bytes
from dataplane.client.memory import CarriedShard, HeldShard, NodeSegment
from dataplane.client.pins import ShardPin
from dataplane.errors import Misuse, ProtocolMismatch
from dataplane.store.live_cells import LiveBlock
from dataplane.wire import shard_messages as sm
from dataplane.wire.places import ShardPlace, Table, unpack

_LEAST = 8
"""The least number of pieces of a column that are read in one pass."""

_MOST = 256 << 10
"""The most bytes of a piece, on average, with which one pass is faster than reading each piece in place."""


def _indexed(column: ColumnHeader) -> bool:
    """Whether the column, or a column nested in it, has an index buffer."""
    return column.indexed or any(map(_indexed, column.children))


def _sorted(sources: Sequence[locations.ColumnRows], by: Index) -> tuple[Index, Index]:
    """The order of the pieces by the numbers `by`, and the new position of each row."""
    order = np.argsort(by, kind="stable")
    lengths = np.array([len(piece.rows) for piece in sources])
    starts, moved = np.cumsum(lengths) - lengths, np.empty_like(lengths)
    moved[order] = np.cumsum(lengths[order]) - lengths[order]
    return order, np.arange(int(lengths.sum())) + np.repeat(moved - starts, lengths)


def _once(
    sources: tuple[locations.ColumnRows, ...], order: Index | None
) -> tuple[tuple[locations.ColumnRows, ...], Index | None]:
    """Merge the pieces of each stored column, and adapt the order. References to rows that share values have many
    pieces of few stored columns."""
    numbers: dict[tuple[bytes, int, int], int] = {}
    own = [numbers.setdefault(piece[:3], len(numbers)) for piece in sources]
    if len(numbers) == len(sources):
        return sources, order
    _, places = _sorted(sources, np.array(own))
    rows: dict[int, list[Index]] = {}
    for number, piece in zip(own, sources, strict=True):
        rows.setdefault(number, []).append(piece.rows.array())
    pieces = [
        locations.ColumnRows(*key, RowIndices.index(np.concatenate(rows[number]))) for key, number in numbers.items()
    ]
    return tuple(pieces), places if order is None else places[order]


def _column(laid: CheckedLayout, ordinal: int) -> ColumnHeader:
    """The header of column `ordinal` in shards with this layout. Raises Misuse if there is no such column."""
    columns = laid.outline.columns
    if ordinal >= len(columns):
        raise Misuse(f"the reference means column {ordinal} of a shard that has {len(columns)}")
    return columns[ordinal][1]


class _Several:
    """The wanted rows of several shards: one `RowIndices` for each, and arrays by which all are checked at once."""

    def __init__(self, rows: Sequence[RowIndices]) -> None:
        self.rows = rows
        self._stops = np.array([each.stop for each in rows])
        self._lengths = np.array([len(each) for each in rows])
        self._ranges = all(each.slice is not None for each in rows)

    def __len__(self) -> int:
        return int(self._lengths.sum())

    def within(self, there: Index) -> bool:
        """Whether shards with these row counts contain the wanted rows."""
        return bool((self._stops <= there).all())

    def cover(self, there: Index) -> bool:
        """Whether the wanted rows are all rows, in order, of shards with these row counts."""
        return self._ranges and bool(((self._stops == there) & (self._lengths == there)).all())


class _Joined(Copied):
    """A ragged column whose row i is the concatenation of rows `bounds[i]` to `bounds[i + 1]` of another column."""

    def __init__(self, column: Column, bounds: Index) -> None:
        super().__init__(column.name, column.field, len(bounds) - 1)
        self._items = gather.items(column.reading, column.field)
        self._bounds = bounds

    @cached_property
    def tables(self) -> ColumnTables:
        bounds, shapes = self._bounds, self._items.shapes
        if shapes is not None:
            along = np.add.reduceat(shapes[:, 0], bounds[:-1])
            shapes = np.column_stack([along, shapes[bounds[:-1], 1:]])
        return ColumnTables(self._items.offsets[bounds], shapes, (), None)

    def _values(self, private: bool) -> Bytes:
        data = as_bytes(self._items.values)
        return data.copy() if private else gather.read_only(data)


class ColumnAssembly:
    """Assembles columns from the shards of one get."""

    def __init__(self, held: HeldShards) -> None:
        self._held = held
        self._stacks: dict[tuple[ShardKey, ...], Stack] = {}
        self._outlines: dict[tuple[ShardKey, ...], list[Outline]] = {}
        self._wanted: dict[int, _Several] = {}  # by frame

    def column(self, ref: BatchRef, name: str, field: Field) -> Column:
        """A column of the reference. Raises Corrupt, and Misuse if a shard has no such column."""
        frame, slot = locations.frame_of(ref, name)
        if frame.cut and frame.bounds is None:
            pieces, order = _once(*locations.sources(ref, name))
            there = [self._piece(self._held[(p.node, p.shard)], p.ordinal, p.rows) for p in pieces]
            return Column(name, field, opened(name, field, there, frame.cut), order, frame.cut)
        listed = self._listed(ref, name, field, frame, slot)
        if frame.bounds is None:
            return listed
        joined = _Joined(listed, frame.bounds.array())
        return Column(name, field, [Selection(joined, RowIndices.range(0, joined.layout.rows))], None, frame.cut)

    def _listed(self, ref: BatchRef, name: str, field: Field, frame: Frame, slot: int) -> Column:
        """The column with the rows of the frame's parts, in the frame's order, but without joining rows at `bounds`."""
        if len(frame.parts) == 1:
            shard, ordinal, _ = frame.parts[0].cells[slot]
            piece = self._piece(self._held[shard[:2]], ordinal, frame.parts[0].rows)
            order = None if frame.order is None else frame.order.array()
            return Column(name, field, opened(name, field, [piece]), order)
        if len(frame.parts) >= _LEAST:
            cells = [part.cells[slot] for part in frame.parts]
            keys, ordinal = tuple([cell.shard[:2] for cell in cells]), cells[0].ordinal
            if len({cell.ordinal for cell in cells}) == 1 and self._lie_alike(keys, ordinal):
                stacked = self._stacked(name, field, ordinal, keys, self._rows(frame))
                if stacked is not None:
                    return Column(name, field, [stacked], None if frame.order is None else frame.order.array())
        sources, order = _once(*locations.sources(ref, name))
        numbers: dict[tuple[object, int], int] = {}
        kinds = np.array([numbers.setdefault(self._kind(piece), len(numbers)) for piece in sources], np.int64)
        runs = 1 + np.count_nonzero(np.diff(kinds))
        if runs > len(numbers) and self._are_worth_a_pass(sources, kinds):
            by, places = _sorted(sources, kinds)
            sources, kinds = tuple([sources[at] for at in by.tolist()]), kinds[by]
            order = places if order is None else places[order]
        selections: list[Selection] = []
        for _, several in groupby(zip(kinds.tolist(), sources, strict=True), lambda each: each[0]):
            alike = [piece for _, piece in several]
            selections += self._opened(name, field, alike[0].ordinal, alike)
        return Column(name, field, selections, order)

    def _lie_alike(self, keys: tuple[ShardKey, ...], ordinal: int) -> bool:
        """Whether a cheap check shows that the column can be read in one pass: all shards have one outline, or they are
        distinct and the column has the same layout in each."""
        if self._held.outline is not None:
            return True
        outlines = self._outlines.get(keys)
        if outlines is None:
            once = len(set(keys)) == len(keys)
            outlines = self._outlines[keys] = self._held.outlines(keys) if once else []
        if not outlines or any(ordinal >= len(outline.columns) for outline in outlines):
            return False
        return len({outline.kinds[ordinal] for outline in outlines}) == 1

    def _rows(self, frame: Frame) -> _Several:
        """The rows wanted from each part of a frame, computed once for all of its columns."""
        wanted = self._wanted.get(id(frame))
        if wanted is None:
            wanted = self._wanted[id(frame)] = _Several([part.rows for part in frame.parts])
        return wanted

    def _kind(self, piece: locations.ColumnRows) -> tuple[object, int]:
        """A key that is equal for pieces with the same layout and column number. Raises Misuse if the shard has no such
        column."""
        laid = self._held.laid((piece.node, piece.shard))
        _column(laid, piece.ordinal)
        return laid.outline.kinds[piece.ordinal], piece.ordinal

    def _are_worth_a_pass(self, sources: Sequence[locations.ColumnRows], kinds: Index) -> bool:
        """Whether a kind has at least `_LEAST` pieces that can be read in one pass, and are small enough for that."""
        for kind in np.flatnonzero(np.bincount(kinds) >= _LEAST).tolist():
            pieces = [sources[at] for at in np.flatnonzero(kinds == kind).tolist()]
            keys, ordinal = tuple([(piece.node, piece.shard) for piece in pieces]), pieces[0].ordinal
            if self._is_small(keys, ordinal):
                return True
        return False

    def _is_small(self, keys: tuple[ShardKey, ...], ordinal: int) -> bool:
        """Whether columns of the same layout can be read in one pass, and have at most `_MOST` bytes on average."""
        if _indexed(_column(self._held.laid(keys[0]), ordinal)):
            return False
        return self._stack(keys).nbytes(ordinal) <= _MOST * len(keys)

    def _opened(
        self, name: str, field: Field, ordinal: int, pieces: Sequence[locations.ColumnRows]
    ) -> Sequence[Selection]:
        keys = tuple([(piece.node, piece.shard) for piece in pieces])
        if len(pieces) >= _LEAST:
            stacked = self._stacked(name, field, ordinal, keys, _Several([piece.rows for piece in pieces]))
            if stacked is not None:
                return [stacked]
        held = zip([self._held[key] for key in keys], pieces, strict=True)
        return opened(name, field, [self._piece(each, ordinal, piece.rows) for each, piece in held])

    def _piece(self, held: PinnedShard, ordinal: int, rows: RowIndices) -> StoredPiece:
        _column(held.laid, ordinal)
        return StoredPiece(held.laid.layout.columns[ordinal][1], held.memory, rows)

    def _stacked(
        self, name: str, field: Field, ordinal: int, keys: tuple[ShardKey, ...], several: _Several
    ) -> Selection | None:
        """The wanted rows of shards with one layout, as a selection of their stack. None if the column is large or has
        an index, if less than half of the rows are wanted, or if a row does not exist."""
        if not self._is_small(keys, ordinal):
            return None
        stack = self._stack(keys)
        rows, total = stack.rows, int(stack.rows.sum())
        whole = several.cover(rows)
        if not (whole or 2 * len(several) >= total):
            return None
        stacked = stack.column(name, ordinal)
        check_fits(name, stacked.layout.field, field)
        if whole:
            return Selection(stacked, RowIndices.range(0, total))
        if not several.within(rows):
            return None  # the caller then reads piece by piece, which raises the error
        starts = (np.cumsum(rows) - rows).tolist()
        chosen = [each.array() + start for each, start in zip(several.rows, starts, strict=True)]
        return Selection(stacked, RowIndices.index(np.concatenate(chosen)))

    def _stack(self, keys: tuple[ShardKey, ...]) -> Stack:
        stack = self._stacks.get(keys)
        if stack is None:
            stack = self._stacks[keys] = self._held.stack(keys)
        return stack


_LEAST_PINNED, _MOST_PINNED = 256 << 10, 4 << 20
"""The bounds of the most bytes of shards that share a pin object. Within them, the most is a quarter of all bytes. Each
pin object takes a message when dropped, and a few hundred messages take longer than reading the shards."""


_NONE = sm.Held(0, b"", [], [])
_FEW = 64
"""The most shards for which lists of Python integers are read faster than a NumPy table."""


class PinnedShard(NamedTuple):
    """A held shard: its memory, size in bytes, and layout."""

    memory: ExtentMemory
    size: int
    laid: CheckedLayout


class HeldShards:
    """Held shards by key, with validated layouts."""

    def __init__(
        self, keys: Sequence[ShardKey], mapped: Mapping[ShardKey, PinnedShard], reply: sm.Held = _NONE
    ) -> None:
        """`keys`: the keys of the reply's shards, in its order. They are pinned, unless the reply has their bytes.
        `mapped`: shards that other processes keep. Raises ProtocolMismatch, Corrupt."""
        self._keys = keys
        self._mapped = mapped
        self._places = places = unpack(reply.places)
        if len(places) != len(keys):
            raise ProtocolMismatch(f"{len(keys)} shards were asked for, and {len(places)} told of")
        self._lives = reply.lives
        if len(places) == 1:
            self._laid = check_layouts(reply.layouts, [int(places[0, 3])])
        else:
            sizes = np.full(len(reply.layouts), np.iinfo(np.int64).max)
            np.minimum.at(sizes, places[:, 4], places[:, 3])  # the smallest of the shards that share a layout
            self._laid = check_layouts(reply.layouts, sizes.tolist())
        self._few = places.tolist() if len(keys) <= _FEW else None
        self._at = dict(zip(keys, range(len(keys)), strict=True))
        self._made: dict[ShardKey, PinnedShard] = {}
        self._segments: Mapping[int, NodeSegment] = {}
        self._carried = reply.carried
        self._starts: list[int] = []  # for each pin, the position of its first shard
        self._pins: list[ShardPin] = []
        self._arrays: dict[int, dict[int, tuple[Bytes, int]]] = {}  # by pin, as `_spans`

    def live(self) -> dict[ShardKey, tuple[list[LiveBlock], CheckedLayout]]:
        """The live blocks and layouts of the shards of which some rows were freed, by key."""
        if not self._lives:
            return {}
        partly = np.flatnonzero(self._places[:, 5])
        rows = zip(partly.tolist(), self._places[partly, 4:].tolist(), strict=True)
        return {self._keys[at]: (self._lives[live - 1], self._laid[layout]) for at, (layout, live) in rows}

    def hold(self, segments: Mapping[int, NodeSegment], pin: Callable[..., ShardPin]) -> None:
        """Make pin objects by `pin` for the reply's shards, in these segments. The node has granted one pin on each."""
        self._segments = segments
        numbers, sizes = self._places[:, 0].tolist(), self._places[:, 3].tolist()
        most, nbytes = max(_LEAST_PINNED, min(_MOST_PINNED, sum(sizes) // 4)), 0
        for at, size in enumerate(sizes):
            if not at or nbytes + size > most:
                self._starts.append(at)
                nbytes = 0
            nbytes += size
        self._pins = [pin(*numbers[start:stop]) for start, stop in pairwise([*self._starts, len(numbers)])]

    @cached_property
    def outline(self) -> Outline | None:
        """The common outline of the shards; None if they differ."""
        outlines = {id(each): each for each in (laid.outline for laid in self._laid)}
        outlines |= {id(held.laid.outline): held.laid.outline for held in self._mapped.values()}
        return next(iter(outlines.values())) if len(outlines) == 1 else None

    def outlines(self, keys: Sequence[ShardKey]) -> list[Outline]:
        """The distinct outlines of these shards."""
        if self._mapped:
            found = [self.laid(key) for key in keys]
        else:
            at = np.array([self._at[key] for key in keys], np.int64)
            found = [self._laid[number] for number in np.unique(self._places[at, 4]).tolist()]
        return list({id(laid.outline): laid.outline for laid in found}.values())

    def laid(self, key: ShardKey) -> CheckedLayout:
        """The layout of a shard."""
        if key in self._mapped:
            return self._mapped[key].laid
        return self._laid[self._place(self._at[key]).layout]

    def _place(self, at: int) -> ShardPlace:
        return ShardPlace._make(self._places[at].tolist() if self._few is None else self._few[at])

    def __getitem__(self, key: ShardKey) -> PinnedShard:
        found = self._mapped.get(key) or self._made.get(key)
        if found is None:
            at = self._at[key]
            place = self._place(at)
            found = self._made[key] = PinnedShard(self._memory(at, place), place.size, self._laid[place.layout])
        return found

    def _memory(self, at: int, place: ShardPlace) -> ExtentMemory:
        if place.segment < 0:
            return CarriedShard(self._carried, place.offset, place.size)
        run = bisect_right(self._starts, at) - 1
        stop = self._starts[run + 1] if run + 1 < len(self._starts) else len(self._keys)
        view = None
        if stop - self._starts[run] > 1:
            if run not in self._arrays:
                self._arrays[run] = self._spans(self._places[self._starts[run] : stop], self._pins[run])
            array, first = self._arrays[run][place.segment]
            view = array[place.offset - first : place.offset - first + place.size]
        return HeldShard(self._segments[place.segment], place.offset, place.size, self._pins[run], view)

    def _spans(self, places: Table, keeps: object) -> dict[int, tuple[Bytes, int]]:
        """For each segment, one array of the bytes from the first of these shards to the last, and its offset. An array
        for each shard would take longer to make than to read."""
        found = {}
        for segment in np.unique(places[:, 1]).tolist():
            inside = places[places[:, 1] == segment]
            first, end = int(inside[:, 2].min()), int((inside[:, 2] + inside[:, 3]).max())
            found[segment] = self._segments[segment].mapping(writable=False).array(first, end - first, keeps), first
        return found

    def stack(self, keys: Sequence[ShardKey]) -> Stack:
        """These shards, which have one outline, to be read in one pass."""
        if self._carried or (self._mapped and any(map(self._mapped.__contains__, keys))):
            held = [self[key] for key in keys]
            table = np.array([each.laid.numbers for each in held])
            return Stack(held[0].laid.outline, table, Scattered.of([each.memory.read(0, each.size) for each in held]))
        places = self._places if keys is self._keys else self._places[[self._at[key] for key in keys]]
        first = self._laid[int(places[0, 4])]
        if len(self._laid) == 1:
            table = np.broadcast_to(first.numbers, (len(places), len(first.numbers)))
        else:
            used, inverse = np.unique(places[:, 4], return_inverse=True)
            table = np.array([self._laid[at].numbers for at in used.tolist()])[inverse]
        spans = self._whole
        bases = np.array([start for _, start in spans.values()])
        which = np.searchsorted(list(spans), places[:, 1])
        memories = [array for array, _ in spans.values()]
        return Stack(first.outline, table, Scattered(memories, which, places[:, 2] - bases[which]))

    @cached_property
    def _whole(self) -> dict[int, tuple[Bytes, int]]:
        """As `_spans`, for all shards, by ascending segment."""
        return self._spans(self._places, tuple(self._pins))
