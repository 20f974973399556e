"""`Batch` and `Column`: rows of named columns that a process can read, over memory that it does not own.

The cost of constructing either does not grow with the bytes: views are made by the calls that return them. Views of
contiguous numbers are not copies, unless the numbers are stored in a narrower dtype. NumPy and Arrow views are
read-only; a torch view is writable, and its writes are private to this process. Scattered or repeated rows, and those
of several shards, are copied, unless a method says otherwise. A view keeps its memory alive after the batch is gone.

The tables among the bytes (offsets, shapes, indexes) are copied and validated at the first use. If one is invalid, the
view raises Corrupt. Values are not validated, except that text is UTF-8.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from dataplane.batch import cuts, gather, tensordicts, views
from dataplane.batch.dtypes import is_integer, storage
from dataplane.batch.field import EMPTY_LISTS, MEASURED, Field, Kind, typed
from dataplane.batch.frame import place_of
from dataplane.batch.layout import Index
from dataplane.batch.rows import RowIndices, positions_in
from dataplane.batch.stored_column import SelectedRows, Selection
from dataplane.batch.values import mismatch
from dataplane.device.memory import device_of
from dataplane.errors import Corrupt, Misuse, SchemaMismatch

if TYPE_CHECKING:
    import pyarrow as pa


class Column:
    """One column of a batch. Immutable; `len(column)` rows.

    Its rows are those of `selections`, concatenated. With `order`, row i is row `order[i]` of those. With `cut`, each
    row is the slice that the cut leaves. A selection's field may be narrower than `field`: ragged with fewer varying
    dimensions, or a struct with fewer keys (`stored_column.opened`). Raises Corrupt for a position beyond the rows.
    """

    def __init__(
        self,
        name: str,
        field: Field,
        selections: Sequence[Selection],
        order: Index | None = None,
        cut: cuts.Cut = cuts.NOTHING,
    ) -> None:
        count = sum([len(selection.rows) for selection in selections])
        if order is not None and len(order) and not 0 <= int(order.min()) <= int(order.max()) < count:
            raise Corrupt(f"column {name!r}: an order beyond the {count} rows")
        self.name = name
        self.field = typed(field)
        self._selections = tuple(selections)
        self._order = order
        self._cut = cut
        self._rows = count if order is None else len(order)
        self._device: Any = None

    @property
    def kind(self) -> Kind:
        """ "dense", "ragged", "text", "bytes", "struct" or "object"."""
        return self.field.kind

    @property
    def dtype(self) -> str:
        """The name of the dtype; "" for text, bytes, struct and object."""
        return self.field.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The number of rows, then the shape of a row; None for a dimension in which rows differ."""
        return (self._rows, *self.field.shape)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the values of all rows, a repeated row counted each time; offsets are not counted."""
        return gather.nbytes(self.reading, self.field)

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {self.field!r}, {self._rows} rows)"

    def __iter__(self) -> Iterator[Any]:
        return iter(views.numpy_rows(self.name, self.field, self.reading))

    @overload
    def __getitem__(self, rows: int) -> Any: ...
    @overload
    def __getitem__(self, rows: slice | str) -> Column: ...
    def __getitem__(self, rows: int | slice | str) -> Any:
        """A row by its number, as `numpy()` gives it; or, as a column, a slice of rows or the values under a struct's
        key. Raises IndexError for a row beyond the end, SchemaMismatch for a key that some row lacks, and Misuse for
        any other index."""
        if isinstance(rows, str):
            return self._key(rows)
        if isinstance(rows, slice):
            return self._slice(positions_in(rows, self._rows))
        try:
            row = range(self._rows)[rows]
        except IndexError:
            raise IndexError(f"row {rows} of {self._rows} rows in column {self.name!r}") from None
        except TypeError:
            raise Misuse(f"a row of a column is named by its number, or several by a slice; not {rows!r}") from None
        return views.numpy_rows(self.name, self.field, self._slice(range(row, row + 1)).reading)[0]

    def _key(self, key: str) -> Column:
        """The column of the values under a key. Raises SchemaMismatch unless all rows have the key."""
        keys = dict(self.field.children)
        if key not in keys:
            there = ", ".join(keys)
            why = f"it has {there}" if keys else f"it is {self.field}, not a struct"
            raise mismatch(self.name, f"there is no key {key!r}: {why}", expected=there, found=repr(key))
        name = f"{self.name}.{key}"
        present, selections, order = gather.keyed(self.reading, key)
        if not present.all():
            row = int(np.argmin(present))
            remedy = "use numpy() or torch(), which give a dict for each row"
            raise mismatch(name, f"not every row has it: {remedy}", row=row, expected="a value", found="none")
        return self._derived(selections, order, self._cut, name=name, field=keys[key])

    def numpy(self) -> Any:
        """Arrays of the storage type: bfloat16 and float8 as their bits, in unsigned integers.

        dense: a read-only array [rows, *shape]. ragged: a list of a read-only array for each row. Scattered rows are
        not copied; rows that are stored in a narrower dtype, and zig-zag shares, are. text, bytes and object: a new 1-D
        array of Python objects. struct: a list of a dict for each row.
        """
        if self.field.kind == "dense" and self._order is None and len(self._selections) == 1 and not self._cut:
            found = gather.in_place(self._selections[0], self.field)
            if found is not None:
                return found
        return views.numpy(self.name, self.field, self.reading)

    def to(self, device: Any) -> Column:
        """The same rows with tensors on this device. Text, bytes, objects and the arrays of `numpy()` stay on the host.
        The copies may still run when this returns; work on the device's current stream waits for them. With "cpu", the
        tensors are on the host again. Raises Misuse if there is no such device, and SchemaMismatch if torch lacks the
        dtype. Imports torch."""
        found = device_of(device)
        column = self._derived(self._selections, self._order, self._cut)
        column._device = None if found.type == "cpu" else found
        if column._device is not None and self.field.kind in ("dense", "ragged", "struct"):
            _ = column._tensor
        return column

    @property
    def is_narrow(self) -> bool:
        """Whether some of its integers are stored in a narrower dtype than they were given in."""
        return any(stored.layout.field.declared is not stored.layout.field for stored, _ in self._selections)

    def narrow(self) -> Column:
        """The same rows, with integers in the dtype in which they are stored, if it is narrower (`put(narrow=...)`).
        Contiguous rows are not copied. Rows stored in several dtypes get the narrowest one that holds all of them."""
        field = _narrowest(self.field, [stored.layout.field for stored, _ in self._selections])
        return self._derived(self._selections, self._order, self._cut, field=field)

    @property
    def device(self) -> str:
        """The device of the tensors of this column: "cpu", or the one that `to` moved it to."""
        return "cpu" if self._device is None else str(self._device)

    def torch(self, *, device: Any = None) -> Any:
        """Writable tensors. Two calls return tensors of the same memory; writes to it are private to this process.

        dense: [rows, *shape]. ragged: a nested tensor of the jagged layout if only the first dimension varies, else a
        list of tensors. struct: a list of dicts of tensors, with text, bytes and objects as Python values. device: the
        tensors' device, if not the column's; each call then returns a new copy. Raises SchemaMismatch for text, bytes,
        object, and dtypes that torch lacks; Misuse if there is no such device. Imports torch.
        """
        if device is None or (found := device_of(device)) == device_of(self.device):
            return self._tensor
        return views.torch(self.name, self.field, self.reading, None if found.type == "cpu" else found)

    def tensors(self) -> list[Any]:
        """A list of a writable tensor for each row (of a struct, a dict of tensors), which shares no memory with other
        rows. Large rows of a ragged column are not copied, even if they are scattered or repeated. Raises
        SchemaMismatch for text, bytes, object, and dtypes that torch lacks. Imports torch."""
        if self.field.kind in ("text", "bytes", "object"):
            return list(self._tensor)  # which raises
        return views.torch_rows(self.name, self.field, self.reading, self._device)

    def packed(self) -> tuple[Any, Any]:
        """A ragged column for variable-length kernels: all items, [total, *item], and the offset of each row among
        them, int64 [rows + 1]. Writable tensors on the column's device. Contiguous rows are not copied. The first call
        is faster than that of `torch()`, for which torch imports many modules.

        Raises SchemaMismatch if the column is not ragged, if more than the first dimension varies, or if torch lacks
        the dtype. Imports torch.
        """
        return views.packed(self.name, self.field, self.reading, self._device)

    def padded(self, value: Any = 0) -> Any:
        """A ragged column as one new writable tensor, [rows, longest, *item], on the column's device, with `value`
        where a row is shorter. If more dimensions vary, each has the size of its longest row. A dense column is
        returned as by `torch()`. `lengths()` has the rows' own lengths.

        Raises SchemaMismatch for text, bytes, struct, object, and dtypes that torch lacks; Misuse if the dtype has no
        such value. Imports torch.
        """
        return self._tensor if self.kind == "dense" else views.padded(self, value)[0]

    def arrow(self) -> pa.Array:
        """An Arrow array: a primitive one or `arrow.fixed_shape_tensor` for dense; `large_list` or
        `arrow.variable_shape_tensor` for ragged; `large_string`, `large_binary` and `struct`. An object column is
        `large_binary` of encoded rows. `dataplane.batch.arrow_out` describes dtypes that Arrow lacks.

        Ragged rows with more than 2**31 - 1 elements in all are `large_list`s of `fixed_size_list`s. Raises
        SchemaMismatch if such rows vary in more dimensions than the first, since Arrow has no type for them.
        """
        from dataplane.batch import arrow_out  # pyarrow takes longer to import than all of this package

        return arrow_out.array(self.name, self.field, self.reading)

    def to_list(self, *, decode: bool = True) -> list[Any]:
        """A list of a plain Python value for each row: a number, list, str, bytes or dict, or an object as it was put.
        Times are as `numpy.ndarray.tolist` gives them. With `decode=False`, each image is a dict, as from
        `datasets.Image(decode=False)`: "bytes" of an image file, and "path", None. Raw pixels are encoded for that, as
        PNG or TIFF. Raises SchemaMismatch for an object of a class that is not imported."""
        return views.python(self.name, self.field, self.reading, decode=decode)

    def lengths(self) -> Index | None:
        """The length of each row in its first dimension, or in bytes for text and bytes, as int64 [rows]; None for
        other kinds.

        Reads the tables of the column, not its values.
        """
        if self.field.kind not in MEASURED:
            return None
        offsets, shapes = gather.tables(self.reading, self.field)
        return np.diff(offsets) if shapes is None else shapes[:, 0]

    def _derived(
        self,
        selections: tuple[Selection, ...],
        order: Index | None,
        cut: cuts.Cut,
        *,
        name: str = "",
        field: Field | None = None,
    ) -> Column:
        """A column of other rows, on the same device."""
        column = Column(name or self.name, field or self.field, selections, order, cut)
        column._device = self._device
        return column

    @cached_property
    def reading(self) -> SelectedRows:
        """The rows as they are in memory, for the other modules of this package."""
        return gather.reading_of(self.field, self._selections, self._order, self._cut)

    @cached_property
    def _tensor(self) -> Any:
        return views.torch(self.name, self.field, self.reading, self._device)

    def _slice(self, rows: range) -> Column:
        """The rows at these positions, over the same memory."""
        positions = np.fromiter(rows, np.int64, len(rows))  # not arange: a step may be beyond 64 bits
        if self._order is not None or rows.step != 1:
            return taken(self, positions)
        selections, start = [], 0
        for stored, own in self._selections:
            first, last = max(rows.start - start, 0), min(rows.stop - start, len(own))
            start += len(own)
            if first < last:
                selections.append(Selection(stored, own.take(RowIndices.range(first, last))))
        return self._derived(tuple(selections), None, cuts.take(self._cut, positions))


def _narrowest(field: Field, parts: Sequence[Field]) -> Field:
    """The field with the narrowest integer dtypes that hold the values of all these parts."""
    if field.kind == "struct":
        keys = [dict(part.children) for part in parts]
        found = [(k, _narrowest(child, [own[k] for own in keys if k in own])) for k, child in field.children]
        return Field("struct", children=tuple(found))
    dtypes = [storage(part.dtype) for part in parts if part != EMPTY_LISTS]
    if not is_integer(field.dtype) or not dtypes:
        return field
    dtype = np.result_type(*dtypes)
    if dtype.kind not in "iu" or dtype.itemsize >= storage(field.dtype).itemsize:
        return field
    return Field(field.kind, dtype.name, field.shape)


def taken(column: Column, positions: Index) -> Column:
    """The rows at these positions, none of them negative. Raises IndexError beyond the end."""
    order = np.arange(len(column)) if column._order is None else column._order
    return column._derived(column._selections, order[positions], cuts.take(column._cut, positions))


class Batch:
    """Named columns with equal row counts. Immutable; `len(batch)` rows, `batch[name]` a column.

    Iteration, `in` and `keys()` are over names, as in a mapping, not over rows. Raises SchemaMismatch if there are no
    columns, or if their row counts differ.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        if not columns:
            raise SchemaMismatch("a batch has at least one column")
        (first, head), *others = columns.items()
        for name, column in others:
            if len(column) != len(head):
                expected, found = f"{len(head)} rows, as {first!r}", f"{len(column)} rows"
                raise mismatch(name, f"{found}, not {expected}", expected=expected, found=found)
        self._columns = MappingProxyType(dict(columns))
        self._rows = len(head)

    def __reduce__(self) -> tuple[Any, ...]:
        raise Misuse("a batch is memory of this host and cannot be pickled: send its reference, and get() that there")

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Column:
        """The column with this name. Raises SchemaMismatch, naming the existing ones."""
        return place_of(self._columns, name)

    def keys(self) -> KeysView[str]:
        """The names of the columns, in order."""
        return self._columns.keys()

    def values(self) -> ValuesView[Column]:
        """The columns."""
        return self._columns.values()

    def items(self) -> ItemsView[str, Column]:
        """Names and columns."""
        return self._columns.items()

    @property
    def rows(self) -> int:
        """The row count of each column."""
        return self._rows

    @property
    def schema(self) -> dict[str, Field]:
        """The field of each column."""
        return {name: column.field for name, column in self._columns.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of all columns' values."""
        return sum(column.nbytes for column in self._columns.values())

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {column.field!r}" for name, column in self._columns.items())
        return f"Batch({self._rows} rows; {shown})"

    def to(self, device: Any) -> Batch:
        """The same rows, with the tensors of every column on this device. See `Column.to`."""
        return Batch({name: column.to(device) for name, column in self._columns.items()})

    def padded(self, *names: str, value: Any = 0) -> dict[str, Any]:
        """A dict of `Column.padded` of the columns with these names, or of all. value: one for all of them, or a
        mapping of values by name, 0 for other columns. Raises as `Column.padded`."""
        values = {self[name].name: each for name, each in value.items()} if isinstance(value, Mapping) else None
        return {
            name: self[name].padded(value if values is None else values.get(name, 0)) for name in names or self._columns
        }

    def to_dict(self) -> dict[str, list[Any]]:
        """Every column's `to_list()`."""
        return {name: column.to_list() for name, column in self._columns.items()}

    def to_tensordict(self) -> Any:
        """A `tensordict.TensorDict` with the batch size [rows]. Dense columns, and ragged ones with one varying
        dimension, are as `torch()` gives them. Any other column is a `NonTensorStack` of one value for each row.
        Rows of structs are dicts, even if they were put as a nested TensorDict, since rows may differ in their keys.

        Raises SchemaMismatch for dtypes that torch lacks. Imports torch and tensordict.
        """
        tensors, others = {}, {}
        for name, column in self._columns.items():
            field = column.field
            if field.kind == "dense" or (field.kind == "ragged" and field.varying == 1):
                tensors[name] = column.torch()
            else:
                others[name] = views.torch_rows(name, field, column.reading, column._device)
        return tensordicts.build(tensors, others, self._rows)

    def to_arrow(self) -> pa.Table:
        """A `pyarrow.Table` of every column's `arrow()`, with metadata from which a put restores them exactly."""
        from dataplane.batch import arrow_out  # as in Column.arrow

        return arrow_out.table((name, column.field, column.reading) for name, column in self._columns.items())
