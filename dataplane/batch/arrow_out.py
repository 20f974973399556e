"""Columns as Arrow arrays: in place if the rows are contiguous and Arrow has their type, else over gathered copies.

The offsets are copies that were checked, since Arrow trusts the offsets that it is given. Text is checked to be UTF-8.
A time that is NaT becomes null, except in a struct, where null means that the key is absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.batch import gather
from dataplane.batch.arrow_types import Element, VariableShapeTensorType, element, metadata, to_native
from dataplane.batch.field import Field, refuse
from dataplane.batch.row_sources import as_bytes
from dataplane.batch.stored_column import SelectedRows
from dataplane.batch.values import mismatch

_INT32_MAX = (1 << 31) - 1
_NAT = np.iinfo(np.int64).min


def table(columns: Iterable[tuple[str, Field, SelectedRows]]) -> Any:
    """A `pyarrow.Table`, whose metadata hold the parts of fields that Arrow's types lack."""
    arrays, fields = [], []
    for name, field, rows in columns:
        arrays.append(array(name, field, rows))
        fields.append(pa.field(name, arrays[-1].type, metadata=metadata(field)))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def array(name: str, field: Field, rows: SelectedRows, *, nullable: bool = True) -> Any:
    """One column as a `pyarrow.Array`. Raises Corrupt, and SchemaMismatch where a row is too large for Arrow.

    `nullable` is false for a struct's child.
    """
    if field.kind == "dense":
        return _dense(field, rows, nullable)
    if field.kind == "ragged":
        return _ragged(name, field, rows, nullable)
    if field.kind == "struct":
        return _struct(name, field, rows)
    if field.kind == "object" and any(stored.layout.indexed for stored, _ in rows.parts):
        return pa.array(list(map(bytes, gather.whole(name, rows))), pa.large_binary())
    values, offsets, _, _ = gather.items(rows, field)
    kind = pa.large_string() if field.kind == "text" else pa.large_binary()
    result = pa.Array.from_buffers(kind, len(offsets) - 1, [None, _buffer(offsets), _buffer(values)])
    if field.kind == "text":
        try:
            result.validate(full=True)
        except pa.ArrowInvalid as error:
            raise refuse(name, f"text that is not UTF-8: {error}") from error
    return result


def _buffer(values: npt.NDArray[Any]) -> Any:
    return pa.py_buffer(as_bytes(values))


def _values(kind: Element, native: npt.NDArray[Any], nullable: bool) -> Any:
    """An Arrow array of all elements."""
    flat = native.reshape(-1)
    if kind.native.kind == "b":
        return pa.array(flat)
    validity = None
    if nullable and kind.native.kind in "mM" and bool((missing := flat.view(np.int64) == _NAT).any()):
        validity = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind.type, len(flat), [validity, _buffer(flat)])


def _dense(field: Field, rows: SelectedRows, nullable: bool) -> Any:
    kind = element(field.dtype)
    native = to_native(field.dtype, gather.dense(rows, field))
    shape = field.item_shape + kind.tail
    values = _values(kind, native, nullable)
    if not shape:
        return values
    if not math.prod(shape):
        return _lists(values, np.zeros(rows.rows + 1, np.int64))
    nested = pa.Array.from_buffers(pa.list_(kind.type, math.prod(shape)), rows.rows, [None], children=[values])
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(kind.type, shape), nested)


def _lists(values: Any, offsets: npt.NDArray[np.int64], *, large: bool = True) -> Any:
    kind = pa.large_list(values.type) if large else pa.list_(values.type)
    edges = offsets if large else offsets.astype(np.int32)
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, _buffer(edges)], children=[values])


def _ragged(name: str, field: Field, rows: SelectedRows, nullable: bool) -> Any:
    kind = element(field.dtype)
    items, offsets, shapes, _ = gather.items(rows, field)
    values = _values(kind, to_native(field.dtype, items), nullable)
    uniform = field.shape + kind.tail
    elements = int(offsets[-1]) * math.prod(field.item_shape + kind.tail)
    if len(uniform) == 1 or (field.varying == 1 and elements > _INT32_MAX):
        for size in (field.item_shape + kind.tail)[::-1]:
            values = pa.Array.from_buffers(pa.list_(values.type, size), len(values) // size, [None], children=[values])
        return _lists(values, offsets)
    if shapes is None:
        shapes = np.empty((len(offsets) - 1, len(field.shape)), np.int64)
        shapes[:, 0] = np.diff(offsets)
        shapes[:, 1:] = field.item_shape
    largest = max(elements, int(shapes.max(initial=0)))
    if largest > _INT32_MAX:
        message = "rows of varying shapes have 32-bit offsets in Arrow: convert fewer rows at a time"
        raise mismatch(name, message, expected=f"at most {_INT32_MAX} elements", found=str(largest))
    full = np.concatenate((shapes, np.full((len(shapes), len(kind.tail)), 2)), axis=1).astype(np.int32)
    sizes = pa.Array.from_buffers(pa.int32(), full.size, [None, _buffer(full)])
    extension = VariableShapeTensorType(kind.type, len(uniform), uniform)
    data = _lists(values, offsets * math.prod(field.item_shape + kind.tail), large=False)
    shape = pa.Array.from_buffers(pa.list_(pa.int32(), len(uniform)), len(full), [None], children=[sizes])
    storage = pa.Array.from_buffers(extension.storage_type, len(full), [None], children=[data, shape])
    return pa.ExtensionArray.from_storage(extension, storage)


def _struct(name: str, field: Field, rows: SelectedRows) -> Any:
    children, fields = [], []
    for key, child in field.children:
        present, inner = gather.presence(rows, key, child)
        values = array(f"{name}.{key}", child, inner, nullable=False)
        if not present.all():
            values = spread(values, present)
        children.append(values)
        fields.append(pa.field(key, values.type, metadata=metadata(child)))
    return pa.Array.from_buffers(pa.struct(fields), rows.rows, [None], children=children)


def spread(values: Any, present: npt.NDArray[np.bool_]) -> Any:
    """The values at the rows that have one, null at the others."""
    index = pa.array(np.cumsum(present) - 1, mask=~present)
    if isinstance(values, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(values.type, values.storage.take(index))
    return values.take(index)
