"""Tensors between the devices of the ranks, by NCCL: a process group beside the caller's, over the same ranks.

It carries the large pieces of columns of numbers, from device to device, if the caller's group sends tensors of the
device by NCCL and each rank of the call has one. Everything else, and the agreement before, goes over the `Link`.

Works of NCCL block the device's stream and not the host, so a rank forwards a piece before it has arrived. The host
waits once, at the end, by looking at an event: a wait of CUDA has no deadline. Only the first message between two ranks
can block the host, since NCCL makes a communicator for it; so the ranks `meet` first, in a thread that can be
abandoned.

Invariants: no ordered pair of ranks is in two chains of a call, so both ends of a pair name its pieces in one order
(NCCL has no tags). A failure costs this group alone, which the next call makes anew.

By default, torch ends the process if a rank dies in the middle of an operation of NCCL. Its settings for that are read
when a group is made, and are set for that moment only.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

from dataplane.clock import Deadline

_LOOK_S = 20e-6
_UNDER_WAY = 8  # pieces of host memory on the device at a time, until they are sent
_OPERATION_S = 600.0  # of NCCL's own patience: the deadline of a call ends it before
_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""An error ends the group only, and no thread of torch watches its other threads."""

_making = threading.Lock()


def devices_of(group: Any) -> frozenset[str]:
    """The types of devices whose tensors the group sends by NCCL."""
    import torch.distributed as dist

    backends = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    return frozenset(device for device, _, backend in backends if backend == "nccl" and dist.is_nccl_available())


def nccl_group(store: Any, rank: int, size: int, device: Any) -> Any:
    """A process group of these ranks, which meet in the store. Raises RuntimeError."""
    import torch
    import torch.distributed as dist

    with torch.cuda.device(device), _environment(_SETTINGS):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_OPERATION_S)
        return dist.ProcessGroupNCCL(store, rank, size, options)


class DeviceLink:
    """The messages of one rank's device. Methods raise RuntimeError, and are called by one thread, except `abort`."""

    def __init__(self, group: Any, device: Any) -> None:
        self.device = device
        self._group = group
        self._met: set[int] = set()
        self._sent: deque[tuple[Any, Any]] = deque()
        self._over = threading.Event()

    def meet(self, before: Sequence[int], after: Sequence[int], deadline: Deadline) -> None:
        """Connect to each neighbour that is not connected yet: receive a byte from the ranks `before`, and send one to
        the ranks `after`. Raises TimeoutError at the deadline."""
        import torch

        with self._current():
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
            for rank in before:
                if rank not in self._met:
                    self.receive(rank, byte).wait()
            for rank in after:
                if rank not in self._met:
                    self.send(rank, byte)
            self.finish(deadline)
        self._met.update(before, after)

    def send(self, rank: int, tensor: Any) -> None:
        """Begin to send a tensor of bytes, which must not change until `finish` returns."""
        with self._current():
            self._sent.append((self._group.send([tensor], rank, 0), tensor))

    def send_copy(self, rank: int, data: Any) -> None:
        """Begin to send the bytes of a host tensor: a copy on the device. Waits for earlier ones if they are many."""
        import torch

        from dataplane.device.copies import fill

        with self._current():
            if len(self._sent) >= _UNDER_WAY:
                self._sent.popleft()[0].wait()
            there = torch.empty(len(data), dtype=torch.uint8, device=self.device)
            fill(there, data)
            self.send(rank, there)

    def receive(self, rank: int, into: Any) -> Any:
        """Begin to fill a tensor of bytes. Returns the work, to `wait` for once before the tensor is used."""
        with self._current():
            return self._group.recv([into], rank, 0)

    def finish(self, deadline: Deadline) -> None:
        """Return when everything is sent, and all awaited receives are done. Raises TimeoutError at the deadline."""
        with self._current():
            while self._sent:
                self._sent.popleft()[0].wait()
            if self.device.type == "cuda":
                self._complete(deadline)
        if self._over.is_set():
            raise RuntimeError("the connections between devices were closed")

    def _complete(self, deadline: Deadline) -> None:
        """Return when the device has done all work on its current stream."""
        import torch

        done = torch.cuda.current_stream().record_event()
        while not (self._over.is_set() or done.query()):
            if not deadline.remaining_s:
                raise TimeoutError("messages between devices did not arrive in time")
            time.sleep(_LOOK_S)

    def abort(self) -> None:
        """End everything that is in progress. Any thread may call this. Idempotent."""
        if not self._over.is_set():
            self._over.set()
            with suppress(RuntimeError):
                self._group.abort()

    def _current(self) -> Any:
        import torch

        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """The process's environment with these settings, unless it has its own."""
    with _making:
        added = {name: value for name, value in settings.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
