"""Counts the calls of this process by the line that made them, its place: how many, and how long they took.

A place has a number below `PLACES`. Who counts is given three functions: `asked` says the number that the caller's
context has already, or -1; `find` walks the stack for the place; `gap` is told of a place whose call came more than
`gap_ns` after the last one had ended. Times are nanoseconds of the monotonic clock.

Invariants: memory is fixed. The extension `_calls` counts the same as `PlainCalls`, which is used where it was
not built, and needs a third of the time: a call of the plane pays for this each time.
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
"""The number of a place; and the address of its code, its last instruction, and how deep its frame is below the one
that asks, from 0 on: by which it is found again without a walk. A code of 0: it is not."""

_clock = time.monotonic_ns


class Calls(Protocol):
    """Counts calls. Any thread may call it."""

    active: bool
    """Whether places are looked for. Calls are counted always."""
    left: int
    """When the last call ended."""

    def place(self) -> int:
        """The number of the place that calls now; 0 where there is none."""

    def called(self, number: int, began: int, /) -> None:
        """A call of this place is over that began then. Higher bits of the number count for nothing."""

    def totals(self, number: int, /) -> tuple[int, int]:
        """The calls of a place, and their nanoseconds."""

    def reset(self) -> None:
        """Forget everything. Nothing is active then."""


class PlainCalls:
    """As the extension, in Python."""

    def __init__(
        self, asked: Callable[[], int], find: Callable[[], Found], gap: Callable[[int, int], Any], gap_ns: int
    ) -> None:
        self._asked = asked
        self._find = find
        self._gap = gap
        self._gap_ns = gap_ns
        self.reset()

    def reset(self) -> None:
        """See `Calls`."""
        self.active = False
        self.left = _clock()
        self._count = [0] * (PLACES + 1)
        self._ns = [0] * (PLACES + 1)

    def place(self) -> int:
        """See `Calls`."""
        number = self._asked()
        if number >= 0:
            return number
        return self._find()[0] if self.active else 0

    def called(self, number: int, began: int, /) -> None:
        """See `Calls`."""
        now = _clock()
        number &= PLACES
        self._count[number] += 1
        self._ns[number] += now - began
        if began - self.left > self._gap_ns:
            self._gap(number, began - self.left)
        self.left = now

    def totals(self, number: int, /) -> tuple[int, int]:
        """See `Calls`."""
        return self._count[number & PLACES], self._ns[number & PLACES]


def counting(asked: Callable[[], int], find: Callable[[], Found], gap: Callable[[int, int], Any], gap_ns: int) -> Calls:
    """Counts calls, as fast as can be here."""
    return PlainCalls(asked, find, gap, gap_ns) if _calls is None else _calls.Calls(asked, find, gap, gap_ns)


def plain_current_frames() -> dict[int, FrameType]:
    """As `current_frames`, where the extension is not there: who turns collecting off in the same moment may find it
    on."""
    collected = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collected:
            gc.enable()


current_frames: Callable[[], dict[int, FrameType]] = plain_current_frames if _calls is None else _calls.current_frames
"""The frame of each thread, by its number, made while no garbage is collected. Before Python 3.12.3 to collect some
meanwhile, by which Python runs, makes this thread and one that starts another wait for each other for ever
(python/cpython#106883)."""
