"""The last freed shards and their causes, for the errors of later readers.

Invariant: it remembers the last `_KEPT` shards that were freed as a whole and the last `_SAYINGS` causes, in memory of
a fixed size. Names are copied there: a name that is kept as an object would keep its page of memory.
"""

from __future__ import annotations

from array import array
from typing import Literal, NamedTuple

from dataplane.clock import Clock
from dataplane.errors import Freed

_KEPT = 4096
_SAYINGS, _SAYING = 128, 256  # the number of causes, and the most bytes of each
_NAME = 120  # bytes of a name
_HOW = {
    "free": "by plane.free of {who}",
    "scope": "with its scope by plane.free of {who}",
    "stream": "since no task of stream {who!r} needs its rows any more",
}


class FreeCause(NamedTuple):
    """The cause of a free: a client, by a reference or by a scope; or a stream."""

    how: Literal["", "free", "scope", "stream"]
    who: str


UNKNOWN = FreeCause("", "")


class Freeings:
    """The last freed shards of a store. `cause`: the cause of the frees that come now, set by the caller of the
    store."""

    def __init__(self, clock: Clock) -> None:
        self.cause = UNKNOWN
        self._clock = clock
        self._numbers = array("q", [-1]) * _KEPT
        self._times = array("d", [0.0]) * _KEPT
        self._said = array("q", [-1]) * _KEPT
        self._next = 0
        self._sayings = bytearray(_SAYINGS * _SAYING)
        self._saying = -1  # the number of the last cause
        self._last: tuple[FreeCause, str] | None = None

    def note(self, number: int, scope: str) -> None:
        """Record the free of a shard that was put under this scope (empty: none)."""
        if self._last is None or self._last[1] != scope or self._last[0] != self.cause:
            self._say(scope)
        at = self._next
        self._numbers[at], self._times[at], self._said[at] = number, self._clock(), self._saying
        self._next = (at + 1) % _KEPT

    def _say(self, scope: str) -> None:
        self._last = self.cause, scope
        self._saying += 1
        how, who = self.cause
        text = b"\0".join((how.encode(), _cut(who), _cut(scope))).ljust(_SAYING, b"\0")
        start = self._saying % _SAYINGS * _SAYING
        self._sayings[start : start + _SAYING] = text

    def error(self, number: int) -> Freed:
        """The error for a shard that no longer exists."""
        try:
            at = self._numbers.index(number)
        except ValueError:
            return Freed(f"shard {number} was freed", shard=number)
        age_s = max(0.0, self._clock() - self._times[at])
        how, who, scope = self._heard(self._said[at])
        under = f", put under scope {scope!r}," if scope else ""
        why = " " + _HOW[how].format(who=who) if how else ""
        message = f"shard {number}{under} was freed {age_s:.1f} s ago{why}"
        return Freed(message, shard=number, scope=scope, freed_by=who, age_s=age_s)

    def _heard(self, saying: int) -> tuple[str, str, str]:
        """The operation and the client or stream that freed the shard, and the scope; empty if no longer known."""
        if saying <= self._saying - _SAYINGS:
            return "", "", ""
        start = saying % _SAYINGS * _SAYING
        how, who, scope, *_ = self._sayings[start : start + _SAYING].decode().split("\0")
        return how, who, scope


def _cut(name: str) -> bytes:
    """The first bytes of a name, in whole characters."""
    return name[:_NAME].encode(errors="replace")[:_NAME].decode(errors="ignore").encode()
