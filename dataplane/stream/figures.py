"""Statistics of a stream as plain values: what it holds, and the progress of each task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.stream.home import Home
from dataplane.stream.progress import ACKED, EXPIRED, LEASED, PENDING, REDELIVERED

_NAMED = 8  # groups that are not complete
_NAME = 256  # characters of their names


Waiting = Sequence[tuple[int | None, tuple[str, ...]]]
"""The waiting requests: for a consumer the number of its task and the columns that it asks for; None for a producer."""


def figures(home: Home, now: float, waiting: Waiting) -> dict[str, Any]:
    """All statistics. `docs/operations.md` explains each. `now` is a time of the clock of the stream."""
    oldest = home.books.facts.oldest()
    return {
        **msgspec.structs.asdict(home.settings),
        "rows": home.books.rows.count,
        "bytes": home.books.nbytes,
        "appended": home.books.appended,
        "oldest_s": 0.0 if oldest is None else max(0.0, now - oldest),
        "latest_version": home.books.facts.latest,
        "closed": home.closed,
        "unfinished": len(home.books.unfinished),
        "oldest_unfinished_s": 0.0 if (began := home.books.unfinished.oldest()) is None else max(0.0, now - began),
        "columns": list(home.books.rows.schema) if home.books.rows.count else [],
        "waiting": sum(task is None for task, _ in waiting),
        "groups": home.books.groups.open,
        "behind": home.books.behind(),
        "task": {name: _task(home, number, now, waiting) for number, name in enumerate(home.settings.tasks)},
    }


def _task(home: Home, task: int, now: float, waiting: Waiting) -> dict[str, Any]:
    asked = [columns for of, columns in waiting if of == task]
    totals, there = home.books.progress.counts[task], home.books.progress.tally(task)
    return {
        "pending": there["pending"],
        "leased": there["leased"],
        "dead": there["dead"],
        "delivered": totals[LEASED],
        "redelivered": totals[REDELIVERED],
        "acked": totals[ACKED],
        "expired": totals[EXPIRED],
        "left": home.books.progress.is_left(task),
        "waiting": len(asked),
        "ready": {
            ",".join(columns): len(home.books.progress.ready(task, columns, 1 << 62))
            for columns in dict.fromkeys(asked)
        },
        "incomplete": _incomplete(home, task, now),
    }


def _incomplete(home: Home, task: int, now: float) -> list[dict[str, Any]]:
    """The incomplete groups for which the task has waited longest."""
    size = home.group_sizes.get(task)
    if size is None:
        return []
    rows = home.books.progress.in_state(task, PENDING)
    places = home.books.rows.places(rows)
    numbers = home.books.facts.groups(places)
    members, dropped = home.books.groups.sizes(numbers, task)
    short = members + dropped < size
    found, first = np.unique(numbers[short], return_index=True)
    age, rows_of, dropped_of = now - home.books.facts.arrived(places)[short], members[short], dropped[short]
    longest = np.argsort(-age[first], kind="stable")[:_NAMED]
    return [
        {
            "group": name[:_NAME] if isinstance(name, str) else name,
            "rows": int(rows_of[at]),
            "dropped": int(dropped_of[at]),
            "of": size,
            "age_s": max(0.0, float(age[at])),
        }
        for name, at in zip(home.books.groups.names(found[longest]), first[longest].tolist(), strict=True)
    ]
