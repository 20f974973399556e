"""Shards that are held, put together as columns: piece by piece, or many small ones in one pass (`batch.stacks`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

import numpy as np

from dataplane.batch import gather
from dataplane.batch import ref as refs
from dataplane.batch.batch import Column, Piece
from dataplane.batch.field import Field
from dataplane.batch.frame import Frame
from dataplane.batch.layout import Bytes, ColumnHeader, Index, Outline, Tables
from dataplane.batch.layout_check import CheckedLayout
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.row_sources import as_bytes
from dataplane.batch.rows import Rows
from dataplane.batch.stacks import Stack
from dataplane.batch.stored_column import Copied, Selection, check_fits, opened
from dataplane.client.held_shards import Holding, PinnedShard
from dataplane.errors import Misuse

_LEAST = 8
"""Pieces of a column from which on they are read in one pass."""

_MOST = 256 << 10
"""Bytes of a piece up to which that is faster than to look at each where it is."""


def _indexed(column: ColumnHeader) -> bool:
    """Whether the column, or a column nested in it, has an index buffer."""
    return column.indexed or any(map(_indexed, column.children))


def _sorted(sources: Sequence[refs.Piece], by: Index) -> tuple[Index, Index]:
    """The places of the pieces in the order of these numbers, and where each of their rows is then."""
    order = np.argsort(by, kind="stable")
    lengths = np.array([len(piece.rows) for piece in sources])
    starts, moved = np.cumsum(lengths) - lengths, np.empty_like(lengths)
    moved[order] = np.cumsum(lengths[order]) - lengths[order]
    return order, np.arange(int(lengths.sum())) + np.repeat(moved - starts, lengths)


def _once(sources: tuple[refs.Piece, ...], order: Index | None) -> tuple[tuple[refs.Piece, ...], Index | None]:
    """The same rows, each stored column in one piece: many rows that share a value are as many pieces of few."""
    numbers: dict[tuple[bytes, int, int], int] = {}
    own = [numbers.setdefault(piece[:3], len(numbers)) for piece in sources]
    if len(numbers) == len(sources):
        return sources, order
    _, places = _sorted(sources, np.array(own))
    rows: dict[int, list[Index]] = {}
    for number, piece in zip(own, sources, strict=True):
        rows.setdefault(number, []).append(piece.rows.array())
    pieces = [refs.Piece(*key, Rows.index(np.concatenate(rows[number]))) for key, number in numbers.items()]
    return tuple(pieces), places if order is None else places[order]


def _column(laid: CheckedLayout, ordinal: int) -> ColumnHeader:
    """A column of shards that lie like this. Raises Misuse where they have none such."""
    columns = laid.outline.columns
    if ordinal >= len(columns):
        raise Misuse(f"the reference means column {ordinal} of a shard that has {len(columns)}")
    return columns[ordinal][1]


class _Several:
    """The rows that are wanted of each of some shards: as they are, and as numbers for all at once."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.rows = rows
        self._stops = np.array([each.stop for each in rows])
        self._lengths = np.array([len(each) for each in rows])
        self._ranges = all(each.slice is not None for each in rows)

    def __len__(self) -> int:
        return int(self._lengths.sum())

    def within(self, there: Index) -> bool:
        """Whether shards of so many rows have them."""
        return bool((self._stops <= there).all())

    def cover(self, there: Index) -> bool:
        """Whether they are all of so many rows, in order."""
        return self._ranges and bool(((self._stops == there) & (self._lengths == there)).all())


class _Joined(Copied):
    """The rows `bounds[i]` up to `bounds[i + 1]` of a ragged column joined, for each i."""

    def __init__(self, column: Column, bounds: Index) -> None:
        super().__init__(column.name, column.field, len(bounds) - 1)
        self._items = gather.items(column.reading, column.field)
        self._bounds = bounds

    @cached_property
    def tables(self) -> Tables:
        bounds, shapes = self._bounds, self._items.shapes
        if shapes is not None:
            along = np.add.reduceat(shapes[:, 0], bounds[:-1])
            shapes = np.column_stack([along, shapes[bounds[:-1], 1:]])
        return Tables(self._items.offsets[bounds], shapes, (), None)

    def _values(self, private: bool) -> Bytes:
        data = as_bytes(self._items.values)
        return data.copy() if private else gather.read_only(data)


