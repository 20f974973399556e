"""Creates references to shards, and finds the shards in which the rows of a reference are stored.

The shards are needed to read the rows, and to retain or free them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from dataplane.batch import ref_codec
from dataplane.batch.cuts import Cut
from dataplane.batch.field import Field
from dataplane.batch.frame import BlockRows, Cell, ColumnPlace, Frame, ShardRef, place_of
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import Index, RowIndices

_ONE_ROW = RowIndices.range(0, 1)


class ColumnRows(NamedTuple):
    """Rows of one stored column: the `ordinal`-th of a shard."""

    node: bytes
    shard: int
    ordinal: int
    rows: RowIndices


class RowSpan(NamedTuple):
    """Contiguous rows of one shard: the shard, the range, and each column's name, field and ordinal in the shard."""

    shard: ShardRef
    rows: RowIndices
    columns: tuple[tuple[str, Field, int], ...]


def ref_to(node: bytes, rows: int, columns: Iterable[tuple[str, Field, int, int, int]]) -> BatchRef:
    """A reference to all `rows` rows of columns that `node` (8 bytes) stores.

    Each column is (name, field, logical bytes, shard, ordinal in the shard). Raises ValueError for an invalid
    description.
    """
    if len(node) != ref_codec.NODE_BYTES or rows < 0:
        raise ValueError(f"{rows} rows on node {node.hex()!r}")
    named: dict[str, ColumnPlace] = {}
    cells: list[Cell] = []
    for slot, (name, field, nbytes, shard, ordinal) in enumerate(columns):
        named[name] = ColumnPlace(field.declared, 0, slot)
        cells.append(Cell(ShardRef(node, shard, rows), ordinal, nbytes))
    if not cells or len(named) != len(cells):
        raise ValueError("a reference has at least one column, and each name once")
    parts = (BlockRows(tuple(cells), RowIndices.range(0, rows)),) if rows else ()
    return BatchRef(rows, named, (Frame(parts),))


def ref_to_shard(node: bytes, rows: int, named: dict[str, ColumnPlace], nbytes: Sequence[int], shard: int) -> BatchRef:
    """A reference to all rows and columns of a shard. `named`: the columns in the shard's order, in one frame; it must
    not be changed. `nbytes`: their logical bytes."""
    stored = ShardRef(node, shard, rows)
    cells = tuple([Cell(stored, ordinal, each) for ordinal, each in enumerate(nbytes)])
    return BatchRef(rows, named, (Frame((BlockRows(cells, _ONE_ROW if rows == 1 else RowIndices.range(0, rows)),)),))


def sources(ref: BatchRef, name: str) -> tuple[tuple[ColumnRows, ...], Index | None]:
    """The places of a column's rows, in as few pieces as possible, and their order. Rows that `concat.joined` joined
    are listed one by one.

    Row i of the column is row `order[i]` of the concatenated rows of all pieces, or row i if the order is None. A
    reader fetches each piece once and then orders the rows.
    """
    frame, slot = frame_of(ref, name)
    return _pieces(frame.parts, slot), None if frame.order is None else frame.order.array()


def pieces(ref: BatchRef, name: str) -> tuple[ColumnRows, ...]:
    """The places of a column's rows, as pieces whose concatenated rows are in order; perhaps one for each row."""
    frame, slot = frame_of(ref, name)
    return _pieces(frame.in_order(), slot)


def numbered(ref: BatchRef, number: Callable[[ShardKey], int]) -> BatchRef:
    """The same reference, with `number(key)` as each shard's number: a link to it, or the shard of a link."""
    frames = tuple([frame.numbered(lambda shard: number(shard[:2])) for frame in ref._frames])
    return BatchRef(ref._rows, ref._columns, frames, ref._origin, ref.traces)


def unlinked(ref: BatchRef) -> BatchRef:
    """The same reference, for readers, with the number of its shard in place of each link."""
    if all(not link_of(number) for _, number in ref.shards()):
        return ref
    return numbered(ref, lambda key: shard_of(key[1]))


Footprint: TypeAlias = dict[ShardKey, list[tuple[tuple[int, ...], RowIndices]]]


def footprint(ref: BatchRef) -> Footprint:
    """The rows and columns of the reference, by shard: ordinals of columns, and their distinct rows, ascending.

    A column of a shard is listed once, unless the reference has it under two names with different rows.
    """
    found: dict[ShardKey, dict[tuple[int, ...], list[RowIndices]]] = {}
    for frame in ref._frames:
        for part in frame.parts:
            for key, ordinals in _ordinals_of(part.cells):
                found.setdefault(key, {}).setdefault(ordinals, []).append(part.rows)
    return {
        key: [(ordinals, _distinct(several)) for ordinals, several in by_columns.items()]
        for key, by_columns in found.items()
    }


