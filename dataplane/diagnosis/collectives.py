"""Collectives of `torch.distributed`: by which names they are known, and who is late for one.

A thread that waits in a collective stands in a line of the user's, by way of a function of torch. All ranks leave a
collective when the last has come: it waits the least there. So, of the ranks that meet at the same function of the
user's, what one waits longer than that rank does is owed to it, and to what it spends its time on and the one that
waits does not. What every rank waits, the last one too, is the collective's own: bytes on their way, or ranks that are
late by turns.

A collective that runs on an accelerator returns at once; what waits for it is the line that reads its result.

Pure, but for the names: of processes of a `graph.Run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataplane.diagnosis.graph import Line, Process

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
"""What a line says that it called, before the name of the collective."""


def is_collective(line: Line) -> bool:
    """Whether threads stood in a collective at this line."""
    return line.via.startswith(COLLECTIVE)


def meetings(process: Process) -> dict[tuple[str, str], float]:
    """The part of its time that a process waits in collectives, by file and function."""
    found: dict[tuple[str, str], float] = {}
    for line in process.lines:
        if is_collective(line):
            key = line.file, line.function
            found[key] = found.get(key, 0.0) + line.seconds / process.total
    return found


def ranks(processes: Iterable[Process], at: tuple[str, str], role: str) -> list[tuple[float, Process]]:
    """Who meets in this file and function, and for which part of its time it was seen to wait there: processes of this
    role that run the file count, though they were never seen to wait, as the last to come hardly does."""
    found = []
    for process in processes:
        part = meetings(process).get(at, 0.0)
        files = {line.file for line in process.lines} | {place.file for place in process.places}
        if part > 0 or (process.role == role and at[0] in files):
            found.append((part, process))
    return found


def last_to_come(processes: Iterable[Process], at: tuple[str, str], role: str) -> tuple[Process, float] | None:
    """Of the `ranks` the one that waits the least there, and for which part of its time; None where there are fewer
    than two."""
    there = ranks(processes, at, role)
    if len(there) < 2:
        return None
    part, process = min(there, key=lambda each: each[0])
    return process, part


def longer(
    late: Mapping[tuple[str, str, int], float], waiting: Mapping[tuple[str, str, int], float]
) -> dict[tuple[str, str, int], float]:
    """By what it spends its time on: what one that is late spends more than one that waits for it, in parts of their
    times; of sum 1, or empty."""
    more = {key: seconds - waiting.get(key, 0.0) for key, seconds in late.items()}
    more = {key: seconds for key, seconds in more.items() if seconds > 0}
    total = sum(more.values())
    return {key: seconds / total for key, seconds in more.items()} if total > 0 else {}
