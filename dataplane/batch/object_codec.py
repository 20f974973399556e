"""Encodes the objects that users put, one row at a time, and decodes them exactly, types included.

None, bool, int (64 bits), float, str, bytes, list and dict are MessagePack's own. Extensions encode tuples, dicts with
keys that are not text, NumPy's and torch's values with dtype, shape and bits, Python's other types and classes of users
(`builtin_codec`), and PIL's images (`images`). Bytes, arrays and images of some KiB are stored next to the MessagePack
(`object_rows`), where the writer and the reader copy them once each. All other values are refused, since they would be
changed or need pickle: functions, locks, generators, text with lone surrogates.

Decoding constructs only these values, checks sizes before it uses them, and raises Corrupt for any other bytes. A class
that the reader has not imported is a SchemaMismatch that names its module. torch, ml_dtypes and PIL are imported only
if a row has one of their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch import builtin_codec, images, object_rows, tensors
from dataplane.batch.builtin_codec import Unfit
from dataplane.batch.dtypes import check_text, exact_dtype, exact_name, storage
from dataplane.batch.field import refuse
from dataplane.batch.object_rows import LARGE, Lookup, ObjectRow
from dataplane.batch.values import Values, as_bytes, mismatch, objects_of
from dataplane.errors import SchemaMismatch

_TUPLE, _PAIRS, _ARRAY, _SCALAR, _TENSOR, _KIND, _CLASS, _OBJECTS, _IMAGE, _BYTES = range(1, 11)
_CONTAINERS = frozenset((_TUPLE, _PAIRS, _KIND, _CLASS, _OBJECTS))
_MAX_NESTING = 64
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_PLAIN = frozenset((type(None), bool, float, str, bytes))
_FALSE = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)
_HINTS = {
    "memoryview": "pass bytes(value)",
    "torch.Size": "pass tuple(value)",
    "numpy.ma": "fill it first",
    "numpy": "pass numpy.asarray(value)",
    "pandas": "pass .to_numpy() or .to_dict()",
    "pydantic": "pass .model_dump()",
    "omegaconf": "pass OmegaConf.to_container(value)",
    "msgspec": "pass msgspec.to_builtins(value)",
}

_encode = msgspec.msgpack.Encoder().encode


Copies: TypeAlias = dict[tuple[int, int], bytes]
"""Copies of parts, as bytes objects, by the part's address and size. Rows that are decoded in succession share them."""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """An array, scalar or tensor. `data`: its bytes if they are few, else the index of its part in the row."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | int


_decode_header = msgspec.msgpack.Decoder(_Header).decode
_decode_picture = msgspec.msgpack.Decoder(images.Picture).decode
_decode_place = msgspec.msgpack.Decoder(int).decode


def encode(column: str, rows: Sequence[Any]) -> list[ObjectRow]:
    """Each row as MessagePack and its large parts, which stay in the caller's memory. Raises SchemaMismatch, naming the
    first row that cannot be stored."""
    encoded, writer = [], _Writer()
    for i, value in enumerate(rows):
        try:
            encoded.append(writer.row(value))
        except Unfit as unfit:
            found, hint = unfit.found, unfit.hint
        except RecursionError:
            found, hint = "a value nested too deeply", "flatten it"
        except UnicodeEncodeError:
            found, hint = "text with a lone surrogate", "encode it to bytes"
        except (ValueError, OverflowError, msgspec.EncodeError) as error:
            found, hint = f"a value that is too large ({error})", "make it a column of its own"
        else:
            continue
        raise mismatch(
            column, f"cannot hold {found}: {hint}", row=i, expected="a value that MessagePack holds", found=found
        )
    return encoded


def values_of(column: str, rows: Sequence[Any]) -> Values:
    """The rows as an object column, in which equal large parts are stored once. Raises SchemaMismatch as `encode`."""
    return object_rows.values_of(encode(column, rows))


def encode_rows(column: str, rows: Sequence[Any]) -> list[bytes]:
    """Each row as it is stored in an object column (`object_rows`). Raises SchemaMismatch as `encode`."""
    return [object_rows.joined(row) for row in encode(column, rows)]


def decode_row(
    column: str,
    data: Any,
    lookup: Lookup = object_rows.nowhere,
    *,
    decode: bool = True,
    number: int = -1,
    copies: Copies | None = None,
) -> Any:
    """The value of an encoded row. `lookup`: finds the parts that are in other rows. Without `decode`, its images are
    dicts: "bytes" of an image file, and "path" None. `copies`: a cache of parts, to which this call adds.

    Of the row's memory, the value keeps only pixels that an image has not converted yet. Raises Corrupt for bytes that
    are no row, and SchemaMismatch for a class of users that this process lacks, with the column, the `number` of the
    row, the class, and the module to import.
    """
    try:
        tree, found = object_rows.split(data, lookup)
        # A copy, since the decoder may read a byte twice, and a hostile process may still write to the row.
        reader = _Reader(found, decode, Copies() if copies is None else copies)
        return reader.value(bytes(tree)) if found or not decode else _decode_alone(bytes(tree))
    except builtin_codec.Absent as absent:
        missing, _, _ = str(absent).partition(":")
        message = f"{'it' if number >= 0 else 'a row'} holds {absent}"
        raise mismatch(column, message, row=number, expected="a class of this process", found=missing) from absent
    except (*_FALSE, msgspec.MsgspecError) as error:
        raise refuse(column, f"a row is not an encoded value: {error}") from error


