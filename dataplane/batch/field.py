"""The type of a column's rows: kind, dtype and shape, as a value that crosses sockets.

A `Field` depends only on the types and shapes of the values, not on the number of rows or on equal lengths of some
rows. The exception is a ragged field, which has the sizes of the trailing dimensions that all its rows share. So the
fields of two parts of one column may differ in the number of dimensions that vary (`merge_fields`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal, cast

import msgspec

from dataplane.batch.dtypes import NULL, split, storage
from dataplane.errors import Corrupt, SchemaMismatch

Kind = Literal["dense", "ragged", "text", "bytes", "struct", "object"]

MEASURED = ("ragged", "text", "bytes")  # the kinds whose rows have lengths
MAX_COLUMNS = 10_000  # of a shard, keys of structs included
MAX_DEPTH = 16  # of structs in structs
MAX_NDIM = 32
MAX_BYTES = 1 << 62  # the largest product of rows, shape and item size; a dimension of zero counts as one
MAX_EMPTY = 1 << 24  # the largest product of rows and shape if rows take no bytes: in a list, each is an object


class Field(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The type of a column's rows. `shape` is the shape of one row; a dimension in which rows differ is None.

    `dtype` is named as in `dataplane.batch.dtypes`; "" for text, bytes, struct and object, "null" for lists that are
    all empty (`EMPTY_LISTS`). A dense row has a shape of integers, () for a scalar. In a ragged row one or more leading
    dimensions are None, and the others integers. `children` are the keys of a struct.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    children: tuple[tuple[str, Field], ...] = ()

    def __repr__(self) -> str:
        if self.kind == "struct":
            return f"struct{{{', '.join(f'{name}: {child!r}' for name, child in self.children)}}}"
        dims = ", ".join("*" if dim is None else str(dim) for dim in self.shape)
        return " ".join(part for part in (self.kind, self.dtype, f"[{dims}]" if dims else "") if part)

    @property
    def declared(self) -> Field:
        """The field that readers see: with the dtypes that were given, even if narrower ones are stored."""
        return _declared(self) if _is_narrow(self) else self

    @property
    def varying(self) -> int:
        """The number of leading dimensions that differ from row to row."""
        return self.shape.count(None)

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The shape of the unit that lengths count: a dense row, an item of a ragged one, or an element (()) if more
        than the first dimension varies."""
        if self.varying > 1:
            return ()
        return cast("tuple[int, ...]", self.shape[self.varying :])

    @property
    def item_nbytes(self) -> int:
        """The bytes of one unit of `item_shape`; 1 for text, bytes and object."""
        return storage(self.dtype).itemsize * math.prod(self.item_shape) if self.dtype else 1


def _is_narrow(field: Field) -> bool:
    return ":" in field.dtype or any(_is_narrow(child) for _, child in field.children)


@lru_cache(maxsize=1024)
def _declared(field: Field) -> Field:
    children = tuple((key, child.declared) for key, child in field.children)
    return Field(field.kind, split(field.dtype)[0], field.shape, children)


EMPTY_LISTS = Field("ragged", NULL, (None,))
"""The field of lists that are all empty. It merges with each ragged field, and with objects."""


def typed(field: Field) -> Field:
    """The field with the dtype int64 in place of "null"."""
    return _typed(field) if _has_null(field) else field


def _has_null(field: Field) -> bool:
    return field.dtype == NULL or any(_has_null(child) for _, child in field.children)


@lru_cache(maxsize=1024)
def _typed(field: Field) -> Field:
    children = tuple((key, typed(child)) for key, child in field.children)
    return Field(field.kind, "int64" if field.dtype == NULL else field.dtype, field.shape, children)


def is_text(name: Any) -> bool:
    """Whether the name is text that UTF-8 can represent, as every name must be."""
    if not isinstance(name, str):
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse(name: str, reason: str) -> Corrupt:
    """The error for an invalid column. The name and the reason are truncated, since they come from other processes."""
    return Corrupt(f"column {name[:200]!r}: {reason[:600]}")


