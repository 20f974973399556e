"""The clock of all deadlines in the package; tests may replace it.

Only the monotonic clock is read. No decision depends on wall time, so jumps of the wall clock have no effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Seconds since a fixed moment; never decreases."""

monotonic: Clock = time.monotonic


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit, as a moment on a clock."""

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
        """Seconds until the deadline; zero once it has passed."""
        return max(0.0, self.at - self.clock())

    @property
    def waited_s(self) -> float:
        """Seconds since the deadline was set."""
        return self.clock() - self.started
