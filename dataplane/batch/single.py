"""One row of small columns, laid out as `batch.columns` lays out lists of one value, in a tenth of its time.

A trajectory that is put by itself has some 25 columns of a few bytes to a few kilobytes each. What a plan makes for
each (values, offsets as an array, jobs, a layout) takes longer than all of their bytes.

Invariants: what is laid out here is, byte by byte, what a plan of the same values is; whatever is not seen to be
simple is refused with None, and is the plan's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from dataplane.batch import form, objects, tensors
from dataplane.batch.dtypes import BITS, storage
from dataplane.batch.field import MAX_COLUMNS, MAX_NDIM, Field, is_text
from dataplane.batch.form import Form
from dataplane.batch.layout import ALIGNMENT, aligned

MOST = 64 << 10
"""Bytes of a row that is small: what travels in a message to the node."""

LARGE = 16 << 10
"""Bytes from which on a value is not small: a few of those would take all of that."""

_PADDING = bytes(ALIGNMENT)
_PRESENT = b"\1".ljust(ALIGNMENT, b"\0")
_OFFSETS = struct.Struct("<qq")
_TEXT, _BYTES, _OBJECT = (Form(Field(kind), 2) for kind in ("text", "bytes", "object"))


class Single(NamedTuple):
    """A column of one row: its form, its items (negative: it has no offsets), and the bytes of its values. `kind`: the
    key of a struct that it is the value of (`batch.variants`); empty where it is a column by itself."""

    form: Form
    items: int
    data: bytes
    kind: str = ""


class Row(NamedTuple):
    """Columns of one row: the bytes of a shard, its layout, and of each column name, field, and logical bytes."""

    payload: bytes
    layout: bytes
    columns: list[tuple[str, Field, int]]


def single(name: str, values: Any, *, as_object: bool) -> Single | None:
    """One column whose values are a list of one, or a tensor [1]; `as_object`: whatever the value looks like. None for
    what is not small or not simple. Raises SchemaMismatch for an object that can not be held."""
    if as_object:
        (row,) = objects.encode(name, values)
        return None if row.parts or len(row.tree) > LARGE else Single(_OBJECT, len(row.tree), row.tree)
    if type(values) is not list:
        return _dense(values) if tensors.is_tensor(values) and values.ndim == 1 else None
    (value,) = values
    if type(value) is str and value.isascii():
        return Single(_TEXT, len(value), value.encode()) if len(value) <= LARGE else None
    if type(value) is bytes:
        return Single(_BYTES, len(value), value) if len(value) <= LARGE else None
    return _ragged(value) if tensors.is_tensor(value) and value.ndim else None


def _dense(tensor: Any) -> Single | None:
    data = _data(tensor)
    return None if data is None else Single(_form("dense", str(tensor.dtype)[6:], ()), -1, data)


def _ragged(tensor: Any) -> Single | None:
    data, shape = _data(tensor), tuple(tensor.shape)
    if data is None or len(shape) > MAX_NDIM:
        return None
    return Single(_form("ragged", str(tensor.dtype)[6:], (None, *shape[1:])), shape[0], data)


def _data(tensor: Any) -> bytes | None:
    """The bytes of a plain tensor in host memory that has some."""
    name = str(tensor.dtype)[6:]
    if name in BITS or not tensors.alike([tensor]) or tensor.device.type != "cpu" or not 0 < tensor.nbytes <= LARGE:
        return None
    if not _is_known(name) or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return None
    data: bytes = tensor.numpy().tobytes()
    return data


@lru_cache(maxsize=256)
def _is_known(dtype: str) -> bool:
    try:
        storage(dtype)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1 << 10)
def _form(kind: Any, dtype: str, shape: tuple[int | None, ...]) -> Form:
    return Form(Field(kind, dtype, shape), 1 if kind == "dense" else 2)


@lru_cache(maxsize=1 << 10)
def _of_kind(kind: str, own: Form) -> Form:
    return Form(Field("struct", children=((kind, own.field),)), 1, (own,))


def laid_out(columns: Sequence[tuple[str, Single]]) -> Row | None:
    """The columns one behind another; None where they are none, take more than `MOST` bytes, or a name is none."""
    numbers: list[int] = []
    pieces: list[bytes] = []
    base = 0
    for name, (_, items, data, kind) in columns:
        if not name or not is_text(name):
            return None
        if kind:
            numbers += (1, 1, base, 1)
            pieces.append(_PRESENT)
            base += ALIGNMENT
        numbers += (1, 1)
        if items >= 0:
            numbers += (base, _OFFSETS.size)
            pieces += (_OFFSETS.pack(0, items), _PADDING[_OFFSETS.size :])
            base += ALIGNMENT
        size = len(data)
        numbers += (base, size)
        pieces += (data, _PADDING[: aligned(size) - size])
        base += aligned(size)
    if base > MOST or not 0 < len(columns) <= MAX_COLUMNS:
        return None
    forms = [(name, _of_kind(each.kind, each.form) if each.kind else each.form) for name, each in columns]
    layout = form.join(forms, numbers)
    described = [(name, own.field, len(each.data)) for (name, own), (_, each) in zip(forms, columns, strict=True)]
    return Row(b"".join(pieces), layout, described)