def decode_rows(column: str, data: bytes, edges: Sequence[int]) -> list[Any]:
    """The values of rows that refer to no other rows; row i is data[edges[i]:edges[i + 1]]. Raises as `decode_row`."""
    try:
        return [_decode_alone(data[a:b]) for a, b in pairwise(edges)]
    except (
        *_FALSE,
        msgspec.MsgspecError,
        SchemaMismatch,
        builtin_codec.Absent,
    ):  # a row has parts, or is invalid: decode one by one, for its own error
        rows = enumerate(pairwise(edges))
        return [decode_row(column, data[a:b], number=number) for number, (a, b) in rows]


class _Writer:
    """Encodes the rows of a column. Caches encoded arrays and images, so that a repeated one is the same part again."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, Any]] = {}  # by identity: the value, to keep it alive, and its encoding
        self._parts: list[Any] = []
        self._places: dict[int, int] = {}  # by identity of a part: its index in the row

    def row(self, value: Any) -> ObjectRow:
        """Encode one row. Raises Unfit, and the encoder's errors for values that are too large."""
        self._parts = []
        self._places.clear()
        plain = type(value) in _PLAIN and type(value) is not bytes
        tree = _encode(value if plain else self._plain(value, 0))
        return ObjectRow(tree, self._parts)

    def _plain(self, value: Any, depth: int) -> Any:
        """The value in types that MessagePack's encoder keeps exactly. Raises Unfit if there is none."""
        kind = type(value)
        if kind is bytes and len(value) >= LARGE:
            return _extension(_BYTES, self._placed(value))
        if kind in _PLAIN or (kind is int and _INT_MIN <= value <= _INT_MAX):
            return value
        if depth >= _MAX_NESTING:
            raise Unfit(f"a value nested more than {_MAX_NESTING} levels", "flatten it, or encode it to text")
        if kind is list:
            return [self._plain(item, depth + 1) for item in value]
        if kind is dict:
            if all(type(key) is str for key in value):
                return {key: self._plain(item, depth + 1) for key, item in value.items()}
            return _extension(_PAIRS, [self._plain(part, depth + 1) for item in value.items() for part in item])
        if kind is tuple:
            return _extension(_TUPLE, [self._plain(item, depth + 1) for item in value])
        if (found := builtin_codec.parts_of(value)) is not None:
            return self._named(_KIND, found, depth)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, kind, depth)
        if tensors.is_tensor(value):
            return _extension(_TENSOR, self._header(value, _tensor))
        if images.is_image(value):
            return self._image(value, depth)
        if (found := builtin_codec.instance_parts_of(value)) is not None:
            return self._named(_CLASS, found, depth)
        raise Unfit(_name(kind), _hint(kind))

    def _named(self, code: int, found: tuple[str, builtin_codec.Parts], depth: int) -> msgspec.msgpack.Ext:
        name, own = found
        return _extension(code, [name, *[self._plain(part, depth + 1) for part in own]])

    def _array(self, value: Any, kind: type, depth: int) -> msgspec.msgpack.Ext:
        if value.dtype == object:
            items = [self._plain(item, depth + 1) for item in value.reshape(-1)]
            return _extension(_OBJECTS, [list(value.shape), *items])
        return _extension(_ARRAY if kind is np.ndarray else _SCALAR, self._header(value, _named_bits))

    def _header(self, value: Any, take: Callable[[Any], tuple[str, npt.NDArray[Any]]]) -> _Header:
        name, shape, data = self._once(value, partial(_bits, take))
        return _Header(name, shape, self._beside(data))

    def _image(self, image: Any, depth: int) -> msgspec.msgpack.Ext:
        picture: images.Picture = self._once(image, images.taken)
        info, rest = dict(image.info), []
        try:
            packed = _encode(self._plain(info, depth + 1))
        except Unfit:
            rest = [key for key, value in info.items() if not self._fits(value, depth)]
            packed = _encode(self._plain({key: value for key, value in info.items() if key not in rest}, depth + 1))
        named = tuple(key for key in rest if type(key) is str)
        made = msgspec.structs.replace(picture, info=msgspec.Raw(packed), rest=named, data=self._beside(picture.data))
        return _extension(_IMAGE, made)

    def _fits(self, value: Any, depth: int) -> bool:
        try:
            self._plain(value, depth + 2)
        except Unfit:
            return False
        return True

    def _beside(self, data: Any) -> bytes | int:
        """The bytes of a small value; of a large one, the index of its part in the row."""
        return bytes(data) if len(data) < LARGE else self._placed(data)

    def _once(self, value: Any, take: Callable[[Any], Any]) -> Any:
        known = self._seen.get(id(value))
        if known is None:
            known = self._seen[id(value)] = value, take(value)
        return known[1]

    def _placed(self, data: Any) -> int:
        """The index of these bytes among the row's parts, to which they are added."""
        place = self._places.setdefault(id(data), len(self._parts))
        if place == len(self._parts):
            self._parts.append(data)
        return place


