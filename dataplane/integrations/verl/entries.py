"""Converts the entries of a TensorDict to columns, and back to the form that TransferQueue's own storage returns.

A tensor of one dimension is a dense column. A tensor of more dimensions is a dense column too, marked ragged:
TransferQueue returns rows jagged, verl calls `offsets()` on them, and rows of several puts differ in length. No byte is
copied in either case. A NonTensorStack of tensors is returned nested too. Other rows are returned as they were put:
text and bytes have columns of their own, dicts of tensors are structs whose tensors are read in place, and everything
else is an object of exact type, in MessagePack.

Invariants: no value is converted; an unsupported value raises SchemaMismatch with its field and row. torch and
tensordict are imported; both are there if TransferQueue is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue.metadata import extract_field_schema

from dataplane.batch import tensordicts, tensors, views
from dataplane.batch.batch import Column
from dataplane.batch.object_codec import Copies
from dataplane.batch.values import mismatch_in
from dataplane.errors import SchemaMismatch
from dataplane.integrations.verl.cells import DENSE, ROWS, TENSOR


class ObjectEntries(list[Any]):
    """Rows to be stored as objects, of any type."""


_OBJECTS = frozenset((int, float, bool, list, tuple, type(None)))  # types that are never a column of another kind
_SCALAR = torch.Size([1])
_FEW = 16  # rows, up to which a list of them is made sooner than a jagged tensor


def columns_of(data: TensorDict) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The columns to put, by field, and how each is returned. Fields that share the objects of all rows, as verl's
    `prompt` and `raw_prompt`, share one list. Raises SchemaMismatch for an unsupported entry."""
    columns, how = {}, {}
    seen: dict[tuple[int, ...], tuple[Any, bytes]] = {}
    for name, entry in tensordicts.entries_of(data):
        columns[name], how[name] = _column(name, entry, seen)
    return columns, how


def schema_of(data: TensorDict) -> dict[str, dict[str, Any]]:
    """The schema of the fields, as TransferQueue's `extract_field_schema` gives it."""
    if not _says_the_same() or not data.batch_size[0]:
        return dict(extract_field_schema(data))
    found = {}
    for name, entry in data.items():
        if type(entry) is torch.Tensor and not entry.is_nested and entry.ndim:
            shape = entry.shape[1:] if entry.ndim > 1 else _SCALAR
            found[name] = {"dtype": entry.dtype, "shape": shape, "is_nested": False, "is_non_tensor": False}
        elif type(entry) is NonTensorStack:
            found[name] = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
        else:
            return dict(extract_field_schema(data))
    return found


@lru_cache(maxsize=1)
def _says_the_same() -> bool:
    """Whether this TransferQueue's schema is the same as ours."""
    sample = {"a": torch.zeros(1, 2, 3), "b": torch.zeros(1, dtype=torch.int8), "c": NonTensorStack("x")}
    theirs = extract_field_schema(TensorDict(sample, batch_size=[1]))
    expected = {
        "a": {"dtype": torch.float32, "shape": torch.Size([2, 3]), "is_nested": False, "is_non_tensor": False},
        "b": {"dtype": torch.int8, "shape": _SCALAR, "is_nested": False, "is_non_tensor": False},
        "c": {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True},
    }
    return bool(theirs == expected)


def _column(name: str, entry: Any, seen: dict[tuple[int, ...], tuple[Any, bytes]]) -> tuple[Any, bytes]:
    """`seen`: columns of rows that are not one tensor, by the identities of the rows, which the batch keeps alive."""
    if type(entry) is NonTensorStack:
        return _once(tensordicts.values_of_stack(entry), seen)
    if type(entry) is torch.Tensor or isinstance(entry, torch.Tensor):
        if entry.is_nested or entry.ndim < 2 or entry.layout != torch.strided:
            return entry, TENSOR
        return list(entry.unbind()) if len(entry) <= _FEW else _ragged(entry), DENSE
    if tensordicts.is_tensordict(entry) and not tensordicts.is_non_tensor(entry):
        found = f"a {type(entry).__name__}"
        raise SchemaMismatch(
            f"field {name!r} is {found}: put its entries as fields of their own, or a NonTensorStack of dicts",
            column=name,
            expected="a tensor or a NonTensorStack",
            found=found,
        )
    found = tensordicts.rows_of(name, entry)
    if isinstance(found, torch.Tensor):
        return _column(name, found, seen)
    return _once(list(found), seen)


