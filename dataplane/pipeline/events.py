"""Simulates the tasks of a plan: the worker, begin and end of each task, and the memory in use.

A task is one instruction: a stage, or a pass of a chunk of a model, for one micro-batch. It begins when all of its
inputs have arrived at a free worker that may execute it. `play` uses a given order of each worker's tasks, or finds
one: a free worker takes the ready task with the lowest key.

The time of a task is its work over its worker's speed. If tasks on a host demand more cores than the host has, all of
them are slowed equally. An output for another worker takes a hop. To another host, it also takes the latency and its
bytes over the sender's rate, one transfer after another and once for each host. A dependency between tasks of one
worker costs nothing.

Invariants: a plan has the same outcome on any machine. The extension `_events` and its replacement `_play` have equal
results. An impossible order does not raise: some tasks are not done (`Outcome.finished`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from dataplane.pipeline import _events as _extension
except ImportError:  # no C compiler when it was installed
    _events: Any = None
else:
    _events = _extension

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]

TIE_S = 1e-9


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
        by_start = np.lexsort((np.arange(len(self.start)), self.start, self.worker)).astype(np.int32)
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
    playing = _play if _events is None else _events.play
    outcome.done = playing((*arrays, *made), room.hop_s, room.latency_s)
    return outcome


_KINDS = "ddidiidddiididiiiiidd"


def _play(arrays: tuple[Any, ...], hop_s: float, latency_s: float) -> int:
    """`_events.play` in Python. Returns the number of done tasks."""
    playing = _Play(arrays, hop_s, latency_s)
    playing.run()
    return playing.done


class _Play:
    def __init__(self, arrays: tuple[Any, ...], hop_s: float, latency_s: float) -> None:
        lists = [array.tolist() for array in arrays[: len(_KINDS)]]
        (self.work, self.cores, self.queue, self.key, self.slot, self.take, self.out, self.alloc) = lists[:8]
        (self.release, self.next_at, self.next, self.next_bytes, self.host, self.speed, queue_at) = lists[8:15]
        (queue_workers, order_at, ordered, self.caps, self.host_cores, self.host_rate) = lists[15:]
        (self.worker_of, self.start, self.end, self.peak, self.host_peak) = arrays[len(_KINDS) :]
        self.hop_s, self.latency_s, self.now, self.done = hop_s, latency_s, 0.0, 0
        tasks, workers, hosts = len(self.work), len(self.host), len(self.host_cores)
        self.members = [queue_workers[a:b] for a, b in pairwise(queue_at)]
        self.mine = [[q for q, members in enumerate(self.members) if w in members] for w in range(workers)]
        self.orders = [ordered[a:b] for a, b in pairwise(order_at)] if order_at else None
        self.prior: list[list[int]] = [[] for _ in range(tasks)]
        for t in range(tasks):
            for e in range(self.next_at[t], self.next_at[t + 1]):
                self.prior[self.next[e]].append(t)
        self.waits = [len(prior) for prior in self.prior]
        self.left = [b - a for a, b in zip(self.next_at, self.next_at[1:], strict=False)]
        if self.orders is not None:
            for w, order in enumerate(self.orders):
                self.worker_of[order] = w
        self.events: list[tuple[float, int]] = []
        self.ready: list[list[tuple[float, int]]] = [[] for _ in self.members]
        self.is_ready = [False] * tasks
        self.running: list[list[tuple[float, int]]] = [[] for _ in range(hosts)]
        self.inside, self.position = [0] * len(self.caps), [0] * workers
        self.idle, self.dirty = [True] * workers, set(range(workers))
        self.held, self.host_held = [0.0] * workers, [0.0] * hosts
        self.own_time, self.rate, self.demand = [0.0] * hosts, [1.0] * hosts, [0.0] * hosts
        self.line_free = [0.0] * hosts

    def run(self) -> None:
        for t, waits in enumerate(self.waits):
            if not waits:
                self._make_ready(t)
        self._dispatch()
        while True:
            at, host = self._earliest()
            if at > self.now + TIE_S:
                self._dispatch()
                at, host = self._earliest()
            if at == float("inf"):
                return
            passed = max(0.0, at - self.now)
            for h, running in enumerate(self.running):
                if running:
                    self.own_time[h] += passed * self.rate[h]
            self.now += passed
            if host >= 0:
                self.own_time[host], t = heapq.heappop(self.running[host])
                self.demand[host] = self.demand[host] - self.cores[t] if self.running[host] else 0.0
                self._set_rate(host)
                self._finish(t)
            else:
                _, event = heapq.heappop(self.events)
                self._finish(event) if event < len(self.work) else self._arrive(self.next[event - len(self.work)])

    def _earliest(self) -> tuple[float, int]:
        """The time of the next event, and the host on which a task ends then, or -1 if it is an entry of `events`."""
        at, host = self.events[0][0] if self.events else float("inf"), -1
        for h, running in enumerate(self.running):
            if running and (ends := self.now + (running[0][0] - self.own_time[h]) / self.rate[h]) < at:
                at, host = ends, h
        return at, host

    def _arrive(self, t: int) -> None:
        self.waits[t] -= 1
        if self.waits[t] == 0:
            self._make_ready(t)

    def _make_ready(self, t: int) -> None:
        self.is_ready[t] = True
        if self.orders is not None:
            self.dirty.add(int(self.worker_of[t]))
            return
        heapq.heappush(self.ready[self.queue[t]], (self.key[t], t))
        self.dirty.update(self.members[self.queue[t]])

    def _dispatch(self) -> None:
        for w in sorted(self.dirty):
            if self.idle[w] and (t := self._choose(w)) >= 0:
                self._begin(w, t)
        self.dirty.clear()

    def _choose(self, w: int) -> int:
        if self.orders is not None:
            order, at = self.orders[w], self.position[w]
            if at == len(order) or not self.is_ready[order[at]]:
                return -1
            self.position[w] += 1
            return int(order[at])
        tops = [(self.ready[q][0], q) for q in self.mine[w] if self.ready[q] and self._admitted(self.ready[q][0][1])]
        if not tops:
            return -1
        (_, t), q = min(tops)
        heapq.heappop(self.ready[q])
        return int(t)

    def _admitted(self, t: int) -> bool:
        slot = self.slot[t]
        return bool(slot < 0 or self.take[t] <= 0 or self.inside[slot] < self.caps[slot])

    def _begin(self, w: int, t: int) -> None:
        h = self.host[w]
        self.idle[w], self.worker_of[t], self.start[t] = False, w, self.now
        if self.slot[t] >= 0 and self.take[t] > 0:
            self.inside[self.slot[t]] += self.take[t]
        self.held[w] += self.alloc[t]
        self.host_held[h] += self.out[t]
        self.peak[w], self.host_peak[h] = max(self.peak[w], self.held[w]), max(self.host_peak[h], self.host_held[h])
        work = self.work[t] / self.speed[w]
        if self.cores[t] > 0 and self.host_cores[h] > 0:
            self.demand[h] += self.cores[t]
            self._set_rate(h)
            heapq.heappush(self.running[h], (self.own_time[h] + work, t))
        else:
            heapq.heappush(self.events, (self.now + work, t))

    def _set_rate(self, h: int) -> None:
        self.rate[h] = self.host_cores[h] / self.demand[h] if self.demand[h] > self.host_cores[h] else 1.0

    def _finish(self, t: int) -> None:
        w = int(self.worker_of[t])
        self.end[t], self.idle[w] = self.now, True
        self.done += 1
        self.dirty.add(w)
        self.held[w] -= self.release[t]
        if self.slot[t] >= 0 and self.take[t] < 0:
            self.inside[self.slot[t]] += self.take[t]
            self.dirty.update(range(len(self.host)))
        for prior in self.prior[t]:
            self.left[prior] -= 1
            if self.left[prior] == 0:
                self.host_held[self.host[self.worker_of[prior]]] -= self.out[prior]
        arrivals: dict[int, float] = {}
        for e in range(self.next_at[t], self.next_at[t + 1]):
            if (wait := self._delay(t, e, arrivals)) > 0:
                heapq.heappush(self.events, (self.now + wait, len(self.work) + e))
            else:
                self._arrive(self.next[e])

    def _delay(self, t: int, e: int, arrivals: dict[int, float]) -> float:
        source, to = int(self.worker_of[t]), int(self.worker_of[self.next[e]])
        h = self.host[source]
        if to < 0:
            members = self.members[self.queue[self.next[e]]]
            if not members:
                return 0.0
            hosts = [self.host[w] for w in members]
            to, there = (source if source in members else -1), (h if h in hosts else hosts[0])
        else:
            there = self.host[to]
        if to == source:
            return 0.0
        if there == h or self.host_rate[h] <= 0:
            return self.hop_s
        if there not in arrivals:
            self.line_free[h] = max(self.line_free[h], self.now) + self.next_bytes[e] / self.host_rate[h]
            arrivals[there] = self.line_free[h] + self.latency_s
        return self.hop_s + arrivals[there] - self.now
