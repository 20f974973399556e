"""`BatchRef`, a reference to a batch: a small immutable value that names rows and columns of shards.

All reshaping of batches happens on references: each operation returns a new one, copies no values and sends no message.
The rows of a reference never change, since shards do not. A reference keeps nothing alive, so its rows may be freed
(`Freed`) by the time they are read.

Rows are counted as in a Python sequence. A position beyond the end raises IndexError, as iteration needs. An unsuitable
column raises `SchemaMismatch`, which names the column; a size beyond a limit raises `LimitExceeded`. Every other
invalid operation raises `Misuse`.

A reference without rows still has its columns' fields, and names no shard.

A reference that a stream delivered has an origin: the numbers of its rows in that stream. Every operation on rows keeps
the origin, so that results computed from selected, sorted or sent rows can be assigned to the rows of the stream.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch import cuts, ref_codec, slicing
from dataplane.batch.field import Field, is_text
from dataplane.batch.frame import Cell, ColumnPlace, Frame, delivery_numbers, origin_of, place_of, rows_by_stream
from dataplane.batch.rows import Index, RowIndices, Selector, positions_of
from dataplane.config import format_size
from dataplane.errors import LimitExceeded, Misuse, SchemaMismatch

#: A shard as the rest of the system names it: the node that stores it, and its number on that node.
ShardKey = tuple[bytes, int]

#: The most rows that `repeat` returns: their positions take 2 GiB.
_MOST_REPEATED = 1 << 28
_KEPT = 1 << 16  # the most bytes of an encoded reference that are kept, since most references are passed on


class BatchRef:
    """Rows and columns of shards. `len(ref)` rows. Immutable; it keeps nothing alive, so its rows may be freed
    (`Freed`) by the time they are read. Rows are counted as in a Python sequence: a position beyond the end raises
    IndexError."""

    __slots__ = ("_columns", "_encoded", "_frames", "_origin", "_rows", "traces")

    def __init__(
        self,
        rows: int,
        columns: dict[str, ColumnPlace],
        frames: tuple[Frame, ...],
        origin: Frame | None = None,
        traces: tuple[str, ...] = (),
    ) -> None:
        """Not for callers: `locations.ref_to`, `decode` and the operations make references. The arguments are not
        validated."""
        self._rows = rows
        self._columns = columns
        self._frames = frames
        self._origin = origin
        self.traces = traces
        """The trace spans in which its rows were made, as W3C trace parents; see `client.traced`."""
        self._encoded: tuple[tuple[str, ...], bytes] | None = None  # traces, and the bytes with these

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
        """The bytes of the rows' values. A row counts each time that it is referred to, even if it is stored once.

        Exact for dense columns, and if all rows of a column are selected. If only some rows of a ragged column are
        selected, each counts as the column's average row. Rows of different lengths that were sliced by `start` and
        `stop` count as whole rows. Narrow integers count as they are stored.
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
        """As `nbytes`, but a repeated row counts once, as it is stored, and a sliced row counts whole."""
        total = 0
        for frame in self._frames:
            stored: dict[tuple[Cell, ...], list[RowIndices]] = {}  # several parts may repeat rows of the same cells
            for part in frame.parts:
                stored.setdefault(part.cells, []).append(part.rows)
            for cells, rows in stored.items():
                if len(rows) == 1:
                    distinct = len(rows[0].distinct()[0])
                else:
                    distinct = len(np.unique(np.concatenate([each.array() for each in rows])))
                total += sum(cell.nbytes * distinct // cell.shard.rows for cell in cells)
        return total

    def __eq__(self, other: object) -> bool:
        """Whether both refer to the same rows of the same stored columns, in the same order with the same names."""
        if not isinstance(other, BatchRef):
            return NotImplemented
        if self is other:
            return True
        if self._rows != other._rows or list(self.schema.items()) != list(other.schema.items()):
            return False
        return _same(self, other, self._columns)

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
        """The reference as bytes, which `decode` reads in any process."""
        if self._encoded is not None and self._encoded[0] is self.traces:
            return self._encoded[1]
        encoded = ref_codec.pack(self._rows, self._columns, self._frames, self._origin, self.traces)
        if len(encoded) <= _KEPT:
            self._encoded = self.traces, encoded
        return encoded

    @classmethod
    def decode(cls, encoded: bytes | bytearray | memoryview) -> BatchRef:
        """The reference that `encode` gave. Raises ProtocolMismatch for other bytes; executes nothing."""
        if not isinstance(encoded, bytes | bytearray | memoryview):
            raise Misuse(f"a reference is decoded from bytes, not {type(encoded).__name__}")
        found = cls(*ref_codec.unpack(encoded))
        if len(encoded) <= _KEPT:
            found._encoded = found.traces, bytes(encoded)
        return found

    # rows

    def __getitem__(self, rows: Selector) -> BatchRef:
        """The rows selected by a position, a slice, or a list, array or tensor of positions or flags.

        Positions may repeat, be in any order, and be negative, as in NumPy. One position gives a reference of one
        row.
        """
        picked = positions_of(rows, self._rows)
        if isinstance(picked, range):
            return _sliced(self, picked.start, max(picked.start, picked.stop))
        return _picked(self, len(picked), lambda frame: frame.take(picked))

    def __iter__(self) -> Iterator[BatchRef]:
        """A reference to each row, in order."""
        return _between(self, range(self._rows + 1))

    def repeat(self, times: int) -> BatchRef:
        """Each row `times` in succession, as the responses of a group follow one another. Copies nothing. Raises
        LimitExceeded for more than 2**28 rows in all."""
        _require_count(times, 0, "a row cannot be repeated {} times")
        if times == 0 or not self._rows:
            return _sliced(self, 0, 0)
        if times == 1:
            return self
        rows = self._rows * int(times)
        if rows > _MOST_REPEATED:
            what = "rows of a reference with repeated ones"
            raise LimitExceeded(f"{rows} {what}; at most {_MOST_REPEATED}", what=what, asked=rows, limit=_MOST_REPEATED)
        return _picked(self, rows, lambda frame: frame.repeat(int(times)))

    def chunk(self, count: int) -> list[BatchRef]:
        """`count` consecutive parts of nearly equal length, the longer ones first; empty ones if there are few rows."""
        _require_count(count, 1, "a batch cannot be cut into {} parts")
        least, longer = divmod(self._rows, count)
        return self.split([least + (part < longer) for part in range(count)])

    def split(self, sizes: int | Sequence[int]) -> list[BatchRef]:
        """Split into consecutive parts, as `torch.split` does. sizes: the row count of each part; or an int, the row
        count of every part but the last, which may have fewer. Raises Misuse if the sizes do not add up to all rows.
        """
        if isinstance(sizes, int | np.integer):
            if sizes < 1 or isinstance(sizes, bool):
                raise Misuse(f"a batch cannot be cut into parts of {sizes} rows")
            return list(_between(self, [*range(0, max(1, self._rows), int(sizes)), self._rows]))
        try:
            counts = [operator.index(size) for size in sizes]
        except TypeError:
            raise Misuse(f"a batch is cut by a number of rows, or several; not {sizes!r}") from None
        if sum(counts) != self._rows or min(counts, default=0) < 0:
            raise Misuse(f"parts of {counts} rows do not make {self._rows} rows")
        return list(_between(self, [*accumulate(counts, initial=0)]))

    # columns

    def select(self, *names: str) -> BatchRef:
        """These columns, in this order. Raises SchemaMismatch for an unknown or repeated name."""
        for name in names:
            place_of(self._columns, name)
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
        """All columns but these. Raises SchemaMismatch for an unknown name, or if none would be left."""
        for name in names:
            place_of(self._columns, name)
        left = [name for name in self._columns if name not in names]
        if not left:
            raise SchemaMismatch("no column would be left: a reference has at least one", found=", ".join(names))
        return self.select(*left)

    def slice_rows(
        self,
        name: str | Sequence[str],
        axis: int = 0,
        start: int | npt.ArrayLike | None = None,
        stop: int | npt.ArrayLike | None = None,
    ) -> BatchRef:
        """The same reference, with each row of a column, or of several, cut to the items from `start` to `stop` of its
        dimension `axis`. As in Python, negative numbers count from the row's end, None is the beginning or the end, and
        positions beyond the row are ignored. Copies nothing; a reader maps, or is sent, only that part.

        name: columns of numbers, or structs of them, whose keys are all sliced. axis: a dimension of a row, so 0 is
        its tokens. start, stop: integers, or an array of one for each row (`len(ref)`). With an array, a dense column
        becomes ragged. A slice of a slice counts within the earlier one. Freeing or retaining the reference concerns
        whole rows. Raises SchemaMismatch (there is no such column or dimension), Misuse (not an integer, or an axis
        other than 0 of joined rows), LimitExceeded (a column was cut more than 64 times by this and `share_rows`, or
        more than 4 times by `share_rows(zigzag=True)`).
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
        """The same reference, with each row of a column, or of several, cut to the share of rank `rank` of `ranks`
        along its dimension `axis`, as context and sequence parallel trainers cut packed rows. Copies nothing.

        Shares are computed as if each row were padded to a multiple of `multiple`, which is `ranks` (with `zigzag`,
        2 x ranks) by default, and else a multiple of this. Rank r gets the r-th of `ranks` equal parts; with `zigzag`
        the r-th and the (2 x ranks - 1 - r)-th of 2 x ranks chunks, as Megatron-LM and Transformer Engine balance
        causal attention. The result has no padding: a share ends where the row does, so the last ones may be shorter.
        `name`, `axis` and errors are those of `slice_rows`.
        """
        return slicing.sliced(self, name, axis, slicing.share_step(rank, ranks, zigzag, multiple))

    def rename(self, names: Mapping[str, str] | None = None, /, **more: str) -> BatchRef:
        """The same columns in the same order; `names` and `more` map old names to new ones. Raises SchemaMismatch for
        an unknown, empty or repeated name."""
        if not isinstance(names, Mapping | None):
            raise Misuse(f"columns are renamed by a mapping of old names to new, not {type(names).__name__}")
        renaming = {**(names or {}), **more}
        for name in renaming:
            place_of(self._columns, name)
        renamed: dict[str, ColumnPlace] = {}
        for name, column in self._columns.items():
            new = renaming.get(name, name)
            if not new or not is_text(new):
                raise SchemaMismatch(
                    f"a column's name is text of one character or more, not {new!r}", expected="a name", found=repr(new)
                )
            if new in renamed:
                raise SchemaMismatch(f"two columns would be called {new!r}", column=new)
            renamed[new] = column
        return BatchRef(self._rows, renamed, self._frames, self._origin, self.traces)

    def union(self, other: BatchRef) -> BatchRef:
        """The columns of both, this reference's first: row i of one is row i of the other.

        A column that both have must be the same rows of the same stored column, and is kept once. Raises SchemaMismatch
        for different columns of one name, or different row counts.
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
            if name in other._columns and not _same(self, other, [name]):
                raise SchemaMismatch(f"both have a column {name!r}, and they are not the same", column=name)
        new = [name for name in other._columns if name not in self._columns]
        return _beside(self, other.select(*new)) if new else self

    def shards(self) -> tuple[ShardKey, ...]:
        """The node and number of each shard referred to, each once, in order of first use."""
        cells = (cell for frame in self._frames for part in frame.parts for cell in part.cells)
        return tuple(dict.fromkeys([cell.shard[:2] for cell in cells]))

    def is_sliced(self, name: str | None = None) -> bool:
        """Whether the reference names only parts of rows: of this column, or of any column."""
        frames = self._frames if name is None else [self._frames[place_of(self._columns, name).frame]]
        return any(frame.cut for frame in frames)

    def distinct(self) -> list[tuple[BatchRef, Index | None]]:
        """For each frame: a reference to the distinct rows of its columns, and the position of each row of this
        reference among them; or all rows and None, if no row repeats or rows are joined."""
        found = []
        for number, frame in enumerate(self._frames):
            once, index = frame.distinct()
            columns = {name: ColumnPlace(c.field, 0, c.slot) for name, c in self._columns.items() if c.frame == number}
            found.append((BatchRef(once.rows, columns, (once,)), index))
        return found

    # which rows of a stream it is

    def with_origin(self, stream: bytes, rows: npt.ArrayLike, hold: int = 0) -> BatchRef:
        """The same reference with an origin: its rows have the numbers `rows` (int64) in the stream `stream` (8 bytes).
        `hold`: the number of the delivery. Raises Misuse unless there is a number, 0 or more, for each row."""
        numbers = np.asarray(rows)
        whole = numbers.shape == (self._rows,) and (not self._rows or numbers.dtype.kind in "iu")
        if len(stream) != 8 or hold < 0 or not whole or numbers.min(initial=0) < 0:
            raise Misuse(f"an origin is 8 bytes, {self._rows} integers of 0 or more, and a delivery of 0 or more")
        if not self._rows:
            return self
        return BatchRef(self._rows, self._columns, self._frames, origin_of(stream, rows, hold), self.traces)

    def origin(self) -> tuple[bytes, Index] | None:
        """The id of the stream (8 bytes) and the rows' numbers in it, in order; None if no stream delivered them.

        Raises Misuse for rows of several streams.
        """
        found = self.origins()
        if len(found) > 1:
            raise Misuse("these rows come from several streams; extend each with its own")
        return (found[0][0], found[0][2]) if found else None

    def origins(self) -> list[tuple[bytes, Index, Index]]:
        """For each stream or partition that delivered rows: its id (8 bytes), the positions of its rows in this
        reference, ascending, and the numbers of these rows in the stream."""
        return [] if self._origin is None or not self._rows else rows_by_stream(self._origin)

    def holds(self) -> Index:
        """The delivery number of each row, in order, int64; empty if no stream delivered the rows."""
        if self._origin is None or not self._rows:
            return np.empty(0, np.int64)
        return delivery_numbers(self._origin)


def _picked(ref: BatchRef, rows: int, picked: Callable[[Frame], Frame]) -> BatchRef:
    """Other rows of the same columns, with their origin."""
    frames = tuple([picked(frame) for frame in ref._frames])
    origin = None if ref._origin is None else picked(ref._origin)
    return BatchRef(rows, ref._columns, frames, origin, ref.traces)


def _sliced(ref: BatchRef, start: int, stop: int) -> BatchRef:
    if (start, stop) == (0, ref._rows):
        return ref
    return _picked(ref, stop - start, lambda frame: frame.slice(start, stop))


def _between(ref: BatchRef, bounds: Sequence[int]) -> Iterator[BatchRef]:
    """The rows between each two neighbours of these ascending positions, from the first row to the end. Splits by
    halves, since each slice of a reference visits all of its parts."""
    if len(bounds) < 4:
        for start, stop in pairwise(bounds):
            yield _sliced(ref, start - bounds[0], stop - bounds[0])
        return
    middle = len(bounds) // 2
    at, rows = bounds[middle] - bounds[0], bounds[-1] - bounds[0]
    yield from _between(_sliced(ref, 0, at), bounds[: middle + 1])
    yield from _between(_sliced(ref, at, rows), bounds[middle:])


def _same(ref: BatchRef, other: BatchRef, names: Iterable[str]) -> bool:
    """Whether both references have the same rows of the same stored column under each of these names."""
    slots: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for name in names:
        ours, theirs = ref._columns[name], other._columns[name]
        slots.setdefault((ours.frame, theirs.frame), []).append((ours.slot, theirs.slot))
    return all(ref._frames[a].means(other._frames[b], pairs) for (a, b), pairs in slots.items())


def _beside(ref: BatchRef, other: BatchRef) -> BatchRef:
    """The columns of both references, whose names differ. Frames that select the same rows become one."""
    frames = list(ref._frames)
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
    columns = dict(ref._columns)
    for name, (field, frame, slot) in other._columns.items():
        index, first = places[frame]
        columns[name] = ColumnPlace(field, index, first + slot)
    traces = ref_codec.together(ref.traces, other.traces)
    return BatchRef(ref._rows, columns, tuple(frames), ref._origin or other._origin, traces)


def decode(encoded: bytes) -> BatchRef:
    """`BatchRef.decode` as a function of this module, so that a pickle stores its name. With each pickle, cloudpickle
    would send the code of a method."""
    return BatchRef.decode(encoded)


def _require_count(count: Any, least: int, refusal: str) -> None:
    if not isinstance(count, int | np.integer) or isinstance(count, bool) or count < least:
        raise Misuse(refusal.format(repr(count)))
