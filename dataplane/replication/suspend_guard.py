"""Detects that a replica did not run for a while, so that it does not blame its peers for silence.

A replica is ticked at every beat. If a tick is overdue, the process or the whole host was stopped or starved. Messages
of others may still wait to be received, and the replica has sent none that they could acknowledge. So it judges others
again only two beats after it continued. Judging later is always safe.
"""

from __future__ import annotations

import math


class SuspendGuard:
    """Suspension guard of one replica, by its clock."""

    __slots__ = ("_most_s", "_since_s", "_ticked_s")

    def __init__(self, beat_s: float, now: float) -> None:
        self._most_s = 2 * beat_s
        self._ticked_s = now
        self._since_s = -math.inf

    def tick(self, now: float) -> None:
        """Note that the replica runs."""
        if now - self._ticked_s > self._most_s:
            self._since_s = now
        self._ticked_s = now

    def judges(self, now: float) -> bool:
        """Whether silence of a peer counts: this replica has run without a break for long enough."""
        return now - self._ticked_s <= self._most_s and now - self._since_s >= self._most_s
