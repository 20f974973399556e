"""Tables as Arrow IPC streams, in files that this package writes and reads, and that anybody may change in between.

Invariants: a table that was read is of the types that `arrow_out` writes and no others, and every value in it
was validated in full (`arrow_check`), so any code can follow it. Whatever is not so is `Corrupt`.

The types are bounded because some cost no bytes: 2^60 nulls, or lists of no elements, are a valid array, and a value
each as soon as somebody looks at them.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dataplane.batch.arrow import VARIABLE
from dataplane.batch.arrow_check import check
from dataplane.errors import Corrupt, DataplaneError


def encoded(table: Any) -> Any:
    """The table as an Arrow IPC stream: a buffer."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()


def decoded(data: bytes) -> Any:
    """The table that `encoded` gave. Raises Corrupt for anything else."""
    try:
        with pa.ipc.open_stream(data) as stream:
            _check_types(stream.schema)
            table = stream.read_all()
        table.validate()
        for field, column in zip(table.schema, table.columns, strict=True):
            check(field.name, column)
    except DataplaneError as error:
        raise Corrupt(f"a table that was not written so: {error}") from error
    except Exception as error:  # the boundary: bytes of a file, of which pyarrow raises as it pleases
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
    """Numbers, or lists of a fixed size of them, which have elements."""
    while pa.types.is_fixed_size_list(kind):
        if kind.list_size < 1:
            return False
        kind = kind.value_type
    return bool(pa.types.is_primitive(kind))
