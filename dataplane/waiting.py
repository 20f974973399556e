"""What a node's requests wait for, how long, and whose request ended each wait.

While a node does what a request asks, `asked` says which: the client's number, and the request's. Whoever ends a wait
does so within a request of its own (the append that makes a row ready, the ack that frees room), so that `asked` names
it as the wait ends; (0, 0) is the node itself, which has written a shard to disk, or read one.

The low `BITS` of a request's number are the place in the client's source that it was made at, as the client numbers
those (`dataplane.diagnosis.recorder`). So no message carries anything for this. Here they are only counted under.

Invariants: a table keeps at most `MOST` places and kinds, and of each `ENDERS` that ended its waits; what is
beyond counts under place 0 and ender (0, 0). What waits for less than `SHORT_S` is not counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

BITS = 10
PLACES = (1 << BITS) - 1
MOST = 256
ENDERS = 16
SHORT_S = 0.0002

Asked = tuple[int, int]
"""A client's number, and its request's."""

NODE: Asked = (0, 0)

asked: ContextVar[Asked] = ContextVar("asked", default=NODE)
"""The request that is being done."""


def processor_s() -> tuple[float, float]:
    """Seconds that the main thread of this process ran, and was ready to run without a processor, as the kernel counts
    them; zeros where it does not."""
    try:
        with open("/proc/self/schedstat", "rb") as told:
            ran, queued, *_ = told.read().split()
        return 1e-9 * int(ran), 1e-9 * int(queued)
    except (OSError, ValueError):
        return 0.0, 0.0


def computed_s() -> float:
    """Seconds that the threads of this process ran, all together."""
    return time.process_time()


def processors() -> int:
    """How many processors this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def busy_s() -> float:
    """Seconds that all processors of this host ran anything, since it started; 0 where that is not told."""
    try:
        with open("/proc/stat", "rb") as told:
            user, nice, system, _, _, irq, soft, *_ = (int(each) for each in told.readline().split()[1:])
        return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


class Waits:
    """The waits of one client, by place and kind and by what for (a stream's name)."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, str], list[Any]] = {}  # count, seconds, {ender: [count, seconds]}
        self.open: set[Wait] = set()
        """Those that have not ended."""

    def add(self, place: int, kind: str, what: str, seconds: float, ender: Asked) -> None:
        """A wait is over, that `ender` has ended."""
        key = (place, kind, what)
        entry = self._found.get(key)
        if entry is None:
            if len(self._found) >= MOST:
                key = (0, kind, "")
                if key not in self._found and len(self._found) >= MOST + 16:
                    return
            entry = self._found.setdefault(key, [0, 0.0, {}])
        entry[0] += 1
        entry[1] += seconds
        by = (ender[0], ender[1] & PLACES)
        ended = entry[2]
        if by not in ended and len(ended) >= ENDERS:
            by = NODE
        counted = ended.setdefault(by, [0, 0.0])
        counted[0] += 1
        counted[1] += seconds

    def told(self) -> list[list[Any]]:
        """As plain values: [place, kind, what, count, seconds, [[client, place, count, seconds], ...]]. Those that have
        not ended count with what they have waited, and without an ender."""
        found = {key: [count, seconds, ended] for key, (count, seconds, ended) in self._found.items()}
        for wait in self.open:
            key, waited_s = wait.key, wait.waited_s
            if key[1] and waited_s >= SHORT_S:
                found.setdefault(key, [0, 0.0, {}])[1] += waited_s
        return [
            [*key, count, seconds, [[*by, *counted] for by, counted in ended.items()]]
            for key, (count, seconds, ended) in found.items()
        ]


class Wait:
    """A request that may wait, perhaps for one thing after another. `end` counts the last of them."""

    __slots__ = ("_before", "_ender", "_kind", "_place", "_since", "_waits", "_what")

    def __init__(self, waits: Waits, number: int, kind: str) -> None:
        self._waits = waits
        self._place = number & PLACES
        self._kind = kind
        self._what = ""
        self._since = time.monotonic()
        self._ender = NODE
        self._before = kind, ""
        if number or kind:
            waits.open.add(self)

    @property
    def key(self) -> tuple[int, str, str]:
        """What it counts under."""
        return self._place, self._kind, self._what

    @property
    def waited_s(self) -> float:
        """Seconds that it has waited."""
        return time.monotonic() - self._since

    def turn(self, kind: str, what: str = "") -> None:
        """From now on it waits for this, if at all. An empty kind: for nothing that counts."""
        self._count()
        self._before = self._kind, self._what
        self._kind, self._what, self._since, self._ender = kind, what, time.monotonic(), NODE

    def turn_back(self) -> None:
        """It waits for what it waited for before."""
        self.turn(*self._before)

    def noting(self, then: Callable[[T], object]) -> Callable[[T], None]:
        """`then`, which ends the wait, and whoever calls it is remembered for that."""

        def ended(value: T) -> None:
            self.ended()
            then(value)

        return ended

    def ended(self) -> None:
        """Who does this now ends the wait."""
        self._ender = asked.get()

    def end(self) -> None:
        """The wait is over."""
        self._count()
        self._kind = ""
        self._waits.open.discard(self)

    def _count(self) -> None:
        seconds = self.waited_s
        if self._kind and seconds >= SHORT_S:
            self._waits.add(*self.key, seconds, self._ender)


_current: ContextVar[Wait | None] = ContextVar("waiting", default=None)


def begin(waits: Waits, number: int, kind: str) -> Wait:
    """The request of this number waits, in this task; for what, unless `turn` says it."""
    wait = Wait(waits, number, kind)
    _current.set(wait)
    return wait


def turn(kind: str, what: str = "") -> Wait:
    """The request of this task waits for this from now on. Where there is none, what is said of it counts nowhere."""
    wait = _current.get()
    if wait is None:
        return Wait(Waits(), 0, "")
    wait.turn(kind, what)
    return wait
