"""How columns lie in a shard's bytes: values that describe them, and the checks they must pass before use.

A shard is one extent of bytes. `ShardLayout` says which columns it holds and, for each, where its buffers
are: offsets and lengths relative to the extent, each buffer starting at a multiple of `ALIGNMENT`. A layout
comes from another process, so nothing in it is believed: `check` refuses one whose buffers do not fit the
extent or do not have the size that rows, dtype and shape require; `check_contents` refuses one whose row
offsets, indexes or presence flags, which lie in the bytes themselves, point anywhere but into their data.
Both are vectorised; neither reads values. The bytes may change
after a check, where a hostile process still maps them; so a reader takes its own copy of them, checks that (`tables`)
and uses nothing else.

The buffers of each kind, in order, for `stored` rows (which is `rows`, unless the column is indexed):

    dense    values [stored, *shape]
    ragged   offsets int64 [stored + 1], counted in items of the trailing fixed shape; values;
             where more than the first dimension varies: shapes int64 [stored, ndim], and the offsets then
             count single elements
    text     offsets int64 [stored + 1], counted in bytes; UTF-8
    bytes    offsets int64 [stored + 1]; bytes
    object   offsets int64 [stored + 1]; one MessagePack value a row
    struct   for each child one presence buffer uint8 [stored]; child k holds one row for each 1 in it

An indexed column stores each distinct row once: its last buffer is int64 [rows], the stored row of each row. An indexed
object column may store rows that no index names: the parts that several of its rows have (`parts`). Of a struct's
children only objects are indexed; else the struct is. Integers are little-endian.

This module is what a node needs to know of columns, so it imports neither pyarrow nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch import form
from dataplane.batch.dtypes import storage
from dataplane.batch.field import MAX_BYTES, MAX_COLUMNS, MAX_DEPTH, MAX_EMPTY, check_field, most_items, refuse
from dataplane.batch.field import Field as Field
from dataplane.batch.form import Form, Outline
from dataplane.errors import Corrupt

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]
Read = Callable[[int, int], Bytes]

ALIGNMENT = 64  # a cache line, and what Arrow asks of its buffers


class ColumnLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a column of `rows` rows lies. `buffers` are (offset, nbytes) in the extent, in the kind's order."""

    field: Field
    rows: int
    stored: int
    buffers: tuple[tuple[int, int], ...]
    children: tuple[ColumnLayout, ...] = ()
    indexed: bool = False


class ShardLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The columns of a shard, each with its name."""

    columns: tuple[tuple[str, ColumnLayout], ...]

    def encode(self) -> bytes:
        """The layout as bytes: see `batch.form`."""
        numbers: list[int] = []
        columns = [(name, form_of(column, numbers)) for name, column in self.columns]
        return form.join(columns, numbers)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> ShardLayout:
        """What `encode` gave. Raises ProtocolMismatch for anything that has not its types; believe it after `check`."""
        return cls.of(*form.split(data))

    @classmethod
    def of(cls, outline: Outline, numbers: form.Numbers) -> ShardLayout:
        """The layout that an outline and its numbers are."""
        listed = numbers.tolist()
        pairs = zip(outline.columns, outline.starts, strict=True)
        return cls(tuple([(name, _column(each, listed, start)[0]) for (name, each), start in pairs]))

    def column(self, name: str) -> ColumnLayout | None:
        """The column called `name`, or None."""
        return next((layout for known, layout in self.columns if known == name), None)


def form_of(column: ColumnLayout, numbers: list[int]) -> Form:
    """The column without its numbers, which are put behind the others."""
    numbers += (column.rows, column.stored)
    for buffer in column.buffers:
        numbers += buffer
    children = tuple([form_of(child, numbers) for child in column.children])
    return Form(column.field, len(column.buffers), children, column.indexed)


def _column(each: Form, numbers: list[int], start: int) -> tuple[ColumnLayout, int]:
    """The column whose numbers begin at `start`, and where they end."""
    end = start + 2 + 2 * each.buffers
    buffers, children = form.buffers(numbers, start, each.buffers), []
    for child in each.children:
        column, end = _column(child, numbers, end)
        children.append(column)
    rows, stored = numbers[start], numbers[start + 1]
    return ColumnLayout(each.field, rows, stored, buffers, tuple(children), each.indexed), end


def aligned(nbytes: int) -> int:
    """The least multiple of `ALIGNMENT` that is not below `nbytes`."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def check(layout: ShardLayout, nbytes: int) -> None:
    """Raises Corrupt where the layout is not that of a shard in an extent of `nbytes` bytes."""
    names = [name for name, _ in layout.columns]
    if not names or len(set(names)) != len(names) or not all(names):
        raise Corrupt(f"a shard with the columns {names[:20]}: names must be given, and differ")
    if len({column.rows for _, column in layout.columns}) > 1:
        raise Corrupt("a shard whose columns have different numbers of rows")
    count = 0
    for name, column in layout.columns:
        count = check_column(name, column, nbytes, count)


