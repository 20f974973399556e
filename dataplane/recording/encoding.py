"""Columns as tables that Parquet stores without changing a bit, and back.

The files have no Arrow extension types, because `datasets` refuses them. A tensor is stored as the storage of its
extension type. The metadata of the field name this type for `decoded`. Timestamps in seconds, which Parquet lacks, are
stored as int64.

Repeated values of some KiB (the image of a prompt in each of its responses) are media: the cell has the hash of their
bytes, and the bytes are stored once. A column is media if its first rows have `LARGE` bytes or more on average, and are
bytes or repeated tensors. The large parts of objects always are.

Invariants: `decoded` restores each field's kind, dtype, shape and bits, and raises Corrupt for other tables.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from dataplane.batch import arrow_in, arrow_out, gather, object_rows
from dataplane.batch.arrow_in import check
from dataplane.batch.arrow_out import DTYPE, VARIABLE, VariableShapeTensorType, metadata, uniform_shape
from dataplane.batch.batch import Batch
from dataplane.batch.dtypes import storage
from dataplane.batch.field import Field, check_field
from dataplane.batch.object_rows import LARGE
from dataplane.batch.stored_column import SelectedRows
from dataplane.batch.values import Values, as_bytes, byte_rows, dense, ragged_rows
from dataplane.batch.values import struct as struct_of
from dataplane.errors import Corrupt, DataplaneError

MEDIA, TENSOR = b"dataplane.media", b"dataplane.tensor"
EMPTY = b"dataplane.empty"
"""Marks the child of nulls in a struct without keys, because Parquet has no struct without children."""

Find = Callable[[str], bytes]
"""Returns the bytes of a medium by its hash. Raises KeyError."""

_REFERS = b"\xc1dpm"  # no MessagePack begins with these bytes
_COUNT = struct.Struct("<I")
_DIGEST = 16  # bytes


class Encoder:
    """Makes tables of batches. `media`: whether a column is media, by path; the attribute is a copy, with new columns
    too. `named`: columns that are always media. `seed`: of the hashes, unknown to those who supply media."""

    def __init__(self, media: dict[str, bool], named: Iterable[str] = (), seed: int = 0) -> None:
        self.media = media | dict.fromkeys(named, True)
        self._seed = seed
        self.contents: dict[str, Any] = {}
        """The bytes of the media of the last table, by their hashes."""
        self._rows: list[list[str]] = []
        self._known: dict[tuple[int, int], str] = {}
        self._alive: list[Any] = []

    def table(self, batch: Batch) -> tuple[Any, list[list[str]]]:
        """The columns as a `pyarrow.Table`, and for each row the hashes of its media. Raises Corrupt."""
        self.contents, self._rows = {}, [[] for _ in range(len(batch))]
        self._known, self._alive = {}, []
        arrays, fields = [], []
        try:
            everything = np.arange(len(batch))
            for name, column in batch.items():
                array, said = self._column(name, column.field, column.reading, everything)
                arrays.append(array)
                fields.append(pa.field(name, array.type, metadata=said))
            return pa.Table.from_arrays(arrays, schema=pa.schema(fields)), self._rows
        finally:
            self._known, self._alive = {}, []

    def _column(
        self, path: str, field: Field, rows: SelectedRows, at: npt.NDArray[Any], *, nullable: bool = True
    ) -> tuple[Any, Any]:
        """The array, and the metadata of its field. `at`: the row of the table, for each of `rows`. `nullable`: whether
        an invalid time may be null."""
        field = gather.stored_field(rows, field)
        if field.kind == "struct":
            return self._struct(path, field, rows, at)
        if field.kind == "object":
            return self._objects(path, rows, at), metadata(field)
        if self._is_media(path, field, rows):
            return self._media(field, rows, at), {MEDIA: msgspec.json.encode(field)}
        array = arrow_out.array(path, field, rows, nullable=nullable)
        said = dict(metadata(field) or {})
        if isinstance(array, pa.ExtensionArray):
            said[TENSOR] = json.dumps(_tensor(array.type)).encode()
        return _plain(array), said

    def _struct(self, path: str, field: Field, rows: SelectedRows, at: npt.NDArray[Any]) -> tuple[Any, Any]:
        children, fields = [], []
        for key, child in field.children:
            present, own = gather.presence(rows, key, child)
            array, said = self._column(f"{path}.{key}", child, own, at[present], nullable=False)
            if not present.all():
                array = arrow_out.spread(array, present)
            children.append(array)
            fields.append(pa.field(key, array.type, metadata=said))
        if not fields:
            children.append(pa.nulls(rows.rows, pa.bool_()))
            fields.append(pa.field("__empty__", pa.bool_(), metadata={EMPTY: b""}))
        kind = pa.struct(fields)
        return pa.Array.from_buffers(kind, rows.rows, [None], children=children), metadata(field)

    # media

    def _is_media(self, path: str, field: Field, rows: SelectedRows) -> bool:
        known = self.media.get(path)
        if known is None and rows.rows and field.kind != "text":
            known = gather.nbytes(rows, field) >= LARGE * rows.rows
            if known and field.kind != "bytes":
                found = [self._hash(each, keep=False) for each in _items(field, rows)]
                known = len(set(found)) < len(found)
            self.media[path] = known
        return bool(known) and field.kind != "text"

    def _hash(self, data: Any, *, keep: bool = True) -> str:
        """The hash of these bytes, computed once a table. `keep`: whether to add them to `contents`."""
        flat = as_bytes(np.ascontiguousarray(data)) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        place = flat.__array_interface__["data"][0], flat.nbytes
        found = self._known.get(place)
        if found is None:
            found = self._known[place] = hash_of(flat.data, self._seed)
            self._alive.append(flat)
        if keep:
            self.contents.setdefault(found, flat)
        return found

    def _media(self, field: Field, rows: SelectedRows, at: npt.NDArray[Any]) -> Any:
        items = _items(field, rows)
        hashes = [self._hash(each) for each in items]
        for row, found in zip(at.tolist(), hashes, strict=True):
            self._rows[row].append(found)
        named = pa.array(hashes, pa.string())
        if field.kind == "bytes":
            return named
        shapes = pa.array([list(each.shape) for each in items], pa.list_(pa.int64()))
        return pa.StructArray.from_arrays([named, shapes], ["media", "shape"])

    def _objects(self, path: str, rows: SelectedRows, at: npt.NDArray[Any]) -> Any:
        cells = []
        for number, (data, lookup) in zip(at.tolist(), gather.objects(rows), strict=True):
            row = object_rows.row_of(path, data, lookup)
            if not row.parts:
                cells.append(row.tree)
                continue
            hashes = [self._hash(part) for part in row.parts]
            self._alive.append(row)
            self._rows[number] += hashes
            cells.append(_REFERS + _COUNT.pack(len(hashes)) + bytes.fromhex("".join(hashes)) + row.tree)
        return pa.array(cells, pa.large_binary())


def hash_of(data: Any, seed: int) -> str:
    """The hash of a medium in a recording with this seed."""
    return xxhash.xxh3_128_hexdigest(data, seed)


def _items(field: Field, rows: SelectedRows) -> Sequence[Any]:
    """The medium of each row, as an array or a run of bytes."""
    if field.kind == "bytes":
        return gather.spans(rows)
    return gather.rows_of(rows, field) if field.kind == "ragged" else list(gather.dense(rows, field))


def _tensor(kind: Any) -> dict[str, Any]:
    if kind.extension_name == VARIABLE:
        return {"uniform_shape": list(uniform_shape(kind) or ())}
    return {"shape": list(kind.shape)}


def _plain(array: Any) -> Any:
    """The array without extension types, and with timestamps in seconds as int64."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.unit == "s":
        return pa.Array.from_buffers(pa.int64(), len(array), [None, array.buffers()[1]])  # the bits of NaT included
    if pa.types.is_struct(kind):
        children = [_plain(array.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, [field.name for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_plain(array.values), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(array.offsets, _plain(array.values))
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, _plain(array.values))
    return array


# Back


def decoded(table: Any, find: Find) -> dict[str, Values]:
    """The columns of a table that `Encoder` made. Raises Corrupt, also if `find` lacks a medium."""
    found = {}
    try:
        for field, column in zip(table.schema, table.columns, strict=True):
            array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            if isinstance(array, pa.ChunkedArray):
                array = array.chunk(0)
            check(field.name, array)
            found[field.name] = _values(field.name, array, field.metadata or {}, find)
    except KeyError as error:
        raise Corrupt(f"the medium {error} is not in the recording") from None
    except DataplaneError as error:
        raise Corrupt(f"columns that were not recorded so: {error}") from error
    except (pa.ArrowException, ValueError, TypeError, IndexError, msgspec.MsgspecError) as error:
        raise Corrupt(f"columns that were not recorded so: {error}") from error
    return found


def _values(path: str, array: Any, said: Mapping[bytes, bytes], find: Find) -> Values:
    if MEDIA in said:
        return _from_media(path, msgspec.json.decode(said[MEDIA], type=Field), array, find)
    declared = said.get(DTYPE, b"").decode()
    if declared == "object":
        return _from_objects(array, find)
    if declared == "struct":
        keys, presence, children = [], [], []
        for i, field in enumerate(array.type):
            if EMPTY in (field.metadata or {}):
                continue
            keys.append(field.name)
            child = array.field(i)
            flags = child.is_valid().to_numpy(zero_copy_only=False)
            presence.append(flags)
            child = child if flags.all() else child.drop_null()
            children.append(_values(f"{path}.{field.name}", child, field.metadata or {}, find))
        return struct_of(keys, presence, children, len(array))
    if TENSOR in said:
        array = _extended(array, json.loads(said[TENSOR]))
    return arrow_in.converted(path, array, said)


def _extended(array: Any, said: dict[str, list[int | None]]) -> Any:
    """An array of the extension type of a tensor, from its storage. `said`: the type's shape."""
    if "shape" in said:
        shape = [int(size or 0) for size in said["shape"]]
        flat = array.type.value_type
        nested = pa.FixedSizeListArray.from_arrays(
            array.values.slice(array.offset * array.type.list_size, len(array) * array.type.list_size), math.prod(shape)
        )
        kind = pa.fixed_shape_tensor(flat, shape)
        return pa.ExtensionArray.from_storage(kind, nested.cast(kind.storage_type))
    uniform = tuple(said["uniform_shape"])
    own = VariableShapeTensorType(array.type.field(0).type.value_type, len(uniform), uniform)
    return pa.ExtensionArray.from_storage(own, array.cast(own.storage_type))


def _from_media(path: str, field: Field, array: Any, find: Find) -> Values:
    check_field(path, field)
    if field.kind == "bytes":
        return byte_rows("bytes", [find(each) for each in array.to_pylist()])
    hashes, shapes = array.field("media").to_pylist(), array.field("shape").to_pylist()
    dtype = storage(field.dtype)
    rows = [np.frombuffer(find(each), dtype).reshape(shape) for each, shape in zip(hashes, shapes, strict=True)]
    if field.kind == "ragged":
        return ragged_rows(path, field.dtype, rows, field.shape)
    return dense(path, np.stack(rows) if rows else np.empty((0, *field.item_shape), dtype), field.dtype)


def _from_objects(array: Any, find: Find) -> Values:
    return object_rows.values_of([_object(data, find) for data in _cells(array)])


def _object(data: bytes, find: Find) -> object_rows.ObjectRow:
    if not data.startswith(_REFERS):
        return object_rows.ObjectRow(data)
    at = len(_REFERS) + _COUNT.size
    (count,) = _COUNT.unpack(data[len(_REFERS) : at])
    end = at + count * _DIGEST
    if end > len(data):
        raise ValueError(f"{count} parts in a cell of {len(data)} bytes")
    return object_rows.ObjectRow(data[end:], [find(data[i : i + _DIGEST].hex()) for i in range(at, end, _DIGEST)])


def _cells(array: Any) -> Iterator[bytes]:
    for value in array:
        yield value.as_py()
