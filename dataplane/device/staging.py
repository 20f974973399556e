"""Copies from a device to host memory that is not page-locked, through a few page-locked buffers.

While the device fills one buffer, the host copies the previous one to its target. Several threads may copy at once:
each waits for its first buffer only, and continues with that one if the others have all the rest.

Invariants: the source has been read when a copy returns or raises; each buffer is free again then, with no transfer
into it. The device defines its own buffers and how they are filled: see `Buffer`.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_BUFFERS = 4
_BUFFER = 8 << 20  # bytes; all are taken from the host for as long as this process lives
_AHEAD = 2  # buffers that one copy fills at a time

_outward: dict[Any, Outward] = {}
_making = threading.Lock()


class Buffer(Protocol):
    """Host memory that a device writes to. `memory`: all of it."""

    memory: Bytes

    def begin(self, source: Any) -> None:
        """Begin to copy these bytes, at most the size of the memory, to its beginning."""

    def wait(self) -> None:
        """Return once they are there, or raise the error; then the buffer is free."""


class Staging:
    """The page-locked host buffers of one device. Any thread may copy."""

    def __init__(self, buffers: list[Any]) -> None:
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._size = len(buffers[0].memory)

    def copy(self, memory: Bytes, source: Any) -> None:
        """Copy bytes on the device, an object with `len` and slices, to host memory of the same length."""
        under_way: deque[tuple[Buffer, int]] = deque()
        try:
            for start in range(0, len(source), self._size):
                buffer = self._next(memory, under_way)
                under_way.append((buffer, start))
                buffer.begin(source[start : start + self._size])
            while under_way:
                self._free.put(self._landed(memory, under_way))
        except BaseException:
            while under_way:
                buffer, _ = under_way.popleft()
                try:
                    buffer.wait()
                finally:
                    self._free.put(buffer)
            raise

    def _next(self, memory: Bytes, under_way: deque[tuple[Buffer, int]]) -> Buffer:
        """The next buffer to fill. A copy waits until its first one is free. While it has fewer than `_AHEAD` in
        progress, it takes a free one if there is one. Else it reuses its oldest, once the bytes there were copied to
        their target."""
        if not under_way:
            return self._free.get()
        if len(under_way) < _AHEAD:
            try:
                return self._free.get_nowait()
            except queue.Empty:
                pass
        return self._landed(memory, under_way)

    def _landed(self, memory: Bytes, under_way: deque[tuple[Buffer, int]]) -> Buffer:
        """The first buffer in progress, once its bytes were copied to their target."""
        buffer, start = under_way[0]
        buffer.wait()
        stop = min(start + self._size, len(memory))
        np.copyto(memory[start:stop], buffer.memory[: stop - start])
        return under_way.popleft()[0]


class _PageLocked:
    """A buffer of a CUDA device, filled on a stream of copies."""

    def __init__(self, stream: Any) -> None:
        import torch

        self._stream = stream
        self._tensor = torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True)
        self._done = torch.cuda.Event(blocking=True)
        self.memory: Bytes = self._tensor.numpy()

    def begin(self, source: Any) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            self._tensor[: len(source)].copy_(source, non_blocking=True)
            self._done.record()

    def wait(self) -> None:
        self._done.synchronize()


class Outward:
    """The path from one CUDA device to the host: a stream of its own, and buffers."""

    def __init__(self, device: Any) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)
        self.staging = Staging([_PageLocked(self.stream) for _ in range(_BUFFERS)])


def outward(device: Any) -> Outward:
    """The path from this device, created at its first use."""
    with _making:
        found = _outward.get(device)
        if found is None:
            found = _outward[device] = Outward(device)
        return found


def leave(memory: Bytes, tensors: list[Any], after: Any) -> None:
    """Copy the concatenated values of tensors of one dtype on one device to host memory, after all work of `after`.
    Several tensors are joined on the device first. Blocks this thread until the bytes are there."""
    import torch

    device = tensors[0].device
    if device.type != "cuda":
        gathered = tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
        np.copyto(memory, gathered.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return
    way = outward(device)
    with torch.no_grad(), torch.cuda.stream(way.stream):
        for event in after.events:
            way.stream.wait_event(event)
        first = tensors[0]
        run = first.contiguous() if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
        way.staging.copy(memory, run.reshape(-1).view(torch.uint8))
