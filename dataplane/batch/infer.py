"""Infers the kind of column for a list of Python values.

Rows that are arrays or lists of numbers are a ragged column, even if all have the same length: the kind follows from
types only. Rows that are numbers, text, bytes or dicts become dense, text, bytes and struct columns. Text and bytes may
be of any type: `numpy.str_` is returned as str, bytearray as bytes. Rows that no column of one type represents exactly
become objects (`object_codec`): arrays of text or records, arrays and tensors of several dtypes, tuples, and all other
values. A list without rows is an object column too. Numbers are converted only if nothing is lost: ints among floats
must be equal as floats. Lists that are all empty get the dtype of the column's rows in other shards
(`field.EMPTY_LISTS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch import _lists as extension
from dataplane.batch import object_codec, tensors
from dataplane.batch.dtypes import is_bits, name_of, storage
from dataplane.batch.field import EMPTY_LISTS, MAX_DEPTH, Field, is_text
from dataplane.batch.values import (
    Values,
    byte_rows,
    byte_run,
    dense,
    dtype_name,
    leading,
    mismatch,
    mismatch_in,
    offsets_of,
    ragged_items,
    ragged_rows,
    ragged_run,
    struct,
)
from dataplane.errors import SchemaMismatch

_MAX_KEYS = 1024  # dicts with more keys than this between them are maps, not records
INTS, FLOATS = Field("ragged", "int64", (None,)), Field("ragged", "float64", (None,))
_NO_NUMBERS = np.empty(0, np.int64)
_BYTES_LIKE = frozenset((bytes, bytearray, memoryview, np.bytes_))
_TEXT = frozenset((str, np.str_))


def infer(column: str, rows: Sequence[Any], depth: int = 0) -> Values:
    """The column whose rows are these values; `depth` structs are around it. Raises SchemaMismatch."""
    kinds = set(map(type, rows))
    if kinds == {list}:
        return _lists(column, rows)
    if kinds <= _TEXT and kinds:
        return _text(column, rows)
    if kinds <= _BYTES_LIKE and kinds:
        return byte_rows("bytes", [_flat(row) for row in rows])
    if kinds == {np.ndarray} or (kinds and all(isinstance(row, np.ndarray) for row in rows)):
        return _arrays(column, rows)
    if kinds == {dict}:
        return _dicts(column, rows, depth)
    if kinds and tensors.is_tensor(rows[0]):
        if all(tensors.is_tensor(row) for row in rows):
            return tensors.values_of_rows(column, rows) if _are_alike(rows) else object_codec.values_of(column, rows)
        if all(tensors.is_tensor(row) or isinstance(row, np.ndarray) for row in rows):
            return _mixed_arrays(column, rows)
    elif tensors.is_tensor(next((row for row in rows if not isinstance(row, np.ndarray)), None)):
        return _mixed_arrays(column, rows)
    numbers = _numbers(rows, kinds)
    return object_codec.values_of(column, rows) if numbers is None else dense(column, numbers)


def _flat(row: Any) -> Any:
    """A byte string of any type as one whose `len` is its size in bytes."""
    return row.tobytes() if type(row) is memoryview else row


def _text(column: str, rows: Sequence[str]) -> Values:
    joined = "".join(rows)
    if joined.isascii():  # then bytes are characters, and one encoding serves all rows
        return byte_run("text", np.frombuffer(joined.encode(), np.uint8), offsets_of(list(map(len, rows))))
    encoded = []
    for i, row in enumerate(rows):
        try:
            encoded.append(row.encode())
        except UnicodeEncodeError as error:
            found = "text with a lone surrogate"
            raise mismatch(column, f"{found}: encode it to bytes", row=i, expected="text", found=found) from error
    return byte_rows("text", encoded)


def _numbers(values: Sequence[Any], kinds: set[type]) -> npt.NDArray[Any] | None:
    """The values as an array of a dtype that represents each of them exactly; None if there is no such dtype."""
    if kinds == {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            unsigned = min(values) >= 0 and max(values) < 1 << 64
            return np.array(values, np.uint64) if unsigned else None
    if kinds == {float}:
        return np.array(values, np.float64)
    if kinds == {bool}:
        return np.array(values, np.bool_)
    if kinds == {complex}:
        return np.array(values, np.complex128)
    if kinds == {int, float}:
        exact = all(abs(value) <= 1 << 1023 and float(value) == value for value in values if type(value) is int)
        return np.array(values, np.float64) if exact else None
    if len(kinds) == 1 and issubclass(next(iter(kinds)), np.generic):
        dtypes = {value.dtype for value in values}
        dtype = dtypes.pop()
        name = None if dtypes else name_of(dtype)
        if name is not None and not is_bits(name):
            return np.array(values, dtype)
    return None


def _arrays(column: str, rows: Sequence[npt.NDArray[Any]]) -> Values:
    first = rows[0]
    _refuse_masked(column, rows)
    name = name_of(first.dtype)
    if name is None or not _are_alike(rows):
        return object_codec.values_of(column, [row.view(np.ndarray) for row in rows])
    if is_bits(name):
        rows = [row.view(storage(name)) for row in rows]
    if not first.ndim:
        return dense(column, np.array(rows, storage(name)), name)
    return ragged_rows(column, name, rows)


def _refuse_masked(column: str, rows: Sequence[Any]) -> None:
    for i, row in enumerate(rows):
        if isinstance(row, np.ma.MaskedArray):
            raise mismatch(column, "a masked array: fill it first", row=i, expected="an array", found="a masked array")


def _are_alike(rows: Sequence[Any]) -> bool:
    """Whether all arrays or tensors have the same dtype and number of dimensions."""
    return len({(row.dtype, row.ndim) for row in rows}) == 1


def _mixed_arrays(column: str, rows: Sequence[Any]) -> Values:
    """A ragged or dense column, if all rows are arrays or tensors of one dtype; else objects."""
    if not all(tensors.is_tensor(row) or isinstance(row, np.ndarray) for row in rows):
        return object_codec.values_of(column, rows)
    _refuse_masked(column, rows)
    bits = [
        tensors.host_bits(column, row) if tensors.is_tensor(row) else (name_of(row.dtype) or "", row) for row in rows
    ]
    name = bits[0][0]
    if not name or len({(dtype, array.ndim) for dtype, array in bits}) > 1:
        return object_codec.values_of(column, rows)
    arrays = [array.view(storage(name)) for _, array in bits]
    return ragged_rows(column, name, arrays) if arrays[0].ndim else dense(column, np.array(arrays), name)


def numbers_of(rows: Sequence[list[Any]]) -> tuple[bool, bytes, bytes] | None:
    """For lists that are all of 64-bit ints, or all of floats: whether they are floats, the bytes of the numbers in 64
    bits each, and the bytes of the rows' offsets, int64. None for other rows."""
    return extension.numbers(rows if type(rows) is list else list(rows))


