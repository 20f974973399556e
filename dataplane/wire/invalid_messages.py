"""Log lines about invalid messages. The first lines about each sender are logged, then the number of further ones.

Invariants: for each sender at most `MOST` lines are logged in `EACH_S` seconds, and afterwards one line with the number
of omitted ones; all senders after the first `SENDERS` in that time count as one sender. So no sender can fill a disk
with log lines, even if it uses many names, and yet every invalid message is counted in some line.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from dataplane.clock import Clock, monotonic

MOST, EACH_S, SENDERS = 5, 60.0, 32

_OTHERS = "others"


class _Sender:
    """One sender, since its first line."""

    __slots__ = ("began_s", "left_out", "lines")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.lines = self.left_out = 0


class InvalidMessageLog:
    """The lines of one logger. `log` may be called from the event loop or, without one, from anywhere."""

    def __init__(self, log: logging.Logger, clock: Clock = monotonic) -> None:
        self._log = log
        self._clock = clock
        self._senders: dict[str, _Sender] = {}

    def log(self, level: int, sender: str, text: str, *arguments: object) -> None:
        """Log a line about what this sender sent, or count it."""
        self._tell()
        if sender not in self._senders and len(self._senders) >= SENDERS:
            sender = _OTHERS
        found = self._senders.get(sender)
        if found is None:
            found = self._senders[sender] = _Sender(self._clock())
            with suppress(RuntimeError):  # without a loop, the next log line does it
                asyncio.get_running_loop().call_later(EACH_S, self._tell)
        if found.lines < MOST:
            found.lines += 1
            self._log.log(level, text, *arguments)
        else:
            found.left_out += 1

    def _tell(self) -> None:
        """For senders whose `EACH_S` seconds are over, log the count of omitted lines, and forget them."""
        now = self._clock()
        for sender, each in [(s, e) for s, e in self._senders.items() if now - e.began_s >= EACH_S]:
            del self._senders[sender]
            if each.left_out:
                self._log.warning("%s: %d more of this kind in %.0f s", sender, each.left_out, now - each.began_s)
