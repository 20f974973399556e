"""Counts the calls of this process, and sums their time, by the line that made them (the place).

A place has a number below `PLACES`. A counter uses three functions: `asked` returns the number of the place if the
caller's context has one, else -1. `find` walks the stack for the place. `gap` is called for a call that began more than
`gap_ns` after the end of the last call. Times are nanoseconds of the monotonic clock.

Invariants: memory is fixed. The extension `_calls` and its replacement `PlainCalls` count the same. The extension takes
a third of the time, which every call of the plane takes longer.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from dataplane.waiting import PLACES

try:
    from dataplane.diagnosis import _calls as _extension
except ImportError:  # no C compiler when it was installed
    _calls: Any = None
else:
    _calls = _extension

Found = tuple[int, int, int, int]
"""The number of a place, the id of its code, its last instruction, and the distance of its frame from the calling
frame, from 0. By these, the place is found again without a walk, unless the id is 0."""

_clock = time.monotonic_ns


class CallCounts(Protocol):
    """Counts calls. Thread-safe."""

    active: bool
    """Whether `place` looks for places. Calls are always counted."""
    left: int
    """The time at which the last call ended."""

    def place(self) -> int:
        """The number of the calling place; 0 if there is none."""

    def called(self, number: int, began: int, /) -> None:
        """Count a call of this place that began at `began` and ends now. Bits of the number beyond `PLACES` are
        ignored."""

    def totals(self, number: int, /) -> tuple[int, int]:
        """The number of calls of a place, and their nanoseconds."""

    def reset(self) -> None:
        """Forget all counts, and become inactive. No call may be in progress."""


class PlainCalls:
    """The extension in Python."""

    def __init__(
        self, asked: Callable[[], int], find: Callable[[], Found], gap: Callable[[int, int], Any], gap_ns: int
    ) -> None:
        self._asked = asked
        self._find = find
        self._gap = gap
        self._gap_ns = gap_ns
        self.reset()

    def reset(self) -> None:
        """See `CallCounts`."""
        self.active = False
        self.left = _clock()
        self._count = [0] * (PLACES + 1)
        self._ns = [0] * (PLACES + 1)

    def place(self) -> int:
        """See `CallCounts`."""
        number = self._asked()
        if number >= 0:
            return number
        return self._find()[0] if self.active else 0

    def called(self, number: int, began: int, /) -> None:
        """See `CallCounts`."""
        now = _clock()
        number &= PLACES
        self._count[number] += 1
        self._ns[number] += now - began
        if began - self.left > self._gap_ns:
            self._gap(number, began - self.left)
        self.left = now

    def totals(self, number: int, /) -> tuple[int, int]:
        """See `CallCounts`."""
        return self._count[number & PLACES], self._ns[number & PLACES]


def counting(
    asked: Callable[[], int], find: Callable[[], Found], gap: Callable[[int, int], Any], gap_ns: int
) -> CallCounts:
    """A counter of calls: the extension, or `PlainCalls` without it."""
    return PlainCalls(asked, find, gap, gap_ns) if _calls is None else _calls.Calls(asked, find, gap, gap_ns)


def plain_current_frames() -> dict[int, FrameType]:
    """`current_frames` without the extension. Another thread that turns garbage collection off meanwhile may find it
    on."""
    collected = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collected:
            gc.enable()


current_frames: Callable[[], dict[int, FrameType]] = plain_current_frames if _calls is None else _calls.current_frames
"""The frame of each thread, by its number, read while garbage collection is off. Before Python 3.12.3, a collection
meanwhile could deadlock this thread with a thread that starts another (python/cpython#106883)."""
