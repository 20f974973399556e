"""Encodes arrays as bytes. In a snapshot (`pack`), constant arrays and arithmetic sequences take no bytes for each
value, and other integers take 1, 2, 4 or 8. In a message (`hook`), all are 64-bit integers.

`unpack` returns the values given to `pack`, as int64 or float64. It validates: a wrong length is a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, DataplaneError, ProtocolMismatch

_WIDTHS = ("<u1", "<u2", "<u4")
_FEW = 4  # rows for each distinct value, at least, for which distinct values are listed once


class PackedIntegers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` values. If `step` is not None, an arithmetic sequence from `first`. Otherwise `data` has numbers of the
    dtype `code`: floats are the values; integers plus `first` are the values or, with `listed`, indices into it."""

    count: int
    first: int = 0
    step: int | None = 0
    code: str = ""
    data: bytes = b""
    listed: bytes = b""


def pack(values: npt.NDArray[Any]) -> PackedIntegers:
    """Pack integers of at most 64 bits, or floats."""
    if values.dtype.kind == "f":
        listed, which = np.unique(values, return_inverse=True)
        if len(listed) * _FEW > len(values):
            return PackedIntegers(len(values), step=None, code="<f8", data=values.astype("<f8").tobytes())
        inner = pack(which.astype(np.int64))
        data = inner.data if inner.step is None else which.astype("<u4").tobytes()
        code = inner.code if inner.step is None else "<u4"
        first = inner.first if inner.step is None else 0
        return PackedIntegers(len(values), first, None, code, data, listed.astype("<f8").tobytes())
    if not len(values):
        return PackedIntegers(0)
    values = values.astype(np.int64, copy=False)
    first = int(values[0])
    step = int(values[1]) - first if len(values) > 1 else 0
    if abs(step) < 1 << 32 and (np.diff(values) == step).all():
        return PackedIntegers(len(values), first, step)
    least, span = int(values.min()), int(values.max()) - int(values.min())
    for code in _WIDTHS:
        if span <= np.iinfo(code).max:
            return PackedIntegers(len(values), least, None, code, (values - least).astype(code).tobytes())
    return PackedIntegers(len(values), 0, None, "<i8", values.astype("<i8").tobytes())


def unpack(packed: PackedIntegers, count: int | None = None) -> npt.NDArray[Any]:
    """The packed values, int64 or float64. Raises ValueError unless they are valid, and `count`."""
    if packed.count < 0 or (count is not None and packed.count != count):
        raise ValueError(f"{packed.count} values where {count} are expected")
    if packed.step is not None:
        return packed.first + packed.step * np.arange(packed.count)
    if packed.code not in (*_WIDTHS, "<i8", "<f8"):
        raise ValueError(f"no numbers are {packed.code!r}")
    values = np.frombuffer(packed.data, packed.code)
    if len(values) != packed.count:
        raise ValueError(f"{len(values)} values where {packed.count} are said")
    if packed.code == "<f8":
        return values.astype(np.float64)
    found = values.astype(np.int64) + packed.first
    if packed.listed:
        listed = np.frombuffer(packed.listed, "<f8").astype(np.float64)
        if len(found) and not 0 <= found.min() <= found.max() < len(listed):
            raise ValueError("a value that is not listed")
        return listed[found]
    return found


def hook(value: Any) -> Any:
    """The encoding of a reference or an array in a message."""
    if isinstance(value, BatchRef):
        return value.encode()
    if isinstance(value, np.ndarray):
        return value.astype("<i8", copy=False).tobytes()
    raise NotImplementedError(f"a message has no {type(value).__name__}")


def unhook(kind: Any, value: Any) -> Any:
    """The reference or array that a message encodes. Raises ValueError, Corrupt."""
    if kind is BatchRef:
        return BatchRef.decode(value)
    if len(value) % 8:
        raise ValueError("these are no 64-bit integers")
    return np.frombuffer(value, "<i8").astype(np.int64, copy=False)


def union(names: Mapping[str, object], base: type[msgspec.Struct]) -> Any:
    """The union type of all tagged subclasses of `base` among these names, for a decoder."""
    kinds = [each for each in names.values() if isinstance(each, type) and issubclass(each, base)]
    return reduce(or_, [kind for kind in kinds if kind.__struct_config__.tag is not None])


def decoder(kinds: Any, what: str, error: type[DataplaneError] = ProtocolMismatch) -> Callable[[bytes], Any]:
    """A decoder of messages of these types, with their arrays and references. It raises `error` for invalid bytes.
    `what`: a message, in the error's text."""
    decode = msgspec.msgpack.Decoder(kinds, dec_hook=unhook).decode

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except (msgspec.MsgspecError, ValueError, TypeError, Corrupt) as wrong:
            raise error(f"this is no {what}: {wrong}") from wrong

    return decoded
