"""Creates references to shards, and finds the shards in which the rows of a reference are stored.

It is used to read rows, and to retain or free them.
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
    """Contiguous rows of one shard: the shard, the range, and of each column its name, field and ordinal there."""

    shard: ShardRef
    rows: RowIndices
    columns: tuple[tuple[str, Field, int], ...]


def ref_to(node: bytes, rows: int, columns: Iterable[tuple[str, Field, int, int, int]]) -> BatchRef:
    """All `rows` of columns that `node` (8 bytes) stores.

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
    """As `ref_to`, for all columns of a shard in order. `named` has them, in one frame, and must not be changed;
    `nbytes` are their logical bytes."""
    stored = ShardRef(node, shard, rows)
    cells = tuple([Cell(stored, ordinal, each) for ordinal, each in enumerate(nbytes)])
    return BatchRef(rows, named, (Frame((BlockRows(cells, _ONE_ROW if rows == 1 else RowIndices.range(0, rows)),)),))


def sources(ref: BatchRef, name: str) -> tuple[tuple[ColumnRows, ...], Index | None]:
    """The places of a column's rows, in as few pieces as possible, and their order. For rows
    that `batch.concat` joined, the pieces have the rows that were joined.

    Row i of the column is row `order[i]` of the rows of all pieces concatenated; without an order, row i of
    them. A reader fetches each piece once and then orders the rows.
    """
    frame, slot = frame_of(ref, name)
    return _pieces(frame.parts, slot), None if frame.order is None else frame.order.array()


def pieces(ref: BatchRef, name: str) -> tuple[ColumnRows, ...]:
    """The places of a column's rows: the rows of these pieces concatenated. May be one for each row: see
    `sources`."""
    frame, slot = frame_of(ref, name)
    return _pieces(frame.in_order(), slot)


def numbered(ref: BatchRef, number: Callable[[ShardKey], int]) -> BatchRef:
    """The same rows and columns, with these numbers of shards: links to the shards, or the shards of links."""
    frames = tuple([frame.numbered(lambda shard: number(shard[:2])) for frame in ref._frames])
    return BatchRef(ref._rows, ref._columns, frames, ref._origin, ref.traces)


def unlinked(ref: BatchRef) -> BatchRef:
    """The reference for reading, with each link replaced by its shard."""
    if all(not link_of(number) for _, number in ref.shards()):
        return ref
    return numbered(ref, lambda key: shard_of(key[1]))


Footprint: TypeAlias = dict[ShardKey, list[tuple[tuple[int, ...], RowIndices]]]


def footprint(ref: BatchRef) -> Footprint:
    """The rows and columns of the reference, by shard: columns by ordinal, and their distinct rows, ascending.

    A column is listed once for each shard, unless the reference has it under two names with different rows.
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
    """The same cells of one shard, each once: an entry a column."""
    found: dict[int, list[RowIndices]] = {}
    for columns, rows in parts:
        for column in columns:
            found.setdefault(column, []).append(rows)
    return [((column,), _distinct(several)) for column, several in found.items()]


def are_apart(ref: BatchRef) -> bool:
    """Whether no two cells of the reference share storage."""
    stored = sum(len(columns) * len(rows) for parts in footprint(ref).values() for columns, rows in parts)
    return stored == sum(frame.width * frame.listed.rows for frame in ref._frames)


def wanted(ref: BatchRef) -> dict[ShardKey, list[tuple[tuple[int, ...], RowIndices, Cut]]]:
    """As `footprint`, with the cut of each row: rows ascending; a row with two cuts comes twice."""
    found: dict[ShardKey, list[tuple[tuple[int, ...], RowIndices, Cut]]] = {}
    for frame in ref._frames:
        for cells, rows, cut in frame.wanted():
            for key, ordinals in _ordinals_of(cells):
                found.setdefault(key, []).append((ordinals, rows, cut))
    return found


def _ordinals_of(cells: Iterable[Cell]) -> Iterator[tuple[ShardKey, tuple[int, ...]]]:
    """The columns of each shard that the reference names."""
    found: dict[ShardKey, set[int]] = {}
    for cell in cells:
        found.setdefault(cell.shard[:2], set()).add(cell.ordinal)
    return ((key, tuple(sorted(ordinals))) for key, ordinals in found.items())


def span_of(ref: BatchRef) -> RowSpan | None:
    """The rows as a span, if they are contiguous rows of one shard and the reference has no link to it; else None."""
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
    """The frame of a column, and its slot in the parts of that: `sources` without an object for each piece."""
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
# A stored row may have more than one owner, as a file may have several hard links. The first owner names it by the
# number of its shard. Each other owner has a link: the number of the shard in the low bits, and a number of its own in
# the high bits. So a link can be used wherever the number of a shard can: in references, messages and cells that others
# store. A reader extracts the number of the shard from it.
#
# Rejected: a count of owners, which `free` decrements. Freeing a shard twice has no effect, and callers rely on that:
# when a message is repeated after its answer was lost, when a reference names a row twice, when two writers replace the
# same row. With a count, each of these would free a shard that another owner still needs.

_SHARD_BITS = 40
MOST_SHARDS = 1 << _SHARD_BITS
"""The number of every shard is below this."""

_SHARD = MOST_SHARDS - 1

MAX_LINK = (1 << 63 - _SHARD_BITS) - 1
"""The last link that a shard can have: numbers of shards stay below 2**63."""


def shard_of(number: int) -> int:
    """The number of the shard that this is, or is a link to."""
    return number & _SHARD


def link_of(number: int) -> int:
    """The number of the link among the shard's; 0 for the first owner."""
    return number >> _SHARD_BITS


def linked(shard: int, link: int) -> int:
    """The number of this link to a shard."""
    return shard | link << _SHARD_BITS