def _extension(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encode(value))


def _bits(take: Callable[[Any], tuple[str, npt.NDArray[Any]]], value: Any) -> tuple[str, tuple[int, ...], Any]:
    """The name of the dtype, the shape, and the bytes, in place if they are contiguous."""
    name, array = take(value)
    return name, array.shape, as_bytes(array) if array.nbytes else b""


def _named_bits(value: Any) -> tuple[str, npt.NDArray[Any]]:
    name = exact_name(value.dtype)
    if name is None:
        raise Unfit(f"NumPy's {value.dtype}", _dtype_hint(value.dtype))
    return name, value


def _tensor(value: Any) -> tuple[str, npt.NDArray[Any]]:
    try:
        return tensors.host_bits("", value)
    except SchemaMismatch as error:
        raise Unfit(error.found, "use a plain tensor") from error


def _dtype_hint(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "fc":
        return "long double differs between hosts, use float64"
    return "put its fields one by one" if dtype.names else "use .tolist() or .astype(object)"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _hint(kind: type) -> str:
    """Advice for a value of a type that cannot be stored."""
    for each in kind.__mro__:
        name = _name(each)
        for start, hint in _HINTS.items():
            if name == start or name.startswith(f"{start}."):
                return hint
    return "convert it to a dict, a list, a data class, numbers, text, bytes or an array"


class _Reader:
    """Decodes a row. `found`: the row's parts."""

    def __init__(self, found: Sequence[Any], decode: bool, copies: Copies) -> None:
        self._found = found
        self._decode = decode
        self._copies = copies

    def value(self, data: Any) -> Any:
        """Decode these bytes. A stored decoder and this object would refer to each other, and keep the parts alive."""
        if not self._found and self._decode:
            return _decode_alone(data)
        return msgspec.msgpack.decode(data, ext_hook=self._extended)

    def _extended(self, code: int, data: memoryview) -> Any:
        if code in _CONTAINERS:
            items = self.value(data)
            if type(items) is not list:
                raise ValueError("not a list of items")
            return tuple(items) if code == _TUPLE else _container(code, items)
        if code in (_ARRAY, _SCALAR, _TENSOR):
            return self._array(code, _decode_header(data))
        if code == _IMAGE:
            return self._image(_decode_picture(data))
        if code == _BYTES:
            return self._bytes(_decode_place(data))
        raise ValueError(f"unknown extension {code}")

    def _array(self, code: int, header: _Header) -> Any:
        dtype = storage(header.dtype) if code == _TENSOR else exact_dtype(header.dtype)
        data = self._view(header.data)
        if any(dim < 0 for dim in header.shape) or math.prod(header.shape) * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes are no array of {header.shape}")
        array: Any = np.ndarray(header.shape, dtype, np.array(data, np.uint8))
        if code == _TENSOR:
            return tensors.from_bits("", header.dtype, array)
        check_text(array)
        return array[()] if code == _SCALAR else array

    def _image(self, header: images.Picture) -> Any:
        if not self._decode and header.frame >= 0:
            return {"bytes": self._bytes(header.data), "path": None}
        info = self.value(header.info)
        if type(info) is not dict:
            raise ValueError("an image's info is no dict")
        data: Any = self._view(header.data)
        if not images.is_deferred(header.frame, header.mode, len(data)):
            data = self._bytes(header.data)
        image = images.made(header, info, data)
        return image if self._decode else {"bytes": images.as_file(image), "path": None}

    def _view(self, data: bytes | int) -> memoryview:
        """A view of these bytes, or of the part with this index. Raises ValueError for an unknown part."""
        if type(data) is int:
            if not 0 <= data < len(self._found):
                raise ValueError(f"part {data} of {len(self._found)}")
            return memoryview(self._found[data])
        return memoryview(data)  # type: ignore[arg-type]

    def _bytes(self, data: bytes | int) -> bytes:
        view = self._view(data)
        if type(view.obj) is bytes and len(view.obj) == len(view):
            return view.obj
        if type(data) is bytes or not len(view):
            return bytes(view)
        place = np.frombuffer(view, np.uint8).__array_interface__["data"][0], len(view)
        copy = self._copies.get(place)
        if copy is None:
            copy = self._copies[place] = bytes(view)
        return copy


def _container(code: int, items: list[Any]) -> Any:
    if code == _PAIRS:
        return builtin_codec.pairs(items)
    if code == _OBJECTS:
        return _objects(*items)
    name, *parts = items
    return (builtin_codec.made if code == _KIND else builtin_codec.instance_made)(name, parts)


def _objects(shape: list[int], *items: Any) -> npt.NDArray[Any]:
    if any(dim < 0 for dim in shape) or math.prod(shape) != len(items):
        raise ValueError(f"{len(items)} objects are no array of {shape}")
    return objects_of(items).reshape(shape)


#: Decodes a row without parts.
_decode_alone = msgspec.msgpack.Decoder(ext_hook=_Reader((), True, Copies())._extended).decode