def check_column(name: str, layout: ColumnLayout, nbytes: int, count: int = 0, depth: int = 0) -> int:
    """`check` for one column; `count` columns came before it. Returns how many have come after it."""
    count += 1
    if depth > MAX_DEPTH or count > MAX_COLUMNS:
        raise refuse(name, f"more than {MAX_COLUMNS} columns or {MAX_DEPTH} structs in each other")
    if depth == 0:
        check_field(name, layout.field)
    field, rows, stored = layout.field, layout.rows, layout.stored
    if not (0 <= rows <= MAX_BYTES and 0 <= stored <= MAX_BYTES) or (stored != rows and not layout.indexed):
        raise refuse(name, f"{rows} rows with {stored} stored")
    if field.kind == "dense" and max(stored, 1) > most_items(field):
        raise refuse(name, f"{stored} rows of {field!r} are too large")
    needed = buffer_sizes(field, rows, stored, layout.indexed)
    if len(needed) != len(layout.buffers):
        raise refuse(name, f"{len(layout.buffers)} buffers, {field.kind} has {len(needed)}")
    for i, ((offset, size), expected) in enumerate(zip(layout.buffers, needed, strict=True)):
        if offset < 0 or size < 0 or offset % ALIGNMENT or offset + size > nbytes:
            raise refuse(name, f"buffer {i} at {offset}+{size} is not in an extent of {nbytes} bytes")
        unit = field.item_nbytes
        if size != expected if expected is not None else (size % unit if unit else size):
            raise refuse(name, f"buffer {i} has {size} bytes, {rows} rows of {field!r} do not")
    if tuple(child.field for child in layout.children) != tuple(child for _, child in field.children):
        raise refuse(name, f"its children are not those of {field!r}")
    for (key, _), child in zip(field.children, layout.children, strict=True):
        if (child.indexed and child.field.kind != "object") or child.rows > stored:
            raise refuse(name, f"child {key!r} has {child.rows} rows of {stored}, or an index")
        count = check_column(f"{name}.{key}", child, nbytes, count, depth + 1)
    return count


def buffer_sizes(field: Field, rows: int, stored: int, indexed: bool) -> list[int | None]:
    """The bytes of each buffer, None for the one whose size depends on the values."""
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


class Tables(NamedTuple):
    """What a column's bytes say about its rows: copies, which nobody else can change once they are checked."""

    offsets: Index | None
    shapes: Index | None
    presence: tuple[npt.NDArray[np.bool_], ...]
    stored_row: Index | None


def tables(name: str, layout: ColumnLayout, read: Read) -> Tables:
    """Copies and checks the tables of a column that `check` has passed. `read(offset, nbytes)` gives its bytes.

    Raises Corrupt where they point anywhere but into the column's data. Children are not looked at, but for how
    many rows each has.
    """

    def table(i: int, dtype: Any = np.int64) -> npt.NDArray[Any]:
        offset, size = layout.buffers[i]
        copy = np.array(read(offset, size), dtype=np.uint8)
        if len(copy) != size:
            raise refuse(name, f"{len(copy)} bytes at {offset}, {size} are missing")
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
    return Tables(offsets, shapes, presence, index)


def check_contents(layout: ShardLayout, memory: Bytes) -> None:
    """Checks the tables of every column of a layout that `check` has passed; `memory` is the extent's bytes.

    Raises Corrupt. No value is read.
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
    # Monotonic and within bounds, tested without subtracting: a difference of hostile int64 could wrap around.
    last, unit = int(offsets[-1]), field.item_nbytes
    if int(offsets[0]) != 0 or bool((offsets[1:] < offsets[:-1]).any()):
        raise refuse(name, "row offsets do not rise from 0")
    if last * unit != nbytes or last > most_items(field):
        raise refuse(name, f"row offsets end at {last} items of {unit} bytes, the values at {nbytes}")


def check_shapes(name: str, shapes: Index, offsets: Index, field: Field) -> None:
    """Raises Corrupt where these are no shapes of rows with these offsets."""
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
