"""Sums of the counts of streams. No sum decreases when a stream is dropped, moves to another node, or is no longer
reported by name but among the others.

A monitoring system takes a decreasing counter for a restart, and counts its whole value again. So each look adds the
increase of each stream's counts since the previous look.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from dataplane.observe.snapshot import NAMED, OTHERS, PAIRS

Counts = tuple[int, int, int, int]
"""delivered, redelivered, acked, expired."""

_ZERO: Counts = (0, 0, 0, 0)


class TaskCounts(NamedTuple):
    """A task of a stream now: the rows that the task is not done with, its waiting consumers, and its counts."""

    lag: int
    waiting: int
    counts: Counts


class StreamCounts(NamedTuple):
    """A stream now. `identity`: unique, also among later streams of the same name. `begun`: whether this node created
    the stream, so that its counts before the first look are added too."""

    identity: Hashable
    name: str
    rows: int
    nbytes: int
    oldest_s: float
    waiting: int
    appended: int
    tasks: Mapping[str, TaskCounts]
    begun: bool = True
    waits: bool = False
    """Whether consumers wait for rows."""
    unfinished: int = 0
    oldest_unfinished_s: float = 0.0


_LAG, _WAITING = attrgetter("lag"), attrgetter("waiting")
_ROWS, _NBYTES, _OLDEST, _APPENDS = map(attrgetter, ("rows", "nbytes", "oldest_s", "waiting"))
_UNFINISHED, _OLDEST_UNFINISHED = map(attrgetter, ("unfinished", "oldest_unfinished_s"))


class _Sum:
    """The sums of the counts of a stream while this node led it."""

    def __init__(self) -> None:
        self.appended = 0
        self.tasks: dict[str, list[int]] = {}

    def add(self, appended: int, tasks: Mapping[str, Sequence[int]]) -> None:
        self.appended += appended
        for name, more in tasks.items():
            self.tasks[name] = _added(self.tasks.get(name, _ZERO), more)


class Ledger:
    """The sums of one node."""

    def __init__(self, named: int = NAMED, pairs: int = PAIRS) -> None:
        self._named = named
        self._pairs = pairs
        self._seen: dict[Hashable, tuple[int, Mapping[str, TaskCounts], int]] = {}
        self._sums: dict[str, _Sum] = {}
        self._among: set[str] = set()
        self._others = _Sum()
        self.appended = 0
        self.counts: list[int] = [0, 0, 0, 0]

    def close(self, stream: StreamCounts) -> None:
        """Add the last counts of a stream that is dropped. A stream that no look has seen adds only to the totals,
        because this runs while the memory of the stream is being released."""
        self._add(stream, stream.name in self._among, kept=stream.name in self._sums)
        self._seen.pop(stream.identity, None)

    def look(self, streams: Iterable[StreamCounts]) -> dict[str, dict[str, object]]:
        """Add the increases of these streams. Returns plain values of `StreamFigures` by name, with the sum of those
        with less lag under `OTHERS`."""
        by_name: dict[str, list[StreamCounts]] = {}
        for each in streams:
            by_name.setdefault(each.name, []).append(each)
        known, lags, changed = self._seen.get, {}, []
        for name, several in by_name.items():
            for each in several:
                seen = known(each.identity)
                if seen is None or seen[0] != each.appended or seen[1] is not each.tasks:
                    changed.append(each)
                    seen = None
            lags[name] = seen[2] if seen is not None and len(several) == 1 else _lag(several)
        lags.pop(OTHERS, None)
        first = sorted(lags)
        first.sort(key=lags.__getitem__, reverse=True)  # stable: streams with the same lag stay in order of their names
        del first[self._named :]
        chosen = set(first)
        rest = [name for name in by_name if name not in chosen]
        before, self._among = self._among, set(rest)
        for each in changed:
            self._add(each, each.name in self._among or each.name in before)
        if len(self._seen) > sum(map(len, by_name.values())):
            here = {each.identity for several in by_name.values() for each in several}
            self._seen = {identity: seen for identity, seen in self._seen.items() if identity in here}
        if len(self._sums) > len(by_name):
            self._sums = {name: self._sums[name] for name in by_name}
        room = max(3, self._pairs // max(1, len(first)))
        found = {name: _values(by_name[name], self._sums[name], room) for name in first}
        if rest or self._others.tasks:
            found[OTHERS] = _values([each for name in rest for each in by_name[name]], self._others, 0)
        return found

    def _add(self, stream: StreamCounts, other: bool, kept: bool = True) -> None:
        """Add the increase of a stream's counts since the last look to the totals. `other`: also to the others' sum;
        `kept`: to its own."""
        seen = self._seen.get(stream.identity)
        fresh = (0, {}, 0) if stream.begun else (stream.appended, stream.tasks, 0)
        before, tasks, _ = fresh if seen is None else seen
        appended = max(0, stream.appended - before)
        more = {
            name: [max(0, now - then) for now, then in zip(task.counts, _before(tasks, name), strict=True)]
            for name, task in stream.tasks.items()
        }
        self.appended += appended
        for each in more.values():
            self.counts = _added(self.counts, each)
        if kept:
            self._sums.setdefault(stream.name, _Sum()).add(appended, more)
        if other:
            self._others.add(appended, {OTHERS: _all(more.values())})
        self._seen[stream.identity] = stream.appended, stream.tasks, _lag([stream])


def _before(tasks: Mapping[str, TaskCounts], name: str) -> Counts:
    return tasks[name].counts if name in tasks else _ZERO


def _added(sums: Sequence[int], more: Sequence[int]) -> list[int]:
    return [total + each for total, each in zip(sums, more, strict=True)]


def _all(counts: Iterable[Sequence[int]]) -> list[int]:
    total = list(_ZERO)
    for each in counts:
        total = _added(total, each)
    return total


def _lag(several: Sequence[StreamCounts]) -> int:
    """The lag of the task that has the most."""
    if len(several) == 1:
        return max(map(_LAG, several[0].tasks.values()), default=0)
    lags: dict[str, int] = {}
    for each in several:
        for name, task in each.tasks.items():
            lags[name] = lags.get(name, 0) + task.lag
    return max(lags.values(), default=0)


def _values(several: Sequence[StreamCounts], sums: _Sum, room: int) -> dict[str, object]:
    """The values of one stream or of several together, with at most `room` tasks by name."""
    names = sorted({name for each in several for name in each.tasks if name != OTHERS})[:room] if room else []
    shown = set(names)
    tasks = {
        name: _task([each.tasks[name] for each in several if name in each.tasks], sums.tasks[name]) for name in names
    }
    if shown:
        left = [task for each in several for name, task in each.tasks.items() if name not in shown]
    else:
        left = list(chain.from_iterable([each.tasks.values() for each in several]))
    counted = [counts for name, counts in sums.tasks.items() if name not in shown]
    if left or counted:
        tasks[OTHERS] = _task(left, _all(counted))
    return {
        "rows": sum(map(_ROWS, several)),
        "bytes": sum(map(_NBYTES, several)),
        "oldest_s": max(map(_OLDEST, several), default=0.0),
        "unfinished": sum(map(_UNFINISHED, several)),
        "oldest_unfinished_s": max(map(_OLDEST_UNFINISHED, several), default=0.0),
        "waiting": sum(map(_APPENDS, several)),
        "appended": sums.appended,
        "tasks": tasks,
    }


def _task(tasks: Sequence[TaskCounts], counts: Sequence[int]) -> dict[str, int]:
    delivered, redelivered, acked, expired = counts
    return {
        "lag": sum(map(_LAG, tasks)),
        "waiting": sum(map(_WAITING, tasks)),
        "delivered": delivered,
        "redelivered": redelivered,
        "acked": acked,
        "expired": expired,
    }
