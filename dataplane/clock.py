"""Time, as a seam: every deadline in the package comes from here, and tests may put their own clock in.

Only the monotonic clock is read. No decision depends on wall time, so a clock that jumps changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Seconds since some fixed moment; never goes back."""

monotonic: Clock = time.monotonic


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a clock, by which something has to have happened."""

    at: float
    started: float
    clock: Clock = monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = monotonic) -> Deadline:
        """The moment `seconds` from now."""
        now = clock()
        return cls(now + seconds, now, clock)

    @property
    def remaining_s(self) -> float:
        """Seconds until then; zero once it has passed."""
        return max(0.0, self.at - self.clock())

    @property
    def waited_s(self) -> float:
        """Seconds since the deadline was set."""
        return self.clock() - self.started
