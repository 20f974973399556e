"""Names of every NumPy dtype whose bytes mean the same on each host, for arrays that are kept as what they are.

A column has one of the dtypes of `dtypes`; an array inside of a row may have any that is named here: those, text and
bytes of a fixed length ("<U8", "|S10"), plain void ("|V5"), records, and those of `ml_dtypes`. A record's name is JSON:
its fields with their names, offsets and titles. Objects are no such dtype (`objects` walks them), nor is long double.

Names come from other processes as well: `exact_dtype` knows a closed set and raises ValueError for anything else.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.dtypes import DType, is_bits, name_of, storage

_FIXED = re.compile(r"[<>|][SUV]\d{1,9}")
_EXTENSIONS = frozenset(
    (
        *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
        *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
    )
)  # of ml_dtypes
_MAX_DEPTH = 16  # of records in records


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A field of a record: the name of its dtype, and the shape of the array of those that it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    title: str | None = None


class _Record(msgspec.Struct, frozen=True):
    fields: tuple[_Entry, ...]
    nbytes: int
    aligned: bool = False
    record: bool = False  # scalars are numpy.record


_parse = msgspec.json.Decoder(_Record).decode


def exact_name(dtype: DType) -> str | None:
    """The name of a NumPy dtype; None where it has no exact form."""
    if dtype.names is not None:
        return _record_name(dtype)
    if dtype.kind in "SUV" and dtype.type in (np.bytes_, np.str_, np.void) and dtype.subdtype is None:
        return dtype.str
    name = name_of(dtype)
    if name is not None and not is_bits(name):
        return name
    return dtype.name if dtype.name in _EXTENSIONS and dtype.type.__module__ == "ml_dtypes" else None


def exact_dtype(name: str, depth: int = 0) -> DType:
    """The dtype of that name. Raises ValueError for a name that there is not."""
    if name.startswith("{"):
        return _record(name, depth)
    if _FIXED.fullmatch(name):
        return np.dtype(name)
    if name not in _EXTENSIONS:
        return storage(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ValueError(f"an array of {name}, for which ml_dtypes has to be installed here") from error
    dtype: DType = np.dtype(getattr(ml_dtypes, name))
    return dtype


def check_text(array: np.ndarray[Any, Any]) -> None:
    """Raises ValueError where text of a fixed length has code points that there are not."""
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
        entries.append(_Entry(name, base_name, shape, offset, *title))
    if dtype.type not in (np.void, np.record):
        return None
    made = _Record(tuple(entries), dtype.itemsize, dtype.isalignedstruct, dtype.type is np.record)
    return msgspec.json.encode(made).decode()


def _record(name: str, depth: int) -> DType:
    if depth >= _MAX_DEPTH:
        raise ValueError("records too deep in each other")
    try:
        parsed = _parse(name)
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
