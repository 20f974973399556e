"""Statistics of a stream as plain values: its rows and bytes, and the progress of each task."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.progress import ACKED, EXPIRED, LEASED, PENDING, REDELIVERED

_NAMED = 8  # incomplete groups that are listed
_NAME = 256  # characters of a group's name
_HOLDERS = 3  # holders of leases that are listed


Waiting = Sequence[tuple[int | None, tuple[str, ...]]]
"""The waiting requests: the task's number and the requested columns of a consumer, or None and no columns for a
producer."""


def figures(leased: LeasedRows, now: float, waiting: Waiting) -> dict[str, Any]:
    """All statistics. `docs/operations.md` explains each. `now` is a time of the clock of the stream."""
    oldest, holders = leased.partition.metadata.oldest(), _holders(leased, now)
    return {
        **msgspec.structs.asdict(leased.settings),
        "rows": leased.partition.rows.count,
        "bytes": leased.partition.nbytes,
        "appended": leased.partition.appended,
        "lost": len(leased.lost),
        "oldest_s": 0.0 if oldest is None else max(0.0, now - oldest),
        "latest_version": leased.partition.metadata.latest,
        "closed": leased.closed,
        "unfinished": len(leased.partition.unfinished),
        "oldest_unfinished_s": 0.0
        if (began := leased.partition.unfinished.oldest()) is None
        else max(0.0, now - began),
        "columns": list(leased.partition.rows.schema.fields) if leased.partition.rows.count else [],
        "waiting": sum(task is None for task, _ in waiting),
        "groups": leased.partition.groups.open,
        "behind": leased.partition.behind(leased.asked, _idle(leased, waiting)),
        "task": {
            name: _task(leased, number, now, waiting) | {"holders": holders[number]}
            for number, name in enumerate(leased.settings.tasks)
        },
    }


def _idle(leased: LeasedRows, waiting: Waiting) -> set[int]:
    """The tasks whose consumers wait for rows and hold none. Such tasks are not the slow ones."""
    asking = {task for task, _ in waiting if task is not None}
    return {task for task in asking if not leased.partition.progress.tally(task)["leased"]}


def _task(leased: LeasedRows, task: int, now: float, waiting: Waiting) -> dict[str, Any]:
    asked = [columns for of, columns in waiting if of == task]
    totals, there = leased.partition.progress.counts[task], leased.partition.progress.tally(task)
    return {
        "pending": max(0, there["pending"] - len(leased.partition.unfinished)),
        "leased": there["leased"],
        "dead": there["dead"],
        "delivered": totals[LEASED],
        "redelivered": totals[REDELIVERED],
        "acked": totals[ACKED],
        "expired": totals[EXPIRED],
        "left": leased.partition.progress.is_left(task),
        "waiting": len(asked),
        "ready": {
            ",".join(columns): len(leased.partition.progress.ready(task, columns, 1 << 62))
            for columns in dict.fromkeys(asked)
        },
        "incomplete": _incomplete(leased, task, now),
    }


def _holders(leased: LeasedRows, now: float) -> list[list[dict[str, Any]]]:
    """For each task, the clients that hold rows without having acked them, and the replicas that have not received
    them. Those with the longest leases come first."""
    found: list[dict[tuple[str, str], tuple[int, float]]] = [{} for _ in leased.settings.tasks]
    for grant in leased.leases:
        holding = found[grant.task]
        for replica, client in leased.leases.to_ack(grant).items():
            named = "" if replica is None else f"replica {replica} of member {grant.who.member!r}"
            key = "" if client is None else str(client), named
            rows, until_s = holding.get(key, (0, 0.0))
            holding[key] = rows + len(grant.rows), max(until_s, grant.expires)
    return [
        [
            {"holder": client, "replica": named, "rows": rows, "left_s": until_s - now}
            for (client, named), (rows, until_s) in heapq.nlargest(
                _HOLDERS, holding.items(), key=lambda each: each[1][1]
            )
        ]
        for holding in found
    ]


def labelled(values: dict[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    """The statistics of a stream with the labels of the holders in the place of their names."""

    def holder(each: dict[str, Any]) -> dict[str, Any]:
        return {**each, "holder": label(each["holder"]) if each["holder"] else ""}

    tasks = {name: {**task, "holders": [*map(holder, task["holders"])]} for name, task in values["task"].items()}
    return {**values, "task": tasks}


def _incomplete(leased: LeasedRows, task: int, now: float) -> list[dict[str, Any]]:
    """The oldest incomplete groups of the task, at most `_NAMED`; none if it takes no whole groups."""
    size = leased.group_sizes.get(task)
    if size is None:
        return []
    rows = leased.partition.progress.in_state(task, PENDING)
    places = leased.partition.rows.places(rows)
    numbers = leased.partition.metadata.groups(places)
    members, dropped = leased.partition.groups.sizes(numbers, task)
    short = members + dropped < size
    found, first = np.unique(numbers[short], return_index=True)
    age, rows_of, dropped_of = now - leased.partition.metadata.arrived(places)[short], members[short], dropped[short]
    longest = np.argsort(-age[first], kind="stable")[:_NAMED]
    return [
        {
            "group": name[:_NAME] if isinstance(name, str) else name,
            "rows": int(rows_of[at]),
            "dropped": int(dropped_of[at]),
            "of": size,
            "age_s": max(0.0, float(age[at])),
        }
        for name, at in zip(leased.partition.groups.names(found[longest]), first[longest].tolist(), strict=True)
    ]
