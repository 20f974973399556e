"""torch values in and out; torch is imported only when a tensor is put or asked for.

In: dense tensors of any device and strides, nested tensors of both layouts, lists of tensors. Tensors that require grad
are detached, conjugate and negative views are resolved. Contiguous host memory is read in place; other host memory is
copied by torch, which transposes five times as fast as NumPy. Device memory is copied by `device.staging`. This copy
waits for the work that the CUDA streams of the planning thread had queued when the put was planned. Sparse, quantized,
meta and distributed tensors raise SchemaMismatch.

Out: tensors over bytes in memory, which they keep alive.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.dtypes import BITS, storage
from dataplane.batch.layout import Bytes, Index
from dataplane.batch.values import (
    Job,
    RowSource,
    Values,
    as_bytes,
    bounds_of,
    dense,
    gathered,
    groups,
    leading,
    mismatch,
    ragged,
    ragged_rows,
    ragged_run,
    typed_field,
)
from dataplane.device.ordering import NOTHING, Mark
from dataplane.device.staging import leave

# Any, since torch may be absent, and its own strict types change from release to release.
Tensor = Any

_SIGNED = {1: "int8", 2: "int16", 4: "int32"}


def is_tensor(value: object) -> bool:
    """Whether the value is a torch tensor. False if torch was never imported."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def _torch() -> Any:
    import torch

    return torch


def on_device(values: Any) -> bool:
    """Whether `values`, or the first of its rows, is a tensor on a device."""
    if isinstance(values, list | tuple) and values:
        values = values[0]
    return is_tensor(values) and values.device.type not in ("cpu", "meta")


def values_of(column: str, tensor: Tensor) -> Values:
    """A tensor [rows, ...] as a dense column, or a nested tensor as a ragged column. Raises SchemaMismatch."""
    if getattr(tensor, "is_nested", False):
        return _nested(column, tensor)
    tensor, name = plain(column, tensor)
    if not tensor.ndim:
        raise mismatch(
            column, "a 0-d tensor has no rows: pass tensor[None]", expected="one value a row", found="a 0-d tensor"
        )
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return dense(column, _bits(tensor, name), name)
    shape = tuple(tensor.shape)
    return Values(
        typed_field(column, "dense", name, shape[1:]), shape[0], _Rectangle(tensor, name, Mark.of([tensor.device]))
    )


def values_of_rows(column: str, rows: Sequence[Tensor]) -> Values:
    """Tensors of one dtype and number of dimensions as a column: dense if they are 0-d, else ragged. Raises
    SchemaMismatch."""
    arrays, name = _in_place(rows), str(rows[0].dtype)[6:]
    if arrays is None:
        rows = [plain(column, row, i)[0] for i, row in enumerate(rows)]
        if rows[0].ndim and any(row.device.type != "cpu" for row in rows):
            shapes = [tuple(row.shape) for row in rows]
            head = ragged(column, name, shapes, leading(shapes))
            assert head.offsets is not None
            item_shape = None if head.field.varying > 1 else head.field.item_shape
            mark = Mark.of({row.device for row in rows})
            joined = _Joined(rows, bounds_of(head.field, head.offsets), item_shape, name, mark)
            return msgspec.structs.replace(head, data=joined)
        arrays = [_bits(row.cpu(), name) for row in rows]
    if not arrays[0].ndim:
        return dense(column, np.array(arrays, storage(name)), name)
    return ragged_rows(column, name, arrays)


def _in_place(rows: Sequence[Tensor]) -> list[npt.NDArray[Any]] | None:
    """The tensors as arrays of their storage types; None if one is not plain memory of this host.

    NumPy joins arrays in one call. torch.cat of 4096 rows of 32 KiB took as long with one thread, 1.5 times as long
    with two, and every thread that calls it starts a team of threads.
    """
    torch = _torch()
    if not set(map(type, rows)) <= {torch.Tensor, torch.nn.Parameter}:
        return None
    name = str(rows[0].dtype)[6:]
    if not _known(name):
        return None
    try:
        return [row.numpy() for row in rows] if name not in BITS else [_bits(row, name) for row in rows]
    except (TypeError, RuntimeError):  # on a device, sparse, requires grad, a lazy conjugate: `plain` sees to each
        return None


def alike(rows: Sequence[Any]) -> bool:
    """Whether all are plain tensors of one dtype and number of dimensions, so that a column returns them exactly."""
    if not len(rows) or not is_tensor(rows[0]):
        return False
    torch = _torch()
    if not set(map(type, rows)) <= {torch.Tensor, torch.nn.Parameter}:
        return False
    looks = {(row.dtype, row.ndim, row.layout, row.is_nested) for row in rows}
    return len(looks) == 1 and rows[0].layout == torch.strided and not rows[0].is_nested


