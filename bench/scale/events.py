"""Simulated time: events in a heap, processors that serve in the order in which work comes, links of a rate.

What always holds: time never goes back; what happens at the same time happens in the order in which it was planned; a
processor never does two things at once, and is never idle while something that came waits for it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

Process = Generator[Any, Any, Any]
"""What happens one after the other: yields the time at which it goes on, or a `Signal` to wait for."""


class Signal:
    """What processes wait for."""

    def __init__(self) -> None:
        self.waiting: list[Process] = []


class Loop:
    """The events of one simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do this then."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._numbers), what))

    def start(self, process: Process, when: float = 0.0) -> None:
        """Begin it then."""
        self.at(when, lambda: self._go_on(process))

    def raise_signal(self, signal: Signal) -> None:
        """Who waits for it goes on, now."""
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self.start(process, self.now)

    def run(self, until: float) -> None:
        """All that happens until then."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, what = heapq.heappop(self._heap)
            self.events += 1
            what()

    def _go_on(self, process: Process) -> None:
        try:
            until = next(process)
        except StopIteration:
            return
        if isinstance(until, Signal):
            until.waiting.append(process)
        else:
            self.at(until, lambda: self._go_on(process))


class Processors:
    """Processes of one thread each, which have a core each.

    What comes in a moment is planned now: it counts as work from now on, and is not done before it could be. So no time
    is lost between now and then, in which other work may come.
    """

    def __init__(self, loop: Loop, count: int) -> None:
        self.free = np.zeros(count)
        self.busy = np.zeros(count)
        self._loop = loop

    def one(self, process: int, when: float, cost: float) -> float:
        """The process does what comes then; when it is done."""
        free = max(float(self.free[process]), self._loop.now)
        self.free[process] = free + cost
        self.busy[process] += cost
        return max(when, free) + cost

    def many(self, processes: Index, when: Floats | float, costs: Floats | float) -> Floats:
        """As `one`, of different processes."""
        free = np.maximum(self.free[processes], self._loop.now)
        self.free[processes] = free + costs
        self.busy[processes] += costs
        done: Floats = np.maximum(when, free) + costs
        return done


class Shared(Processors):
    """Processes of one thread each, which share fewer cores."""

    def __init__(self, loop: Loop, count: int, cores: int) -> None:
        super().__init__(loop, count)
        self._cores = [0.0] * cores

    def one(self, process: int, when: float, cost: float) -> float:
        now = self._loop.now
        ready = max(float(self.free[process]), now)
        cores = range(len(self._cores))
        free = [core for core in cores if self._cores[core] <= ready]
        # Of the cores that are idle then, the one that has been so for the least time: no time of others is lost.
        chosen = max(free, key=self._cores.__getitem__) if free else min(cores, key=self._cores.__getitem__)
        begins = max(ready, self._cores[chosen])
        self._cores[chosen] = self.free[process] = begins + cost
        self.busy[process] += cost
        return max(when, begins) + cost

    def many(self, processes: Index, when: Floats | float, costs: Floats | float) -> Floats:
        whens = np.broadcast_to(np.asarray(when, float), processes.shape)
        each = np.broadcast_to(np.asarray(costs, float), processes.shape)
        return np.array([self.one(int(p), float(t), float(c)) for p, t, c in zip(processes, whens, each, strict=True)])


class Links:
    """A link of each host, both ways at once, of so many bytes a second, and the time that a message is under way."""

    def __init__(self, loop: Loop, hosts: int, bytes_s: float, latency_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_s = bytes_s
        self.out, self.into = Processors(loop, hosts), Processors(loop, hosts)

    def bring(self, source: int, target: int, when: float, nbytes: float) -> float:
        """Bytes go from one host to another; when the last has come."""
        took = nbytes / self.bytes_s
        sent = self.out.one(source, when, took)
        return self.into.one(target, sent - took, took) + self.latency_s
