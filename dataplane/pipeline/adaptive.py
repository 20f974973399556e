"""Plans again when the work has changed, and switches between steps.

Each step is executed by the current plan for its rows. After it, costs are fitted to the measurements of the last
steps. If the next step's predicted time exceeds the lower bound by `drift` more than when the plan was made, another
plan is searched. It is used if it is shorter by the share `gain`.

Invariants: a step is executed by one plan. The executor switches only to better plans by the measured costs, or if the
rows do not fit the current plan.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace

from dataplane.batch.ref import BatchRef
from dataplane.pipeline.executor import Executor, Result
from dataplane.pipeline.measuring import measure, measure_cluster
from dataplane.pipeline.plans import Plan
from dataplane.pipeline.search import Search, lower_bound, plan
from dataplane.pipeline.stages import Pipeline, Rows


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of the plan before step `number`. before_s, after_s: predictions of both plans for its rows."""

    number: int
    before_s: float
    after_s: float
    planning_s: float


class Adaptive:
    """An executor of stages whose plan follows the work.

    gain: the share by which a step must become shorter for a switch. drift: the additional share above the lower bound,
    since the plan was made, from which another one is searched. window: the number of steps whose measurements count.
    seconds: the time of a search. Raises ValueError for a pipeline with a lag.
    """

    def __init__(
        self,
        executor: Executor,
        pipeline: Pipeline,
        *,
        gain: float = 0.05,
        drift: float = 0.1,
        window: int = 4,
        seconds: float = 1.0,
    ) -> None:
        if pipeline.lag:
            raise ValueError("a plan is switched between steps, and with a lag steps overlap always")
        self.executor, self.pipeline = executor, pipeline
        self.cluster = executor.plan.cluster
        self.switches: list[Switch] = []
        self._gain, self._drift, self._seconds = gain, drift, seconds
        self._steps: deque[tuple[Plan, Rows, Result]] = deque(maxlen=window)
        self._gap: float | None = None

    def step(self, ref: BatchRef | None, rows: Rows) -> Result:
        """Execute a step. `rows`: the lengths of the rows of `ref`. Raises the errors of `Executor.step`."""
        current = self._current(rows)
        if self._drifted(current, rows):
            current = self._again(current, rows)
        if current is not self.executor.plan:
            self.executor.use(current)
        result = self.executor.step(ref)
        self._steps.append((current, rows, result))
        if not result.replaced:
            self.pipeline = measure(self.pipeline, list(self._steps))
            self.cluster = measure_cluster(self.cluster, [(p, r) for p, _, r in self._steps])
        return result

    def _current(self, rows: Rows) -> Plan:
        """The current plan for these rows, which are distributed over its micro-batches. If they cannot fill them,
        another plan."""
        used = self.executor.plan
        count = used.micro_batches
        if len(rows) == sum(map(len, used.parts)) and (rows.group is None or self._keeps_groups(used, rows)):
            return used
        search = Search(self.pipeline, rows, self.cluster, 0.0, 0)
        parts = search.parts(min(count, len(rows.groups)), "balanced")
        if len(parts) != count:
            return self._planned(rows)
        return replace(used, parts=tuple(tuple(part.tolist()) for part in parts))

    @staticmethod
    def _keeps_groups(used: Plan, rows: Rows) -> bool:
        assert rows.group is not None
        where = {i: m for m, part in enumerate(used.parts) for i in part}
        return all(len({where[int(i)] for i in group}) == 1 for group in rows.groups)

    def _drifted(self, current: Plan, rows: Rows) -> bool:
        gap = self._predicted(current, rows) / max(lower_bound(self.pipeline, rows, self.cluster), 1e-12) - 1
        if self._gap is None:
            self._gap = gap
            return False
        return gap > self._gap + self._drift

    def _predicted(self, of: Plan, rows: Rows) -> float:
        return of.on(self.cluster).predict(self.pipeline, rows).step_s

    def _planned(self, rows: Rows, given: Plan | None = None) -> Plan:
        return plan(self.pipeline, rows, self.cluster, seconds=self._seconds, given=given)

    def _again(self, current: Plan, rows: Rows) -> Plan:
        began = time.monotonic()
        found = self._planned(rows, current)
        before, after = self._predicted(current, rows), self._predicted(found, rows)
        bound = max(found.bound_s, 1e-12)
        if after < before * (1 - self._gain):
            self._gap = after / bound - 1
            self.switches.append(Switch(self.executor.steps, before, after, time.monotonic() - began))
            return found
        self._gap = before / bound - 1  # no better plan is known: search again only after more drift
        return current
