"""Names of element types (dtypes), and the NumPy dtypes in which they are stored.

A dtype is named as in torch: "float32", "bfloat16", "float8_e4m3fn", "bool", "complex64". A time type is named as in
NumPy, "datetime64[ns]", and a big-endian dtype has ">" in front, ">float32". Dtypes that NumPy lacks are stored as
their bits, in the unsigned integer of the same size: `storage("bfloat16")` is uint16, so a NaN keeps its payload and
nothing is rounded. Integers that are stored narrower than they were given have both dtypes in their name: "int64:uint8"
is int64 for readers (`Field.declared`), and one byte each in the shard. "null" is the dtype of lists that are all empty
(`field.EMPTY_LISTS`), as Arrow's null type; its storage is int64, without elements.

An array inside an object may have any dtype whose bytes mean the same on each host (`exact_name`): one of the above,
text or bytes of a fixed length ("<U8", "|S10"), plain void ("|V5"), a record, or a dtype of `ml_dtypes`. A record's
name is JSON: its fields with their names, dtypes, shapes, offsets and titles.

Names come from other processes as well. `storage` and `exact_dtype` know a closed set and raise ValueError for other
names. Platform types (long double) are refused, since their bytes mean different things on different hosts.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

DType = np.dtype[Any]

#: Types without a NumPy counterpart, and the unsigned integer that holds their bits.
BITS: dict[str, DType] = {
    "bfloat16": np.dtype("uint16"),
    "float8_e4m3fn": np.dtype("uint8"),
    "float8_e4m3fnuz": np.dtype("uint8"),
    "float8_e5m2": np.dtype("uint8"),
    "float8_e5m2fnuz": np.dtype("uint8"),
    "float8_e8m0fnu": np.dtype("uint8"),
    "float4_e2m1fn_x2": np.dtype("uint8"),
    "complex32": np.dtype("uint32"),
}

_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
NULL = "null"
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TIME = re.compile(r"(datetime64|timedelta64)(\[(\d{1,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")


@lru_cache(maxsize=1024)
def storage(name: str) -> DType:
    """The NumPy dtype in which the dtype called `name` is stored. Raises ValueError for an unknown name."""
    if (bits := BITS.get(name)) is not None:
        return bits
    if name == NULL:
        return np.dtype(np.int64)
    wide, narrow = split(name)
    if narrow:
        return _narrow(wide, narrow)
    plain = name.removeprefix(">")
    if plain not in _NATIVE and not _TIME.fullmatch(plain):
        raise ValueError(f"unknown dtype {name!r}")
    try:
        dtype = np.dtype(plain)
    except TypeError as error:  # e.g. a multiple of a time unit that NumPy cannot hold
        raise ValueError(f"unknown dtype {name!r}") from error
    if name == plain:
        return dtype
    if dtype.itemsize == 1:
        raise ValueError(f"dtype {name!r}: one byte has no order")
    return dtype.newbyteorder(">")


def _narrow(wide: str, narrow: str) -> DType:
    """The NumPy dtype `narrow`. Raises ValueError unless both names are integers and it is narrower than `wide`."""
    whole, part = wide.removeprefix(">"), np.dtype(narrow) if narrow in INTEGERS else None
    if whole not in INTEGERS or part is None or part.itemsize >= np.dtype(whole).itemsize:
        raise ValueError(f"unknown dtype '{wide}:{narrow}'")
    return part


def split(name: str) -> tuple[str, str]:
    """The dtype that readers see, and the narrower one that is stored; "" if they are the same."""
    wide, _, narrow = name.partition(":")
    return wide, narrow


def is_integer(name: str) -> bool:
    return split(name)[0].removeprefix(">") in INTEGERS


@lru_cache(maxsize=1024)
def name_of(dtype: DType) -> str | None:
    """The name of a NumPy dtype, or None if a dense column cannot store it (objects, text, records, long double).

    The extension types of `ml_dtypes` ("bfloat16", "float8_e5m2", ...) are named like torch's.
    """
    name = dtype.name
    if name in BITS:
        return name if dtype.itemsize == BITS[name].itemsize else None
    if dtype.kind not in "biufcmM" or (name not in _NATIVE and not _TIME.fullmatch(name)):
        return None
    return name if dtype.isnative else f">{name}"


def is_bits(name: str) -> bool:
    """Whether the dtype is stored as its bits, since NumPy lacks it."""
    return name in BITS


def is_time(name: str) -> bool:
    return name.removeprefix(">").startswith(("datetime64", "timedelta64"))


def decoded(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values of an array of the dtype's storage type, in a NumPy type that represents each of them exactly.

    Packed four-bit floats stay bytes.
    """
    if name == "bfloat16":
        wide: np.ndarray[Any, Any] = np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
        return wide
    if name == "complex32":
        pairs: np.ndarray[Any, Any] = np.ascontiguousarray(array)[..., None].view(np.float16)
        whole: np.ndarray[Any, Any] = pairs.astype(np.float32).view(np.complex64)[..., 0]
        return whole
    if name.startswith("float8"):
        floats: np.ndarray[Any, Any] = array.view(exact_dtype(name)).astype(np.float64)
        return floats
    return array


