"""Shards that are held, put together as columns: piece by piece, or many small ones in one pass (`batch.stacks`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from dataplane.batch import ref as refs
from dataplane.batch.alike import Laid
from dataplane.batch.batch import Column, Piece
from dataplane.batch.field import Field
from dataplane.batch.form import Form
from dataplane.batch.layout import Index
from dataplane.batch.pieces import Memory, Selection, check_fits, opened
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import Rows
from dataplane.batch.stacks import Stack
from dataplane.errors import Misuse

_LEAST = 8
"""Pieces of a column from which on they are read in one pass."""

_MOST = 256 << 10
"""Bytes of a piece up to which that is faster than to look at each where it is."""


class Held(NamedTuple):
    """A shard that this process holds: its memory, how many bytes that is, and its layout."""

    memory: Memory
    size: int
    laid: Laid


def _indexed(column: Form) -> bool:
    """Whether it is indexed, or what is under a key of it."""
    return column.indexed or any(map(_indexed, column.children))


class Opening:
    """Columns over these shards."""

    def __init__(self, held: Mapping[ShardKey, Held]) -> None:
        self._held = held
        self._alike_all = len({id(each.laid.outline) for each in held.values()}) == 1
        self._stacks: dict[tuple[ShardKey, ...], Stack] = {}

    def column(self, ref: BatchRef, name: str, field: Field) -> Column:
        """A column of the reference. Raises Corrupt, and Misuse where a shard has no such column."""
        found, order = ref.sources(name)
        if self._alike_all and len({piece.ordinal for piece in found}) == 1:
            return Column.of(name, field, list(self._opened(name, field, found[0].ordinal, found)), order)
        sources, order = self._together(found, order)
        selections: list[Selection] = []
        for (_, ordinal), several in groupby(sources, self._alike):
            selections += self._opened(name, field, ordinal, list(several))
        return Column.of(name, field, selections, order)

    def _alike(self, piece: refs.Piece) -> tuple[int, int]:
        """The same for pieces that lie alike: in shards of one outline, in the same column."""
        return id(self._held[piece.node, piece.shard].laid.outline), piece.ordinal

    def _together(
        self, sources: tuple[refs.Piece, ...], order: Index | None
    ) -> tuple[Sequence[refs.Piece], Index | None]:
        """The same rows, pieces that lie alike one after another where more of them are then read in one pass."""
        if len(sources) < _LEAST:
            return sources, order
        numbers: dict[tuple[int, int], int] = {}
        kinds = np.array([numbers.setdefault(self._alike(piece), len(numbers)) for piece in sources])
        runs = 1 + np.count_nonzero(np.diff(kinds))
        if runs == len(numbers) or not any(map(self._is_small, self._many(sources, kinds))):
            return sources, order
        by = np.argsort(kinds, kind="stable")
        lengths = np.array([len(piece.rows) for piece in sources])
        starts, moved = np.cumsum(lengths) - lengths, np.empty_like(lengths)
        moved[by] = np.cumsum(lengths[by]) - lengths[by]
        places = np.arange(int(lengths.sum())) + np.repeat(moved - starts, lengths)
        return [sources[at] for at in by.tolist()], places if order is None else places[order]

    def _many(self, sources: Sequence[refs.Piece], kinds: Index) -> Iterator[list[refs.Piece]]:
        """Those of a kind of which there are enough to be read in one pass."""
        for kind in np.flatnonzero(np.bincount(kinds) >= _LEAST).tolist():
            yield [sources[at] for at in np.flatnonzero(kinds == kind).tolist()]

    def _is_small(self, pieces: Sequence[refs.Piece]) -> bool:
        """Whether pieces that lie alike can be read in one pass, and are small enough for that."""
        columns, ordinal = self._held[pieces[0].node, pieces[0].shard].laid.outline.columns, pieces[0].ordinal
        if ordinal >= len(columns) or _indexed(columns[ordinal][1]):
            return False
        stack = self._stack(tuple([(piece.node, piece.shard) for piece in pieces]))
        return stack.nbytes(ordinal) <= _MOST * len(pieces)

    def _opened(
        self, name: str, field: Field, ordinal: int, pieces: Sequence[refs.Piece]
    ) -> Sequence[Selection] | Iterator[Selection]:
        columns = self._held[pieces[0].node, pieces[0].shard].laid.outline.columns
        if ordinal >= len(columns):
            raise Misuse(f"the reference means column {ordinal} of a shard that has {len(columns)}")
        if len(pieces) >= _LEAST and not _indexed(columns[ordinal][1]):
            stacked = self._stacked(name, field, ordinal, pieces)
            if stacked is not None:
                return [stacked]
        held = [self._held[piece.node, piece.shard] for piece in pieces]
        layouts = [each.laid.layout.columns[ordinal][1] for each in held]
        rows = zip(layouts, held, pieces, strict=True)
        return opened(name, field, [Piece(layout, each.memory, piece.rows) for layout, each, piece in rows])

    def _stacked(self, name: str, field: Field, ordinal: int, pieces: Sequence[refs.Piece]) -> Selection | None:
        """The pieces as one; None where they are large, or so little of them is wanted that it is not worth it."""
        stack = self._stack(tuple([(piece.node, piece.shard) for piece in pieces]))
        rows, several = stack.rows, [piece.rows for piece in pieces]
        total = int(rows.sum())
        if stack.nbytes(ordinal) <= _MOST * len(pieces) and all(map(Rows.covers, several, rows.tolist())):
            stacked = stack.column(name, ordinal)
            check_fits(name, stacked.layout.field, field)
            return Selection(stacked, Rows.range(0, total))
        wanted = sum(map(len, several))
        if stack.nbytes(ordinal) > _MOST * len(pieces) or 2 * wanted < total:
            return None
        ends = np.cumsum(rows)
        stacked = stack.column(name, ordinal)
        check_fits(name, stacked.layout.field, field)
        if any(piece.rows.stop > own for piece, own in zip(pieces, rows.tolist(), strict=True)):
            return None  # which `opened` refuses
        starts = (ends - rows).tolist()
        chosen = [piece.rows.array() + start for piece, start in zip(pieces, starts, strict=True)]
        return Selection(stacked, Rows.index(np.concatenate(chosen)))

    def _stack(self, keys: tuple[ShardKey, ...]) -> Stack:
        stack = self._stacks.get(keys)
        if stack is None:
            held = [self._held[key] for key in keys]
            different = {id(each.laid): each.laid.numbers for each in held}
            if len(different) == 1:
                table = np.broadcast_to(held[0].laid.numbers, (len(held), len(held[0].laid.numbers)))
            else:
                table = np.array([each.laid.numbers for each in held])
            shards = [each.memory.read(0, each.size) for each in held]
            stack = self._stacks[keys] = Stack(held[0].laid.outline, table, shards)
        return stack
