"""A replica that was not running heard nobody, and takes nobody for silent because of that.

A replica is ticked every beat. One whose tick is overdue was stopped, or starved, or its whole host was; what others
sent meanwhile it has yet to hear, and what it should have sent itself nobody could acknowledge. So it judges others
again only two beats after it has gone on. To judge later is always safe.
"""

from __future__ import annotations

import math


class Attention:
    """Of one replica, by its clock."""

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
        """Whether silence of others is theirs."""
        return now - self._ticked_s <= self._most_s and now - self._since_s >= self._most_s
