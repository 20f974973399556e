"""What the clients of a stream were told, written down, and the rules that all of it must keep.

What a rule finds broken is told in words, with the numbers of a few rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

_NAMED, _LINES = 6, 24


@dataclass(frozen=True, slots=True)
class Event:
    """What a client asked, between which times, and what it was told: whether it was done."""

    what: str
    rows: tuple[int, ...]
    task: str
    began: float
    ended: float
    done: bool = True
    why: str = ""


@dataclass(slots=True)
class History:
    tasks: Sequence[str]
    events: list[Event] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What was seen to be wrong at once."""

    def of(self, what: str, done: bool | None = None) -> Iterator[Event]:
        return (event for event in self.events if event.what == what and done in (None, event.done))

    # the rules

    def broken(self) -> list[str]:
        """What is not as it must be; empty where all is."""
        return [*self.wrong, *self._lost_rows(), *self._acked_twice(), *self._delivered_again()]

    def _lost_rows(self) -> Iterator[str]:
        """Rows whose ack was asked for, and not answered, may be done."""
        appended = {row for event in self.of("append", True) for row in event.rows}
        for task in self.tasks:
            acked = {row for event in self.of("ack") if event.task == task for row in event.rows if _may_be(event)}
            yield from self._say(appended - acked, f"were never acked by {task!r}")

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
            yield f"{len(rows)} rows {what}: {some}\n" + "\n".join(self._story(row) for row in some[:2])

    def _story(self, row: int) -> str:
        """All that was said of a row."""
        start = self.events[0].began if self.events else 0.0
        lines = [
            f"    {e.began - start:6.2f}-{e.ended - start:6.2f} {e.what} {e.task}"
            f" {'done' if e.done else 'refused'} {e.why}"
            for e in sorted(self.events, key=lambda e: e.began)
            if row in e.rows
        ]
        some = lines if len(lines) <= _LINES else [*lines[: _LINES // 2], "    ...", *lines[-_LINES // 2 :]]
        return f"  row {row}:\n" + "\n".join(some)


def _may_be(ack: Event) -> bool:
    """Whether it may have been done: its answer may have been lost."""
    return ack.done or ack.why == "OutcomeUnknown"
