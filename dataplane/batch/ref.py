"""`BatchRef`: a reference to a batch: a small immutable value that names rows and columns of shards.

All reshaping of batches happens on references: each operation returns a new one, copies no values and sends no message.
The rows of a reference never change, since shards do not. A reference keeps nothing alive, so its rows may be freed
(`Freed`) by the time they are read.

Rows are counted as in a Python sequence. A position beyond the end raises IndexError, as sequences do and iteration
needs; every other impossible operation raises a `Misuse`, or, if a column is to blame, a `SchemaMismatch` that names
it.

A reference without rows still has its columns' fields, and names no shard.

A reference that a stream delivered also knows which rows of that stream its rows are: its origin. Every operation on
rows keeps it, so that what was computed from rows that were picked, sorted and sent anywhere can be assigned to
them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch import cuts, ref_codec, slicing
from dataplane.batch.field import Field, is_text
from dataplane.batch.frame import (
    BlockRows,
    Cell,
    ColumnPlace,
    Frame,
    Shard,
    delivery_numbers,
    origin_of,
    origin_rows,
    rows_by_stream,
)
from dataplane.batch.rows import Index, Rows, Selector, positions_of
from dataplane.batch.shard_ids import link_of, shard_of
from dataplane.config import format_size
from dataplane.errors import LimitExceeded, Misuse, SchemaMismatch

#: A shard as the rest of the system names it: the node that holds it and its number there.
ShardKey = tuple[bytes, int]

#: Rows of a reference with repeated ones: a position each, 2 GiB of them.
_MOST_REPEATED = 1 << 28


_ONE_ROW = Rows.range(0, 1)


class Piece(NamedTuple):
    """Rows of one stored column: the `ordinal`-th of a shard."""

    node: bytes
    shard: int
    ordinal: int
    rows: Rows


class Span(NamedTuple):
    """Contiguous rows of one shard: the shard, the range, and of each column its name, field and ordinal there."""

    shard: Shard
    rows: Rows
    columns: tuple[tuple[str, Field, int], ...]


class BatchRef:
    """Rows and columns of shards. `len(ref)` rows; the module's docstring says what holds for every reference."""

    __slots__ = ("_columns", "_frames", "_origin", "_rows", "traces")

    _rows: int
    _columns: dict[str, ColumnPlace]
    _frames: tuple[Frame, ...]
    _origin: Frame | None
    traces: tuple[str, ...]
    """The spans that made its rows, as W3C trace parents, if they were traced; see `client.traced`."""

    def __init__(
        self,
        rows: int,
        columns: dict[str, ColumnPlace],
        frames: tuple[Frame, ...],
        origin: Frame | None = None,
        traces: tuple[str, ...] = (),
    ) -> None:
        """Not for callers: `of`, `decode` and the operations make references. The arguments are not validated."""
        self._rows = rows
        self._columns = columns
        self._frames = frames
        self._origin = origin
        self.traces = traces

    @classmethod
    def of(cls, node: bytes, rows: int, columns: Iterable[tuple[str, Field, int, int, int]]) -> BatchRef:
        """All `rows` of columns that `node` (8 bytes) stores.

        Each column is (name, field, logical bytes, shard, ordinal in the shard). Raises ValueError if that describes
        nothing storable.
        """
        if len(node) != ref_codec.NODE_BYTES or rows < 0:
            raise ValueError(f"{rows} rows on node {node.hex()!r}")
        named: dict[str, ColumnPlace] = {}
        cells: list[Cell] = []
        for slot, (name, field, nbytes, shard, ordinal) in enumerate(columns):
            named[name] = ColumnPlace(field.declared, 0, slot)
            cells.append(Cell(Shard(node, shard, rows), ordinal, nbytes))
        if not cells or len(named) != len(cells):
            raise ValueError("a reference has at least one column, and each name once")
        parts = (BlockRows(tuple(cells), Rows.range(0, rows)),) if rows else ()
        return cls(rows, named, (Frame(parts),))

    @classmethod
    def whole(
        cls, node: bytes, rows: int, named: dict[str, ColumnPlace], nbytes: Sequence[int], shard: int
    ) -> BatchRef:
        """As `of`, for all columns of a shard in order. `named` has them, in one frame, and must not be changed;
        `nbytes` are their logical bytes."""
        stored = Shard(node, shard, rows)
        cells = tuple([Cell(stored, ordinal, each) for ordinal, each in enumerate(nbytes)])
        return cls(rows, named, (Frame((BlockRows(cells, _ONE_ROW if rows == 1 else Rows.range(0, rows)),)),))

    # its own properties

    def __len__(self) -> int:
        return self._rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self._columns)

    @property
    def schema(self) -> Mapping[str, Field]:
        """The field of each column, by name, in order. Read-only."""
        return MappingProxyType({name: column.field for name, column in self._columns.items()})

    @property
    def nbytes(self) -> int:
        """The bytes of the rows, each counted as often as it is referred to, even if it is stored once.

        Exact for dense columns and for whole ones. Of a part of a ragged column, the proportional share; rows that
        were sliced by `start` and `stop` count as a whole. Narrow integers count as they are stored.
        """
        total = 0
        for frame in self._frames:
            own = 0
            for part, count in zip(frame.parts, frame.counts(), strict=True):
                own += sum(cell.nbytes * count // cell.shard.rows for cell in part.cells)
            total += round(own * cuts.fraction(frame.cut)) if frame.cut else own
        return total

    @property
    def stored_nbytes(self) -> int:
        """As `nbytes`, but a repeated row counts once, as it is stored."""
        total = 0
        for frame in self._frames:
            for part in frame.parts:
                distinct = len(part.rows.distinct()[0])
                total += sum(cell.nbytes * distinct // cell.shard.rows for cell in part.cells)
        return total

    def __eq__(self, other: object) -> bool:
        """Whether both refer to the same rows of the same stored columns, in the same order with the same names."""
        if not isinstance(other, BatchRef):
            return NotImplemented
        if self is other:
            return True
        if self._rows != other._rows or list(self.schema.items()) != list(other.schema.items()):
            return False
        return self._means(other, self._columns)

    def __hash__(self) -> int:
        return hash((self._rows, tuple(self._columns), frozenset(self.shards())))

    def __repr__(self) -> str:
        shown = [f"{name}: {column.field!r}" for name, column in self._columns.items()]
        more = [f"{len(shown) - 6} more"] if len(shown) > 7 else []
        rows = f"{self._rows} row{'' if self._rows == 1 else 's'}"
        return f"BatchRef({rows}, {format_size(self.nbytes)}; {', '.join((shown[:6] + more) if more else shown)})"

    def __reduce__(self) -> tuple[Callable[[bytes], BatchRef], tuple[bytes]]:
        return decode, (self.encode(),)

    def encode(self) -> bytes:
        """The reference as bytes, for any channel. `decode` is the inverse."""
        return ref_codec.pack(self._rows, self._columns, self._frames, self._origin, self.traces)

    @classmethod
    def decode(cls, encoded: bytes | bytearray | memoryview) -> BatchRef:
        """The reference that `encode` gave. Raises ProtocolMismatch for other bytes; executes nothing."""
        if not isinstance(encoded, bytes | bytearray | memoryview):
            raise Misuse(f"a reference is decoded from bytes, not {type(encoded).__name__}")
        return cls(*ref_codec.unpack(encoded))

    # rows

    def __getitem__(self, rows: Selector) -> BatchRef:
        """The rows selected by a position, a slice, or a list, array or tensor of positions or flags.

        Positions may repeat, be in any order, and be negative, as in NumPy. One position gives a reference of one
        row.
        """
        picked = positions_of(rows, self._rows)
        if isinstance(picked, range):
            return self._slice(picked.start, max(picked.start, picked.stop))
        return self._with(len(picked), lambda frame: frame.take(picked))

    def __iter__(self) -> Iterator[BatchRef]:
        """The rows, a reference each."""
        return self._between(range(self._rows + 1))

    def repeat(self, times: int) -> BatchRef:
        """Each row `times` in succession, as the responses of a group follow one another. Copies nothing."""
        _require_count(times, 0, "a row cannot be repeated {} times")
        if times == 0 or not self._rows:
            return self._slice(0, 0)
        if times == 1:
            return self
        rows = self._rows * int(times)
        if rows > _MOST_REPEATED:
            what = "rows of a reference with repeated ones"
            raise LimitExceeded(f"{rows} {what}; at most {_MOST_REPEATED}", what=what, asked=rows, limit=_MOST_REPEATED)
        return self._with(rows, lambda frame: frame.repeat(int(times)))

    def chunk(self, count: int) -> list[BatchRef]:
        """`count` consecutive parts of nearly equal length, the longer ones first; empty ones if there are few rows."""
        _require_count(count, 1, "a batch cannot be cut into {} parts")
        least, longer = divmod(self._rows, count)
        return self._cut([least + (part < longer) for part in range(count)])

    def split(self, sizes: int | Sequence[int]) -> list[BatchRef]:
        """Split into consecutive parts, as `torch.split` does. sizes: the rows of each part, which add up to all
        rows; or an int, the rows of every part but the last, which may have fewer."""
        if isinstance(sizes, int | np.integer):
            if sizes < 1 or isinstance(sizes, bool):
                raise Misuse(f"a batch cannot be cut into parts of {sizes} rows")
            return list(self._between([*range(0, self._rows, int(sizes)), self._rows]))
        try:
            counts = [operator.index(size) for size in sizes]
        except TypeError:
            raise Misuse(f"a batch is cut by a number of rows, or several; not {sizes!r}") from None
        if sum(counts) != self._rows or min(counts, default=0) < 0:
            raise Misuse(f"parts of {counts} rows do not make {self._rows} rows")
        return self._cut(counts)

    # columns

    def select(self, *names: str) -> BatchRef:
        """These columns, in this order."""
        for name in names:
            self._require(name)
        if not names or len(set(names)) != len(names):
            raise SchemaMismatch("select names at least one column, and each once", found=", ".join(names))
        kept: dict[int, list[int]] = {}  # by frame in use: its slots in use
        columns = {}
        for name in names:
            field, frame, slot = self._columns[name]
            slots = kept.setdefault(frame, [])
            columns[name] = ColumnPlace(field, list(kept).index(frame), len(slots))
            slots.append(slot)
        frames = tuple([self._frames[frame].pick(slots) for frame, slots in kept.items()])
        return BatchRef(self._rows, columns, frames, self._origin, self.traces)

    def drop(self, *names: str) -> BatchRef:
        """All columns but these."""
        for name in names:
            self._require(name)
        return self.select(*(name for name in self._columns if name not in names))

    def slice_rows(
        self,
        name: str | Sequence[str],
        axis: int = 0,
        start: int | npt.ArrayLike | None = None,
        stop: int | npt.ArrayLike | None = None,
    ) -> BatchRef:
        """Of each row of a column, or of several, the items from `start` to `stop` of its dimension `axis`, as a Python
        slice: negative numbers count from the row's end, None is the beginning or the end, and positions beyond the row
        are ignored. Copies nothing; a reader maps, or is sent, only that part.

        name: columns of numbers, or structs of such, whose keys are all sliced. axis: counted within a row, so 0 is
        its tokens. start, stop: integers, or an array of one for each row (`len(ref)`); if one is an array, the rows
        of a dense column, or of a dimension that all rows share, may have different lengths afterwards, and the
        column is then ragged. Slices of slices count within the earlier ones. Freeing or retaining the reference
        concerns whole rows. Raises SchemaMismatch (there is no such column or dimension), Misuse (not an integer),
        LimitExceeded (more than 64 slices of slices, or 4 zig-zag shares).
        """
        return slicing.sliced(self, name, axis, slicing.slice_step(start, stop, self._rows))

    def share_rows(
        self,
        name: str | Sequence[str],
        rank: int,
        ranks: int,
        *,
        axis: int = 0,
        zigzag: bool = False,
        multiple: int | None = None,
    ) -> BatchRef:
        """Of each row of a column, or of several, the share of one of `ranks` ranks in its dimension `axis`, as context
        and sequence parallel trainers cut packed rows. Copies nothing, as `slice_rows`.

        Each row counts as if padded to a `multiple` (of `ranks`, or with zigzag of 2 x ranks; that if None). Rank r
        gets the r-th of `ranks` equal parts; with `zigzag` the r-th and the (2 x ranks - 1 - r)-th of 2 x ranks
        chunks, as Megatron-LM and Transformer Engine balance causal attention. There is no padding in the result: a
        share ends where the row does, so the last ones may be shorter. Raises as `slice_rows`.
        """
        return slicing.sliced(self, name, axis, slicing.share_step(rank, ranks, zigzag, multiple))

    def rename(self, names: Mapping[str, str] | None = None, /, **more: str) -> BatchRef:
        """The same columns in the same order; those named here, old to new, with their new names."""
        if not isinstance(names, Mapping | None):
            raise Misuse(f"columns are renamed by a mapping of old names to new, not {type(names).__name__}")
        renaming = {**(names or {}), **more}
        for name in renaming:
            self._require(name)
        renamed: dict[str, ColumnPlace] = {}
        for name, column in self._columns.items():
            new = renaming.get(name, name)
            if not new or not is_text(new):
                raise SchemaMismatch(f"a column's name is text, not {new!r}", expected="a name", found=repr(new))
            if new in renamed:
                raise SchemaMismatch(f"two columns would be called {new!r}", column=new)
            renamed[new] = column
        return BatchRef(self._rows, renamed, self._frames, self._origin, self.traces)

    def union(self, other: BatchRef) -> BatchRef:
        """The columns of both, this reference's first: row i of one is row i of the other.

        A column that both have must be the same rows of the same stored column, and is kept once.
        """
        if not isinstance(other, BatchRef):
            raise Misuse(f"a reference is united with a reference, not {type(other).__name__}")
        if self._rows != other._rows:
            raise SchemaMismatch(
                f"columns of {other._rows} rows do not fit beside columns of {self._rows}",
                column=next(iter(other._columns)),
                expected=f"{self._rows} rows",
                found=f"{other._rows} rows",
            )
        for name in self._columns:
            if name in other._columns and not self._means(other, [name]):
                raise SchemaMismatch(f"both have a column {name!r}, and they are not the same", column=name)
        new = [name for name in other._columns if name not in self._columns]
        return self._beside(other.select(*new)) if new else self

    # where it is

    def sources(self, name: str) -> tuple[tuple[Piece, ...], Index | None]:
        """The places of a column's rows, in as few pieces as possible, and their order. For joined rows
        (`batch.concat`), the rows before the join.

        Row i of the column is row `order[i]` of the rows of all pieces concatenated; without an order, row i of
        them. A reader fetches each piece once and then orders the rows.
        """
        column = self._require(name)
        frame = self._frames[column.frame]
        order = None if frame.order is None else frame.order.array()
        return _pieces(frame.parts, column.slot), order

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """The places of a column's rows: the rows of these pieces concatenated. May be one for each row: see
        `sources`."""
        column = self._require(name)
        return _pieces(self._frames[column.frame].in_order(), column.slot)

    def shards(self) -> tuple[ShardKey, ...]:
        """The shards referred to, each once, in order of first use."""
        cells = (cell for frame in self._frames for part in frame.parts for cell in part.cells)
        return tuple(dict.fromkeys([cell.shard[:2] for cell in cells]))

    def numbered(self, number: Callable[[ShardKey], int]) -> BatchRef:
        """The same rows and columns, with these numbers of shards: links to the shards, or the shards of links."""
        frames = tuple([frame.numbered(lambda shard: number(shard[:2])) for frame in self._frames])
        return BatchRef(self._rows, self._columns, frames, self._origin, self.traces)

    def unlinked(self) -> BatchRef:
        """The reference for reading, with each link replaced by its shard."""
        if all(not link_of(number) for _, number in self.shards()):
            return self
        return self.numbered(lambda key: shard_of(key[1]))

    def footprint(self) -> dict[ShardKey, list[tuple[tuple[int, ...], Rows]]]:
        """The rows and columns of the reference, by shard: columns by ordinal, and their distinct rows, ascending.

        A column is there once for each shard, unless the reference has it under two names with different rows.
        """
        found: dict[ShardKey, dict[tuple[int, ...], list[Rows]]] = {}
        for frame in self._frames:
            for part in frame.parts:
                for key, ordinals in slicing.ordinals_of(part.cells):
                    found.setdefault(key, {}).setdefault(ordinals, []).append(part.rows)
        return {
            key: [(ordinals, _distinct(several)) for ordinals, several in by_columns.items()]
            for key, by_columns in found.items()
        }

    def is_sliced(self, name: str | None = None) -> bool:
        """Whether the reference is to parts of the rows of a column, or of any."""
        frames = self._frames if name is None else [self._frames[self._require(name).frame]]
        return any(frame.cut for frame in frames)

    def distinct(self) -> list[tuple[BatchRef, Index | None]]:
        """Group the columns by how their rows repeat. For each group: a reference to its distinct rows, and for each
        row of this reference the index of its distinct row (None: the rows themselves, in order)."""
        found = []
        for number, frame in enumerate(self._frames):
            once, index = frame.distinct()
            columns = {name: ColumnPlace(c.field, 0, c.slot) for name, c in self._columns.items() if c.frame == number}
            found.append((BatchRef(once.rows, columns, (once,)), index))
        return found

    # which rows of a stream it is

    def with_origin(self, stream: bytes, rows: npt.ArrayLike, hold: int = 0) -> BatchRef:
        """The same reference, known to be these rows (numbers, int64) of the stream `stream` (8 bytes), delivered
        with the number `hold`."""
        if not self._rows:
            return self
        return BatchRef(self._rows, self._columns, self._frames, origin_of(stream, rows, hold), self.traces)

    def origin(self) -> tuple[bytes, Index] | None:
        """The stream (8 bytes) and the numbers in it of the rows, in order; None if no stream delivered them.

        Raises Misuse if they are of several streams.
        """
        return None if self._origin is None or not self._rows else origin_rows(self._origin)

    def origins(self) -> list[tuple[bytes, Index, Index]]:
        """As `origin`, for rows of several streams, or of parts of a stream on several hosts: for each (8 bytes) the
        positions of its rows here, ascending, and their numbers in it."""
        return [] if self._origin is None or not self._rows else rows_by_stream(self._origin)

    def holds(self) -> Index:
        """The numbers with which a stream delivered the rows, in order, int64; empty if no stream did."""
        if self._origin is None or not self._rows:
            return np.empty(0, np.int64)
        return delivery_numbers(self._origin)

    # inside

    def _require(self, name: Any) -> ColumnPlace:
        try:
            return self._columns[name]
        except (KeyError, TypeError):
            there = ", ".join(self._columns)
            hint = "" if isinstance(name, str) else '; names are given one by one: select("a", "b")'
            raise SchemaMismatch(
                f"there is no column {name!r}; there are {there}{hint}",
                column=str(name),
                expected=f"one of {there}",
                found=repr(name),
            ) from None

    def _with(self, rows: int, picked: Callable[[Frame], Frame]) -> BatchRef:
        """Other rows of the same columns, with their origin."""
        frames = tuple([picked(frame) for frame in self._frames])
        origin = None if self._origin is None else picked(self._origin)
        return BatchRef(rows, self._columns, frames, origin, self.traces)

    def _slice(self, start: int, stop: int) -> BatchRef:
        if (start, stop) == (0, self._rows):
            return self
        return self._with(stop - start, lambda frame: frame.slice(start, stop))

    def _cut(self, sizes: Sequence[int]) -> list[BatchRef]:
        return list(self._between([*accumulate(sizes, initial=0)]))

    def _between(self, bounds: Sequence[int]) -> Iterator[BatchRef]:
        """The rows between each two of these ascending positions, which begin with the first row and end with the
        last. By halves: to cut a reference of many parts goes through all of them."""
        if len(bounds) < 4:
            for start, stop in pairwise(bounds):
                yield self._slice(start - bounds[0], stop - bounds[0])
            return
        middle = len(bounds) // 2
        at, rows = bounds[middle] - bounds[0], bounds[-1] - bounds[0]
        yield from self._slice(0, at)._between(bounds[: middle + 1])
        yield from self._slice(at, rows)._between(bounds[middle:])

    def _means(self, other: BatchRef, names: Iterable[str]) -> bool:
        """Whether each of these columns is, in both, the same rows of the same stored columns."""
        slots: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for name in names:
            ours, theirs = self._columns[name], other._columns[name]
            slots.setdefault((ours.frame, theirs.frame), []).append((ours.slot, theirs.slot))
        return all(self._frames[a].means(other._frames[b], pairs) for (a, b), pairs in slots.items())

    def _beside(self, other: BatchRef) -> BatchRef:
        """The columns of both, which share no name: frames that select alike become one."""
        frames = list(self._frames)
        places: list[tuple[int, int]] = []  # for each frame of `other`: its frame here, and its first slot in that
        for theirs in other._frames:
            for index, ours in enumerate(frames):
                both = ours.beside(theirs)
                if both is not None:
                    places.append((index, ours.width))
                    frames[index] = both
                    break
            else:
                places.append((len(frames), 0))
                frames.append(theirs)
        columns = dict(self._columns)
        for name, (field, frame, slot) in other._columns.items():
            index, first = places[frame]
            columns[name] = ColumnPlace(field, index, first + slot)
        traces = ref_codec.together(self.traces, other.traces)
        return BatchRef(self._rows, columns, tuple(frames), self._origin or other._origin, traces)


def span_of(ref: BatchRef) -> Span | None:
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
    return Span(shard, rows, tuple(columns))


def frame_of(ref: BatchRef, name: str) -> tuple[Frame, int]:
    """The frame of a column, and its slot in the parts of that: `sources` without an object for each piece."""
    column = ref._require(name)
    return ref._frames[column.frame], column.slot


def decode(encoded: bytes) -> BatchRef:
    """A module-level function, so that a pickle stores its name; cloudpickle would send the code of a method with
    each pickle."""
    return BatchRef.decode(encoded)


def _pieces(parts: Iterable[BlockRows], slot: int) -> tuple[Piece, ...]:
    found = []
    for part in parts:
        shard, ordinal, _ = part.cells[slot]
        found.append(Piece(shard.node, shard.id, ordinal, part.rows))
    return tuple(found)


def _distinct(several: Sequence[Rows]) -> Rows:
    if len(several) == 1:
        return several[0].distinct()[0]
    return Rows.index(np.unique(np.concatenate([rows.array() for rows in several])))


def _require_count(count: Any, least: int, refusal: str) -> None:
    if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < least:
        raise Misuse(refusal.format(repr(count)))
