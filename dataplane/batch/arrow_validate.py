"""Validates Arrow values from elsewhere completely, once, before their offsets and indexes are followed; also tables in
files.

pyarrow trusts the offsets, indexes, run ends, type ids, null counts and UTF-8 in an array: a wrong offset crashes the
process. So arrays from a caller, a file or another process are checked here first. The check of numbers takes no time,
that of bytes and lists 1 ns per offset, that of text the time to validate its UTF-8 (3 to 18 GB/s, decision 0030).

Invariants: `check` reads only the rows of the array, even if it is a slice; an array that passes can be read safely by
any code. The array belongs to the caller, and must not change afterwards, as with every put. A table in a file may have
only the types that `arrow_out` writes: values of some other types take no bytes in the file (2^60 nulls, lists without
elements), but memory when they are read.

Rejected: `validate(full=True)` of the whole array. For a slice of structs or lists it validates the array behind the
slice: a table that is put in a thousand slices would be validated a thousand times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from dataplane.batch.arrow_types import VARIABLE
from dataplane.batch.values import mismatch
from dataplane.errors import Corrupt, DataplaneError


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
    """A struct or list without its children: the same nulls and offsets over children of nulls, which have no memory;
    None for other types."""
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
    """The children's rows of a struct or list whose own offsets were checked."""
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
    """The table as an Arrow IPC stream: a buffer."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def decode_table(data: bytes) -> Any:
    """The table that `encode_table` gave. Raises Corrupt for anything else."""
    try:
        with pa.ipc.open_stream(data) as stream:
            _check_types(stream.schema)
            table = stream.read_all()
        table.validate()
        for field, column in zip(table.schema, table.columns, strict=True):
            check(field.name, column)
    except DataplaneError as error:
        raise Corrupt(f"a table that was not written so: {error}") from error
    except Exception as error:  # the boundary: for invalid bytes pyarrow may raise any error
        raise Corrupt(f"a table that is none: {error}") from error
    return table


def _check_types(schema: Any) -> None:
    for field in schema:
        if not _is_column(field.type):
            raise Corrupt(f"column {field.name!r} is of the type {field.type}, which no table of ours has")


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
