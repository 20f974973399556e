"""Arrow arrays as columns, without copying values if Arrow's layout of them is the same as ours.

Of slices and chunks only the selected rows are read. Dictionaries are decoded. A null becomes NaT in a column of times,
an absent key in a struct that was written by this package, and otherwise None in an object column. An array whose Arrow
type corresponds to no kind of column is stored as the list of its Python values would be (`infer`).

Invariant: no offset or index is followed before it was checked (`check`). The public functions check, or
require that the caller has checked.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.batch.arrow_out import DTYPE, SHAPE, VARIABLE, element, from_native, permutation, uniform_shape
from dataplane.batch.dtypes import NULL, is_time, storage
from dataplane.batch.field import MAX_BYTES
from dataplane.batch.infer import empty_lists, infer
from dataplane.batch.layout import Index
from dataplane.batch.values import (
    Values,
    byte_run,
    dense,
    dtype_name,
    leading,
    mismatch,
    ragged_items,
    ragged_run,
    struct,
    typed_field,
)
from dataplane.errors import Corrupt, DataplaneError

Metadata = Mapping[bytes, bytes] | None
_NAT = np.iinfo(np.int64).min


def columns_of(table: Any, *, checked: bool = False) -> Iterator[tuple[str, Values]]:
    """The names and columns of a `pyarrow.Table` or `RecordBatch`. `checked`: the arrays have passed `check`. Raises
    SchemaMismatch."""
    names = Counter(table.schema.names)
    for field, column in zip(table.schema, table.columns, strict=True):
        if names[field.name] > 1:
            raise mismatch(field.name, "several columns of this name", expected="one", found="several")
        yield field.name, (converted if checked else values_of)(field.name, column, field.metadata)


def values_of(column: str, array: Any, metadata: Metadata = None) -> Values:
    """A `pyarrow.Array` or `ChunkedArray` as a column. Raises SchemaMismatch."""
    check(column, array)
    return converted(column, array, metadata)


def converted(column: str, array: Any, metadata: Metadata) -> Values:
    """An array that `check` has accepted, as a column. Raises SchemaMismatch, also if pyarrow,
    NumPy or the JSON decoder refuses a type or metadata."""
    try:
        return _values(column, array, metadata)
    except (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        message = f"an Arrow array that is no column: {error}"
        raise mismatch(column, message, expected="rows of one kind", found=str(array.type)) from error


def _values(column: str, array: Any, metadata: Metadata) -> Values:
    array = _whole(array)
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _values(column, array.dictionary_decode(), metadata)
    if pa.types.is_run_end_encoded(kind):
        import pyarrow.compute as pc  # a tenth of a second, for a type that few use

        return _values(column, pc.run_end_decode(array), metadata)
    declared = (metadata or {}).get(DTYPE, b"").decode("utf-8", "replace")
    if (metadata or {}).get(b"ARROW:extension:name") == VARIABLE.encode() and pa.types.is_struct(kind):
        found = _variable(column, array, declared, None)
    elif isinstance(kind, pa.BaseExtensionType):
        found = _extension(column, array, declared)
    elif array.null_count and not _is_time(kind):
        found = None
    elif pa.types.is_struct(kind):
        return _struct(column, array, absent=declared == "struct")
    elif (flat := _bytes(array, declared)) is not None:
        return flat
    elif pa.types.is_large_list(kind):
        found = _list(column, array, declared, (metadata or {}).get(SHAPE))
    else:
        rectangle = _rectangle(array)
        found = None if rectangle is None else _dense(column, rectangle, declared)
    return infer(column, array.to_pylist()) if found is None else found


def _whole(array: Any) -> Any:
    """The chunks as one array. Text, bytes and lists get 64-bit offsets."""
    kind = array.type
    wider = None
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        wider = pa.large_string()
    elif pa.types.is_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        wider = pa.large_binary()
    elif pa.types.is_list(kind):
        wider = pa.large_list(kind.value_field)
    if wider is not None:
        array = array.cast(wider)
    if not isinstance(array, pa.ChunkedArray):
        return array
    return array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()


def _is_time(kind: Any) -> bool:
    return (pa.types.is_timestamp(kind) and kind.tz is None) or pa.types.is_duration(kind)


def _flat(array: Any) -> npt.NDArray[Any] | None:
    """A primitive array as a NumPy array, in place unless it has nulls or is of bools. None for other types, and for
    nulls in other types than times."""
    kind = array.type
    if pa.types.is_boolean(kind) and not array.null_count:
        return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return, unused-ignore]  # no types
    if _is_time(kind):
        dtype = np.dtype(f"{'datetime64' if pa.types.is_timestamp(kind) else 'timedelta64'}[{kind.unit}]")
    elif (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not array.null_count:
        dtype = np.dtype(kind.to_pandas_dtype())
    else:
        return None
    values = _view(array.buffers()[1], dtype, array.offset, len(array))
    if array.null_count:
        missing = array.is_null().to_numpy(zero_copy_only=False)
        values = np.where(missing, np.array(_NAT, np.int64).view(dtype), values)
    return values


def _view(buffer: Any, dtype: Any, offset: int, count: int) -> npt.NDArray[Any]:
    if buffer is None or not count:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, count, offset * np.dtype(dtype).itemsize)


def _rectangle(array: Any) -> npt.NDArray[Any] | None:
    """Numbers, or fixed-size lists of them, as an array [rows, *sizes]; None for other types and lists with nulls."""
    if not pa.types.is_fixed_size_list(array.type):
        return _flat(array)
    if array.null_count:
        return None
    size = array.type.list_size
    inner = _rectangle(array.values.slice(array.offset * size, len(array) * size))
    return None if inner is None else inner.reshape(len(array), size, *inner.shape[1:])


def _typed(column: str, values: npt.NDArray[Any], declared: str, tail: tuple[int, ...]) -> tuple[str, Any]:
    """The name of a dtype, and the values as its storage type. The dtype is the declared one if Arrow stores it in the
    type of this array, else the array's own."""
    name = dtype_name(column, values.dtype)
    if declared not in ("", NULL, name):
        try:
            kind = element(declared)
        except ValueError:
            return name, values
        counted = is_time(declared) and values.dtype == np.int64  # a unit that a file format lacks
        if counted or (kind.native == values.dtype and (not kind.tail or tail[-1:] == kind.tail)):
            return declared, from_native(declared, values)
    return name, values


