"""Returns the node's own unused memory to the host: memory that streams and large messages have left.

The state of a stream is many small objects. When streams are dropped, the allocators keep the memory. A single object
in Python's free lists keeps a whole arena of the allocator, and glibc keeps every page below the last one in use.
Measured with 2,048 streams of a row each, which took 27 MiB. Without this module all 27 stay. With it 10 to 14 stay,
which the next streams reuse.

glibc keeps large free blocks that are not at the end of the heap. Once a block of some MiB was freed, it allocates
blocks of that size from the heap (mallopt(3): M_MMAP_THRESHOLD is dynamic). Rejected: a fixed threshold, with which
each read of 256 KiB is mapped and unmapped.

Invariant: memory is trimmed at most every `_BETWEEN_S`, and trims take at most 1 % of a processor. After streams were
dropped, a trim takes as long as a garbage collection, some 40 ms, during which no request is answered.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable

_SOON_S = 0.5  # delay after a stream is dropped: more may follow
_BETWEEN_S = 10.0
_SHARE = 0.01  # the share of a processor that trims may take
_WORTH = 8 << 20  # bytes of freed large blocks that make a trim worth its cost

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)  # glibc only; other allocators keep less


class MemoryTrim:
    """Returns unused memory to the host, some time after `due` or `freed` was called. `cool` is called just before, so
    that other parts of the node release memory. Used from one event loop only."""

    def __init__(self, cool: Callable[[], object] = lambda: None) -> None:
        self._cool = cool
        self._freed = 0
        self._dropped = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0  # the loop's time before which nothing is trimmed
        self.count = 0
        """Number of trims."""

    def due(self) -> None:
        """Trim soon: a stream was dropped."""
        self._dropped = True
        self._later()

    def _later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time() + _SOON_S, self._next_s), self._trim)

    def freed(self, nbytes: int) -> None:
        """Note that `nbytes` of large blocks are freed, now or in this step of the event loop."""
        self._freed += nbytes
        if self._freed >= _WORTH:
            self._later()

    def _trim(self) -> None:
        began_s, dropped = time.thread_time(), self._dropped
        self._freed, self._dropped, self._timer = 0, False, None
        if dropped:
            gc.collect()  # only a whole collection empties the free lists
        self._cool()
        _malloc_trim(0)
        pause_s = max(_BETWEEN_S, (time.thread_time() - began_s) / _SHARE)
        self._next_s = asyncio.get_running_loop().time() + pause_s
        self.count += 1

    def close(self) -> None:
        """Stop: the node ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
