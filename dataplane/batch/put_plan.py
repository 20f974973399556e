"""Plans a put: infers, sizes and lays out the columns before a byte is written.

`plan` reads types and shapes, and makes offsets and encoded text. The plan has the size of each column, its layout at
any place in an extent, and the copies that fill this place. It refers to the caller's memory, which must not change
until the copies have run.
"""

from __future__ import annotations

import itertools
import reprlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from dataplane.batch import gather, object_rows, tensordicts, tensors
from dataplane.batch.batch import Batch, Column
from dataplane.batch.dedupe import Each, distinct
from dataplane.batch.dtypes import name_of
from dataplane.batch.field import MAX_COLUMNS, MEASURED, Field, check_field, is_text, most_items, refuse
from dataplane.batch.infer import infer
from dataplane.batch.layout import (
    ALIGNMENT,
    Bytes,
    ColumnHeader,
    Index,
    ShardLayout,
    aligned,
    check_shapes,
    decode,
    encode,
)
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import SelectedRows, Selection
from dataplane.batch.values import Job as Job
from dataplane.batch.values import (
    Joined,
    Rectangle,
    RowRun,
    RowSource,
    Values,
    as_bytes,
    bounds_of,
    dense,
    flat_jobs,
    mismatch,
    struct,
)
from dataplane.errors import Corrupt, Misuse, SchemaMismatch

_SMALL = 1 << 16  # bytes: smaller copies share one job, since handing a job to a thread costs as much


_ROWS = "a sequence of rows"
_PADDING = np.zeros(ALIGNMENT, np.uint8)


class PlannedColumn(msgspec.Struct, frozen=True, eq=False):
    """A column that is ready to be written: `rows` rows of `field`, in `nbytes` bytes. They are stored as
    `values.field`, which may have narrower integers.

    `logical_nbytes`: the bytes of the rows' values, without offsets and padding; each of several equal rows counts.
    """

    name: str
    field: Field
    rows: int
    nbytes: int
    logical_nbytes: int
    values: Values
    index: Index | None
    buffers: tuple[Bytes | RowSource, ...]

    @property
    def lengths(self) -> Index | None:
        """The lengths of the rows, as in `Column.lengths`."""
        if self.field.kind not in MEASURED or self.values.offsets is None:
            return None
        shapes = self.values.shapes
        found = np.diff(self.values.offsets) if shapes is None else shapes[:, 0]
        return found if self.index is None else found[self.index]

    @property
    def device(self) -> Any:
        """The device of the values; None if all are on the host."""
        found = (buffer.device for buffer in self.buffers if not isinstance(buffer, np.ndarray))
        return next((device for device in found if device is not None), None)

    def header(self, base: int, numbers: list[int]) -> ColumnHeader:
        """The header of the column if it is written at `base`, a multiple of 64, in the shard's extent. Appends the
        column's numbers to `numbers`."""
        return _header(self.values, _placed(self.buffers, base), numbers, self.index)

    def jobs(self, memory: Bytes, piece: int = 8 << 20) -> list[Job]:
        """Copies that together write every byte of `memory`, uint8, `nbytes` long and aligned to 64.

        They are independent: run them in any order and in any threads. Large copies are split into pieces of about
        `piece` bytes. Raises ValueError if the memory has another length.
        """
        if len(memory) != self.nbytes:
            raise ValueError(f"{len(memory)} bytes of memory for {self.nbytes}")
        jobs: list[Job] = []
        small: list[Job] = []
        for (offset, nbytes), buffer in zip(_placed(self.buffers, 0), self.buffers, strict=True):
            target = memory[offset : offset + nbytes]
            found = flat_jobs(buffer, target, piece) if isinstance(buffer, np.ndarray) else buffer.jobs(target, piece)
            (small if nbytes < _SMALL else jobs).extend(found)
            if padding := aligned(nbytes) - nbytes:  # else a reader would see bytes of an earlier shard
                small.append(partial(memory[offset + nbytes : offset + nbytes + padding].fill, 0))
        return [*jobs, partial(_run, small)] if len(small) > 1 else jobs + small

    def payload(self) -> Iterator[Bytes]:
        """The bytes that `jobs` writes, as consecutive runs, for columns that are too small for jobs."""
        for buffer in self.buffers:
            yield buffer if isinstance(buffer, np.ndarray) else buffer.run()
            if padding := aligned(buffer.nbytes) - buffer.nbytes:
                yield _PADDING[:padding]


