"""The waits of a node's requests: the reason and duration of each, and the request that ended it.

While a node executes a request, `asked` names it: the number of the client, and that of the request. A wait is ended by
another request (the append that makes a row ready, the ack that frees room), which `asked` names at that moment; (0, 0)
stands for the node itself, after it has written a shard to disk or read one.

The low `BITS` of a request's number are the number of the calling place in the client's source
(`dataplane.diagnosis.recorder`). So messages need no other field for this. Here they only serve as keys.

Invariants: a table keeps at most `MOST` places and kinds, and `ENDERS` requests for each that ended its waits; others
count under place 0 and ender (0, 0). Waits of less than `SHORT_S` are not counted.
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
"""The number of a client, and of its request."""

NODE: Asked = (0, 0)

asked: ContextVar[Asked] = ContextVar("asked", default=NODE)
"""The request in progress."""


def processor_s() -> tuple[float, float]:
    """Seconds that the main thread of this process ran, and that it was ready to run without a processor, as counted by
    the kernel; zeros if it does not count them."""
    try:
        with open("/proc/self/schedstat", "rb") as told:
            ran, queued, *_ = told.read().split()
        return 1e-9 * int(ran), 1e-9 * int(queued)
    except (OSError, ValueError):
        return 0.0, 0.0


def computed_s() -> float:
    """Seconds that all threads of this process ran, in total."""
    return time.process_time()


def processors() -> int:
    """The number of processors that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def busy_s() -> float:
    """Seconds that all processors of this host were busy since its start; 0 if unknown."""
    try:
        with open("/proc/stat", "rb") as told:
            user, nice, system, _, _, irq, soft, *_ = (int(each) for each in told.readline().split()[1:])
        return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


class ClientWaits:
    """The waits of one client, by place, kind and object (the name of a stream)."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str, str], list[Any]] = {}  # count, seconds, {ender: [count, seconds]}
        self.open: set[RequestWait] = set()
        """The waits that have not ended."""

    def add(self, place: int, kind: str, what: str, seconds: float, ender: Asked) -> None:
        """Count a wait that `ender` has ended."""
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
        """As plain values: [place, kind, what, count, seconds, [[client, place, count, seconds], ...]]. Waits that have
        not ended count with their seconds so far, and without an ender."""
        found = {key: [count, seconds, ended] for key, (count, seconds, ended) in self._found.items()}
        for wait in self.open:
            key, waited_s = wait.key, wait.waited_s
            if key[1] and waited_s >= SHORT_S:
                found.setdefault(key, [0, 0.0, {}])[1] += waited_s
        return [
            [*key, count, seconds, [[*by, *counted] for by, counted in ended.items()]]
            for key, (count, seconds, ended) in found.items()
        ]


class RequestWait:
    """The wait of a request, which may have several reasons in turn. `end` counts the last one."""

    __slots__ = ("_before", "_ender", "_kind", "_place", "_since", "_waits", "_what")

    def __init__(self, waits: ClientWaits, number: int, kind: str) -> None:
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
    def kind(self) -> str:
        """The present reason."""
        return self._kind

    @property
    def key(self) -> tuple[int, str, str]:
        """The key under which it is counted."""
        return self._place, self._kind, self._what

    @property
    def waited_s(self) -> float:
        """The seconds of the wait so far."""
        return time.monotonic() - self._since

    def turn(self, kind: str, what: str = "") -> None:
        """Count the wait so far, and begin one with this reason. With an empty kind it is not counted."""
        self._count()
        self._before = self._kind, self._what
        self._kind, self._what, self._since, self._ender = kind, what, time.monotonic(), NODE

    def turn_back(self) -> None:
        """Return to the previous reason."""
        self.turn(*self._before)

    def noting(self, then: Callable[[T], object]) -> Callable[[T], None]:
        """A function that calls `then`, and records the current request as the ender of the wait."""

        def ended(value: T) -> None:
            self.ended()
            then(value)

        return ended

    def ended(self) -> None:
        """Record the current request as the ender of the wait."""
        self._ender = asked.get()

    def end(self) -> None:
        """End the wait, and count it."""
        self._count()
        self._kind = ""
        self._waits.open.discard(self)

    def _count(self) -> None:
        seconds = self.waited_s
        if self._kind and seconds >= SHORT_S:
            self._waits.add(*self.key, seconds, self._ender)


_current: ContextVar[RequestWait | None] = ContextVar("waiting", default=None)


def begin(waits: ClientWaits, number: int, kind: str) -> RequestWait:
    """Begin the wait of the request with this number, in this task; `kind` is its reason until `turn`."""
    wait = RequestWait(waits, number, kind)
    _current.set(wait)
    return wait


def turn(kind: str, what: str = "") -> RequestWait:
    """Change the reason of the current task's wait. Without a wait, returns one that is not counted."""
    wait = _current.get()
    if wait is None:
        return RequestWait(ClientWaits(), 0, "")
    wait.turn(kind, what)
    return wait
