"""Detects that a replica did not run for a while, so that it does not take its own pause for silence of its peers.

A replica of the configuration is ticked at every beat. If a tick is overdue, the process or the whole host was stopped,
or got too little processor time. Messages of peers may still wait to be received, and the replica has sent none that
they could acknowledge. So it treats its leader or followers as silent again only after it has run for two beats.
Waiting longer is always safe.
"""

from __future__ import annotations

import math


class SuspendGuard:
    """The suspend guard of one replica, by the replica's clock."""

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
        """Whether a peer may be treated as silent: this replica has run for long enough without a pause."""
        return now - self._ticked_s <= self._most_s and now - self._since_s >= self._most_s