class PutPlan(msgspec.Struct, frozen=True, eq=False):
    """Columns of `rows` rows each, ready to be written consecutively."""

    rows: int
    columns: tuple[PlannedColumn, ...]

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    @property
    def on_device(self) -> bool:
        """Whether any values are on a device. Copying them waits for the device."""
        return any(column.device is not None for column in self.columns)

    def layout(self) -> ShardLayout:
        """The layout of a shard with the consecutive columns, from offset 0."""
        return ShardLayout.of(*decode(layout_of(self.columns)))

    def jobs(self, memory: Bytes, piece: int = 8 << 20) -> list[Job]:
        """The copies of all columns into `memory`, `nbytes` long, for `layout()`. See `PlannedColumn.jobs`."""
        jobs, base = [], 0
        for column in self.columns:
            jobs += column.jobs(memory[base : base + column.nbytes], piece)
            base += column.nbytes
        return jobs


def layout_of(columns: Iterable[PlannedColumn], base: int = 0) -> bytes:
    """The encoded layout of a shard of these columns, consecutive from byte `base` on."""
    numbers: list[int] = []
    headers = []
    for column in columns:
        headers.append((column.name, column.header(base, numbers)))
        base += column.nbytes
    return encode(headers, numbers)


def plan(columns: Any, *, dedupe: Collection[str] = (), each: Each = map) -> PutPlan:
    """Plan the storage of `columns`: a mapping of names to values, a TensorDict, an Arrow table or a `Batch`.

    Values are NumPy arrays, torch tensors (nested ones too), Arrow arrays, `Column`s, dicts of these by key (a struct),
    or sequences of rows (see `dataplane.batch.infer`; bytearray and memoryview are returned as bytes). `dedupe`: names
    of columns whose equal rows are stored once. `each`: `map`, or an equivalent that hashes rows in several threads.

    Raises SchemaMismatch, with the column and the first invalid row, if values form no column, if columns have
    different row counts, if there are no columns or too many, or if a name is empty, no text, or in `dedupe` only.
    Raises Misuse if `dedupe` is no collection.
    """
    if isinstance(dedupe, str):
        dedupe = (dedupe,)
    if not isinstance(dedupe, Collection):
        raise Misuse(f"dedupe is a list of columns' names, not {dedupe!r}")
    planned = [_planned(name, values, each if name in dedupe else None) for name, values in columns_of(columns)]
    count = sum(_count(column.field) for column in planned)
    if not count:
        raise SchemaMismatch("a batch has one column or more, and this has none", expected="columns", found="none")
    if count > MAX_COLUMNS:
        expected, found = f"at most {MAX_COLUMNS} columns, keys of structs included", f"{count} columns"
        raise SchemaMismatch(f"a batch has {expected}; not {found}", expected=expected, found=found)
    rows = check_counts([(column.name, column.rows) for column in planned])
    for name in dedupe:
        if all(column.name != name for column in planned):
            there = ", ".join(column.name for column in planned)
            raise mismatch(name, f"to be deduplicated, but there are only {there}", expected=there, found=name)
    return PutPlan(rows, tuple(planned))


def check_counts(columns: Sequence[tuple[str, int]]) -> int:
    """The row count of all of these (name, row count) pairs. Raises SchemaMismatch if the counts differ."""
    first, rows = columns[0]
    for name, count in columns:
        if count != rows:
            expected, found = f"{rows} rows, as column {first!r}", f"{count} rows"
            raise mismatch(name, f"{found}, and column {first!r} has {rows}", expected=expected, found=found)
    return rows


def values_of(column: str, values: Any) -> Values:
    """A user's values for one column, as `Values`. Raises SchemaMismatch if they form no column."""
    if isinstance(values, np.ndarray):
        return _from_array(column, values)
    if isinstance(values, list):
        return infer(column, values)
    if tensors.is_tensor(values):
        return tensors.values_of(column, values)
    if isinstance(values, Column):
        return _from_reading(column, values.field, values.reading)
    if type(values) is dict:
        return _struct_of(column, values)
    if tensordicts.is_tensordict(values):
        return tensordicts.values_of(column, values)
    if _is_arrow(values, "Array", "ChunkedArray"):
        from dataplane.batch import arrow_in  # pyarrow is slow to import, and here it has been already

        return arrow_in.values_of(column, values)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray | memoryview):
        return infer(column, list(values))
    if hasattr(values, "__array__"):
        return _from_array(column, np.asarray(values))
    found = type(values).__name__
    if isinstance(values, Mapping):
        keys = ", ".join(repr(key) for key in itertools.islice(values, 3)) + (", ..." if len(values) > 3 else "")
        message = (
            f"{found} is no column, and its keys ({keys}) are none: put each as a column, or dict(values) for a struct"
        )
        raise mismatch(column, message, expected=_ROWS, found=found)
    if isinstance(values, str | bytes | bytearray):
        hint = f"it is one value: pass [{reprlib.repr(values)}] for one row"
    else:
        hint = "pass list(values)" if isinstance(values, Iterable) else "pass one value a row, in a list"
    raise mismatch(column, f"{found} is no sequence of rows: {hint}", expected=_ROWS, found=found)


