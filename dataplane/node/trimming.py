"""Memory of the node's own that streams have left, given back to the host.

A stream's bookkeeping is many small objects. When streams go, the allocators keep what they had: Python's free lists
hold one object here and there, each of which keeps a whole arena; glibc keeps every page below the last one in use.
Measured with 4,096 streams of a row each: of 41 MiB that they took, 40 stay without this, and 3 to 8 with it.

What always holds: nothing is done where little has grown, nor more often than every `_BETWEEN_S`: it takes as long as
looking for garbage does, some 40 ms, in which nobody is answered.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

_SOON_S = 0.5  # after a stream has gone: more of them may go
_BETWEEN_S = 10.0
_GROWN = 8 << 20  # bytes more than after the last time, from which on it is worth the while


class Trimming:
    """Gives back what is not used any more, some time after it was `due`. To be used from one event loop alone."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._more = False  # has gone since the timer was set
        self._floor = anonymous()
        self._last_s = -_BETWEEN_S
        self.count = 0
        """How often memory was given back."""

    def due(self) -> None:
        """Something large may have gone."""
        self._more = True
        if self._timer is None:
            self._look_later()

    def _look_later(self) -> None:
        self._more = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(loop.time() + _SOON_S, self._last_s + _BETWEEN_S), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._more:
            self._look_later()
        elif anonymous() >= self._floor + _GROWN:
            self._trim()

    def _trim(self) -> None:
        gc.collect()  # only a whole collection empties the free lists
        with suppress(AttributeError, OSError):  # where the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)
        self._floor, self._last_s = anonymous(), asyncio.get_running_loop().time()
        self.count += 1

    def close(self) -> None:
        """The node stops."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def anonymous() -> int:
    """Bytes of this process's memory that are no file's: its heaps and stacks."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