def _once(rows: list[Any], seen: dict[tuple[int, ...], tuple[Any, bytes]]) -> tuple[Any, bytes]:
    identity = tuple(map(id, rows))
    if identity not in seen:
        seen[identity] = _others(rows)
    return seen[identity]


def _others(rows: list[Any]) -> tuple[Any, bytes]:
    if set(map(type, rows)) <= _OBJECTS:
        return ObjectEntries(rows), ROWS
    if tensors.alike(rows):
        return rows, TENSOR
    if _is_column(rows):
        return rows, ROWS
    return ObjectEntries(rows), ROWS


def _ragged(tensor: torch.Tensor) -> torch.Tensor:
    rows, length = tensor.shape[:2]
    offsets = torch.arange(0, (rows + 1) * length, length) if length else torch.zeros(rows + 1, dtype=torch.int64)
    return tensors.jagged(tensor.detach().flatten(0, 1), offsets)


def _is_column(rows: Sequence[Any]) -> bool:
    """Whether a column of these rows returns exactly them."""
    kinds = set(map(type, rows))
    if kinds == {str} or kinds == {bytes}:
        return True
    if kinds != {dict} or not any(rows) or any(type(key) is not str for row in rows for key in row):
        return False
    keys = dict.fromkeys([key for row in rows for key in row])
    if any(list(row) != [key for key in keys if key in row] for row in rows):
        return False  # a struct has its keys in one order
    return all(tensors.alike([row[key] for row in rows if key in row]) for key in keys)


def entry_of(column: Column, how: bytes, *, dense: bool, copies: Copies | None = None) -> Any:
    """A whole field as TransferQueue returns it: a tensor, or a stack of other rows. `dense`: a tensor that was put
    dense is returned dense. `copies`: shared by fields that are read together, as verl's `prompt` and `raw_prompt`.

    Raises SchemaMismatch for a row of a class whose module is not imported here, and Corrupt.
    """
    if how not in (TENSOR, DENSE):
        return tensordicts.stacked(rows_of(column, copies))
    found = column.torch()
    if isinstance(found, list):
        return tensordicts.stacked(found)
    if how == DENSE and dense:
        lengths = column.lengths()
        assert lengths is not None, "a dense field is stored ragged"
        if len(set(lengths.tolist())) == 1:
            values = found.values()
            return values.view(len(column), int(lengths[0]), *values.shape[1:])
    return found


def rows_of(column: Column, copies: Copies | None = None) -> list[Any]:
    """The rows of the column, as they were put. `copies` as in `entry_of`."""
    if column.kind in ("text", "bytes", "object"):
        return views.python(column.name, column.field, column.reading, copies=copies)
    return column.tensors()


def merged(
    parts: Sequence[tuple[Column, bytes, np.ndarray[Any, Any] | None]], rows: int, copies: Copies | None = None
) -> Any:
    """A field with rows in several columns, each with the positions of its rows. Raises as `entry_of`."""
    whole: list[Any] = [None] * rows
    for column, _, positions in parts:
        places = range(rows) if positions is None else positions.tolist()
        try:
            found = rows_of(column, copies)
        except SchemaMismatch as error:
            raise mismatch_in(error, column.name, places) from error
        for place, row in zip(places, found, strict=True):
            whole[place] = row
    return tensordicts.stacked(whole)
