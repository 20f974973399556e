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
    """Processes of one thread each, which have a core each."""

    def __init__(self, count: int) -> None:
        self.free = np.zeros(count)
        self.busy = np.zeros(count)

    def one(self, process: int, when: float, cost: float) -> float:
        """The process does what came then; when it is done."""
        done: float = max(when, float(self.free[process])) + cost
        self.free[process] = done
        self.busy[process] += cost
        return done

    def many(self, processes: Index, when: Floats | float, costs: Floats | float) -> Floats:
        """As `one`, of different processes."""
        done: Floats = np.maximum(when, self.free[processes]) + costs
        self.free[processes] = done
        self.busy[processes] += costs
        return done


class Shared(Processors):
    """Processes of one thread each, which share fewer cores."""

    def __init__(self, count: int, cores: int) -> None:
        super().__init__(count)
        self._cores = [0.0] * cores

    def one(self, process: int, when: float, cost: float) -> float:
        ready = max(when, float(self.free[process]))
        free = [core for core in range(len(self._cores)) if self._cores[core] <= ready]
        # Of the cores that are idle then, the one that has been so for the least time: no time of others is lost.
        chosen = max(free, key=self._cores.__getitem__) if free else min(
            range(len(self._cores)), key=self._cores.__getitem__
        )
        done = max(ready, self._cores[chosen]) + cost
        self._cores[chosen] = self.free[process] = done
        self.busy[process] += cost
        return done

    def many(self, processes: Index, when: Floats | float, costs: Floats | float) -> Floats:
        whens = np.broadcast_to(np.asarray(when, float), processes.shape)
        each = np.broadcast_to(np.asarray(costs, float), processes.shape)
        return np.array([self.one(int(p), float(t), float(c)) for p, t, c in zip(processes, whens, each, strict=True)])


class Links:
    """A link of each host, both ways at once, of so many bytes a second, and the time that a message is under way."""

    def __init__(self, hosts: int, bytes_s: float, latency_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_s = bytes_s
        self.out, self.into = Processors(hosts), Processors(hosts)

    def bring(self, source: int, target: int, when: float, nbytes: float) -> float:
        """Bytes go from one host to another; when the last has come."""
        took = nbytes / self.bytes_s
        sent = self.out.one(source, when, took)
        return self.into.one(target, sent - took, took) + self.latency_s
