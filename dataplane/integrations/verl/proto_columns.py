"""The columns of a DataProto into the plane and out of it, each with its type.

| a column of | is stored as | is returned as |
|---|---|---|
| `batch` | dense, or ragged if it is nested | a tensor on the CPU, in place if the rows lie in one run |
| `non_tensor_batch`, an array of numbers or times | dense | an array of that dtype |
| ... of text, or of bytes | text, or bytes | an array of text, or of bytes, as wide as its longest row |
| ... of text in several dimensions, of records | MessagePack, an array a row | an array of that dtype |
| ... of objects, all dicts or None, as `multi_modal_inputs` | struct | dicts of tensors in place, or handles |
| ... of objects, all `LazyRow` or None | not at all: it is stored already | as the one above |
| ... of any other objects, images among them, also in several dimensions | MessagePack, exact in type | the objects |

A value that MessagePack cannot represent (`dataplane.batch.object_codec`) is refused with the name of its column:
nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from dataplane.batch.batch import Batch, Column
from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane
from dataplane.errors import SchemaMismatch
from dataplane.integrations.rows import LazyRow, encoded, lazy_rows, read_rows
from dataplane.integrations.verl.columns import Columns, Kind

#: What the responses of a prompt share, and is large.
SHARED = ("multi_modal_inputs",)


def store(
    plane: Plane,
    tensors: Mapping[str, Any] | None,
    others: Mapping[str, npt.NDArray[Any]],
    rows: int,
    *,
    dedupe: Collection[str] = (),
    scope: str | None = None,
    timeout: float = 60.0,
) -> Columns:
    """Put the columns of a DataProto; of those named in `dedupe`, equal rows are stored once.

    Raises SchemaMismatch for an unsupported column, and as `Plane.put`.
    """
    columns: dict[str, Any] = {}
    kinds: dict[str, Kind] = {}
    handles: dict[str, Sequence[Any]] = {}
    for name, tensor in (tensors if tensors is not None else {}).items():
        columns[name], kinds[name] = tensor, "tensor"
    for name, array in others.items():
        if name in kinds:
            raise SchemaMismatch(f"column {name!r} is in batch and in non_tensor_batch: rename one", column=name)
        kinds[name] = _kind(name, array, dedupe)
        if kinds[name] == "rows" and any(isinstance(row, LazyRow) for row in array):
            handles[name] = array.tolist()
        else:
            columns[name] = _stored(array, kinds[name])
    once = [name for name in columns if name in dedupe]
    ref = plane.put(columns, scope=scope, dedupe=once, timeout=timeout) if columns else None
    for name, values in handles.items():
        more = _of_handles(plane, name, values, scope, timeout)
        ref = more if ref is None else ref.union(more)
    return Columns(None if ref is None else ref.select(*kinds), kinds, rows, tensors is not None)


def load(
    plane: Plane, columns: Columns, lazy: Collection[str] = (), *, timeout: float = 60.0, device: Any = None
) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """The `batch` and the `non_tensor_batch` of these columns; for those in `lazy`, handles of the rows. `device`: the
    device of the tensors, if not the host.

    Raises as `Plane.get`.
    """
    tensors: dict[str, Any] = {}
    others: dict[str, npt.NDArray[Any]] = {}
    for name in lazy:
        if columns.kinds.get(name) != "rows":
            what = f"column {name!r} is no column of dicts: only those are left as handles"
            raise SchemaMismatch(what, column=name, expected="rows", found=columns.kinds.get(name, "not there"))
    read = [name for name in columns.kinds if name not in lazy]
    batch: Batch | dict[str, Column] = {}
    if columns.ref is not None and read:
        batch = plane.get(columns.ref.select(*read), timeout=timeout, device=device)
    for name, kind in columns.kinds.items():
        if name in lazy and columns.ref is not None:
            others[name] = _objects(lazy_rows(columns.ref, name))
        elif kind == "tensor":
            tensors[name] = batch[name].torch()
        else:
            others[name] = _loaded(batch[name], kind)
    return TensorDict(tensors, batch_size=[columns.rows]) if columns.tensors else None, others


def _kind(name: str, array: npt.NDArray[Any], dedupe: Collection[str]) -> Kind:
    if array.dtype.kind == "O":
        if array.ndim > 1:
            return "table"
        of_rows = [row is None or _is_row(row) for row in array]
        return "rows" if all(of_rows) and (name in dedupe or any(row is not None for row in array)) else "objects"
    if array.dtype.kind in "US" and array.ndim == 1:
        return "text"
    return "array" if array.dtype.kind in "biufcmM" else "stack"


def _is_row(value: object) -> bool:
    """Whether the value is returned as an equal dict: one of a class of its own is an object."""
    return isinstance(value, Mapping) and (type(value) is dict or not isinstance(value, dict))


def _stored(array: npt.NDArray[Any], kind: Kind) -> Any:
    if kind == "rows":
        return encoded(array.tolist())
    if kind == "objects":
        return [(value,) for value in array.tolist()]  # a tuple a row makes objects of all, whatever they look like
    if kind == "table":
        return [(row.ravel().tolist(), row.shape) for row in array]
    if kind == "stack":
        return [(np.asarray(row),) for row in array]
    return array


def _loaded(column: Column, kind: Kind) -> npt.NDArray[Any]:
    if kind == "rows":
        return _objects(read_rows(column) if len(column) else [])
    if kind == "objects":
        return _objects([value for (value,) in column.to_list()])
    if kind == "table":
        rows = [_objects(values).reshape(shape) for values, shape in column.to_list()]
        return np.stack(rows) if rows else _objects([])
    if kind == "stack":
        stacked = [value for (value,) in column.to_list()]
        return np.stack(stacked) if stacked else _objects([])
    if kind == "text":
        return np.array(column.to_list(), np.bytes_ if column.kind == "bytes" else np.str_)
    array: npt.NDArray[Any] = np.array(column.numpy())
    return array


def _objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """An array filled one by one: NumPy would take lists of equal length for a second dimension."""
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _of_handles(plane: Plane, name: str, values: Sequence[Any], scope: str | None, timeout: float) -> BatchRef:
    """References to the rows: a handle has one; a plain value is put first."""
    there = [value.ref.rename({value.column: name}) for value in values if _is_handle(value)]
    here = [row for row, value in enumerate(values) if not _is_handle(value)]
    order = np.empty(len(values), np.int64)
    order[[row for row, value in enumerate(values) if _is_handle(value)]] = np.arange(len(there))
    order[here] = len(there) + np.arange(len(here))
    if here:
        put = {name: encoded([values[row] for row in here])}
        there.append(plane.put(put, scope=scope, timeout=timeout))
    ref = concat(there)
    return ref[order] if here else ref


def _is_handle(value: Any) -> bool:
    """Whether it is a handle of a struct column; a handle of several columns is read and put as a row."""
    return isinstance(value, LazyRow) and value.column is not None
