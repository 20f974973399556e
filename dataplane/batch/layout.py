"""The layout of columns in a shard's bytes: its description, its encoding, and the tables among the bytes.

A shard is one extent of bytes. `ShardLayout` lists its columns and, for each, the offsets and lengths of its buffers in
the extent. Each buffer starts at a multiple of `ALIGNMENT`. A layout comes from another process, so it is not trusted
before `batch.layout_check` has passed it. Row offsets, indexes and presence flags lie among the bytes of the extent. A
hostile process that still maps the extent may change them after a check, so a reader checks its own copy of them
(`tables`) and uses nothing else. Both checks are vectorised, and neither reads values.

The buffers of each kind, in order, for `stored` rows (which is `rows`, unless the column is indexed):

    dense    values [stored, *shape]
    ragged   offsets int64 [stored + 1], counted in items of the trailing fixed shape; values;
             where more than the first dimension varies: shapes int64 [stored, ndim], and the offsets then
             count single elements
    text     offsets int64 [stored + 1], counted in bytes; UTF-8
    bytes    offsets int64 [stored + 1]; bytes
    object   offsets int64 [stored + 1]; encoded rows (`object_rows`)
    struct   for each child a presence buffer uint8 [stored]; the child has one row for each 1 in its buffer

An indexed column stores each distinct row once: its last buffer is int64 [rows], the stored row of each row. An indexed
object column may also store values that several of its rows share as parts; no index names these (`object_rows`). In a
struct, only object children are indexed by themselves; otherwise the whole struct is. The bytes are arranged by
`put_plan`, from buffers that `values` makes. Integers are little-endian.

An encoded layout is an `Outline` (everything but the numbers), followed by the numbers. Each column has its rows, its
stored rows, the offset and bytes of each buffer, and then the numbers of its children. Shards that are put a row at a
time differ only in their numbers, so an outline is decoded once, and the numbers of many layouts are read as one table.

Nodes import this module, so it imports neither pyarrow nor torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.dtypes import storage
from dataplane.batch.field import MAX_BYTES, MAX_EMPTY, Field, most_items, refuse
from dataplane.errors import ProtocolMismatch

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]
Read = Callable[[int, int], Bytes]

ALIGNMENT = 64  # a cache line, and Arrow's alignment of buffers

_CODES = {"H": 1 << 16, "I": 1 << 32, "q": 1 << 63}
_HEAD = struct.Struct("<cI")
_SMALL = 8 << 10  # the most bytes of an outline that is cached


class ColumnLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The location of a column of `rows` rows, of which `stored` are stored. `buffers` are (offset, nbytes) in the
    extent, in the kind's order."""

    field: Field
    rows: int
    stored: int
    buffers: tuple[tuple[int, int], ...]
    children: tuple[ColumnLayout, ...] = ()
    indexed: bool = False


class ColumnHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A column without its numbers: its field, its number of buffers, its children, and whether it is indexed."""

    field: Field
    buffers: int
    children: tuple[ColumnHeader, ...] = ()
    indexed: bool = False


class Outline:
    """The column headers of a layout, without its numbers (row counts, offsets and sizes; see the module). `starts`:
    the position of each column's first number. `width`: the count of all numbers. `kinds`: a token for each column, the
    same for two columns with the same header and start in outlines of the same width. `rules`: the constraints on the
    numbers, once `layout_check` has made them."""

    __slots__ = ("columns", "kinds", "rules", "starts", "width")

    def __init__(self, columns: tuple[tuple[str, ColumnHeader], ...]) -> None:
        self.columns = columns
        self.rules: Any = None
        *self.starts, self.width = accumulate((width(header) for _, header in columns), initial=0)
        beside = zip(columns, self.starts, strict=True)
        self.kinds = [_kind(header, start, self.width) for (_, header), start in beside]


@lru_cache(maxsize=1 << 12)
def _kind(header: ColumnHeader, start: int, width: int) -> object:
    return object()


def width(header: ColumnHeader) -> int:
    """The count of a column's numbers, its children's included. Raises ProtocolMismatch."""
    if header.buffers < 0:
        raise ProtocolMismatch(f"a column with {header.buffers} buffers")
    return 2 + 2 * header.buffers + sum(map(width, header.children))


def encode(columns: Sequence[tuple[str, ColumnHeader]], numbers: Iterable[int]) -> bytes:
    """The columns and their numbers as bytes. Raises OverflowError for a number beyond 63 bits."""
    outline, table = _encoder.encode(columns), list(numbers)
    low, high = min(table, default=0), max(table, default=0)
    code = "q" if low < 0 else next((code for code, bound in _CODES.items() if high < bound), "q")
    try:
        packed = struct.pack(f"<{len(table)}{code}", *table)
    except struct.error as error:
        raise OverflowError(str(error)) from None
    return _HEAD.pack(code.encode(), len(outline)) + outline + packed


def decode(encoded: bytes | bytearray | memoryview) -> tuple[Outline, Numbers]:
    """The inverse of `encode`. Raises ProtocolMismatch for other bytes."""
    encoded = bytes(encoded)
    try:
        code, size = _HEAD.unpack_from(encoded)
        end = _HEAD.size + size
        part = encoded[_HEAD.size : end]
        if len(part) != size or code.decode() not in _CODES:
            raise ValueError("it is cut, or begins with something else")
        outline = _known(part) if size <= _SMALL else _outline(part)
        numbers = np.frombuffer(encoded, f"<{code.decode()}", offset=end).astype(np.int64)
    except (msgspec.MsgspecError, RecursionError, ValueError, struct.error) as error:
        raise ProtocolMismatch(f"not the layout of a shard: {error}") from error
    if len(numbers) != outline.width:
        raise ProtocolMismatch(f"not the layout of a shard: {len(numbers)} numbers, not {outline.width}")
    return outline, numbers


def _outline(encoded: bytes) -> Outline:
    return Outline(_decoder.decode(encoded))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[tuple[str, ColumnHeader], ...])
_known = lru_cache(maxsize=256)(_outline)


class ShardLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The columns of a shard, each with its name."""

    columns: tuple[tuple[str, ColumnLayout], ...]

    def encode(self) -> bytes:
        numbers: list[int] = []
        return encode([(name, header_of(column, numbers)) for name, column in self.columns], numbers)

    @classmethod
    def of(cls, outline: Outline, numbers: Numbers) -> ShardLayout:
        """The layout of an outline and its numbers."""
        left = iter(numbers.tolist())
        return cls(tuple([(name, _column(header, left)) for name, header in outline.columns]))


def header_of(column: ColumnLayout, numbers: list[int]) -> ColumnHeader:
    """The header of a column. Appends the column's numbers to `numbers`."""
    numbers += (column.rows, column.stored)
    for buffer in column.buffers:
        numbers += buffer
    children = tuple([header_of(child, numbers) for child in column.children])
    return ColumnHeader(column.field, len(column.buffers), children, column.indexed)


def _column(header: ColumnHeader, numbers: Iterator[int]) -> ColumnLayout:
    rows, stored = next(numbers), next(numbers)
    buffers = tuple([(next(numbers), next(numbers)) for _ in range(header.buffers)])
    children = tuple([_column(child, numbers) for child in header.children])
    return ColumnLayout(header.field, rows, stored, buffers, children, header.indexed)


def aligned(nbytes: int) -> int:
    """The smallest multiple of `ALIGNMENT` that is at least `nbytes`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def aligned_bytes(nbytes: int) -> Bytes:
    """New memory that begins at a multiple of the layout's alignment."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -block.__array_interface__["data"][0] % ALIGNMENT
    return block[start : start + nbytes]


def buffer_sizes(field: Field, rows: int, stored: int, indexed: bool) -> list[int | None]:
    """The bytes of each buffer in the kind's order; None for a buffer whose size depends on the values."""
    sizes: list[int | None]
    if field.kind == "dense":
        sizes = [stored * field.item_nbytes]
    elif field.kind == "struct":
        sizes = [stored] * len(field.children)
    else:
        sizes = [8 * (stored + 1), None]
        if field.varying > 1:
            sizes.append(8 * stored * len(field.shape))
    return [*sizes, 8 * rows] if indexed else sizes


class ColumnTables(NamedTuple):
    """The tables of a column, copied out of the extent, so that no other process can change them after the check.
    `stored_row`: the index."""

    offsets: Index | None
    shapes: Index | None
    presence: tuple[npt.NDArray[np.bool_], ...]
    stored_row: Index | None


