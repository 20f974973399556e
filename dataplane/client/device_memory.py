"""Memory of a CUDA device that one process keeps and others of its host map, by CUDA IPC as torch does it.

torch's handle of a storage (`_share_cuda_`) names the allocation, the storage's offset in it, and an event on which a
process that maps it waits. The device keeps the allocation as long as its process lives; the node's pins say when it
may be reused.

Invariants: all bytes are written before the handle is made, and never afterwards: readers map the very memory.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dataplane.batch.layout import Bytes, aligned
from dataplane.batch.put_plan import PlannedColumn
from dataplane.client.kept_columns import MemoryHandle
from dataplane.client.pins import drop_later
from dataplane.device.ordering import NOTHING
from dataplane.device.staging import leave, outward

_own: weakref.WeakValueDictionary[int, OwnDevice] = weakref.WeakValueDictionary()
"""Memory of this process, by number: CUDA IPC can map only memory of other processes."""
_numbers = itertools.count(secrets.randbits(48))  # random, so that no other process has the same


class OwnDevice:
    """Memory of this process on a device."""

    def __init__(self, size: int, device: Any) -> None:
        import torch

        self.size = size
        self.number = next(_numbers)
        self._device = device
        self._counter: tuple[Any, int] | None = None
        _own[self.number] = self
        with torch.cuda.device(device), torch.cuda.stream(outward(device).stream):  # the stream of all writes to it
            self._tensor: Any = torch.empty(size, dtype=torch.uint8, device=device)

    def handle(self) -> MemoryHandle:
        """See `kept_columns.OwnHost`."""
        import torch

        with torch.cuda.device(self._device):
            parts = self._tensor.untyped_storage()._share_cuda_()
            self._counter = parts[4], parts[5]
        name = str(torch.cuda.get_device_properties(self._device).uuid)
        return MemoryHandle(os.getpid(), self.number, 0, name, (*parts, self._tensor.storage_offset()))

    def write(self, column: PlannedColumn) -> list[Callable[[], Any]]:
        """One job, since all copies are made on one stream of the device."""
        return [partial(self._write, column)]

    def _write(self, column: PlannedColumn) -> None:
        import torch

        stream, base = outward(self._device).stream, 0
        with torch.no_grad(), torch.cuda.stream(stream):
            for buffer in column.buffers:
                target = self._tensor[base : base + buffer.nbytes]
                there = None if isinstance(buffer, np.ndarray) else getattr(buffer, "flat", None)
                if there is not None:
                    for event in buffer.after.events:  # type: ignore[union-attr]
                        stream.wait_event(event)
                    target.copy_(there())
                elif buffer.nbytes:
                    run = buffer if isinstance(buffer, np.ndarray) else np.empty(buffer.nbytes, np.uint8)
                    for job in () if isinstance(buffer, np.ndarray) else buffer.jobs(run, buffer.nbytes):
                        job()
                    target.copy_(torch.from_numpy(run.copy()))
                padding = base + buffer.nbytes
                base += aligned(buffer.nbytes)
                self._tensor[padding:base].zero_()
            stream.synchronize()

    def mapped(self, pin: object) -> MappedDevice:
        """The memory for readers in this process."""
        return MappedDevice(self._tensor, pin, own=True)

    def copy(self, memory: Bytes) -> None:
        """See `kept_columns.OwnHost`."""
        tensor = self._tensor
        if tensor is not None:  # else it was freed meanwhile
            leave(memory[: self.size], [tensor], NOTHING)

    def close(self, *, mapped: bool = False) -> None:
        """See `kept_columns.OwnHost`. torch counts how many mappings it expects (one at first) and how many were
        made, and keeps the memory until these agree. If no process has mapped it, one mapping is reported to torch."""
        tensor, counter = self._tensor, self._counter
        self._tensor = self._counter = None
        if tensor is not None and mapped:
            _left.append(tensor)
        elif tensor is not None and counter is not None:
            tensor.untyped_storage()._release_ipc_counter(*counter, device=self._device)


_left: list[Any] = []
"""Tensors that other processes still mapped when the plane was closed; kept until the process ends."""


class _PinHold:
    """Holds the pin of mapped memory for its tensors, until the CUDA stream has run the work queued when they were
    dropped."""

    __slots__ = ("_device", "_pin")

    def __init__(self, pin: object, device: Any) -> None:
        self._pin = pin
        self._device = device

    def __del__(self) -> None:
        import torch

        if self._device.type == "cuda" and torch.cuda.is_initialized():
            used = torch.cuda.Event()
            used.record(torch.cuda.current_stream(self._device))
            drop_later(self._pin, partial(_done, used))


def _done(event: Any) -> bool:
    """Whether the device has reached the event. A forked child has no device, and does not ask."""
    import torch

    return torch.cuda.is_initialized() and bool(event.query())


class MappedDevice:
    """Memory of another process's device, or this one's (`batch.Memory`): read on the host by copies, and on the device
    in place. The tensors' storage keeps the pin, until the current CUDA stream of the thread that drops them has done
    its queued work."""

    def __init__(self, tensor: Any, pin: object, *, own: bool = False) -> None:
        """`own`: the tensor is this process's. It needs no pin while readers use it: torch keeps its memory."""
        self._tensor = tensor
        if own:
            self._pin = pin
        else:
            tensor.untyped_storage().dataplane_hold = _PinHold(pin, tensor.device)

    def read(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.read`: a copy."""
        view = self.own(offset, nbytes)
        view.setflags(write=False)
        return view

    def private(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.private`: a copy."""
        return self.own(offset, nbytes)

    def own(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.own`."""
        memory = np.empty(nbytes, np.uint8)
        if nbytes:
            leave(memory, [self._tensor[offset : offset + nbytes]], NOTHING)
        return memory

    def there(self, offset: int, nbytes: int, device: Any) -> Any:
        """These bytes as a tensor in place, where they are on this device; else None."""
        if self._tensor.device != device:
            return None
        there = self._tensor[offset : offset + nbytes]
        if there.is_cuda:
            import torch

            there.record_stream(torch.cuda.current_stream(device))  # of memory of this process
        return there


def mapped(name: str, parts: tuple[Any, ...], size: int, pin: object) -> MappedDevice | None:
    """Map the memory of this handle on the device with this UUID; None if this process cannot."""
    import torch

    if not torch.cuda.is_available():
        return None
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == name:
            break
    else:
        return None
    *shared, offset = parts
    shared[0] = index  # processes may number the devices differently
    with torch.cuda.device(index):
        try:
            storage = torch.UntypedStorage._new_shared_cuda(*shared)
        except RuntimeError:  # the driver refuses: another container, or no peer access
            return None
        tensor = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage, offset, (size,), (1,))
    return MappedDevice(tensor, pin)


def of_this_process(number: int, pin: object) -> MappedDevice | None:
    """The memory with this number, if this process keeps it; else None."""
    own = _own.get(number)
    return None if own is None else own.mapped(pin)
