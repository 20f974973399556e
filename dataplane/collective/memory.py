"""Memory of this process for received rows, which it may write to; for a device, memory there as well.

New memory costs more than the transfer into it, because the kernel zeroes each page first. So the block of a batch
that was dropped, with all its arrays and tensors, is kept for the next one: at most one block, and none below
`_KEPT` bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataplane.batch.layout import Bytes, aligned_bytes
from dataplane.device.copies import fill
from dataplane.device.memory import bytes_tensor
from dataplane.errors import LimitExceeded

_KEPT = 1 << 20

_idle: deque[Bytes] = deque(
    maxlen=1
)  # its operations need no lock, which a finalizer could find taken by its own thread


class _Lease:
    """The owner of the block's arrays for NumPy; it ends with the last view."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, block: Bytes, nbytes: int) -> None:
        self.__array_interface__ = block[:nbytes].__array_interface__
        weakref.finalize(self, _idle.append if len(block) >= _KEPT else _dropped, block).atexit = False


def _dropped(_: Bytes) -> None:
    """Drops a small block."""


class ReceivedBlock:
    """A block of this process's memory (`batch.stored_column.ExtentMemory`). Private views are the block itself, which
    belongs to this process.

    After `mirror`, received bytes are copied to a device while the rest arrives, or received there; tensors on that
    device use that memory. What was received only on the device is copied to the block when the block is read.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises LimitExceeded if the process cannot allocate that much."""
        self.block = np.asarray(_Lease(_block(nbytes), nbytes)) if nbytes else np.empty(0, np.uint8)
        self._there: Any = None
        self._wanted: Sequence[tuple[int, int]] = ()
        self._only_there: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def mirror(self, device: Any, wanted: Sequence[tuple[int, int]]) -> None:
        """Allocate memory on the device too, to which `arrived` copies bytes of these ranges."""
        import torch

        if wanted:
            self._there = torch.empty(len(self.block), dtype=torch.uint8, device=device)
            self._wanted = wanted

    def arrived(self, start: int, stop: int) -> None:
        """These bytes are in the block, and do not change any more."""
        if self._there is not None and any(start < last and first < stop for first, last in self._wanted):
            fill(self._there[start:stop], bytes_tensor(self.block[start:stop]))

    def direct(self, start: int, stop: int) -> Any:
        """The memory on the device for these bytes, which are received there and not in the block."""
        self._only_there.append((start, stop))
        return self._there[start:stop]

    def there(self, offset: int, nbytes: int, device: Any) -> Any:
        """The bytes as a tensor on the device, if they are there: see `pieces.Stored.there`."""
        if self._there is None or self._there.device != device:
            return None
        if not any(first <= offset and offset + nbytes <= last for first, last in self._wanted):
            return None
        return self._there[offset : offset + nbytes]

    def read(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.read`."""
        view = self.private(offset, nbytes)
        view.setflags(write=False)
        return view

    def private(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.private`."""
        if self._only_there:
            self._copy_back(offset, offset + nbytes)
        return self.block[offset : offset + nbytes]

    def own(self, offset: int, nbytes: int) -> Bytes:
        """See `Memory.own`."""
        return self.private(offset, nbytes).copy()

    def _copy_back(self, first: int, last: int) -> None:
        """Copy those of these bytes that are only on the device."""
        with self._lock:
            for start, stop in self._only_there:
                if start < last and first < stop:
                    bytes_tensor(self.block[start:stop]).copy_(self._there[start:stop])
            self._only_there = [each for each in self._only_there if not (each[0] < last and first < each[1])]


def _block(nbytes: int) -> Bytes:
    """The kept block if it is large enough and not much too large; else a new one."""
    try:
        kept = _idle.pop()
    except IndexError:
        kept = None
    if kept is not None and nbytes <= len(kept) <= 2 * nbytes:
        return kept
    del kept  # before there is another
    try:
        return aligned_bytes(nbytes)
    except MemoryError:
        what = "memory of this process"
        raise LimitExceeded(f"{nbytes} bytes do not fit into the {what}", what=what, asked=nbytes) from None
