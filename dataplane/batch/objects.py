"""Any value that MessagePack holds, one row at a time, exact in type: what comes back is what went in.

None, bool, int (64 bits), float, str, bytes, list and dict are MessagePack's own. A tuple, a dict with keys that
are not text, a NumPy scalar or array and a torch tensor are extensions, with dtype, shape and bits. Anything else
is refused, since it would come back as something else or need pickle: sets, dates, data classes, subclasses of
the plain types, images, text with lone surrogates, integers beyond 64 bits.

Decoding constructs nothing but these values, checks sizes before it uses them and raises Corrupt for the rest.
torch is imported only where a row holds a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.batch import tensors
from dataplane.batch.dtypes import is_bits, name_of, storage
from dataplane.batch.field import refuse
from dataplane.batch.values import mismatch
from dataplane.errors import SchemaMismatch

_TUPLE, _PAIRS, _ARRAY, _SCALAR, _TENSOR = 1, 2, 3, 4, 5
_MAX_NESTING = 64
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_PLAIN = frozenset((type(None), bool, float, str, bytes))
_HINTS = {
    "PIL": "encode images to bytes or arrays first",
    "datetime": "use numpy.datetime64, a timestamp or text",
    "decimal": "use float or text",
    "builtins": "convert it to lists, dicts, numbers, text or bytes",
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
        except _Unfit as unfit:
            found, hint = unfit.args
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
    """The value of a row that `encode_rows` gave. Raises Corrupt for anything else."""
    try:
        return _DECODER.decode(data)
    except (ValueError, TypeError, RecursionError, OverflowError, MemoryError, msgspec.MsgspecError) as error:
        raise refuse(column, f"a row is not an encoded value: {error}") from error


class _Unfit(Exception):
    """What was found, and what to do about it."""


def _plain(value: Any, depth: int) -> Any:
    """The value in types that MessagePack's encoder keeps exactly."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        if not _INT_MIN <= value <= _INT_MAX:
            raise _Unfit("an int beyond 64 bits", "use float, text or bytes")
        return value
    if depth >= _MAX_NESTING:
        raise _Unfit(f"a value nested more than {_MAX_NESTING} levels", "flatten it, or encode it to text")
    if kind is list:
        return [_plain(item, depth + 1) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _plain(item, depth + 1) for key, item in value.items()}
        return _extension(_PAIRS, [_plain(part, depth + 1) for item in value.items() for part in item])
    if kind is tuple:
        return _extension(_TUPLE, [_plain(item, depth + 1) for item in value])
    return _array(value, kind)


def _extension(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encode(value))


def _array(value: Any, kind: type) -> msgspec.msgpack.Ext:
    if kind is np.ndarray or isinstance(value, np.generic):
        name = name_of(value.dtype)
        if name is None or is_bits(name):  # an extension type of ml_dtypes would come back as its bits
            raise _Unfit(f"NumPy's {value.dtype}", "use .tolist()")
        code = _ARRAY if kind is np.ndarray else _SCALAR
        return _extension(code, _Header(name, value.shape, value.tobytes()))
    if tensors.is_tensor(value):
        try:
            name, array = tensors.host_bits("", value)
        except SchemaMismatch as error:
            raise _Unfit(error.found, "use a plain tensor") from error
        return _extension(_TENSOR, _Header(name, array.shape, array.tobytes()))
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    hint = _HINTS.get(kind.__module__.partition(".")[0], "convert it to a dict, list, number, text, bytes or array")
    raise _Unfit(name, hint)


def _extended(code: int, data: memoryview) -> Any:
    if code in (_TUPLE, _PAIRS):
        items = _DECODER.decode(data)
        if type(items) is not list or (code == _PAIRS and len(items) % 2):
            raise ValueError("not a list of items")
        return tuple(items) if code == _TUPLE else dict(zip(items[::2], items[1::2], strict=True))
    if code not in (_ARRAY, _SCALAR, _TENSOR):
        raise ValueError(f"unknown extension {code}")
    header = _decode_header(data)
    dtype = storage(header.dtype)
    if any(dim < 0 for dim in header.shape) or math.prod(header.shape) * dtype.itemsize != len(header.data):
        raise ValueError(f"{len(header.data)} bytes are no array of {header.shape}")
    array = np.frombuffer(header.data, dtype).reshape(header.shape)
    if code == _SCALAR:
        return array[()]
    return array.copy() if code == _ARRAY else tensors.from_bits("", header.dtype, array.copy())


_DECODER = msgspec.msgpack.Decoder(ext_hook=_extended)