_FIXED = re.compile(r"[<>|][SUV]\d{1,9}")
_EXTENSIONS = frozenset(
    (
        *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
        *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
    )
)  # of ml_dtypes
_MAX_DEPTH = 16  # of records in records


class _RecordField(msgspec.Struct, frozen=True, array_like=True):
    """A field of a record. `dtype`: the name of its dtype. `shape`: () for a single value. `offset`: in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    title: str | None = None


class _Record(msgspec.Struct, frozen=True):
    fields: tuple[_RecordField, ...]
    nbytes: int
    aligned: bool = False
    record: bool = False  # scalars are numpy.record


_parse_record = msgspec.json.Decoder(_Record).decode


def exact_name(dtype: DType) -> str | None:
    """The name of a NumPy dtype; None if it cannot be stored exactly."""
    if dtype.names is not None:
        return _record_name(dtype)
    if dtype.kind in "SUV" and dtype.type in (np.bytes_, np.str_, np.void) and dtype.subdtype is None:
        return dtype.str
    name = name_of(dtype)
    if name is not None and not is_bits(name):
        return name
    return dtype.name if dtype.name in _EXTENSIONS and dtype.type.__module__ == "ml_dtypes" else None


def exact_dtype(name: str, depth: int = 0) -> DType:
    """The dtype of this name; `depth` records are around it. Raises ValueError for an unknown name."""
    if name.startswith("{"):
        return _record(name, depth)
    if _FIXED.fullmatch(name):
        return np.dtype(name)
    if name not in _EXTENSIONS:
        return storage(name)
    import ml_dtypes  # seldom needed

    dtype: DType = np.dtype(getattr(ml_dtypes, name))
    return dtype


def check_text(array: np.ndarray[Any, Any]) -> None:
    """Raises ValueError if text of a fixed length has invalid code points."""
    for name in array.dtype.names or ():
        check_text(array[name])
    if array.dtype.kind == "U" and array.size and array.dtype.itemsize:
        points = np.ascontiguousarray(array).reshape(-1).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if int(points.max()) > 0x10FFFF:
            raise ValueError("text of code points that there are not")


def _record_name(dtype: DType) -> str | None:
    entries = []
    for name in dtype.names or ():
        own, offset, *title = dtype.fields[name]  # type: ignore[index]  # there are fields where there are names
        base, shape = own.subdtype or (own, ())
        base_name = exact_name(base)
        if base_name is None or (title and type(title[0]) is not str):
            return None
        entries.append(_RecordField(name, base_name, shape, offset, *title))
    if dtype.type not in (np.void, np.record):
        return None
    made = _Record(tuple(entries), dtype.itemsize, dtype.isalignedstruct, dtype.type is np.record)
    return msgspec.json.encode(made).decode()


def _record(name: str, depth: int) -> DType:
    if depth >= _MAX_DEPTH:
        raise ValueError("records too deep in each other")
    try:
        parsed = _parse_record(name)
        entries = parsed.fields
        dtype: DType = np.dtype(
            {
                "names": [each.name for each in entries],
                "formats": [np.dtype((exact_dtype(each.dtype, depth + 1), each.shape)) for each in entries],
                "offsets": [each.offset for each in entries],
                "itemsize": parsed.nbytes,
                "titles": [each.title for each in entries],
            },
            align=parsed.aligned,
        )
    except (TypeError, msgspec.MsgspecError) as error:
        raise ValueError(f"no record: {error}") from error
    return np.dtype((np.record, dtype)) if parsed.record else dtype
