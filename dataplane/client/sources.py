"""A tensor to be published: which slice of what it is, and how its bytes get into shared memory.

Invariants: contiguous host memory is copied once, and read in place before; torch copies other strides and values on
a device directly to their place. Of a `DTensor` each rank publishes its local shard; what several ranks have alike
is published by one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np

from dataplane.batch import tensors
from dataplane.batch.dtypes import name_of, storage
from dataplane.batch.row_sources import join
from dataplane.device.memory import bytes_tensor
from dataplane.device.ordering import NOTHING, Mark
from dataplane.errors import SchemaMismatch
from dataplane.weights.slices import Slice

_PIECE, _COMPARED = 16 << 20, 1 << 20  # bytes of a job, and of a comparison, which ends with the first that differ


class Source:
    """A slice of a tensor. `tied`: equal for another one with the same memory; None if that is not known."""

    __slots__ = ("_mark", "_value", "dtype", "extent", "nbytes", "offsets", "shape", "tied")

    def __init__(
        self, value: Any, dtype: str, shape: tuple[int, ...], offsets: tuple[int, ...], tied: Hashable
    ) -> None:
        self._value = value
        self._mark = Mark.of([value.device]) if tensors.on_device(value) else NOTHING
        self.dtype = dtype
        self.extent = tuple(int(size) for size in value.shape)
        self.shape, self.offsets = shape, offsets
        self.nbytes = math.prod(self.extent) * storage(dtype).itemsize
        self.tied = (tied, shape, offsets) if tied is not None and self.nbytes else None

    def jobs(self, memory: Any) -> list[Callable[[], Any]]:
        """The jobs that together write it into `memory`, of `nbytes` bytes."""
        if not self.nbytes:
            return []
        flat = self.bytes()
        if flat is None:
            return [partial(self._copy, memory)]
        starts = range(0, self.nbytes, _PIECE)
        return [partial(join, memory[start : start + _PIECE], [flat[start : start + _PIECE]]) for start in starts]

    def same(self, memory: Any) -> bool:
        """Whether `memory`, of `nbytes` bytes, has its bytes already; False if that would need a copy."""
        flat = self.bytes()
        starts = range(0, self.nbytes, _COMPARED)
        return flat is not None and all(
            _equal(flat[start : start + _COMPARED], memory[start : start + _COMPARED]) for start in starts
        )

    @property
    def width(self) -> int:
        """The bytes of an element."""
        return storage(self.dtype).itemsize

    def bytes(self) -> Any:
        """Its bytes in place, as an array; None if they are not row-major in host memory."""
        value = self._value
        if isinstance(value, np.ndarray):
            return value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else None
        if value.device.type != "cpu" or not value.is_contiguous():
            return None
        _, bits = tensors.host_bits("", value)
        return bits.reshape(-1).view(np.uint8)

    def _copy(self, memory: Any) -> None:
        if isinstance(self._value, np.ndarray):
            np.copyto(memory.view(self._value.dtype).reshape(self.extent), self._value)
            return
        value = self._value
        self._mark.wait()  # the caller's stream may have it to compute still
        bytes_tensor(memory).view(value.dtype).view(self.extent).copy_(value)


def _equal(one: Any, other: Any) -> bool:
    words = len(one) // 8 * 8
    same = np.array_equal(one[:words].view(np.uint64), other[:words].view(np.uint64))
    return same and np.array_equal(one[words:], other[words:])


def source_of(name: str, value: Any) -> Source | None:
    """What is to be published of a value; None if another rank publishes the same. Raises SchemaMismatch."""
    if hasattr(value, "device_mesh") and hasattr(value, "placements"):
        placed = _local(name, value)
        if placed is None:
            return None
        value = placed
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    if isinstance(value, Slice):
        shape, offsets, value = value.shape, value.offsets, value.tensor
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        dtype, tied = name_of(value.dtype), None
    elif tensors.is_tensor(value):
        value, dtype, tied = _plain(name, value)
    else:
        raise _refused(name, f"a tensor or an array, not {type(value).__name__}")
    try:
        storage(dtype or "")
    except ValueError:
        raise _refused(name, f"of a dtype that travels, not {value.dtype}") from None
    own = tuple(int(size) for size in value.shape)
    return Source(value, str(dtype), shape or own, offsets or (0,) * len(own), tied)


def _plain(name: str, value: Any) -> tuple[Any, str, Hashable]:
    """A tensor without gradients and lazy conjugation or negation; its dtype; the identity of its memory."""
    value, dtype = tensors.plain(name, value)
    value = value.detach()
    return value, dtype, (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)


def _local(name: str, value: Any) -> Slice | None:
    """The shard of a `DTensor` that this rank publishes."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for at, placement in zip(coordinate, value.placements, strict=True):
        if placement.is_partial():
            raise _refused(name, f"a DTensor without partial sums, not {value.placements}: redistribute it")
        if isinstance(placement, Replicate) and at:
            return None
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    local = value.to_local()
    if not local.numel():
        offsets = (0,) * value.ndim
    return Slice(local, tuple(value.shape), tuple(offsets))


def _refused(name: str, expected: str) -> SchemaMismatch:
    return SchemaMismatch(f"{name!r} is to be {expected}", column=name, expected=expected)
