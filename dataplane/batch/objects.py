"""Any value that users put, one row at a time, exact in type: what comes back is what went in.

None, bool, int (64 bits), float, str, bytes, list and dict are MessagePack's own. Everything else is an extension:
a tuple, a dict with keys that are not text, NumPy's and torch's values with dtype, shape and bits, Python's other
types (`kinds`) and classes of users (`classes`). Anything beyond is refused, since it would come back as something
else or need pickle: functions, locks, generators, text with lone surrogates.

Decoding constructs nothing but these values, checks sizes before it uses them and raises Corrupt for the rest. A
class that the reader has not imported is a SchemaMismatch that names its module. torch and ml_dtypes are imported
only where a row holds one of their values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch import classes, kinds, tensors
from dataplane.batch.array_dtypes import check_text, exact_dtype, exact_name
from dataplane.batch.dtypes import storage
from dataplane.batch.field import refuse
from dataplane.batch.kinds import Unfit
from dataplane.batch.values import mismatch
from dataplane.errors import SchemaMismatch

_TUPLE, _PAIRS, _ARRAY, _SCALAR, _TENSOR, _KIND, _CLASS, _OBJECTS = range(1, 9)
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


class _Header(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_decode_header = msgspec.msgpack.Decoder(_Header).decode


def encode_rows(column: str, rows: Sequence[Any]) -> list[bytes]:
    """Each row as MessagePack. Raises SchemaMismatch naming the first row that it cannot hold."""
    encoded = []
    for i, value in enumerate(rows):
        try:
            encoded.append(_encode(value if type(value) in _PLAIN else _plain(value, 0)))
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


def decode_row(column: str, data: Any) -> Any:
    """The value of a row that `encode_rows` gave. Raises Corrupt for anything else, and SchemaMismatch for a class of
    users that this process does not have."""
    try:
        return _DECODER.decode(data)
    except classes.Absent as absent:
        found, _, _ = str(absent).partition(":")
        raise mismatch(column, f"a row holds {absent}", expected="a class of this process", found=found) from absent
    except (*_FALSE, msgspec.MsgspecError) as error:
        raise refuse(column, f"a row is not an encoded value: {error}") from error


def _plain(value: Any, depth: int) -> Any:
    """The value in types that MessagePack's encoder keeps exactly."""
    kind = type(value)
    if kind in _PLAIN or (kind is int and _INT_MIN <= value <= _INT_MAX):
        return value
    if depth >= _MAX_NESTING:
        raise Unfit(f"a value nested more than {_MAX_NESTING} levels", "flatten it, or encode it to text")
    if kind is list:
        return [_plain(item, depth + 1) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _plain(item, depth + 1) for key, item in value.items()}
        return _extension(_PAIRS, [_plain(part, depth + 1) for item in value.items() for part in item])
    if kind is tuple:
        return _extension(_TUPLE, [_plain(item, depth + 1) for item in value])
    if (found := kinds.taken(value)) is not None:
        return _named(_KIND, found, depth)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _array(value, kind, depth)
    if tensors.is_tensor(value):
        return _tensor(value)
    if (found := classes.taken(value)) is not None:
        return _named(_CLASS, found, depth)
    raise Unfit(_name(kind), _hint(kind))


def _named(code: int, found: tuple[str, kinds.Parts], depth: int) -> msgspec.msgpack.Ext:
    name, parts = found
    return _extension(code, [name, *[_plain(part, depth + 1) for part in parts]])


def _extension(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encode(value))


def _array(value: Any, kind: type, depth: int) -> msgspec.msgpack.Ext:
    if value.dtype == object:
        return _extension(_OBJECTS, [list(value.shape), *[_plain(item, depth + 1) for item in value.reshape(-1)]])
    name = exact_name(value.dtype)
    if name is None:
        raise Unfit(f"NumPy's {value.dtype}", _dtype_hint(value.dtype))
    return _extension(_ARRAY if kind is np.ndarray else _SCALAR, _Header(name, value.shape, value.tobytes()))


def _tensor(value: Any) -> msgspec.msgpack.Ext:
    try:
        name, array = tensors.host_bits("", value)
    except SchemaMismatch as error:
        raise Unfit(error.found, "use a plain tensor") from error
    return _extension(_TENSOR, _Header(name, array.shape, array.tobytes()))


def _dtype_hint(dtype: np.dtype[Any]) -> str:
    if dtype.kind in "fc":
        return "long double differs between hosts, use float64"
    return "put its fields one by one" if dtype.names else "use .tolist() or .astype(object)"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _hint(kind: type) -> str:
    """What to do about a value of a type that no row holds."""
    for each in kind.__mro__:
        name = _name(each)
        for start, hint in _HINTS.items():
            if name == start or name.startswith(f"{start}."):
                return hint
    return "convert it to a dict, a list, a data class, numbers, text, bytes or an array"


def _extended(code: int, data: memoryview) -> Any:
    if code in (_TUPLE, _PAIRS, _KIND, _CLASS, _OBJECTS):
        items = _DECODER.decode(data)
        if type(items) is not list:
            raise ValueError("not a list of items")
        return _container(code, items)
    if code not in (_ARRAY, _SCALAR, _TENSOR):
        raise ValueError(f"unknown extension {code}")
    header = _decode_header(data)
    dtype = storage(header.dtype) if code == _TENSOR else exact_dtype(header.dtype)
    if any(dim < 0 for dim in header.shape) or math.prod(header.shape) * dtype.itemsize != len(header.data):
        raise ValueError(f"{len(header.data)} bytes are no array of {header.shape}")
    array: Any = np.ndarray(header.shape, dtype, bytearray(header.data))
    if code == _TENSOR:
        return tensors.from_bits("", header.dtype, array)
    check_text(array)
    return array[()] if code == _SCALAR else array


def _container(code: int, items: list[Any]) -> Any:
    if code == _TUPLE:
        return tuple(items)
    if code == _PAIRS:
        return kinds.pairs(items)
    if code == _OBJECTS:
        return _objects(*items)
    name, *parts = items
    return (kinds if code == _KIND else classes).made(name, parts)


def _objects(shape: list[int], *items: Any) -> npt.NDArray[Any]:
    if any(dim < 0 for dim in shape) or math.prod(shape) != len(items):
        raise ValueError(f"{len(items)} objects are no array of {shape}")
    array = np.empty(len(items), object)
    for i, item in enumerate(items):  # one by one: NumPy would take a list of lists for a second dimension
        array[i] = item
    return array.reshape(shape)


_DECODER = msgspec.msgpack.Decoder(ext_hook=_extended)
