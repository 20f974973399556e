"""The times of a replay if moving data takes no time, as implied by the trace's lengths and latencies.

It simulates the rules of the processes with a queue of events, without a plane. Slots take responses in order. The rows
of a prompt are appended when its last response is made. The reward is known its seconds later. An idle rank of the
reference takes rows in the order of arrival. The trainer waits for a whole batch, splits it by tokens, and takes as
long as its most loaded rank.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bench.replaying.plan import Plan
from dataplane.stream.balance import balanced


@dataclass
class Times:
    """Times in seconds from the start: `made`, `rewarded` and `referenced` by row; `began` and `trained` by update.
    `taken`: the rows of each update. `expired`: the number of expired rows."""

    made: dict[int, float] = field(default_factory=dict)
    rewarded: dict[int, float] = field(default_factory=dict)
    referenced: dict[int, float] = field(default_factory=dict)
    began: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    taken: list[list[int]] = field(default_factory=list)
    expired: int = 0

    def stages(self, plan: Plan) -> list[dict[str, float]]:
        """The seconds of each stage, by step. For synchronous replays only: in others, steps overlap.

        rollout: until the last row was appended; reward, reference: from the first row appended to the last one done;
        train: from the last row ready to the end; step: the whole step.
        """
        found, before = [], 0.0
        for step, (first, last) in enumerate(zip(plan.starts, plan.starts[1:], strict=False)):
            rows = range(int(first), int(last))
            there, whole = min(self.made[row] for row in rows), max(self.made[row] for row in rows)
            rewarded = max(self.rewarded[row] for row in rows)
            referenced = max(self.referenced[row] for row in rows)
            stages = {"rollout": whole - before, "reward": rewarded - there, "reference": referenced - there}
            stages["train"] = self.trained[step] - max(rewarded, referenced)
            found.append(stages | {"step": self.trained[step] - before})
            before = self.trained[step]
        return found


def implied(plan: Plan) -> Times:
    """The times of a replay if moving data takes no time."""
    return _Play(plan).run()


class _Play:
    """A simulation of one replay."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._now = 0.0
        self._times = Times()
        self._version, self._latest = 0, 0
        self._done = 0  # rows that are trained or have expired
        self._queues = [_begins(plan, worker) for worker in range(plan.workers)]
        self._free = [plan.slots] * plan.workers
        self._groups = {row: rows for queue in self._queues for _, row, rows in queue}
        self._left = {rows[0]: len(rows) for rows in self._groups.values()}
        self._versions: dict[int, int] = {}  # by a group's first row
        self._arrived: deque[int] = deque()  # for the reference
        self._idle = plan.reference.dp
        self._ready: list[int] = []
        self._training = False

    def run(self) -> Times:
        self._begin()
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self._times

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self._now + seconds, self._number, event))

    def _begin(self) -> None:
        """Start the responses that may begin in free slots."""
        for worker, queue in enumerate(self._queues):
            while self._free[worker] and queue and self._plan.begins_at(queue[0][0]) <= self._done:
                _, row, rows = queue.popleft()
                self._free[worker] -= 1
                self._versions.setdefault(rows[0], self._version)
                self._after(float(self._plan.made_s[row]), partial(self._made, worker, row))

    def _made(self, worker: int, row: int) -> None:
        self._free[worker] += 1
        self._begin()
        rows = self._groups[row]
        self._left[rows[0]] -= 1
        if self._left[rows[0]]:
            return
        self._latest = max(self._latest, self._versions[rows[0]])
        for each in rows:
            self._times.made[each] = self._now
            self._after(float(self._plan.reward_s[each]), partial(self._rewarded, each))
        self._arrived.extend(rows)
        self._refer()

    def _rewarded(self, row: int) -> None:
        self._times.rewarded[row] = self._now
        self._also(row, self._times.referenced)

    def _refer(self) -> None:
        while self._idle and self._arrived:
            rows = [self._arrived.popleft() for _ in range(min(self._plan.delivered, len(self._arrived)))]
            self._idle -= 1
            tokens = int(self._plan.tokens[rows].sum())
            self._after(tokens * self._plan.reference_token_s, partial(self._referred, rows))

    def _referred(self, rows: list[int]) -> None:
        self._idle += 1
        for row in rows:
            self._times.referenced[row] = self._now
            self._also(row, self._times.rewarded)
        self._refer()

    def _also(self, row: int, other: dict[int, float]) -> None:
        """Make the row ready for the trainer, if the other stage is done, too."""
        if row in other:
            self._ready.append(row)
            self._train()

    def _train(self) -> None:
        if self._training or not self._ready:
            return
        if self._plan.max_lag:
            self._expire()
        wanted = self._plan.wanted(len(self._times.trained))
        left = self._plan.rows - self._done
        whole = len(self._times.made) == self._plan.rows
        if not self._ready or len(self._ready) < (min(wanted, left) if whole else wanted):
            return
        self._ready.sort(key=lambda row: -self._version_of(row) if self._plan.max_lag else 0)  # stable
        rows, self._ready = self._ready[:wanted], self._ready[wanted:]
        self._training = True
        self._times.began.append(self._now)
        self._times.taken.append(rows)
        self._after(self._train_s(rows), partial(self._trained, len(rows)))

    def _train_s(self, rows: list[int]) -> float:
        """The seconds of the most loaded rank."""
        tokens = self._plan.tokens[rows]
        shares = balanced(tokens, self._plan.trainer.dp)
        return float(max(tokens[share].sum() for share in shares)) * self._plan.train_token_s

    def _version_of(self, row: int) -> int:
        return self._versions[self._groups[row][0]]

    def _expire(self) -> None:
        oldest = self._latest - self._plan.max_lag
        fresh = [row for row in self._ready if self._version_of(row) >= oldest]
        gone, self._ready = len(self._ready) - len(fresh), fresh
        if gone:
            self._done += gone
            self._times.expired += gone
            self._begin()

    def _trained(self, rows: int) -> None:
        self._training = False
        self._version += 1
        self._done += rows
        self._times.trained.append(self._now)
        self._begin()
        self._train()


def _begins(plan: Plan, worker: int) -> deque[tuple[int, int, list[int]]]:
    """The responses of a worker in the order of their starts: step, row, and all rows of the prompt."""
    steps = range(len(plan.trace.steps))
    return deque((step, row, rows) for step in steps for _, rows in plan.groups(step, worker) for row in rows)


def error(replayed: float, of: float) -> float:
    """The difference of a time from the implied one, in per cent of the latter."""
    return 100 * abs(replayed - of) / of if of else float(np.inf if replayed else 0)