def tables(name: str, layout: ColumnLayout, read: Read) -> ColumnTables:
    """Copies and checks the tables of a column whose layout was checked. `read(offset, nbytes)` returns bytes of the
    extent.

    Raises Corrupt if a table is incomplete, or points outside the column's data. Of children only the row counts are
    checked.
    """

    def table(i: int, dtype: Any = np.int64) -> npt.NDArray[Any]:
        offset, size = layout.buffers[i]
        copy = np.array(read(offset, size), dtype=np.uint8)
        if len(copy) != size:
            raise refuse(name, f"{len(copy)} bytes at {offset}, {size} are missing")
        copy.setflags(write=False)  # all views of the column rely on the table
        return copy.view(dtype)

    field = layout.field
    offsets: Index | None = None
    shapes: Index | None = None
    presence: tuple[npt.NDArray[np.bool_], ...] = ()
    if field.kind == "struct":
        presence = tuple(_presence(name, table(i, np.uint8), child) for i, child in enumerate(layout.children))
    elif field.kind != "dense":
        offsets = table(0)
        _check_offsets(name, offsets, layout.buffers[1][1], field)
        if field.varying > 1:
            shapes = table(2).reshape(layout.stored, len(field.shape))
            check_shapes(name, shapes, offsets, field)
    index = table(len(layout.buffers) - 1) if layout.indexed else None
    if index is not None and len(index) and not (int(index.min()) >= 0 and int(index.max()) < layout.stored):
        raise refuse(name, f"the index names a row beyond the {layout.stored} stored")
    return ColumnTables(offsets, shapes, presence, index)


def check_contents(layout: ShardLayout, memory: Bytes) -> None:
    """Checks the tables of every column of a layout that was checked; `memory` is the extent's bytes.

    Raises Corrupt if a table is invalid. Reads no value.
    """

    def one(name: str, column: ColumnLayout) -> None:
        tables(name, column, lambda offset, nbytes: memory[offset : offset + nbytes])
        for (key, _), child in zip(column.field.children, column.children, strict=True):
            one(f"{name}.{key}", child)

    for name, column in layout.columns:
        one(name, column)


def _presence(name: str, flags: Bytes, child: ColumnLayout) -> npt.NDArray[np.bool_]:
    if len(flags) and int(flags.max()) > 1:
        raise refuse(name, "a presence flag that is neither 0 nor 1")
    if int(np.count_nonzero(flags)) != child.rows:
        raise refuse(name, f"a child has {child.rows} rows where another number is present")
    return flags.view(np.bool_)


def _check_offsets(name: str, offsets: Index, nbytes: int, field: Field) -> None:
    # Compared without subtracting: a difference of hostile int64 could wrap around.
    last, unit = int(offsets[-1]), field.item_nbytes
    if int(offsets[0]) != 0 or bool((offsets[1:] < offsets[:-1]).any()):
        raise refuse(name, "row offsets do not rise from 0")
    if last * unit != nbytes or last > most_items(field):
        raise refuse(name, f"row offsets end at {last} items of {unit} bytes, the values at {nbytes}")


def check_shapes(name: str, shapes: Index, offsets: Index, field: Field) -> None:
    """Raises Corrupt if the shapes do not fit the offsets or the field."""
    if not len(shapes):
        return
    fixed = field.shape[field.varying :]
    if int(shapes.min()) < 0 or bool((shapes[:, field.varying :] != np.array(fixed, np.int64)).any()):
        raise refuse(name, f"a row's shape is not one of {field!r}")
    # The product in floating point cannot wrap around, and is near enough to bound the exact one.
    bound = np.maximum(shapes, 1).astype(np.float64).prod(axis=1)
    elements = np.diff(offsets)
    most = MAX_BYTES / storage(field.dtype).itemsize
    if float(bound.max()) > most or bool((shapes.prod(axis=1) != elements).any()):
        raise refuse(name, "a row's shape has not as many elements as the row")
    if float(bound[elements == 0].sum()) > MAX_EMPTY:
        raise refuse(name, f"rows without elements have shapes of more than {MAX_EMPTY}")