def _lists(column: str, rows: Sequence[list[Any]]) -> Values:
    read = numbers_of(rows)
    if read is not None:
        floats, packed, offsets = read
        return ragged_run(FLOATS if floats else INTS, np.frombuffer(packed, np.uint8), np.frombuffer(offsets, np.int64))
    kinds: set[type] = set()
    for row in rows:
        kinds.update(map(type, row))
    if kinds == {list}:
        return _nested_lists(column, rows)
    if not kinds:
        return empty_lists(len(rows))
    numbers = _numbers(list(chain.from_iterable(rows)), kinds)
    if numbers is None:
        return object_codec.values_of(column, rows)
    return ragged_items(column, dtype_name(column, numbers.dtype), [(len(row),) for row in rows], (None,), numbers)


def empty_lists(rows: int) -> Values:
    """A column of `rows` empty lists."""
    return ragged_run(EMPTY_LISTS, _NO_NUMBERS, np.zeros(rows + 1, np.int64))


def _nested_lists(column: str, rows: Sequence[list[Any]]) -> Values:
    """A column of nested lists: ragged if all rows are rectangles of numbers of equal depth, else objects."""
    shapes = [_rectangle(row, 0) for row in rows]
    ndim = max(len(shape) if shape else 0 for shape in shapes)
    full = [shape for shape in shapes if shape is not None and len(shape) == ndim]
    flat: Iterable[Any] = rows
    # A row that ends early, as [] among [[1, 2]], has no elements; it takes the others' trailing dimensions.
    whole = [(*shape, *full[0][len(shape) :]) for shape in shapes if shape and (len(shape) == ndim or not shape[-1])]
    if len(whole) < len(rows) or ndim > MAX_DEPTH:
        return object_codec.values_of(column, rows)
    for _ in range(ndim):
        flat = chain.from_iterable(flat)
    leaves = list(flat)
    numbers = _numbers(leaves, set(map(type, leaves))) if leaves else _NO_NUMBERS
    if numbers is None:
        return object_codec.values_of(column, rows)
    return ragged_items(column, dtype_name(column, numbers.dtype), whole, leading(whole), numbers)


def _rectangle(value: list[Any], depth: int) -> tuple[int, ...] | None:
    """The shape of nested lists, or None if they are not rectangular."""
    inner = [type(item) is list for item in value]
    if not any(inner):
        return (len(value),)
    if not all(inner) or depth > MAX_DEPTH:
        return None
    shapes = {_rectangle(item, depth + 1) for item in value}
    shape = shapes.pop()
    return None if shapes or shape is None else (len(value), *shape)


def _dicts(column: str, rows: Sequence[dict[Any, Any]], depth: int) -> Values:
    keys = list(dict.fromkeys(chain.from_iterable(rows)))
    if depth >= MAX_DEPTH or len(keys) > _MAX_KEYS or not all(type(key) is str and is_text(key) for key in keys):
        return object_codec.values_of(column, rows)
    presence, children = [], []
    for key in keys:
        flags = np.fromiter((key in row for row in rows), np.bool_, len(rows))
        present = [row[key] for row in rows if key in row]
        try:
            children.append(infer(f"{column}.{key}", present, depth + 1))
        except SchemaMismatch as error:
            raise mismatch_in(error, error.column, np.flatnonzero(flags).tolist()) from error
        presence.append(flags)
    return struct(keys, presence, children, len(rows))
