"""A simulation of schedules in the model of `history.scheduling`: workers decode, end, continue with the next step, and
hand responses to each other. Nothing here runs a model.

A step may begin when the one `max_lag + 1` before it has ended on all workers, except for the share `partial` of its
responses, which continue (partial rollouts). All responses of a worker have the same rate: in `BASE + active * each`
they produce `pace` tokens (processor sharing); without drafts both are 1. A moved response costs `PREFILL` for each
of its tokens so far.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataplane.errors import Misuse
from dataplane.history.lengths import Floats
from dataplane.history.scheduling import BASE, Schedule

PREFILL = 0.02
"""The cost of a token of a moved response, relative to that of decoding it."""

_WORTH = 1.1  # the factor by which a worker must become faster by giving away half of its responses


@dataclass(frozen=True, slots=True)
class Timeline:
    """The result. `duration`: until all steps had ended; `ends`: of each step; `idle`: of all workers; `moves`:
    responses that moved. Times are in units of one more response in a decoding step."""

    duration: float
    ends: list[float]
    idle: float
    moves: int
    workers: int

    @property
    def bubbles(self) -> float:
        """The idle share of the workers' time."""
        return self.idle / (self.workers * self.duration) if self.duration else 0.0


@dataclass(slots=True)
class _Worker:
    """`clock`: the tokens of a response that began at 0. `active`: (clock at its end, step, clock at its beginning,
    actual or virtual). `waiting`: (step, tokens in all, tokens so far)."""

    waiting: deque[tuple[int, float, float]] = field(default_factory=deque)
    active: list[tuple[float, int, float]] = field(default_factory=list)
    clock: float = 0.0
    now: float = 0.0
    idle: float = 0.0
    due: float = 0.0  # prefill
    version: int = 0
    pace: float = 1.0
    each: float = 1.0

    @property
    def cost(self) -> float:
        """The cost of one token for every active response."""
        return (BASE + len(self.active) * self.each) / self.pace

    def go_on(self, now: float) -> None:
        """Advance the worker to the time `now`."""
        passed = now - self.now
        self.now = now
        if not self.active:
            self.idle += passed
            return
        paid = min(passed, self.due)
        self.due -= paid
        self.clock += (passed - paid) / self.cost

    def fill(self, slots: int) -> None:
        """Begin waiting responses while there is room."""
        while self.waiting and len(self.active) < slots:
            step, tokens, made = self.waiting.popleft()
            heapq.heappush(self.active, (self.clock + tokens - made, step, self.clock - made))

    @property
    def next(self) -> float:
        """The time at which the next response ends."""
        return self.now + self.due + max(0.0, self.active[0][0] - self.clock) * self.cost


class Rollouts:
    """Steps with these schedules and actual lengths: `actual[step]` is [prompts, samples]."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        actual: Sequence[Floats],
        *,
        max_lag: int = 0,
        migrate: bool = False,
        partial: float = 0.0,
        pace: float = 1.0,
        each: float = 1.0,
    ) -> None:
        if len(schedules) != len(actual) or not schedules or max_lag < 0 or not (0 <= partial < 1 <= pace and each > 0):
            raise Misuse(
                "a timeline is of a step or more with a schedule each, a lag of 0 or more, and a pace of 1 or more"
            )
        self._schedules, self._actual, self._lag, self._migrate = schedules, actual, max_lag, migrate
        self._slots = schedules[0].slots
        self._workers = [_Worker(pace=pace, each=each) for _ in schedules[0].workers]
        self._open = [int(partial * lengths.size) for lengths in actual]
        self._left = [each.size for each in actual]
        self._ends = [0.0] * len(actual)
        self._ended = self._begun = self._moves = 0
        self._events: list[tuple[float, int, int]] = []

    def run(self) -> Timeline:
        """Run all steps."""
        now = 0.0
        self._begin(now)
        while self._events:
            now, version, number = heapq.heappop(self._events)
            worker = self._workers[number]
            if version != worker.version:
                continue
            worker.go_on(now)
            self._end(worker, now)
            worker.fill(self._slots)
            self._expect(number)
            self._begin(now)
            if self._migrate and not worker.active:
                self._take_over(number, now)
        for worker in self._workers:
            worker.go_on(now)
        idle = sum(worker.idle for worker in self._workers)
        return Timeline(now, self._ends, idle, self._moves, len(self._workers))

    def _expect(self, number: int) -> None:
        worker = self._workers[number]
        worker.version += 1
        if worker.active:
            heapq.heappush(self._events, (worker.next, worker.version, number))

    def _end(self, worker: _Worker, now: float) -> None:
        first = True  # its exact time, despite rounding
        while worker.active and (first or worker.active[0][0] <= worker.clock):
            _, step, _ = heapq.heappop(worker.active)
            first = False
            self._left[step] -= 1
            self._ends[step] = now
        while self._ended < len(self._left) and self._left[self._ended] <= self._open[self._ended]:
            self._ended += 1

    def _begin(self, now: float) -> None:
        """Begin the steps that may begin."""
        while self._begun < len(self._actual) and self._begun <= self._ended + self._lag:
            step, lengths = self._begun, self._actual[self._begun]
            for number, positions in enumerate(self._schedules[step].workers):
                worker = self._workers[number]
                worker.go_on(now)
                worker.waiting += [(step, tokens, 0.0) for tokens in lengths[positions].ravel().tolist()]
                worker.fill(self._slots)
                self._expect(number)
            self._begun += 1

    def _take_over(self, number: int, now: float) -> None:
        """Let an idle worker take half of the responses of the fullest, if that is faster."""
        source = max(range(len(self._workers)), key=lambda each: self._fill_of(self._workers[each]))
        full, worker = self._workers[source], self._workers[number]
        half = self._fill_of(full) // 2
        if not full.waiting and (BASE + 2 * half) / (BASE + half) < _WORTH:
            return
        full.go_on(now)
        for _ in range(min(half, len(full.waiting))):
            worker.waiting.appendleft(full.waiting.pop())
        for entry in sorted(full.active, key=lambda each: -each[2])[: half - len(worker.waiting)]:
            full.active.remove(entry)
            end, step, began = entry
            worker.waiting.append((step, end - began, full.clock - began))
            worker.due += PREFILL * (full.clock - began) * (BASE + 1)
        heapq.heapify(full.active)
        self._moves += len(worker.waiting)
        for each in (number, source):
            self._workers[each].fill(self._slots)
            self._expect(each)

    @staticmethod
    def _fill_of(worker: _Worker) -> int:
        return len(worker.active) + len(worker.waiting)
