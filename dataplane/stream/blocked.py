"""Detects streams that stay full for ever: a task's remaining rows are all of incomplete groups, and the limits leave
no room for the missing rows."""

from __future__ import annotations

from collections.abc import Mapping

from dataplane.stream.partition_state import StreamState
from dataplane.stream.progress import LEASED, PENDING

_NAMED = 3  # groups


def blocked(partition: StreamState, sizes: Mapping[int, int]) -> str:
    """The reason why the stream stays full for ever; empty if it does not. `sizes`: for each task that takes whole
    groups, their size."""
    progress = partition.progress
    for task, size in sizes.items():
        rows = progress.in_state(task, PENDING)
        if not len(rows) or len(progress.in_state(task, LEASED)):
            continue
        groups = partition.metadata.groups(partition.rows.places(rows))
        members, dropped = partition.groups.sizes(groups, task)
        if not (members + dropped < size).all():
            continue
        names = list(dict.fromkeys(partition.groups.names(groups)))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        named = ", ".join(map(repr, names[:_NAMED])) + more
        return (
            f"it holds rows of groups that lack some of their {size} alone ({named}), which task"
            f" {partition.settings.tasks[task]!r} takes whole, and has no room for the others: give it room for all"
            " groups that are begun at a time, or drop some"
        )
    return ""