def host_bits(column: str, tensor: Tensor) -> tuple[str, npt.NDArray[Any]]:
    """The dtype's name, and the tensor as an array of its storage type in host memory. Raises SchemaMismatch."""
    tensor, name = plain(column, tensor)
    return name, _bits(tensor.cpu(), name)


def from_bits(column: str, name: str, array: npt.NDArray[Any]) -> Tensor:
    """A tensor over a writable array of the storage type of the dtype `name`. Imports torch.

    Raises SchemaMismatch if torch has no such dtype.
    """
    torch = _torch()
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if dtype is None:
        raise mismatch(column, f"torch has no {name}: use .numpy()", expected="a dtype of torch", found=name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    if name not in BITS:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_SIGNED[array.itemsize])).view(dtype)


def require(column: str, name: str) -> None:
    """Raises SchemaMismatch if this release of torch lacks the dtype `name`. Imports torch."""
    if name.isidentifier() and not hasattr(_torch(), name):
        raise mismatch(column, f"torch here has no {name}", expected="a dtype of torch", found=name)


def shaped(flat: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    """A tensor of bytes as a tensor of this dtype and shape, in place."""
    return flat.view(getattr(_torch(), name)).view(*shape)


def jagged(values: Tensor, offsets: Tensor, lengths: Tensor | Index | None = None) -> Tensor:
    """A nested tensor of the jagged layout over `values`, without a copy; row i is values[offsets[i]:offsets[i + 1]].

    torch is told the least and the largest length of a row: without these, torch 2.13 pads each row to the length of
    all rows together (`to_padded_tensor`). `lengths`: the lengths of the rows, if they are known on the host.
    """
    lengths = offsets.diff() if lengths is None else lengths
    bounds = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())} if len(lengths) else {}
    log = logging.getLogger("torch.fx._symbolic_trace")  # torch 2.13 warns there of a name that it uses itself
    drop = logging.Filter("nothing else")  # one for each call, since each thread removes its own
    log.addFilter(drop)
    try:
        return _torch().nested.nested_tensor_from_jagged(values, offsets, **bounds)
    finally:
        log.removeFilter(drop)


def plain(column: str, tensor: Tensor, row: int = -1) -> tuple[Tensor, str]:
    """The tensor, detached and resolved, and its dtype's name. Raises SchemaMismatch, with the number `row`."""
    torch = _torch()
    name, why = str(tensor.dtype)[6:], ""
    if hasattr(tensor, "full_tensor"):
        why, found = "pass tensor.to_local() or tensor.full_tensor()", "a distributed tensor"
    elif tensor.is_nested:
        why, found = "pass tensor.unbind()", "a nested tensor"
    elif tensor.layout != torch.strided:
        why, found = "pass tensor.to_dense()", f"a tensor with the layout {tensor.layout}"
    elif tensor.is_quantized:
        why, found = "pass tensor.int_repr() or tensor.dequantize()", f"a quantized tensor ({name})"
    elif tensor.is_meta:
        why, found = "it has no values", "a meta tensor"
    elif not _known(name):
        why, found = "pass a view of its bits", f"a tensor of {name}"
    if why:
        raise mismatch(column, f"{found} cannot be stored: {why}", row=row, expected="a dense tensor", found=found)
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg(), name


def _known(name: str) -> bool:
    try:
        storage(name)
    except ValueError:
        return False
    return True


def _bits(tensor: Tensor, name: str) -> npt.NDArray[Any]:
    """A tensor in host memory, of any strides, as an array of its storage type, in place."""
    if name not in BITS:
        return tensor.numpy()  # type: ignore[no-any-return]  # torch is typed as Any here
    bits = storage(name)
    return tensor.view(getattr(_torch(), _SIGNED[bits.itemsize])).numpy().view(bits)  # type: ignore[no-any-return]