def _struct_of(column: str, columns: dict[Any, Any]) -> Values:
    """A struct column from a column for each key; all rows have all keys. Raises SchemaMismatch."""
    children: dict[str, Values] = {}
    for key, values in columns.items():
        if not is_text(key):
            raise mismatch(column, "a key of a struct is text", expected="a name", found=repr(key))
        try:
            children[key] = values if isinstance(values, Values) else values_of(f"{column}.{key}", values)
        except SchemaMismatch as error:
            if error.row >= 0 or error.column != f"{column}.{key}" or error.expected != _ROWS:
                raise
            raise SchemaMismatch(
                f"{error}; a dict in the place of a column has a column under each key", **error.fields
            ) from None
    rows = {child.rows for child in children.values()}
    if not columns:
        raise mismatch(column, "an empty dict has no rows: leave the column out", expected="rows", found="{}")
    if len(rows) != 1:
        counts = ", ".join(f"{key!r} of {child.rows}" for key, child in itertools.islice(children.items(), 8))
        expected, found = "columns of as many rows each", f"{counts} rows"
        raise mismatch(column, f"a struct of {expected}, not of {found}", expected=expected, found=found)
    (count,) = rows
    return struct(list(children), [np.ones(count, np.bool_)] * len(children), list(children.values()), count)


def columns_of(columns: Any) -> Iterator[tuple[str, Values]]:
    """The names and values of the columns in a mapping, batch, TensorDict or Arrow table. Raises SchemaMismatch for any
    other type, an invalid name or invalid values."""
    if type(columns) is dict or isinstance(columns, Batch):
        pairs: Any = columns.items()
    elif tensordicts.is_tensordict(columns):
        pairs = tensordicts.columns_of(columns)
    elif isinstance(columns, Mapping):
        pairs = columns.items()
    elif _is_arrow(columns, "Table", "RecordBatch"):
        from dataplane.batch import arrow_in  # as above

        pairs = arrow_in.columns_of(columns)
    else:
        found = type(columns).__name__
        what = "is no batch, which is a dict of columns by name with a value a row, a TensorDict or a pyarrow Table"
        rows = isinstance(columns, Sequence) and columns and isinstance(columns[0], Mapping)
        hint = ": of a list of rows make columns, {name: [row[name] for row in rows]}" if rows else ""
        raise SchemaMismatch(f"{found} {what}{hint}", expected="a mapping of names to columns", found=found)
    for name, values in pairs:
        if not is_text(name) or not name:
            raise mismatch(
                str(name),
                f"a column's name is text of one character or more, not {name!r}",
                expected="a name",
                found=repr(name),
            )
        yield name, values if isinstance(values, Values) else values_of(name, values)


def _count(field: Field) -> int:
    return 1 + sum(_count(child) for _, child in field.children)


def _is_arrow(value: Any, *names: str) -> bool:
    pyarrow = sys.modules.get("pyarrow")
    return pyarrow is not None and isinstance(value, tuple(getattr(pyarrow, name, ()) for name in names))


def _from_array(column: str, array: np.ndarray[Any, Any]) -> Values:
    if not array.ndim:
        hint = "a 0-d array has no rows: pass array[None]"
        raise mismatch(column, hint, expected="one value a row", found="a 0-d array")
    if isinstance(array, np.ma.MaskedArray):
        raise mismatch(column, "a masked array: fill it first", expected="an array", found="a masked array")
    if array.dtype.kind in "OSU":
        return infer(column, list(array) if array.ndim == 1 else array.tolist())
    if name_of(array.dtype) is None and array.dtype.kind not in "fc":
        return infer(column, list(array))  # records and the like, one by one
    return dense(column, array)


