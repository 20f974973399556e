"""Partially received messages of all connections of a process, within one bound in bytes.

One message is bounded by its length (`wire.framing`); a thousand connections with half of one each are not. So when all
partial messages together reach the bound, a connection that would add to them is not read until others have completed
theirs. Rejected: to disconnect the one that adds the last, since of many honest clients that send large messages at
once each has a part for a moment; to count the announced length, since most of it may never come.

Invariants: the parts take at most the bound, one message, and for each connection its free share and one read. The
connection with the oldest part continues. While others wait, one whose part is older than `PATIENCE_S` is
disconnected, so no other waits longer for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dataplane.errors import LimitExceeded

MAX_HALVES = 64 << 20
"""Bytes of all partial messages."""

SHARE = 64 << 10
"""Bytes that each connection may have of one at any time."""

PATIENCE_S = 10.0
"""Seconds that a partial message may take while others wait."""

_LOOK_S = 1.0


class FrameSource(Protocol):
    """A connection that is read."""

    def hold_on(self) -> None:
        """Stop reading until `go_on`."""

    def go_on(self) -> None:
        """Read again."""

    def cut_off(self, error: LimitExceeded) -> None:
        """Disconnect; it calls `PartialFrames.gone`."""


@dataclass(slots=True)
class _PartialFrame:
    """Bytes of a message, when it began, and since when more of it could come."""

    nbytes: int
    began: float
    since: float


class PartialFrames:
    """The partial messages of one process. Used from one event loop."""

    def __init__(
        self,
        bound: int = MAX_HALVES,
        patience_s: float = PATIENCE_S,
        *,
        freed: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        """`freed` is called with the size of a partial message that is gone."""
        self._bound = bound
        self._freed = freed
        self._patience_s = patience_s
        self._held: dict[FrameSource, _PartialFrame] = {}
        self._waiting: dict[FrameSource, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.nbytes = 0
        """The bytes of all partial messages."""

    def note(self, reading: FrameSource, nbytes: int, *, anew: bool) -> None:
        """A connection now has so many bytes of a message, which has begun since the last call if `anew`."""
        half = self._held.pop(reading, None)
        if half is None or anew:
            now = asyncio.get_running_loop().time()
            self.nbytes -= 0 if half is None else half.nbytes
            half = _PartialFrame(0, now, now)
        self.nbytes += nbytes - half.nbytes
        half.nbytes = nbytes
        if nbytes:
            self._held[reading] = half
        if nbytes > SHARE and self.nbytes > self._bound and reading is not self._first():
            self._waiting[reading] = None
            reading.hold_on()
            self._watch()
        if self._waiting:
            self._go_on()

    def gone(self, reading: FrameSource) -> None:
        """The connection has ended."""
        half = self._held.pop(reading, None)
        if half is not None:
            self.nbytes -= half.nbytes
            self._freed(half.nbytes)
        self._waiting.pop(reading, None)
        if self._waiting:
            self._go_on()
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _first(self) -> FrameSource | None:
        """The connection with the oldest counted part, which continues so that one does."""
        counted = [(half.began, each) for each, half in self._held.items() if half.nbytes > SHARE]
        return min(counted, key=lambda one: one[0])[1] if counted else None

    def _go_on(self) -> None:
        """Let the first continue and, if there is room, the others; each stops again when room runs out."""
        waiting, first = list(self._waiting), self._first()
        for reading in waiting if self.nbytes <= self._bound else [each for each in waiting if each is first]:
            del self._waiting[reading]
            self._held[reading].since = asyncio.get_running_loop().time()
            reading.go_on()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Disconnect connections that take too long while others wait."""
        self._timer = None
        late = asyncio.get_running_loop().time() - self._patience_s
        for reading in [each for each, half in self._held.items() if half.nbytes > SHARE and half.since <= late]:
            if self._waiting and reading not in self._waiting:
                what = "bytes of messages of which a part has come"
                text = f"half a message for {self._patience_s:.0f} s, while others wait to send theirs"
                reading.cut_off(LimitExceeded(text, what=what, asked=self.nbytes, limit=self._bound))
        if self._waiting:
            self._watch()
