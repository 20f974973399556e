"""Columns as Arrow arrays: in place if the rows are contiguous and Arrow has their type, else over gathered copies.

Offsets are checked copies, since Arrow trusts the offsets that it is given. Text is checked to be UTF-8. NaT becomes
null, except in a struct, where null means that the key is absent.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.batch import gather
from dataplane.batch.dtypes import is_bits, is_time, storage
from dataplane.batch.field import Field, refuse
from dataplane.batch.stored_column import SelectedRows
from dataplane.batch.values import as_bytes, mismatch

_INT32_MAX = (1 << 31) - 1
_NAT = np.iinfo(np.int64).min


def table(columns: Iterable[tuple[str, Field, SelectedRows]]) -> Any:
    """A `pyarrow.Table` of these columns. Its metadata has the properties of fields that Arrow's types lack."""
    arrays, fields = [], []
    for name, field, rows in columns:
        field = gather.stored_field(rows, field)
        arrays.append(array(name, field, rows))
        fields.append(pa.field(name, arrays[-1].type, metadata=metadata(field)))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def array(name: str, field: Field, rows: SelectedRows, *, nullable: bool = True) -> Any:
    """One column as a `pyarrow.Array`. `nullable`: whether NaT becomes null; false for a struct's child.

    Raises Corrupt for invalid tables or text, and SchemaMismatch if rows of varying shapes have more elements in all
    than 32-bit offsets can count.
    """
    if field.kind == "dense":
        return _dense(field, rows, nullable)
    if field.kind == "ragged":
        return _ragged(name, field, rows, nullable)
    if field.kind == "struct":
        return _struct(name, field, rows)
    if field.kind == "object" and any(stored.layout.indexed for stored, _ in rows.parts):
        return pa.array(list(map(bytes, gather.whole(name, rows))), pa.large_binary())
    values, offsets, _ = gather.items(rows, field)
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
    items, offsets, shapes = gather.items(rows, field)
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
        child = gather.stored_field(inner, child)
        values = array(f"{name}.{key}", child, inner, nullable=False)
        if not present.all():
            values = spread(values, present)
        children.append(values)
        fields.append(pa.field(key, values.type, metadata=metadata(child)))
    return pa.Array.from_buffers(pa.struct(fields), rows.rows, [None], children=children)


