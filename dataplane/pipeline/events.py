"""Simulates the tasks of a plan: the worker, begin and end of each task, and the memory in use.

A task is one instruction: a stage, or a pass of a chunk of a model, for one micro-batch. It begins when all of its
inputs have arrived at a free worker that may execute it. `play` uses a given order of each worker's tasks, or finds
one: a free worker takes the ready task with the lowest key.

The time of a task is its work over its worker's speed. If tasks on a host demand more cores than the host has, all of
them are slowed equally. An output for another worker takes a hop. To another host, it also takes the latency and its
bytes over the sender's rate, one transfer after another and once for each host. A dependency between tasks of one
worker costs nothing.

The simulation is an extension (`_events.c`), since a search simulates thousands of plans.

Invariants: a plan has the same outcome on any machine. An impossible order does not raise: some tasks are not done
(`Outcome.finished`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.pipeline import _events

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]


@dataclass
class Tasks:
    """Tasks as arrays: entry t is task t's, and `next[next_at[t]:next_at[t + 1]]` are its dependents."""

    work: Floats  # seconds on a worker of speed 1
    cores: Floats  # cores that the task uses; 0: it only waits, and is never slowed
    queue: Ints  # the queue from which it is taken
    key: Floats  # the order in a queue and among queues: the lowest first
    slot: Ints  # -1, or the number of the cap that bounds it
    take: Ints  # places of the slot: taken at its beginning if positive, given back at its end if negative
    out: Floats  # bytes in its host's store, from its beginning until the last of its dependents has ended
    alloc: Floats  # bytes of its worker's own memory that it takes at its beginning
    release: Floats  # bytes of this memory that it gives back at its end
    next_at: Ints
    next: Ints
    next_bytes: Floats  # the bytes that a dependency sends to another host

    def __len__(self) -> int:
        return len(self.work)


@dataclass
class Room:
    """The resources of tasks: workers, their hosts, and for each queue the workers that take its tasks."""

    host: Ints  # of each worker
    speed: Floats
    host_cores: Floats  # 0: no limit
    host_rate: Floats  # bytes a second that a host sends to others; 0: no limit
    queue_at: Ints
    queue_workers: Ints
    hop_s: float = 0.0
    latency_s: float = 0.0


@dataclass
class Outcome:
    """The outcome of a plan: worker, start and end of each task in seconds, -1 if it was not done. `done`: the number
    of done tasks; the others wait for each other."""

    worker: Ints
    start: Floats
    end: Floats
    peak: Floats  # of each worker's own memory
    host_peak: Floats
    done: int = 0
    orders: list[Ints] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether all tasks were done."""
        return self.done == len(self.end)

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended; infinite if some tasks were not done."""
        return float(self.end.max(initial=0.0)) if self.finished else float("inf")

    def order(self) -> list[Ints]:
        """The tasks of each worker in the order in which they began."""
        by_start = np.lexsort((np.arange(len(self.start)), self.end, self.start, self.worker)).astype(np.int32)
        bounds = np.searchsorted(self.worker[by_start], np.arange(len(self.peak) + 1))
        return [by_start[bounds[w] : bounds[w + 1]] for w in range(len(self.peak))]


_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float64)


def play(tasks: Tasks, room: Room, order: Sequence[Ints] | None = None, caps: Ints | None = None) -> Outcome:
    """Simulate the tasks.

    order: the tasks of each worker, each once; None: found by the keys, with at most `caps[i]` places of slot i taken.
    Returns the outcome. Raises ValueError if arrays do not fit each other.
    """
    count, workers = len(tasks), len(room.host)
    outcome = Outcome(
        np.full(count, -1, _INT),
        np.full(count, -1.0),
        np.full(count, -1.0),
        np.zeros(workers),
        np.zeros(len(room.host_cores)),
    )
    if order is None:
        order_at, ordered = np.zeros(0, _INT), np.zeros(0, _INT)
    else:
        order_at = np.cumsum([0, *map(len, order)]).astype(_INT)
        ordered = np.concatenate([np.zeros(0, _INT), *order]).astype(_INT)
    if caps is None:
        caps = np.full(int(tasks.slot.max(initial=-1)) + 1, count, _INT)
    given = (
        *(tasks.work, tasks.cores, tasks.queue, tasks.key, tasks.slot, tasks.take, tasks.out, tasks.alloc),
        *(tasks.release, tasks.next_at, tasks.next, tasks.next_bytes, room.host, room.speed, room.queue_at),
        *(room.queue_workers, order_at, ordered, caps, room.host_cores, room.host_rate),
    )
    arrays = tuple(
        np.ascontiguousarray(a, _INT if kind == "i" else _FLOAT) for a, kind in zip(given, _KINDS, strict=True)
    )
    made = (outcome.worker, outcome.start, outcome.end, outcome.peak, outcome.host_peak)
    outcome.done = _events.play((*arrays, *made), room.hop_s, room.latency_s)
    return outcome


_KINDS = "ddidiidddiididiiiiidd"
