"""Copies from host memory to a device.

Copies to CUDA devices use a few page-locked buffers on a stream of their own: while the device reads one, the host
fills the next. Operations on the caller's current stream after the call see the bytes; the host only waits for a free
buffer.

Invariants: the source has been read when a copy returns, so it may be dropped; the target is not returned to the
allocator before the stream of copies has finished with it.

Rejected: to page-lock the arena's segments in place (`cudaHostRegister`). A segment is a sparse file as large as the
node's whole memory, and to lock it would allocate all of its pages, beyond the budget; to lock and unlock each
extent is a call of the driver that waits for the device.
"""

from __future__ import annotations

import threading
from typing import Any

from dataplane.device.memory import device_of

_BUFFERS = 4
_BUFFER = 8 << 20  # bytes; all are taken from the host for as long as this process lives

_rings: dict[Any, _Ring] = {}
_making = threading.Lock()


def copied(source: Any, device: Any) -> Any:
    """A tensor on the device with the values of a host tensor. Raises Misuse if there is no such device."""
    import torch

    device = device_of(device)
    if device.type != "cuda" or not source.numel():
        return source.to(device, copy=True)
    ring, source = _ring(device), source.contiguous()
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        with torch.cuda.stream(ring.stream):  # the target belongs to this stream, so no other work has to be waited for
            target = torch.empty(source.shape, dtype=source.dtype, device=device)
        ring.copy(target, source)
        if current != ring.stream:
            current.wait_stream(ring.stream)
            target.record_stream(current)
    return target


def fill(target: Any, source: Any) -> None:
    """Copy a host tensor into one of the same shape and dtype, on the host or a device."""
    import torch

    if target.device.type == "cuda" and target.is_contiguous() and source.is_contiguous():
        ring = _ring(target.device)
        current = torch.cuda.current_stream(target.device)
        ring.stream.wait_stream(current)  # work that still uses the target there
        ring.copy(target, source)
        current.wait_stream(ring.stream)
        target.record_stream(ring.stream)
    else:
        target.copy_(source)


def stream_of(device: Any) -> Any:
    """The stream of copies to a CUDA device."""
    return _ring(device).stream


def _ring(device: Any) -> _Ring:
    with _making:
        ring = _rings.get(device)
        if ring is None:
            ring = _rings[device] = _Ring(device)
        return ring


class _Ring:
    """Page-locked buffers of one device, used in turn by one thread at a time."""

    def __init__(self, device: Any) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS)]
        self._free = [torch.cuda.Event() for _ in range(_BUFFERS)]  # recorded once the device has taken the buffer
        self._turn = threading.Lock()
        self._next = 0

    def copy(self, target: Any, source: Any) -> None:
        """Begin to copy on the ring's stream; the source has been read when this returns."""
        import torch

        to, data = _bytes(target), _bytes(source)
        with self._turn, torch.cuda.device(target.device):
            for start in range(0, len(data), _BUFFER):
                piece = data[start : start + _BUFFER]
                free, buffer = self._free[self._next], self._buffers[self._next][: len(piece)]
                free.synchronize()
                buffer.copy_(piece)
                with torch.cuda.stream(self.stream):
                    to[start : start + _BUFFER].copy_(buffer, non_blocking=True)
                    free.record()
                self._next = (self._next + 1) % _BUFFERS


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)
