"""The error of an append that a full stream refuses: the limit that it exceeds, and the tasks and clients that take the
room."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from dataplane.errors import Backpressure
from dataplane.stream.admission import AppendSize
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.progress import LEASED, PENDING

_NAMED = 3  # groups that an error names
_HOLDERS = 64  # clients that an error names


def refusal(leased: LeasedRows, entry: AppendSize) -> Backpressure:
    """The error of a refused append."""
    why, holders = _why(leased, entry), tuple(_holders(leased))
    return Backpressure(f"the stream is full ({why})", needed=entry.nbytes, holders=holders)


def _why(leased: LeasedRows, entry: AppendSize) -> str:
    why = leased.admission.full(entry) or "others before it"
    if stuck := _blocked(leased):
        return f"{why}; {stuck}"
    behind = leased.partition.behind()
    if not behind and (dead := leased.partition.dead_letters()):
        return f"{why}; it holds dead letters of {', '.join(dead)}, which are there until they are dropped"
    left = {
        task: sum(rows.values())
        for task, rows in zip(leased.settings.tasks, leased.partition.progress.left, strict=True)
    }
    acks = ", ".join(f"{task!r} ({rows} rows left)" for task, rows in left.items() if rows)
    return (
        f"{why}; the append waits for acks of {acks}: give it a longer timeout, or the stream a higher limit"
        if acks
        else why
    )


def _holders(leased: LeasedRows) -> Iterator[dict[str, Any]]:
    """The holders of room in the stream: tasks that are behind, and clients with permits."""
    partition = leased.partition
    behind = [(name, "not consumed") for name in partition.behind()]
    for name, how in behind or [(name, "dead letters") for name in partition.dead_letters()]:
        yield {"holder": f"task {name!r}", "bytes": partition.nbytes, "how": how}
    for client, nbytes in islice(leased.admission.coming().items(), _HOLDERS):
        yield {"holder": client, "bytes": nbytes, "how": "admitted"}


def _blocked(leased: LeasedRows) -> str:
    """The reason why the stream stays full for ever, if it does: a task's remaining rows are all of incomplete groups,
    and the limits leave no room for the missing rows. Empty if it does not."""
    partition, progress = leased.partition, leased.partition.progress
    for task, size in leased.group_sizes.items():
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
