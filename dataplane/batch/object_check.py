"""Columns that are to be numbers, text, bytes or structs, and none of objects: `objects="refuse"`.

One `None` among numbers makes objects of all rows, which have no tensor. Invariants: a column is refused where
it would be stored as objects, a struct for any of its keys, whatever it was given as; the row that is named is the
first with which the rows up to it are no column of one type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dataplane.batch.columns import columns_of, values_of
from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import Values, mismatch
from dataplane.errors import Misuse, SchemaMismatch

Objects = Literal["store", "refuse"]
"""Whether a column of mixed rows is stored as objects, or refused."""


def refuses(objects: Any) -> bool:
    """Whether object columns are refused. Raises Misuse for what says neither."""
    if objects not in ("store", "refuse"):
        raise Misuse(f'objects is "store" or "refuse", not {objects!r:.100}')
    return bool(objects == "refuse")


def without_objects(columns: Any) -> BatchRef | Mapping[str, Values]:
    """The columns, or the reference. Raises SchemaMismatch as `columns.plan`, and for a column that is of objects."""
    if isinstance(columns, BatchRef):
        for name, field in columns.schema.items():
            _check(name, field, None)
        return columns
    found = dict(columns_of(columns))
    for name, values in found.items():
        _check(name, values.field, columns[name] if isinstance(columns, Mapping) else None)
    return found


def _check(name: str, field: Field, given: Any) -> None:
    for key, child in field.children:
        _check_key(name, key, child, given)
    if field.kind != "object":
        return
    rows = _rows_of(given)
    expected = "numbers, text, bytes or dicts, of one type in all rows"
    if rows is None or not len(rows):
        hint = "" if rows is None else ": it has no rows to say what they are, so put np.empty((0, ...), dtype)"
        raise mismatch(name, f"it would be stored as objects{hint}", expected=expected, found="objects")
    row = _spoiler(name, rows)
    found = _said(rows[row])
    among = f" among {_said(rows[0])}" if row and _said(rows[0]) != found else ""
    message = f"{found}{among}: the column would be stored as objects, which have no tensor"
    raise mismatch(name, message, row=row, expected=expected, found=found)


def _check_key(name: str, key: str, field: Field, given: Any) -> None:
    """The same of what is under a key of a struct, with the number of the row of the whole column."""
    if isinstance(given, Mapping):
        _check(f"{name}.{key}", field, given.get(key))
        return
    rows = _rows_of(given)
    if rows is None or not all(isinstance(row, Mapping) for row in rows):
        _check(f"{name}.{key}", field, None)
        return
    having = [i for i, row in enumerate(rows) if key in row]
    try:
        _check(f"{name}.{key}", field, [rows[i][key] for i in having])
    except SchemaMismatch as error:
        if error.row < 0:
            raise
        message = str(error).replace(f"row {error.row}:", f"row {having[error.row]}:", 1)
        raise SchemaMismatch(message, **{**error.fields, "row": having[error.row]}) from None


def _rows_of(given: Any) -> Sequence[Any] | None:
    """The rows as Python values; None where they are not at hand."""
    if isinstance(given, np.ndarray):
        return list(given)
    if hasattr(given, "to_pylist"):  # of Arrow
        rows: list[Any] = given.to_pylist()
        return rows
    return given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else None


def _spoiler(name: str, rows: Sequence[Any]) -> int:
    """The first row with which rows are objects."""
    low, high = 0, len(rows)  # that many rows are none, so many are
    while high - low > 1:
        middle = (low + high) // 2
        if values_of(name, list(rows[:middle])).field.kind == "object":
            high = middle
        else:
            low = middle
    return high - 1


def _said(row: Any) -> str:
    """What a row is, in a few words."""
    if isinstance(row, list | tuple):
        inner = ", ".join(sorted({type(item).__name__ for item in row}))
        return f"{type(row).__name__} of {inner}" if inner else f"an empty {type(row).__name__}"
    if row is None:
        return "None"
    dtype = getattr(row, "dtype", None)
    shape = getattr(row, "shape", None)
    kind = type(row).__name__
    return kind if dtype is None or shape is None else f"{kind} of {dtype}, {len(shape)}-d"