def unit_bound(field: Field) -> int:
    """The bytes of a dense row or ragged item, if every dimension that is zero or varies had the size one."""
    return storage(field.dtype).itemsize * math.prod(dim or 1 for dim in field.shape)


@lru_cache(maxsize=1024)
def most_items(field: Field) -> int:
    """The most dense rows, items of all ragged rows, or bytes of text, bytes and objects, that a column may have."""
    if not field.dtype:
        return MAX_BYTES
    bound = unit_bound(field)
    return MAX_BYTES // bound if field.item_nbytes else MAX_EMPTY * storage(field.dtype).itemsize // bound


def check_field(name: str, field: Field) -> None:
    """Raises Corrupt if no column can have this field."""
    # A stack instead of recursion: the field comes from another process, and may be deep.
    left, count = [(name, field, 0)], 0
    while left:
        path, part, depth = left.pop()
        count += 1
        if depth > MAX_DEPTH or count > MAX_COLUMNS:
            raise refuse(name, f"more than {MAX_COLUMNS} keys, or {MAX_DEPTH} structs in each other")
        _check_one(path, part)
        left += [(f"{path}.{key}", child, depth + 1) for key, child in part.children]


def _check_one(name: str, field: Field) -> None:
    shape, typed = field.shape, field.kind in ("dense", "ragged")
    if (field.children and field.kind != "struct") or len(shape) > MAX_NDIM:
        raise refuse(name, f"a {field.kind} with {len(field.children)} keys and {len(shape)} dimensions")
    if len({key for key, _ in field.children}) != len(field.children):
        raise refuse(name, "the keys of a struct must differ")
    if not typed:
        if field.dtype or shape:
            raise refuse(name, f"{field.kind} has no dtype and no shape")
        return
    try:
        storage(field.dtype)
    except ValueError as error:
        raise refuse(name, str(error)) from error
    varying = field.varying
    if (varying > 0) != (field.kind == "ragged") or any(dim is None or dim < 0 for dim in shape[varying:]):
        raise refuse(name, f"{shape} is not the shape of a {field.kind} row")
    if unit_bound(field) > MAX_BYTES:
        raise refuse(name, f"a row of {shape} is too large")
    if field.dtype == NULL and field != EMPTY_LISTS:
        raise refuse(name, f"{shape} is not the shape of empty lists")


def merge_fields(name: str, fields: Iterable[Field]) -> Field:
    """The field of a column whose parts have these fields, at least one. Raises SchemaMismatch, naming the column, for
    different types."""
    merged: Field | None = None
    for field in fields:
        if merged is None:
            merged = field
        elif field is not merged and field != merged:
            merged = _merge(name, merged, field)
    if merged is None:
        raise ValueError(f"column {name!r} has no parts")
    return merged


def _merge(name: str, ours: Field, theirs: Field) -> Field:
    if ours == theirs:
        return ours
    if ours.kind == theirs.kind == "struct":
        keys = dict(ours.children)
        for key, field in theirs.children:
            keys[key] = _merge(f"{name}.{key}", keys[key], field) if key in keys else field
        return Field("struct", children=tuple(keys.items()))
    for one, other in ((ours, theirs), (theirs, ours)):
        if one == EMPTY_LISTS and other.kind in ("ragged", "object"):
            return other
    alike = ours.kind == theirs.kind and ours.dtype == theirs.dtype and len(ours.shape) == len(theirs.shape)
    if not alike or ours.kind != "ragged":
        raise SchemaMismatch(
            f"column {name!r} is {theirs!r} here, and {ours!r} in the rows before: all rows of a column have one type",
            column=name,
            expected=repr(ours),
            found=repr(theirs),
        )
    pairs = enumerate(zip(ours.shape, theirs.shape, strict=True))
    varying = max(axis + 1 for axis, (a, b) in pairs if a != b or a is None)
    return Field("ragged", ours.dtype, (None,) * varying + ours.shape[varying:])