def _from_reading(column: str, field: Field, rows: SelectedRows) -> Values:
    """Rows that are stored already, in place where possible. Repeated rows share memory, so `dedupe` finds them."""
    field = gather.stored_field(rows, field)
    if field.kind == "dense":
        if len(rows.parts) == 1 and rows.run is None and not rows.cut:
            stored = rows.parts[0].stored
            source = gather.dense(
                SelectedRows((Selection(stored.unindexed(), RowIndices.range(0, stored.layout.stored)),), None), field
            )
            _, index = rows.places()
            return Values(field, rows.rows, Rectangle(source).take(index))
        return Values(field, rows.rows, Rectangle(gather.dense(rows, field)))
    if field.kind == "struct":
        keys, presence, children = [], [], []
        for key, child in field.children:
            flags, inner = gather.presence(rows, key, child)
            keys.append(key)
            presence.append(flags)
            children.append(_from_reading(f"{column}.{key}", child, inner))
        return struct(keys, presence, children, rows.rows)
    if field.kind == "object" and any(stored.layout.indexed for stored, _ in rows.parts):
        return object_rows.values_of([object_rows.row_of(column, row, lookup) for row, lookup in gather.objects(rows)])
    if rows.run is not None and rows.run[0].layout.field.varying == field.varying:
        values, offsets, shapes = gather.items(rows, field)
        return Values(field, rows.rows, RowRun(as_bytes(values), bounds_of(field, offsets)), offsets, shapes)
    offsets, shapes = gather.tables(rows, field)
    views = gather.rows_of(rows, field) if field.kind == "ragged" else gather.spans(rows)
    item_shape = None if shapes is not None else field.item_shape
    return Values(field, rows.rows, Joined(views, bounds_of(field, offsets), item_shape), offsets, shapes)


def _planned(name: str, values: Values, dedupe: Each | None) -> PlannedColumn:
    if values.field.kind == "struct":
        try:
            check_field(name, values.field)
        except Corrupt as error:
            raise mismatch(name, str(error), expected="a struct of few keys, not too deep") from error
    rows, logical, index = values.rows, values.nbytes, None
    if not logical or (values.shapes is not None and not values.shapes.all()):
        _check_amount(name, values)
    if dedupe is not None and values.index is None:
        values, index = distinct(values, dedupe)
    buffers = tuple(_buffers(values, index))
    nbytes = sum(aligned(buffer.nbytes) for buffer in buffers)
    return PlannedColumn(name, values.field.declared, rows, nbytes, logical, values, index, buffers)


def _check_amount(name: str, values: Values) -> None:
    """Raises SchemaMismatch for too many rows or items that take no bytes (`field.MAX_EMPTY`)."""
    field, offsets = values.field, values.offsets
    if field.kind not in ("dense", "ragged"):
        return
    try:
        if values.shapes is not None and offsets is not None:
            check_shapes(name, values.shapes, offsets, field)
        elif (values.rows if offsets is None else int(offsets[-1])) > most_items(field):
            raise refuse(name, f"more than {most_items(field)} rows or items that take no bytes")
    except Corrupt as error:
        raise mismatch(name, str(error).partition(": ")[2], expected="rows with elements", found=repr(field)) from error


def _buffers(values: Values, index: Index | None = None) -> Iterator[Bytes | RowSource]:
    """The buffers in the order of the layout, then the buffers of the children."""
    if values.offsets is not None:
        yield as_bytes(values.offsets)
    if values.data is not None:
        yield values.data
    if values.shapes is not None:
        yield as_bytes(values.shapes)
    for flags in values.presence:
        yield as_bytes(flags)
    if (own := values.index if index is None else index) is not None:
        yield as_bytes(own)
    for child in values.children:
        yield from _buffers(child)


def _placed(buffers: Iterable[Bytes | RowSource], base: int) -> Iterator[tuple[int, int]]:
    """The offset and the bytes of each buffer, the first at `base`."""
    for buffer in buffers:
        yield base, buffer.nbytes
        base += aligned(buffer.nbytes)


def _header(
    values: Values, places: Iterator[tuple[int, int]], numbers: list[int], index: Index | None = None
) -> ColumnHeader:
    index = values.index if index is None else index
    stored = values.rows if values.index is None or values.offsets is None else len(values.offsets) - 1
    numbers += (stored if index is None else len(index), stored)
    made = (values.data, values.offsets, values.shapes, index)
    count = sum([each is not None for each in made]) + len(values.presence)
    for _ in range(count):
        numbers += next(places)
    children = tuple([_header(child, places, numbers) for child in values.children])
    return ColumnHeader(values.field, count, children, index is not None)


def _run(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job()
