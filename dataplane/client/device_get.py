"""The destinations of a `get`: the caller's tensors, a device, or the ranks of a group.

Copies to devices are ordered by the current CUDA stream of the caller's thread. Copies to host memory are divided among
the plane's threads. An asynchronous plane makes large copies in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane import threads
from dataplane.batch import tensors
from dataplane.batch.batch import Batch, Column
from dataplane.batch.dtypes import name_of, storage
from dataplane.batch.field import Field
from dataplane.batch.layout import Bytes
from dataplane.batch.put_plan import values_of
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import Job, mismatch
from dataplane.device import ordering
from dataplane.device.copies import fill
from dataplane.errors import DataplaneError, Misuse, SchemaMismatch

if TYPE_CHECKING:
    from dataplane.client.plane import AsyncPlane

_SHARED = 4  # the number of jobs from which on threads share them


def nbytes(batch: Batch, device: Any, out: Mapping[str, Any] | None) -> int:
    """An upper bound of the bytes that `placed` copies."""
    if device is not None and device.type != "cpu":
        return batch.nbytes
    return sum(batch[name].nbytes for name in out if name in batch) if isinstance(out, Mapping) else 0


def placed(
    batch: Batch, device: Any, out: Mapping[str, Any] | None, pool: Executor, streams: Sequence[Any] = ()
) -> Batch:
    """Copy columns of the batch into `out`, and return the batch on the device. No copy is running when this returns or
    raises. `streams`: the CUDA streams of the caller's thread, if this is another thread. Raises as `Batch.to` and
    `jobs_into`."""
    with ordering.as_called(streams):
        if out is not None:
            jobs = jobs_into(batch, out)
            if len(jobs) >= _SHARED and _on_host(out):
                threads.together(pool, lambda job: job(), jobs)
            else:
                for job in jobs:
                    job()
        return batch if device is None else batch.to(device)


def _on_host(out: Mapping[str, Any]) -> bool:
    return all(getattr(getattr(target, "device", None), "type", "cpu") == "cpu" for target in out.values())


async def together(plane: AsyncPlane, ref: BatchRef, group: Any, timeout: float) -> Batch:
    """Run `collective.get` for an asynchronous plane, in a thread. A cancellation ends the call on all ranks."""
    from dataplane import collective  # seldom needed

    loop = asyncio.get_running_loop()

    class Waiting:
        address = plane.address

        def get(self, ref: BatchRef, *, timeout: float) -> Batch:
            return asyncio.run_coroutine_threadsafe(plane.get(ref, timeout=timeout), loop).result()

    calling = asyncio.ensure_future(asyncio.to_thread(collective.get, ref, group, plane=Waiting(), timeout=timeout))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        collective.interrupt(group)
        with suppress(DataplaneError):
            await calling
        raise


_PIECE = 8 << 20


def jobs_into(batch: Batch, out: Mapping[str, Any]) -> list[Job]:
    """Return independent jobs that together fill `out`: NumPy arrays and tensors by the names of columns.

    All columns are checked before the first copy. A dense column needs [rows, *shape]. A ragged column of one varying
    dimension needs [items of all rows, *item], as `Column.packed` returns them. The dtype is the column's, or the
    narrower one in which it is stored (`Column.narrow`). Host memory must be contiguous. Copies to devices run in the
    thread that calls their job.

    Raises SchemaMismatch if a column is missing or has another dtype or shape, Misuse if a destination cannot be
    written or shares memory with another.
    """
    if not isinstance(out, Mapping):
        raise Misuse(f"out is a mapping of columns' names to tensors, not {type(out).__name__}")
    found: list[Job] = []
    for name, target in out.items():
        found += _jobs(batch[name], target)
    _require_apart(out)
    return found


def _require_apart(out: Mapping[str, Any]) -> None:
    """Raises Misuse if two contiguous destinations share memory."""
    spans = []
    for name, target in out.items():
        if not tensors.is_tensor(target):
            spans.append((target.ctypes.data, target.nbytes, name))
        elif target.is_contiguous():
            spans.append((target.data_ptr(), target.nbytes, name))
    for (start, size, name), (following, _, other) in pairwise(sorted(span for span in spans if span[1])):
        if following < start + size:
            raise Misuse(f"the columns {name!r} and {other!r}: out takes memory of its own for each column")


def _jobs(column: Column, target: Any) -> list[Job]:
    name, field = column.name, column.field
    if field.kind not in ("dense", "ragged") or field.varying > 1:
        raise mismatch(name, f"{field!r} is not copied into a tensor", expected="numbers", found=repr(field))
    if column.is_narrow and str(getattr(target, "dtype", "")).removeprefix("torch.") == column.narrow().dtype:
        column = column.narrow()
    if tensors.is_tensor(target) and target.device.type != "cpu":
        if target.is_meta:
            raise Misuse(f"column {name!r}: a meta tensor has no memory to be filled")
        _check(column, str(target.dtype)[6:], tuple(target.shape))
        source = column.torch(device="cpu") if field.kind == "dense" else column.packed()[0]
        return [lambda: fill(target, source)]
    memory = _memory(column, target)
    values = values_of(name, column)
    return [] if values.data is None or not len(memory) else list(values.data.jobs(memory, _PIECE))


def _memory(column: Column, target: Any) -> Bytes:
    """The writable bytes of an array or host tensor."""
    if tensors.is_tensor(target):
        _check(column, str(target.dtype)[6:], tuple(target.shape))
        if target.requires_grad:
            raise Misuse(
                f"column {column.name!r}: a tensor that requires grad cannot be written in place: pass tensor.detach()"
            )
        if target.is_contiguous() and not target.is_conj() and not target.is_neg():
            _, array = tensors.host_bits(column.name, target)
            return array.reshape(-1).view(np.uint8)
    elif isinstance(target, np.ndarray):
        _check(column, _dtype(target, column.field), target.shape)
        if target.flags.c_contiguous and target.flags.writeable:
            return target.reshape(-1).view(np.uint8)
    else:
        raise Misuse(f"column {column.name!r}: out takes arrays and tensors, not {type(target).__name__}")
    raise Misuse(f"column {column.name!r}: out takes contiguous memory that can be written")


def _dtype(target: np.ndarray[Any, Any], field: Field) -> str:
    """The name of an array's dtype; the field's dtype, if the array has the dtype in which it is stored."""
    return field.dtype if target.dtype == storage(field.dtype) else name_of(target.dtype) or str(target.dtype)


def _check(column: Column, dtype: str, shape: tuple[int, ...]) -> None:
    field = column.field
    if field.kind == "dense":
        wanted: tuple[int, ...] = (len(column), *field.item_shape)
    else:
        lengths = column.lengths()
        wanted = (0 if lengths is None else int(lengths.sum()), *field.item_shape)
    if (dtype, shape) != (field.dtype, wanted):
        expected, found = f"{field.dtype} {list(wanted)}", f"{dtype} {list(shape)}"
        raise SchemaMismatch(
            f"column {column.name!r} is {expected}, and the tensor to be filled {found}",
            column=column.name,
            expected=expected,
            found=found,
        )
