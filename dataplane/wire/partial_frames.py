"""Bounds the bytes of the partially received messages of all connections of a process.

The size of one message is bounded (`wire.framing`), but a thousand connections may each have half of one. When all
partial messages together reach the bound, a connection that would add to them is not read until others have completed
theirs. Rejected: to disconnect the connection that exceeds the bound, since many honest clients may send large messages
at the same time; to count the announced lengths, since most of the bytes may never arrive.

Invariants: the partial messages take at most the bound, one message, and for each connection `SHARE` and one read. The
connection with the oldest partial message is always read. While other connections wait, one whose partial message is
older than `PATIENCE_S` is disconnected, so others wait no longer for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dataplane.errors import LimitExceeded

MAX_HALVES = 64 << 20
"""The most bytes of all partial messages."""

SHARE = 64 << 10
"""Bytes of a partial message that each connection may have independent of the others."""

PATIENCE_S = 10.0
"""The most seconds that a partial message may take while other connections wait."""

_LOOK_S = 1.0


class FrameSource(Protocol):
    """A connection that is read."""

    def hold_on(self) -> None:
        """Stop reading until `go_on`."""

    def go_on(self) -> None:
        """Read again."""

    def cut_off(self, error: LimitExceeded) -> None:
        """Disconnect, and call `PartialFrames.gone`."""


@dataclass(slots=True)
class _PartialFrame:
    """A partial message: its bytes, the time at which it began, and the time since which its connection is read."""

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
        """`freed` is called with the size of the partial message of a connection that has ended."""
        self._bound = bound
        self._freed = freed
        self._patience_s = patience_s
        self._held: dict[FrameSource, _PartialFrame] = {}
        self._waiting: dict[FrameSource, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.nbytes = 0
        """The bytes of all partial messages."""

    def note(self, reading: FrameSource, nbytes: int, *, anew: bool) -> None:
        """Note that a connection has `nbytes` bytes of a partial message. `anew`: the message has begun since the last
        call."""
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
        """Note that the connection has ended."""
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
        """The connection with the oldest partial message of more than `SHARE` bytes. It is always read, so that at
        least one connection continues."""
        counted = [(half.began, each) for each, half in self._held.items() if half.nbytes > SHARE]
        return min(counted, key=lambda one: one[0])[1] if counted else None

    def _go_on(self) -> None:
        """Let the connection with the oldest partial message continue and, if there is room, the others. Each stops
        again when the bound is reached."""
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
