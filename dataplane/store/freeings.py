"""Who freed which shards lately: for the errors of those that come too late.

What always holds: it knows of the last `_KEPT` shards that went as a whole, and takes no more memory for more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

from dataplane.clock import Clock
from dataplane.errors import Freed

_KEPT = 4096
_HOW = {
    "free": "by plane.free of {who}",
    "scope": "with its scope by plane.free of {who}",
    "stream": "since no task of stream {who!r} needs its rows any more",
}


class Cause(NamedTuple):
    """Who frees: a client, by a reference or by a scope; or a stream."""

    how: Literal["", "free", "scope", "stream"]
    who: str


UNKNOWN = Cause("", "")


class Freeings:
    """The shards that a store freed last. `cause`: who frees now, set by whoever calls the store for others."""

    def __init__(self, clock: Clock) -> None:
        self.cause = UNKNOWN
        self._clock = clock
        self._noted: OrderedDict[int, tuple[Cause, str, float]] = OrderedDict()

    def note(self, number: int, scope: str) -> None:
        """A shard that was put under this scope, if it has a name, is freed now."""
        self._noted[number] = self.cause, scope, self._clock()
        if len(self._noted) > _KEPT:
            self._noted.popitem(last=False)

    def error(self, number: int) -> Freed:
        """The error for a shard that is not there."""
        cause, scope, when = self._noted.get(number, (UNKNOWN, "", 0.0))
        if number not in self._noted:
            return Freed(f"shard {number} was freed", shard=number)
        age_s = max(0.0, self._clock() - when)
        under = f", put under scope {scope!r}," if scope else ""
        how = " " + _HOW[cause.how].format(who=cause.who) if cause.how else ""
        message = f"shard {number}{under} was freed {age_s:.1f} s ago{how}"
        return Freed(message, shard=number, scope=scope, freed_by=cause.who, age_s=age_s)
