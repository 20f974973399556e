"""Equality of values to the last bit, and batches over memory that counts what is read of it."""

from __future__ import annotations

import dataclasses
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dataplane.batch.batch import Batch, Column
from dataplane.batch.field import Field
from dataplane.batch.layout import Bytes, aligned_bytes, check_contents
from dataplane.batch.layout_check import check_layout
from dataplane.batch.put_plan import PutPlan, plan
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import StoredPiece, opened


def bits(value: Any) -> Any:
    """The value as something whose == is equality of type, shape and bits."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "nested", tuple(bits(row) for row in value.unbind())
        flat = value.detach().resolve_conj().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return "tensor", value.dtype, tuple(value.shape), data
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return "objects", value.shape, tuple(bits(item) for item in value.reshape(-1))
        return "array", value.dtype, value.dtype.type, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return type(value), value.dtype, value.tobytes()
    if type(value) is float:
        return "float", struct.pack("d", value)
    if type(value) is dict:
        return "dict", {bits(key): bits(item) for key, item in value.items()}
    if type(value) in (list, tuple, deque):
        return type(value), tuple(bits(item) for item in value)
    if dataclasses.is_dataclass(value):
        return type(value), tuple(bits(getattr(value, field.name)) for field in dataclasses.fields(value))
    return type(value), value


def same(a: Any, b: Any) -> bool:
    return bool(bits(a) == bits(b))


def filled(planned: PutPlan) -> np.ndarray[Any, Any]:
    """The bytes of a plan, written piece by piece."""
    memory = aligned_bytes(planned.nbytes)
    for job in planned.jobs(memory, piece=64):
        job()
    return memory


class LocalMemory:
    """A `Memory` over an array of bytes. Views that can be written are copies."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._data.setflags(write=False)

    def read(self, offset: int, nbytes: int) -> Bytes:
        return self._data[offset : offset + nbytes]

    def private(self, offset: int, nbytes: int) -> Bytes:
        return self._data[offset : offset + nbytes].copy()

    own = private


def materialise(planned: PutPlan) -> Batch:
    """The batch that the plan describes, written to new memory of this process by this thread."""
    memory = aligned_bytes(planned.nbytes)
    for job in planned.jobs(memory):
        job()
    held, rows = LocalMemory(memory), RowIndices.range(0, planned.rows)
    return Batch({name: of_pieces(name, c.field, [StoredPiece(c, held, rows)]) for name, c in planned.layout().columns})


def local_batch(columns: Any) -> Batch:
    return materialise(plan(columns))


def piece(name: str, values: Any, rows: RowIndices | None = None, *, dedupe: bool = False) -> StoredPiece:
    """The values as a piece of a shard of their own."""
    planned = plan({name: values}, dedupe=[name] if dedupe else [])
    memory = filled(planned)
    shard = planned.layout()
    check_layout(shard.encode(), planned.nbytes)  # whatever is put passes what a node checks
    check_contents(shard, memory)
    layout = shard.columns[0][1]
    return StoredPiece(layout, LocalMemory(memory), RowIndices.range(0, planned.rows) if rows is None else rows)


def of_pieces(name: str, field: Field, pieces: Sequence[StoredPiece], order: Any = None) -> Column:
    return Column(name, field, opened(name, field, pieces), order)


def column(values: Any, *, dedupe: bool = False) -> Column:
    """The values as a column that was stored."""
    one = piece("x", values, dedupe=dedupe)
    return of_pieces("x", one.layout.field, [one])


def rows_as(column: Column, view: str) -> Sequence[Any]:
    values = getattr(column, view)()
    if isinstance(values, torch.Tensor):
        return list(values.unbind())
    return list(values)
