"""What a column is after its rows were sliced."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from dataplane.batch import cuts
from dataplane.batch.cuts import END, SHARE, SLICE, ZIGZAG, Index, Number, Step
from dataplane.batch.field import Field
from dataplane.errors import Misuse, SchemaMismatch


def slice_step(start: Any, stop: Any, rows: int) -> Step:
    """The slice of so many rows. Raises Misuse."""
    first = 0 if start is None else _numbers("start", start, rows)
    last = END if stop is None else _numbers("stop", stop, rows)
    return Step(SLICE, 0, (first, last))


def _numbers(what: str, value: Any, rows: int) -> Number:
    """An integer for all rows, or one a row."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | list | tuple) and np.ndim(value):
        array = np.asarray(value)
        if array.shape != (rows,) or (array.dtype.kind not in "iu" and rows):
            raise Misuse(f"{what} is an integer, or one a row: {rows} integers, not {array.dtype} {list(array.shape)}")
        found: Index = np.clip(array, -END, END).astype(np.int64)
        return found
    try:
        return max(-END, min(END, operator.index(value)))
    except TypeError:
        raise Misuse(f"{what} is an integer, or one a row, not {value!r:.100}") from None


def share_step(rank: Any, ranks: Any, zigzag: bool, multiple: Any) -> Step:
    """The share of a rank. Raises Misuse."""
    least = "2 x ranks" if zigzag else "ranks"
    try:
        own, count = operator.index(rank), operator.index(ranks)
        padded = count * (2 if zigzag else 1) if multiple is None else operator.index(multiple)
        step = Step(ZIGZAG if zigzag else SHARE, 0, (own, count, padded))
        cuts.check(step)
    except (TypeError, ValueError, OverflowError):
        raise Misuse(
            f"a share is of a rank of so many, in rows padded to a multiple of {least}; "
            f"not of {rank!r} of {ranks!r} in multiples of {multiple!r}"
        ) from None
    return step


def axis_of(name: str, field: Field, axis: Any) -> int:
    """The dimension of a row, counted from the first. Raises SchemaMismatch, Misuse."""
    try:
        axis = operator.index(axis)
    except TypeError:
        raise Misuse(f"a dimension of a row is named by its number, not {axis!r}") from None
    if field.kind == "struct" and field.children:
        found = {axis_of(f"{name}.{key}", child, axis) for key, child in field.children}
        if len(found) > 1:
            raise _unfit(name, field, f"dimension {axis} is not the same of all keys: name it from the first")
        return found.pop()
    if field.kind not in ("dense", "ragged"):
        raise _unfit(name, field, "only rows of numbers are sliced")
    dims = len(field.shape)
    if not -dims <= axis < dims:
        raise _unfit(name, field, f"a row has {dims} dimensions, and no dimension {axis}")
    return int(axis) % dims


def size_of(field: Field, axis: int) -> int:
    """How long all rows are in a dimension; 0 where they differ."""
    if field.kind == "struct":
        sizes = {size_of(child, axis) for _, child in field.children}
        return sizes.pop() if len(sizes) == 1 else 0
    return field.shape[axis] or 0


def _unfit(name: str, field: Field, why: str) -> SchemaMismatch:
    return SchemaMismatch(f"column {name!r} is {field!r}: {why}", column=name, expected="numbers", found=repr(field))


def cut_field(name: str, field: Field, step: Step) -> Field:
    """The field after one more step."""
    if field.kind == "struct":
        children = tuple([(key, cut_field(f"{name}.{key}", child, step)) for key, child in field.children])
        return Field("struct", children=children)
    axis, shape = step.axis, list(field.shape)
    size = shape[axis]
    if size is None:
        return field
    if not cuts.is_even((step,)):
        shape[: axis + 1] = [None] * (axis + 1)
        return Field("ragged", field.dtype, tuple(shape))
    shape[axis] = cuts.length((step,), size)
    return Field(field.kind, field.dtype, tuple(shape))
