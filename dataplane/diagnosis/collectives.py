"""Collectives of `torch.distributed`: their names, and the ranks that are late for one.

A thread that waits in a collective is at a line of user code that called a function of torch. All ranks leave a
collective when the last has arrived, so the last rank waits least. Among the ranks that meet at one user function, the
last causes the additional wait of each other, by the activities on which it spends more time. The part that every rank
waits, including the last, belongs to the collective itself: bytes in transfer, or ranks that are late in turn.

A collective on an accelerator returns at once; the line that reads its result waits for it.

Pure functions of processes of a `graph.GraphRun`.
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
    """By file and function of user code, the share of the process's time that it waits in collectives there."""
    found: dict[tuple[str, str], float] = {}
    for line in process.lines:
        if is_collective(line):
            key = line.file, line.function
            found[key] = found.get(key, 0.0) + line.seconds / process.total
    return found


def ranks(processes: Iterable[ProcessNode], at: tuple[str, str], role: str) -> list[tuple[float, ProcessNode]]:
    """The processes that meet in this file and function, each with the share of its time that it waits there. They are
    the processes that wait there, and all processes of the role that run the file, because the last to arrive hardly
    waits."""
    found = []
    for process in processes:
        part = meetings(process).get(at, 0.0)
        files = {line.file for line in process.lines} | {place.file for place in process.places}
        if part > 0 or (process.role == role and at[0] in files):
            found.append((part, process))
    return found


def last_to_come(processes: Iterable[ProcessNode], at: tuple[str, str], role: str) -> tuple[ProcessNode, float] | None:
    """The process of `ranks` that waits least, and the share of its time that it waits. None with fewer than two
    ranks."""
    there = ranks(processes, at, role)
    if len(there) < 2:
        return None
    part, process = min(there, key=lambda each: each[0])
    return process, part


def longer(
    late: Mapping[tuple[str, str, int], float], waiting: Mapping[tuple[str, str, int], float]
) -> dict[tuple[str, str, int], float]:
    """The activities on which the late rank spends more time than a waiting rank, with weights of sum 1. Empty if there
    are none."""
    more = {key: seconds - waiting.get(key, 0.0) for key, seconds in late.items()}
    more = {key: seconds for key, seconds in more.items() if seconds > 0}
    total = sum(more.values())
    return {key: seconds / total for key, seconds in more.items()} if total > 0 else {}
