"""Messages of which a part has come, over all connections of a process: their bytes, within one bound.

One message is bounded by its length (`wire.framing`), a thousand connections with half of one each are not. So when
all halves together reach the bound, a connection that would add to them is not read until others have completed theirs.
Rejected: to cut off who adds the last one, since of many honest clients that send large messages at once each has a
half for a moment; to count the announced length, since most of it may never come.

What always holds: the halves come to no more than the bound, a share of each connection that is free, and one read of
each; while somebody waits, who has had a half for `PATIENCE_S` is cut off, so that nobody waits longer for him.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from dataplane.errors import LimitExceeded

MAX_HALVES = 64 << 20
"""Bytes of all of them together."""

SHARE = 64 << 10
"""Bytes that each connection may have of one at any time."""

PATIENCE_S = 10.0
"""Seconds that a half may take while others wait."""

_LOOK_S = 1.0


class Reading(Protocol):
    """A connection that is read from."""

    def hold_on(self) -> None:
        """Read no more until `go_on`."""

    def go_on(self) -> None:
        """Read again."""

    def cut_off(self, error: LimitExceeded) -> None:
        """End the connection; it calls `Halves.gone`."""


class Halves:
    """The halves of one process. To be used from one event loop."""

    def __init__(self, bound: int = MAX_HALVES, patience_s: float = PATIENCE_S) -> None:
        self._bound = bound
        self._patience_s = patience_s
        self._held: dict[Reading, tuple[int, float]] = {}  # by connection: bytes, and since when
        self._waiting: dict[Reading, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.nbytes = 0
        """Of all of them."""

    def note(self, reading: Reading, nbytes: int, *, anew: bool) -> None:
        """A connection has so many bytes of a message now, one that has begun since the last time if `anew`."""
        before, since = self._held.pop(reading, (0, 0.0))
        self.nbytes += nbytes - before
        if nbytes:
            now = asyncio.get_running_loop().time()
            self._held[reading] = nbytes, now if anew or not before else since
        if nbytes > SHARE and self.nbytes > self._bound and reading is not self._first():
            self._waiting[reading] = None
            reading.hold_on()
            self._watch()
        elif self._waiting and self.nbytes <= self._bound:
            self._go_on()

    def gone(self, reading: Reading) -> None:
        """The connection has ended."""
        nbytes, _ = self._held.pop(reading, (0, 0.0))
        self.nbytes -= nbytes
        self._waiting.pop(reading, None)
        if self._waiting:
            self._go_on()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _first(self) -> Reading | None:
        """Whose half is the oldest of those that count: he goes on, so that somebody does."""
        counted = [(since, each) for each, (nbytes, since) in self._held.items() if nbytes > SHARE]
        return min(counted, key=lambda one: one[0])[1] if counted else None

    def _go_on(self) -> None:
        """Let the first go on and, where there is room, the others too; each comes back if there is none again."""
        waiting, first = list(self._waiting), self._first()
        for reading in waiting if self.nbytes <= self._bound else [each for each in waiting if each is first]:
            del self._waiting[reading]
            self._held[reading] = self._held[reading][0], asyncio.get_running_loop().time()  # it could not go on
            reading.go_on()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Cut off who takes too long, while others wait."""
        self._timer = None
        late = asyncio.get_running_loop().time() - self._patience_s
        for reading in [each for each, (nbytes, since) in self._held.items() if nbytes > SHARE and since <= late]:
            if self._waiting and reading not in self._waiting:
                what = "bytes of messages of which a part has come"
                text = f"half a message for {self._patience_s:.0f} s, while others wait to send theirs"
                reading.cut_off(LimitExceeded(text, what=what, asked=self.nbytes, limit=self._bound))
        if self._waiting:
            self._watch()
