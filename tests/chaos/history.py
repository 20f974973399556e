"""What the clients of a stream were told, written down, and the rules that all of it must keep.

Each row has a number that is its policy version too, and by which it is known in what is lost. What a rule finds broken
is told in words, with the numbers of a few rows.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

TASKS = ("reward", "actor", "log")
NEEDS = {"reward": ["id", "x"], "actor": ["id", "x", "reward"], "log": ["id"]}
_NAMED, _LINES = 6, 24


def values(numbers: Sequence[int]) -> npt.NDArray[np.uint64]:
    """The column "x" of these rows: no other row's at any place."""
    return np.array(numbers, np.uint64)[:, None] * np.uint64(1 << 20) + np.arange(24, dtype=np.uint64)


def reward(numbers: Sequence[int]) -> npt.NDArray[np.float64]:
    """The column "reward" of these rows."""
    return np.array(numbers, np.float64) * 0.5 + 1.0


@dataclass(frozen=True, slots=True)
class Event:
    """What a client of a host asked, between which times, and what it was told: whether it was done."""

    what: str
    rows: tuple[int, ...]
    task: str
    host: int
    began: float
    ended: float
    done: bool
    why: str = ""


def _may_be(ack: Event) -> bool:
    """Whether it may have been done: its answer may have been lost."""
    return ack.done or ack.why in ("PeerUnavailable", "OutcomeUnknown")


@dataclass(slots=True)
class History:
    """What all clients were told. `killed` are hosts; one that was only away has lost nothing."""

    events: list[Event] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What was seen to be wrong at once."""
    killed: set[int] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)
    """The rows that the stream told of as lost."""
    tasks: Sequence[str] = TASKS

    def told(
        self, what: str, rows: Sequence[int], host: int, began: float, task: str = "", done: bool = True, why: str = ""
    ) -> None:
        """Something was answered just now."""
        self.events.append(Event(what, tuple(rows), task, host, began, time.monotonic(), done, why))

    def of(self, what: str, done: bool | None = None) -> Iterator[Event]:
        """The events of one kind."""
        return (event for event in self.events if event.what == what and done in (None, event.done))

    # the rules

    def broken(self) -> list[str]:
        """What is not as it must be; empty where all is."""
        return [*self.wrong, *self._lost_rows(), *self._acked_twice(), *self._delivered_again(), *self._told_lost()]

    def survivors(self) -> set[int]:
        """The rows that were appended and that no node died which could have had columns."""
        appended = {row for event in self.of("append", True) for row in event.rows}
        for what in ("append", "extend"):
            for event in self.of(what):
                if event.host in self.killed:
                    appended.difference_update(event.rows)
        return appended

    def _lost_rows(self) -> Iterator[str]:
        survivors = self.survivors()
        for task in self.tasks:
            acked = {row for event in self.of("ack") if event.task == task and _may_be(event) for row in event.rows}
            yield from self._say(survivors - acked, f"were never acked by {task!r}, and their columns survived")
        yield from self._say(survivors & set(self.lost), "were told as lost, and their columns survived")

    def _acked_twice(self) -> Iterator[str]:
        """Of rows that were appended once: one that is gone may come again with its key."""
        for task, rows in self._acks().items():
            twice = {row for row, events in rows.items() if len(events) > 1} & self._once()
            yield from self._say(twice, f"were acked twice by {task!r}")

    def _delivered_again(self) -> Iterator[str]:
        acks = self._acks()
        for task in self.tasks:
            again = {
                row
                for event in self.of("deliver")
                if event.task == task
                for row in event.rows
                if any(ack.ended < event.began for ack in acks[task].get(row, ()))
            }
            yield from self._say(again & self._once(), f"were delivered again to {task!r} after it had acked them")

    def _told_lost(self) -> Iterator[str]:
        yield from self._say({row for row, count in Counter(self.lost).items() if count > 1}, "were told twice as lost")

    def _acks(self) -> dict[str, dict[int, list[Event]]]:
        found: dict[str, dict[int, list[Event]]] = {task: defaultdict(list) for task in self.tasks}
        for event in self.of("ack", True):
            for row in event.rows:
                found[event.task][row].append(event)
        return found

    def _once(self) -> set[int]:
        counts = Counter(row for event in self.of("append") for row in event.rows)
        return {row for row, count in counts.items() if count == 1}

    def _say(self, rows: Collection[int], what: str) -> Iterator[str]:
        if rows:
            some = sorted(rows)[:_NAMED]
            yield f"{len(rows)} rows {what}: {some}\n" + "\n".join(self.story(row) for row in some[:2])

    def story(self, row: int) -> str:
        """All that was said of a row."""
        start = self.events[0].began if self.events else 0.0
        lines = [
            f"    {e.began - start:6.2f}-{e.ended - start:6.2f} host {e.host} {e.what} {e.task}"
            f" {'done' if e.done else 'refused'} {e.why}"
            for e in sorted(self.events, key=lambda e: e.began)
            if row in e.rows or e.what == "fault"
        ]
        some = lines if len(lines) <= _LINES else [*lines[: _LINES // 2], "    ...", *lines[-_LINES // 2 :]]
        return f"  row {row}:\n" + "\n".join(some)