def _dense(column: str, values: npt.NDArray[Any], declared: str) -> Values:
    name, values = _typed(column, values, declared, values.shape[1:])
    return dense(column, values, name)


def _bytes(array: Any, declared: str) -> Values | None:
    text = pa.types.is_large_string(array.type)
    if not text and not pa.types.is_large_binary(array.type):
        return None
    _, edges, data = array.buffers()
    offsets = _view(edges, np.int64, array.offset, len(array) + 1) if len(array) else np.zeros(1, np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    values = _view(data, np.uint8, first, last - first)
    return byte_run("text" if text else "object" if declared == "object" else "bytes", values, offsets - first)


def _list(column: str, array: Any, declared: str, shape: bytes | None) -> Values | None:
    """Lists of numbers, or of fixed-size lists of them, as ragged rows."""
    offsets, values = _items(array)
    if values is None:
        return None
    if declared == NULL and not len(values):
        return empty_lists(len(array))
    if shape is not None and declared and not len(values):
        sizes = tuple(json.loads(shape))
        if all(type(size) is int and size >= 0 for size in sizes) and not math.prod(sizes):
            return dense(column, np.empty((len(array), *sizes), storage(declared)), declared)
    name, values = _typed(column, values, declared, values.shape[1:])
    return ragged_run(typed_field(column, "ragged", name, (None, *values.shape[1:])), values, offsets)


def _items(array: Any) -> tuple[Index, npt.NDArray[Any] | None]:
    """The offsets of a list array, from 0, and its items as an array [items, *sizes]."""
    offsets = array.offsets.to_numpy() if len(array) else np.zeros(1, np.int64)
    offsets = offsets.astype(np.int64, copy=False)
    first = int(offsets[0])
    return offsets - first, _rectangle(array.values.slice(first, int(offsets[-1]) - first))


def _extension(column: str, array: Any, declared: str) -> Values | None:
    kind = array.type
    order = permutation(kind) if kind.extension_name in ("arrow.fixed_shape_tensor", VARIABLE) else []
    if order != sorted(order):
        found = f"a tensor type with the permutation {order}"
        raise mismatch(column, f"{found}: put the array in order first", expected="row-major rows", found=found)
    if array.null_count:
        return None
    if kind.extension_name == VARIABLE:
        return _variable(column, array.storage, declared, uniform_shape(kind))
    if kind.extension_name != "arrow.fixed_shape_tensor":
        return None
    if not math.prod(kind.shape):
        name = dtype_name(column, np.dtype(kind.value_type.to_pandas_dtype()))
        return dense(column, np.empty((len(array), *kind.shape), name), name)
    rectangle = _rectangle(array.storage)
    return None if rectangle is None else _dense(column, rectangle.reshape(len(array), *kind.shape), declared)


def _variable(column: str, rows: Any, declared: str, uniform: Any) -> Values | None:
    """A column from the storage of `arrow.variable_shape_tensor`, a struct of elements and shapes; None with nulls."""
    shapes = _rectangle(rows.field("shape"))
    if rows.null_count or rows.field("data").null_count or shapes is None:
        return None
    offsets, values = _items(rows.field("data"))
    if values is None or values.ndim != 1:
        return None
    shapes = shapes.astype(np.int64)
    wraps = np.maximum(shapes, 1).astype(np.float64).prod(axis=1).max(initial=0) > MAX_BYTES
    if wraps or shapes.min(initial=0) < 0 or bool((shapes.prod(axis=1) != np.diff(offsets)).any()):
        raise mismatch(column, "shapes that are not those of the data", expected=VARIABLE, found="false shapes")
    sizes = [tuple(shape) for shape in shapes.tolist()]
    shape = _shape(sizes, uniform, shapes.shape[1])
    tail = (2,) if shape[-1:] == (2,) else ()  # then perhaps the halves of complex numbers
    name, values = _typed(column, values if not tail else values.reshape(-1, *tail), declared, tail)
    if name == declared and element(name).tail:
        shape, sizes = shape[:-1], [size[:-1] for size in sizes]
    return ragged_items(column, name, sizes, shape, values)


def _shape(sizes: list[tuple[int, ...]], uniform: Any, ndim: int) -> tuple[int | None, ...]:
    """The field's shape. Its fixed sizes are those that the type names (`uniform`), if all rows have them, else those
    that are equal in all rows."""
    if uniform is None or len(uniform) != ndim:
        return leading(sizes) if sizes else (None,) * ndim
    varying = max([1, *(i + 1 for i, size in enumerate(uniform) if size is None)])
    fixed = tuple(uniform[varying:])
    return (None,) * varying + fixed if all(size[varying:] == fixed for size in sizes) else leading(sizes)


def _struct(column: str, array: Any, *, absent: bool) -> Values:
    """A struct column. With `absent`, a null of a child means that the row lacks the key, and the child has only the
    rows with the key."""
    presence, children = [], []
    keys = [field.name for field in array.type]
    if len(set(keys)) < len(keys):
        raise mismatch(column, "a struct with two keys of one name", expected="keys that differ", found=str(keys))
    for i, field in enumerate(array.type):
        child = array.field(i)
        flags = np.ones(len(array), np.bool_)
        if absent and child.null_count:
            there = child.is_valid()
            flags = there.to_numpy(zero_copy_only=False)
            child = child.filter(there)  # drop_null refuses a struct of tensors of which no row is there
        presence.append(flags)
        children.append(_values(f"{column}.{field.name}", child, field.metadata))
    return struct(keys, presence, children, len(array))


# The validation of arrays from callers, files and other processes.
#
# pyarrow trusts the offsets, indexes, run ends, type ids, null counts and UTF-8 in an array: a wrong offset crashes the
# process. So arrays are checked completely, once, before their offsets and indexes are followed. The check of numbers
# takes no time, the check of bytes and lists 1 ns per offset, and the check of text as long as validating its UTF-8 (3
# to 18 GB/s, decision 0030).
#
# Invariants: `check` reads only the rows of the array, even if it is a slice; an array that passes can be read safely
# by any code. The array belongs to the caller, and must not change afterwards, as with every put. A table in a file may
# have only the types that `arrow_out` writes: values of some other types take no bytes in the file (2^60 nulls, lists
# without elements), but take memory when they are read.
#
# Rejected: `validate(full=True)` of the whole array. For a slice of structs or lists it validates the array behind the
# slice: a table that is put in a thousand slices would be validated a thousand times.


def check(column: str, array: Any) -> None:
    """Raises SchemaMismatch if the contents of an `Array` or `ChunkedArray` do not fit its type."""
    try:
        for chunk in array.chunks if isinstance(array, pa.ChunkedArray) else (array,):
            _check(chunk)
    except (pa.ArrowException, ValueError, IndexError, OverflowError, RecursionError) as error:
        message = f"an Arrow array that is not what its type says: {error}"
        raise mismatch(column, message, expected="valid offsets, indexes and text", found=str(array.type)) from error


def _check(array: Any) -> None:
    array.validate()  # the lengths of all buffers and children, so that the reads below stay inside
    if isinstance(array, pa.ExtensionArray):
        _check(array.storage)
        return
    if (outside := _outside(array)) is None:
        array.validate(full=True)
        return
    outside.validate(full=True)
    for child in _inside(array):
        _check(child)


def _outside(array: Any) -> Any | None:
    """A struct or list without the contents of its children: the same nulls and offsets, over children of nulls, which
    take no memory. None for other types."""
    kind = array.type
    if pa.types.is_struct(kind):
        empty, buffers, children = pa.struct([]), 1, []
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        empty = (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(pa.null())
        buffers, children = 2, [pa.nulls(len(array.values))]
    elif pa.types.is_fixed_size_list(kind):
        empty, buffers, children = pa.list_(pa.null(), kind.list_size), 1, [pa.nulls(len(array.values))]
    else:
        return None
    return pa.Array.from_buffers(empty, len(array), array.buffers()[:buffers], array.null_count, array.offset, children)


def _inside(array: Any) -> Iterator[Any]:
    """The children of a struct or list whose own offsets were checked: only the rows that it refers to."""
    kind = array.type
    if pa.types.is_struct(kind):
        yield from (array.field(i) for i in range(kind.num_fields))
    elif pa.types.is_fixed_size_list(kind):
        yield array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
    elif len(array):
        offsets = array.offsets
        first, last = offsets[0].as_py(), offsets[len(offsets) - 1].as_py()
        yield array.values.slice(first, last - first)


def encode_table(table: Any) -> Any:
    """The table as a buffer with an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def decode_table(data: bytes) -> Any:
    """The table that `encode_table` was given, validated. Raises Corrupt for other bytes or types."""
    try:
        with pa.ipc.open_stream(data) as stream:
            for field in stream.schema:
                if not _is_column(field.type):
                    raise Corrupt(f"column {field.name!r} is of the type {field.type}, which no table of ours has")
            table = stream.read_all()
        table.validate()
        for field, column in zip(table.schema, table.columns, strict=True):
            check(field.name, column)
    except DataplaneError as error:
        raise Corrupt(f"a table that was not written so: {error}") from error
    except Exception as error:  # the boundary: for invalid bytes pyarrow may raise any error
        raise Corrupt(f"a table that is none: {error}") from error
    return table


def _is_column(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        stored = kind.storage_type
        if kind.extension_name == VARIABLE:
            return bool(pa.types.is_primitive(stored.field(0).type.value_type) and _is_items(stored.field(1).type))
        return kind.extension_name == "arrow.fixed_shape_tensor" and _is_items(stored)
    if pa.types.is_struct(kind):
        return all(_is_column(child.type) for child in kind)
    if pa.types.is_large_list(kind):
        return _is_items(kind.value_type)
    return pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or _is_items(kind)


def _is_items(kind: Any) -> bool:
    """Whether the type is numbers, or fixed-size lists of numbers with at least one element."""
    while pa.types.is_fixed_size_list(kind):
        if kind.list_size < 1:
            return False
        kind = kind.value_type
    return bool(pa.types.is_primitive(kind))