class ColumnAssembly:
    """Columns over these shards."""

    def __init__(self, held: Holding) -> None:
        self._held = held
        self._stacks: dict[tuple[ShardKey, ...], Stack] = {}
        self._outlines: dict[tuple[ShardKey, ...], list[Outline]] = {}
        self._wanted: dict[int, _Several] = {}  # by frame

    def column(self, ref: BatchRef, name: str, field: Field) -> Column:
        """A column of the reference. Raises Corrupt, and Misuse where a shard has no such column."""
        frame, slot = refs.frame_of(ref, name)
        if frame.cut and frame.bounds is None:
            pieces, order = _once(*ref.sources(name))
            there = [self._piece(self._held[(p.node, p.shard)], p.ordinal, p.rows) for p in pieces]
            return Column.of(name, field, opened(name, field, there, frame.cut), order, frame.cut)
        listed = self._listed(ref, name, field, frame, slot)
        if frame.bounds is None:
            return listed
        joined = _Joined(listed, frame.bounds.array())
        return Column.of(name, field, [Selection(joined, Rows.range(0, joined.layout.rows))], None, frame.cut)

    def _listed(self, ref: BatchRef, name: str, field: Field, frame: Frame, slot: int) -> Column:
        """The rows of a column that a frame lists, before they are joined."""
        if len(frame.parts) == 1:
            shard, ordinal, _ = frame.parts[0].cells[slot]
            piece = self._piece(self._held[shard[:2]], ordinal, frame.parts[0].rows)
            return Column(name, field, [piece], None if frame.order is None else frame.order.array())
        if len(frame.parts) >= _LEAST:
            cells = [part.cells[slot] for part in frame.parts]
            keys, ordinal = tuple([cell.shard[:2] for cell in cells]), cells[0].ordinal
            if len({cell.ordinal for cell in cells}) == 1 and self._lie_alike(keys, ordinal):
                stacked = self._stacked(name, field, ordinal, keys, self._rows(frame))
                if stacked is not None:
                    return Column.of(name, field, [stacked], None if frame.order is None else frame.order.array())
        sources, order = _once(*ref.sources(name))
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
        return Column.of(name, field, selections, order)

    def _lie_alike(self, keys: tuple[ShardKey, ...], ordinal: int) -> bool:
        """Whether it is seen at once that these columns of the shards can be read in one pass: all shards have one
        outline, or none comes twice and this column is the same in the few outlines that they have."""
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
        """What is wanted of the parts of a frame, looked at once for all columns that are in it."""
        wanted = self._wanted.get(id(frame))
        if wanted is None:
            wanted = self._wanted[id(frame)] = _Several([part.rows for part in frame.parts])
        return wanted

    def _kind(self, piece: refs.Piece) -> tuple[object, int]:
        """The same for pieces that lie alike, which are the same column of shards. Raises Misuse where a shard has no
        such column."""
        laid = self._held.laid((piece.node, piece.shard))
        _column(laid, piece.ordinal)
        return laid.outline.kinds[piece.ordinal], piece.ordinal

    def _are_worth_a_pass(self, sources: Sequence[refs.Piece], kinds: Index) -> bool:
        """Whether pieces of some kind are enough, and small enough, to be read in one pass."""
        for kind in np.flatnonzero(np.bincount(kinds) >= _LEAST).tolist():
            pieces = [sources[at] for at in np.flatnonzero(kinds == kind).tolist()]
            keys, ordinal = tuple([(piece.node, piece.shard) for piece in pieces]), pieces[0].ordinal
            if self._is_small(keys, ordinal):
                return True
        return False

    def _is_small(self, keys: tuple[ShardKey, ...], ordinal: int) -> bool:
        """Whether columns that lie alike can be read in one pass, and are small enough for that."""
        if _indexed(_column(self._held.laid(keys[0]), ordinal)):
            return False
        return self._stack(keys).nbytes(ordinal) <= _MOST * len(keys)

    def _opened(self, name: str, field: Field, ordinal: int, pieces: Sequence[refs.Piece]) -> Sequence[Selection]:
        keys = tuple([(piece.node, piece.shard) for piece in pieces])
        if len(pieces) >= _LEAST:
            stacked = self._stacked(name, field, ordinal, keys, _Several([piece.rows for piece in pieces]))
            if stacked is not None:
                return [stacked]
        held = zip([self._held[key] for key in keys], pieces, strict=True)
        return opened(name, field, [self._piece(each, ordinal, piece.rows) for each, piece in held])

    def _piece(self, held: PinnedShard, ordinal: int, rows: Rows) -> Piece:
        _column(held.laid, ordinal)
        return Piece(held.laid.layout.columns[ordinal][1], held.memory, rows)

    def _stacked(
        self, name: str, field: Field, ordinal: int, keys: tuple[ShardKey, ...], several: _Several
    ) -> Selection | None:
        """These rows of the shards, which lie alike, as one; None where they are large, where one row stands for
        several, or where so little of them is wanted that it is not worth it."""
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
            return Selection(stacked, Rows.range(0, total))
        if not several.within(rows):
            return None  # which `opened` refuses
        starts = (np.cumsum(rows) - rows).tolist()
        chosen = [each.array() + start for each, start in zip(several.rows, starts, strict=True)]
        return Selection(stacked, Rows.index(np.concatenate(chosen)))

    def _stack(self, keys: tuple[ShardKey, ...]) -> Stack:
        stack = self._stacks.get(keys)
        if stack is None:
            stack = self._stacks[keys] = self._held.stack(keys)
        return stack
