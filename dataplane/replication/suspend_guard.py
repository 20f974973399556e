"""A replica that did not run for a while does not blame others for the silence.

A replica is ticked at every beat. If a tick is overdue, the process was stopped or starved, or the whole host was:
it has not yet received what others sent meanwhile, and has not sent what others should have acknowledged. So it
judges others again only two beats after it continued. Judging later is always safe.
"""

from __future__ import annotations

import math


class SuspendGuard:
    """The attention of one replica, by its clock."""

    __slots__ = ("_most_s", "_since_s", "_ticked_s")

    def __init__(self, beat_s: float, now: float) -> None:
        self._most_s = 2 * beat_s
        self._ticked_s = now
        self._since_s = -math.inf

    def tick(self, now: float) -> None:
        """The replica runs."""
        if now - self._ticked_s > self._most_s:
            self._since_s = now
        self._ticked_s = now

    def judges(self, now: float) -> bool:
        """Whether silence is the fault of the others."""
        return now - self._ticked_s <= self._most_s and now - self._since_s >= self._most_s