def spread(values: Any, present: npt.NDArray[np.bool_]) -> Any:
    """An array with a value for each row where `present` is true, null for the other rows."""
    index = pa.array(np.cumsum(present) - 1, mask=~present)
    if isinstance(values, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(values.type, values.storage.take(index))
    return values.take(index)


# The Arrow types of fields: value types, metadata, and the canonical extension type that pyarrow lacks.
#
# Arrow has no bfloat16, float8, complex or big-endian numbers, and only four units of time. Bits become unsigned
# integers, complex numbers a last dimension of two floats, big-endian numbers little-endian ones, and times in other
# units int64. The metadata of the Arrow field has the name of the dtype under `dataplane.dtype`. Under the same key,
# "object" marks encoded rows, and "struct" a struct in which null means that the key is absent. pyarrow's fixed-size
# lists do not keep dense rows without elements; such rows are empty lists, with their shape under `dataplane.shape`.

DTYPE, SHAPE = b"dataplane.dtype", b"dataplane.shape"
VARIABLE = "arrow.variable_shape_tensor"

# Later releases of Arrow's C++ have the type, but pyarrow shows its parameters only in the type's text.
_UNIFORM = re.compile(r"uniform_shape=\[((?:null|\d+)(?:,(?:null|\d+))*)\]")
_PERMUTATION = re.compile(r"permutation=\[(\d+(?:,\d+)*)\]")

_UNITS = ("s", "ms", "us", "ns")


class Element(NamedTuple):
    """The Arrow form of a dtype: values of the Arrow type `type`, with the bytes of the NumPy dtype `native`. Each
    element is an array of such values of the shape `tail`."""

    type: Any
    native: np.dtype[Any]
    tail: tuple[int, ...]


def element(dtype: str) -> Element:
    native = storage(dtype).newbyteorder("=")
    if native.kind == "c" and not is_bits(dtype):
        half = np.dtype(f"float{native.itemsize * 4}")
        return Element(pa.from_numpy_dtype(half), half, (2,))
    if is_time(dtype):
        unit, count = np.datetime_data(native)
        if count != 1 or unit not in _UNITS:
            return Element(pa.int64(), np.dtype(np.int64), ())
        return Element(pa.timestamp(unit) if native.kind == "M" else pa.duration(unit), native, ())
    return Element(pa.from_numpy_dtype(native), native, ())


def to_native(dtype: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert an array of the dtype's storage type to the values of the Arrow type, contiguous. Nothing is copied if
    the array is contiguous and has the byte order of this host."""
    kind = element(dtype)
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(array.shape)
    if kind.tail:
        return array[..., None].view(kind.native)
    return array.view(kind.native)


def from_native(dtype: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The inverse of `to_native`."""
    target = storage(dtype)
    if element(dtype).tail:
        array = np.ascontiguousarray(array).view(target.newbyteorder("="))[..., 0]
    return array.view(target.newbyteorder("=")).astype(target, copy=False)


def metadata(field: Field) -> dict[bytes, bytes] | None:
    """The metadata of the Arrow field of a column; None for text and bytes."""
    if field.kind in ("object", "struct"):
        return {DTYPE: field.kind.encode()}
    if field.kind not in ("dense", "ragged"):
        return None
    shape = {SHAPE: json.dumps(field.shape).encode()} if field.kind == "dense" and not field.item_nbytes else {}
    return {DTYPE: field.dtype.encode(), **shape}


class VariableShapeTensorType(pa.ExtensionType):  # type: ignore[misc, unused-ignore]  # pyarrow ships no types
    """`arrow.variable_shape_tensor` of Arrow's canonical extension types: a struct of `data`, the elements of each
    row, and `shape`, int32 of fixed length. `uniform_shape` has the sizes that all rows share, and None for others.
    """

    def __init__(
        self,
        value_type: Any,
        ndim: int,
        uniform_shape: tuple[int | None, ...] | None = None,
        permutation: tuple[int, ...] | None = None,
        dim_names: tuple[str, ...] | None = None,
    ) -> None:
        self.value_type = value_type
        self.ndim = ndim
        self.uniform_shape = uniform_shape
        self.permutation = permutation
        self.dim_names = dim_names
        stored = [("data", pa.list_(value_type)), ("shape", pa.list_(pa.int32(), ndim))]
        super().__init__(pa.struct(stored), VARIABLE)

    def __arrow_ext_serialize__(self) -> bytes:
        parameters = {"permutation": self.permutation, "dim_names": self.dim_names, "uniform_shape": self.uniform_shape}
        return json.dumps({key: value for key, value in parameters.items() if value is not None}).encode()

    def __hash__(self) -> int:
        return hash((self.value_type, self.ndim, self.uniform_shape))

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> VariableShapeTensorType:
        """Raises ValueError if the storage or the parameters are not of this type."""
        names = [storage_type.field(i).name for i in range(storage_type.num_fields)]
        if not pa.types.is_struct(storage_type) or names != ["data", "shape"]:
            raise ValueError(f"{storage_type} does not store {VARIABLE}")
        data, shape = storage_type.field(0).type, storage_type.field(1).type
        if not (pa.types.is_list(data) and pa.types.is_fixed_size_list(shape)):
            raise ValueError(f"{storage_type} does not store {VARIABLE}")
        parameters = json.loads(serialized or b"{}")
        uniform, permutation, names = (parameters.get(key) for key in ("uniform_shape", "permutation", "dim_names"))
        return cls(
            data.value_type,
            shape.list_size,
            None if uniform is None else tuple(uniform),
            None if permutation is None else tuple(permutation),
            None if names is None else tuple(names),
        )


def uniform_shape(kind: Any) -> tuple[int | None, ...] | None:
    """The sizes that all rows of a variable-shape tensor type share, with None for other dimensions; None if the type
    lacks this parameter."""
    if hasattr(kind, "uniform_shape"):
        return None if kind.uniform_shape is None else tuple(kind.uniform_shape)
    found = _UNIFORM.findall(str(kind))
    return tuple(None if size == "null" else int(size) for size in found[-1].split(",")) if found else None


def permutation(kind: Any) -> list[int]:
    """The order of a tensor type's dimensions; [] if they are not permuted."""
    if hasattr(kind, "permutation"):
        return list(kind.permutation or [])
    found = _PERMUTATION.search(str(kind))
    return [int(axis) for axis in found[1].split(",")] if found else []


def _register() -> None:
    try:
        pa.register_extension_type(VariableShapeTensorType(pa.float32(), 1))
    except pa.ArrowKeyError:  # registered already, by another library or pyarrow itself; any of them can be read
        return


_register()