def combined(parts: Iterable[tuple[tuple[int, ...], RowIndices]]) -> list[tuple[tuple[int, ...], RowIndices]]:
    """The same columns and rows of one shard, in one entry for each column, with distinct rows."""
    found: dict[int, list[RowIndices]] = {}
    for columns, rows in parts:
        for column in columns:
            found.setdefault(column, []).append(rows)
    return [((column,), _distinct(several)) for column, several in found.items()]


def are_apart(ref: BatchRef) -> bool:
    """Whether the reference has each row of each stored column at most once."""
    stored = sum(len(columns) * len(rows) for parts in footprint(ref).values() for columns, rows in parts)
    return stored == sum(frame.width * frame.listed.rows for frame in ref._frames)


def wanted(ref: BatchRef) -> dict[ShardKey, list[tuple[tuple[int, ...], RowIndices, Cut]]]:
    """As `footprint`, with the cut of each entry's rows. A row with two cuts comes twice."""
    found: dict[ShardKey, list[tuple[tuple[int, ...], RowIndices, Cut]]] = {}
    for frame in ref._frames:
        for cells, rows, cut in frame.wanted():
            for key, ordinals in _ordinals_of(cells):
                found.setdefault(key, []).append((ordinals, rows, cut))
    return found


def _ordinals_of(cells: Iterable[Cell]) -> Iterator[tuple[ShardKey, tuple[int, ...]]]:
    """The ordinals of the cells, ascending, by shard."""
    found: dict[ShardKey, set[int]] = {}
    for cell in cells:
        found.setdefault(cell.shard[:2], set()).add(cell.ordinal)
    return ((key, tuple(sorted(ordinals))) for key, ordinals in found.items())


def span_of(ref: BatchRef) -> RowSpan | None:
    """The rows as a span, if they are contiguous whole rows of one shard and the reference has no link; else None."""
    if len(ref._frames) != 1:
        return None
    frame = ref._frames[0]
    if frame.order is not None or frame.bounds is not None or len(frame.parts) != 1 or frame.cut:
        return None
    cells, rows = frame.parts[0]
    shard = cells[0].shard
    if rows.slice is None or link_of(shard.id):
        return None
    if any(cell.shard is not shard and cell.shard != shard for cell in cells):
        return None
    columns = [(name, place.field, cells[place.slot].ordinal) for name, place in ref._columns.items()]
    return RowSpan(shard, rows, tuple(columns))


def frame_of(ref: BatchRef, name: str) -> tuple[Frame, int]:
    """The frame of a column, and the column's slot in the frame's parts: `sources` without an object for each piece."""
    column = place_of(ref._columns, name)
    return ref._frames[column.frame], column.slot


def _pieces(parts: Iterable[BlockRows], slot: int) -> tuple[ColumnRows, ...]:
    found = []
    for part in parts:
        shard, ordinal, _ = part.cells[slot]
        found.append(ColumnRows(shard.node, shard.id, ordinal, part.rows))
    return tuple(found)


def _distinct(several: Sequence[RowIndices]) -> RowIndices:
    if len(several) == 1:
        return several[0].distinct()[0]
    return RowIndices.index(np.unique(np.concatenate([rows.array() for rows in several])))


# The numbers by which the owners of a shard name it.
#
# A stored row may have more than one owner, as a file may have several hard links. The first owner names the row by the
# number of its shard. Each other owner has a link: the number of the shard in the low bits, and a number of its own in
# the high bits. So a link can stand wherever a shard's number can: in references, messages and stored cells. A reader
# extracts the number of the shard from the link.
#
# Rejected: a count of owners, which `free` decrements. Callers rely on a second free of a shard having no effect: when
# a message is repeated after its answer was lost, when a reference names a row twice, when two writers replace the same
# row. With a count, each of these would free a shard that another owner still needs.

_SHARD_BITS = 40
MOST_SHARDS = 1 << _SHARD_BITS
"""The number of every shard is below this."""

_SHARD = MOST_SHARDS - 1

MAX_LINK = (1 << 63 - _SHARD_BITS) - 1
"""The last link that a shard can have: with it, the shard's number stays below 2**63."""


def shard_of(number: int) -> int:
    """The number of the shard, from its number or a link to it."""
    return number & _SHARD


def link_of(number: int) -> int:
    """The number of the link among the links of its shard; 0 for the first owner."""
    return number >> _SHARD_BITS


def linked(shard: int, link: int) -> int:
    """The number that stands for this link to a shard."""
    return shard | link << _SHARD_BITS
