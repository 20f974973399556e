"""Returns the node's own unused memory to the host: memory that streams and large messages have left.

A stream's bookkeeping is many small objects. When streams are dropped, the allocators keep the memory: single objects
in Python's free lists each keep a whole arena of the allocator, and glibc keeps every page below the last one in use.
Measured with 2,048 streams of a row each, which took 27 MiB: without this module all 27 stay; with it 10 to 14, which
the next streams reuse.

glibc keeps large blocks that are not at the end of the heap, and once a block of some MiB was freed it takes such
blocks from the heap (mallopt(3), M_MMAP_THRESHOLD: it is dynamic). A node that has received a hundred halves of
messages of 4 MiB would keep 400 MiB. Rejected: a fixed threshold, with which each read of 256 KiB is mapped and
unmapped.

Invariants: for streams, memory is trimmed only if much more of it is in use than when the node began, and trims take at
most 1 % of a processor: a trim takes as long as a garbage collection, some 40 ms, during which no request is answered.
For large blocks the heap is searched at most every `_SOON_S`, and only after `_WORTH` bytes were freed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

_SOON_S = 0.5  # delay after a stream is dropped: more may follow
_BETWEEN_S = 10.0
_SHARE = 0.01  # the share of a processor that trims may take
_GROWN = 8 << 20  # bytes of growth since the start that make a trim worth its cost
_WORTH = 8 << 20  # bytes of freed large blocks that make a search of the heap worth its cost

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only; other allocators keep less


class MemoryTrim:
    """Returns unused memory to the host, some time after `due` or `freed` was called. Used from one event loop only.
    `cool` is called when the memory of streams is returned, so that other parts of the node can return theirs at the
    same time."""

    def __init__(self, cool: Callable[[], object] = lambda: None) -> None:
        self._cool = cool
        self._freed = 0
        self._freed_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._more = False  # `due` was called since the timer was set
        self._floor = anonymous()
        self._next_s = 0.0  # the loop's time before which nothing is trimmed
        self.count = 0
        """Number of trims."""

    def due(self) -> None:
        """Trim soon if it is worth it: something large may have been freed."""
        self._more = True
        if self._timer is None:
            self._look_later()

    def freed(self, nbytes: int) -> None:
        """Note that `nbytes` of large blocks are freed, now or in this step of the event loop."""
        self._freed += nbytes
        if self._freed >= _WORTH and self._freed_timer is None:
            self._freed_timer = asyncio.get_running_loop().call_later(_SOON_S, self._give_back)

    def _give_back(self) -> None:
        if self._freed_timer is not None:
            self._freed_timer.cancel()
        self._freed, self._freed_timer = 0, None
        if _malloc_trim is not None:
            _malloc_trim(0)

    def _look_later(self) -> None:
        self._more = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(loop.time() + _SOON_S, self._next_s), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._more:
            self._look_later()
        elif anonymous() >= self._floor + _GROWN:
            self._trim()

    def _trim(self) -> None:
        began_s = time.thread_time()
        gc.collect()  # only a whole collection empties the free lists
        self._cool()
        self._give_back()
        pause_s = max(_BETWEEN_S, (time.thread_time() - began_s) / _SHARE)
        self._next_s = asyncio.get_running_loop().time() + pause_s
        self.count += 1

    def close(self) -> None:
        """Stop: the node ends."""
        for timer in (self._timer, self._freed_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._freed_timer = None


def anonymous() -> int:
    """Bytes of this process's anonymous memory: heaps and stacks."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
