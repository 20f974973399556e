"""Gives back to the system what large messages leave in the heap when they are freed.

The C library keeps what it frees unless it lies at the heap's end, and from the first block of some MiB on that was
freed it takes such blocks from the heap (`mallopt(3)`, M_MMAP_THRESHOLD: it is dynamic). A node that has had a hundred
half messages of 4 MiB would so keep 400 MiB for as long as it lives. Rejected: a fixed threshold, with which each read
of 256 KiB is mapped and unmapped.

What always holds: the heap is looked through at most every `_SOON_S`, and only after `_WORTH` bytes were freed.
"""

from __future__ import annotations

import asyncio
import ctypes

_WORTH = 8 << 20  # bytes
_SOON_S = 0.25

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone; others keep less


class Heap:
    """The heap of this process, for one event loop."""

    def __init__(self) -> None:
        self._freed = 0
        self._timer: asyncio.TimerHandle | None = None

    def freed(self, nbytes: int) -> None:
        """So many bytes are freed, of large blocks, now or in this turn of the loop."""
        self._freed += nbytes
        if self._freed >= _WORTH and self._timer is None and _trim is not None:
            self._timer = asyncio.get_running_loop().call_later(_SOON_S, self._give_back)

    def _give_back(self) -> None:
        self._freed, self._timer = 0, None
        if _trim is not None:
            _trim(0)