def _nested(column: str, tensor: Tensor) -> Values:
    tensor = tensor.detach()
    jagged = tensor.layout == _torch().jagged
    if not (jagged and tensor._ragged_idx == 1 and tensor.lengths() is None):
        rows = list(tensor.unbind())
        if rows:
            return values_of_rows(column, rows)
        raise mismatch(column, "a nested tensor without rows", expected="the jagged layout", found=str(tensor.layout))
    offsets = tensor.offsets().cpu().numpy().astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    values, name = plain(column, tensor.values()[first:last])
    field = typed_field(column, "ragged", name, (None, *values.shape[1:]))
    offsets = offsets - first
    if values.device.type == "cpu" and values.is_contiguous():
        return ragged_run(field, _bits(values, name), offsets)
    rows = [values[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    joined = _Joined(rows, bounds_of(field, offsets), field.item_shape, name, Mark.of([values.device]))
    return Values(field, len(rows), joined, offsets)


def _target(memory: Bytes, name: str, shape: Sequence[int]) -> Tensor:
    """The bytes of a destination as a tensor of this dtype and shape."""
    torch = _torch()
    return torch.from_numpy(memory).view(getattr(torch, name)).view(*shape)


class _Rectangle(RowSource, frozen=True, eq=False):
    """A tensor [rows, *shape] on a device, or of any strides. `after`: the mark from which its values are ready."""

    tensor: Tensor
    dtype: str
    after: Mark = NOTHING

    @property
    def nbytes(self) -> int:
        return int(self.tensor.numel() * self.tensor.element_size())

    @property
    def in_place(self) -> bool:
        return False

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        if not self.nbytes:
            return
        rows = len(self.tensor)
        step, row = max(1, piece * rows // self.nbytes), self.nbytes // rows
        target = None if self.device is not None else _target(memory, self.dtype, self.tensor.shape)
        for start in range(0, rows, step):
            own = self.tensor[start : start + step]
            if target is not None:
                yield partial(target[start : start + step].copy_, own)
            else:
                yield partial(leave, memory[start * row : (start + step) * row], [own], self.after)

    @property
    def device(self) -> Any:
        return None if self.tensor.device.type == "cpu" else self.tensor.device

    def flat(self) -> Any:
        """All bytes as a tensor on the device, made by work on the current stream."""
        return self.tensor.contiguous().reshape(-1).view(_torch().uint8)

    def row(self, i: int) -> Bytes:
        self.after.wait()
        return as_bytes(_bits(self.tensor[i].cpu(), self.dtype))

    def identity(self, i: int) -> Hashable:
        return 0 if self.tensor.stride(0) == 0 else None

    def take(self, index: Index) -> RowSource:
        self.after.wait()
        taken = self.tensor[_torch().from_numpy(index).to(self.tensor.device)]
        return _Rectangle(taken, self.dtype, Mark.of([taken.device]))


class _Joined(RowSource, frozen=True, eq=False):
    """Tensors of one dtype, some on devices; row i will have the bytes bounds[i]:bounds[i + 1]. `item_shape` as in
    `values.Joined`. `after`: the mark from which the values are ready."""

    rows: Sequence[Tensor]
    bounds: Index
    item_shape: tuple[int, ...] | None
    dtype: str
    after: Mark = NOTHING

    @property
    def nbytes(self) -> int:
        return int(self.bounds[-1])

    @property
    def in_place(self) -> bool:
        return False

    def jobs(self, memory: Bytes, piece: int) -> Iterator[Job]:
        if self.nbytes:
            for first, last in groups(self.bounds, piece):
                part = memory[self.bounds[first] : self.bounds[last]]
                if len(part):
                    yield partial(self._join, part, first, last)

    def _join(self, memory: Bytes, first: int, last: int) -> None:
        torch = _torch()
        rows = self.rows[first:last]
        devices = {row.device for row in rows}
        with torch.no_grad():  # a state of the thread, and jobs run in any thread
            if len(devices) == 1 and rows[0].device.type != "cpu":
                leave(memory, list(rows), self.after)
                return
            self.after.wait()
            rows = [row.cpu() for row in rows]
            if self.item_shape is None:
                rows = [row.reshape(-1) for row in rows]
            torch.cat(rows, out=_target(memory, self.dtype, (-1, *(self.item_shape or ()))))

    @property
    def device(self) -> Any:
        """The device of the first tensor that is not in host memory."""
        return next((row.device for row in self.rows if row.device.type != "cpu"), None)

    def flat(self) -> Any:
        """As `_Rectangle.flat`, concatenated on the device."""
        torch, device = _torch(), self.device
        return torch.cat([row.to(device).reshape(-1) for row in self.rows]).view(torch.uint8)

    def row(self, i: int) -> Bytes:
        self.after.wait()
        return as_bytes(_bits(self.rows[i].detach().resolve_neg().cpu(), self.dtype))

    def identity(self, i: int) -> Hashable:
        row = self.rows[i]
        return row.data_ptr(), row.device, row.shape, row.stride()

    def take(self, index: Index) -> RowSource:
        rows = [self.rows[i] for i in index.tolist()]
        return _Joined(rows, gathered(self.bounds, index), self.item_shape, self.dtype, self.after)
