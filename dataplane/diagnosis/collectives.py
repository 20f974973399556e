"""Collectives of `torch.distributed`: their names, and the ranks that are late for one.

A thread that waits in a collective stands in a line of the user's that called a function of torch. All ranks leave a
collective when the last has arrived, which waits least. So, among the ranks that meet at one function of the user's,
the additional wait of a rank is caused by the last rank, and by what that spends more time on than the waiting one. The
part that every rank waits, including the last, belongs to the collective itself: bytes in transfer, or ranks that are
late in turn.

A collective on an accelerator returns at once; the line that reads its result waits for it.

Pure: of processes of a `graph.GraphRun`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataplane.diagnosis.graph import Line, ProcessNode

COLLECTIVES = frozenset(
    {
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter", "reduce"),
        *("reduce_scatter_tensor", "broadcast", "broadcast_object_list", "barrier", "monitored_barrier", "all_to_all"),
        *("all_to_all_single", "gather", "gather_object", "scatter", "scatter_object_list", "recv", "send"),
        "batch_isend_irecv",
    }
)
"""Functions of torch.distributed in which ranks wait for each other."""

COLLECTIVE = "torch.distributed."
"""The prefix of a collective's name in a line's call."""


def is_collective(line: Line) -> bool:
    """Whether threads waited in a collective at this line."""
    return line.via.startswith(COLLECTIVE)


def meetings(process: ProcessNode) -> dict[tuple[str, str], float]:
    """The share of its time that a process waits in collectives, by file and function."""
    found: dict[tuple[str, str], float] = {}
    for line in process.lines:
        if is_collective(line):
            key = line.file, line.function
            found[key] = found.get(key, 0.0) + line.seconds / process.total
    return found


def ranks(processes: Iterable[ProcessNode], at: tuple[str, str], role: str) -> list[tuple[float, ProcessNode]]:
    """The processes of this role that meet in this file and function, with the share of their time spent waiting
    there: all that run the file, including those never seen to wait, because the last to arrive hardly does."""
    found = []
    for process in processes:
        part = meetings(process).get(at, 0.0)
        files = {line.file for line in process.lines} | {place.file for place in process.places}
        if part > 0 or (process.role == role and at[0] in files):
            found.append((part, process))
    return found


def last_to_come(processes: Iterable[ProcessNode], at: tuple[str, str], role: str) -> tuple[ProcessNode, float] | None:
    """Of the `ranks` the one that waits least there, and the share of its time; None with fewer than two."""
    there = ranks(processes, at, role)
    if len(there) < 2:
        return None
    part, process = min(there, key=lambda each: each[0])
    return process, part


def longer(
    late: Mapping[tuple[str, str, int], float], waiting: Mapping[tuple[str, str, int], float]
) -> dict[tuple[str, str, int], float]:
    """The activities on which the late rank spends more time than a waiting one, as shares with sum 1, or empty."""
    more = {key: seconds - waiting.get(key, 0.0) for key, seconds in late.items()}
    more = {key: seconds for key, seconds in more.items() if seconds > 0}
    total = sum(more.values())
    return {key: seconds / total for key, seconds in more.items()} if total > 0 else {}
