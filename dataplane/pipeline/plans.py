"""A plan, the ordered instructions of each worker in a step, and the prediction of its time.

A plan has no costs, so it can be simulated with the costs that it was made for, those of another step, or measured
ones. `Executor` runs it unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dataplane.pipeline import programs
from dataplane.pipeline.cluster import Cluster
from dataplane.pipeline.events import Floats, Ints, Outcome, play
from dataplane.pipeline.models import Model
from dataplane.pipeline.programs import Instruction
from dataplane.pipeline.stages import Pipeline, Rows


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a plan.

    step_s: seconds a step, infinite for an impossible order. With several steps in progress, the time between the
    ends of two.
    busy_s: float64 `[workers]`, the seconds of a step in which each worker works.
    worker_bytes, host_bytes: float64, the largest memory of each worker, and of each host's plane.
    bound_s: the lower bound for all plans with these costs on this cluster; 0 if not requested.
    """

    step_s: float
    busy_s: Floats
    worker_bytes: Floats
    host_bytes: Floats
    outcome: Outcome = field(repr=False)
    bound_s: float = 0.0

    @property
    def bubble(self) -> float:
        """The idle share of all workers' time."""
        whole = self.step_s * len(self.busy_s)
        return 1.0 - float(self.busy_s.sum()) / whole if whole and np.isfinite(whole) else 1.0

    @property
    def gap(self) -> float:
        """The share by which the step's time exceeds the lower bound."""
        return self.step_s / self.bound_s - 1.0 if self.bound_s else float("nan")


@dataclass(frozen=True)
class Plan:
    """A plan of a pipeline, or of a model.

    orders: the instructions of each worker, by number, in order.
    parts: for a pipeline, the rows of each micro-batch.
    bounds: for a model, the layer at which each chunk begins, and the number of layers.
    schedule: the name of the order.
    bound_s: the lower bound of step_s by the search; 0 for none.
    considered, planning_s: the number of plans simulated by the search, and its seconds.
    """

    cluster: Cluster
    instructions: tuple[Instruction, ...]
    orders: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, ...], ...] = ()
    bounds: tuple[int, ...] = ()
    schedule: str = ""
    bound_s: float = 0.0
    considered: int = 0
    planning_s: float = 0.0

    def __post_init__(self) -> None:
        placed = sorted(i for order in self.orders for i in order)
        if placed != list(range(len(self.instructions))) or len(self.orders) != self.cluster.workers:
            raise ValueError("a plan has an order for each worker, and each instruction in one of them, once")

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return max(each.micro for each in self.instructions) + 1

    @property
    def split(self) -> bool:
        """Whether backward passes are two instructions."""
        return any(each.kind == programs.BACKWARD_WEIGHT for each in self.instructions)

    @cached_property
    def workers_of(self) -> dict[int, tuple[int, ...]]:
        """The workers of each stage or chunk."""
        found: dict[int, list[int]] = {}
        for w, order in enumerate(self.orders):
            for stage in sorted({self.instructions[i].stage for i in order}):
                found.setdefault(stage, []).append(w)
        return {stage: tuple(workers) for stage, workers in sorted(found.items())}

    @cached_property
    def consumers(self) -> dict[int, tuple[int, ...]]:
        """The workers that need the output of each instruction."""
        worker_of = {i: w for w, order in enumerate(self.orders) for i in order}
        found: dict[int, set[int]] = {}
        for i, each in enumerate(self.instructions):
            for need in each.needs:
                found.setdefault(need, set()).add(worker_of[i])
        return {i: tuple(sorted(workers)) for i, workers in found.items()}

    def on(self, cluster: Cluster) -> Plan:
        """The same plan with the costs of another cluster with as many workers."""
        return replace(self, cluster=cluster)

    def predict(self, of: Pipeline | Model, rows: Rows | None = None, steps: int | None = None) -> Prediction:
        """Predict the time of a step of a pipeline with these rows, or of a model by its layers' costs.

        steps: the number of simulated steps of a pipeline; None: enough for the steady time of a step. Raises
        ValueError if the plan is not of this pipeline or model, or not of these rows.
        """
        if isinstance(of, Model):
            if not self.bounds or self.bounds[-1] != len(of.layers):
                raise ValueError(f"the plan is not of the {len(of.layers)} layers of {of.name}")
            bounds = np.array(self.bounds)
            tasks = programs.chunk_tasks(of, bounds, self.micro_batches, self.split, self.cluster.overhead_s)
            steps = 1
        else:
            if rows is None or sorted(i for part in self.parts for i in part) != list(range(len(rows))):
                raise ValueError("the plan is not of these rows")
            steps = steps or (1 if of.lag == 0 else 2 * (of.lag + 2))
            parts = [np.array(part, np.int64) for part in self.parts]
            tasks = programs.stage_tasks(of, rows, parts, self.cluster.overhead_s, steps)
        count = len(self.instructions)
        if len(tasks) != count * steps:
            raise ValueError("the plan has not the instructions of these stages")
        shifts = np.arange(steps)[:, None] * count
        orders = [(np.array(order, np.int64)[None, :] + shifts).ravel().astype(np.int32) for order in self.orders]
        members = [[0]] * (int(tasks.queue.max()) + 1)  # the order assigns the tasks
        outcome = play(tasks, programs.room_of(self.cluster, members), orders)
        state = np.zeros(self.cluster.workers)
        if isinstance(of, Model):
            each = np.diff(of.sums[np.array(self.bounds), 5])
        else:
            each = np.array([stage.worker_bytes for stage in of.stages])
        for stage, workers in self.workers_of.items():
            state[list(workers)] += each[stage]
        ends = outcome.end.reshape(steps, -1).max(axis=1)
        half = steps // 2
        step_s = float(ends[-1] - ends[half - 1]) / (steps - half) if steps > 1 else float(ends[-1])
        taken = np.where(outcome.end > outcome.start, outcome.end - outcome.start, 0.0)
        busy = np.bincount(np.maximum(outcome.worker, 0), taken, len(outcome.peak)) / steps
        if not outcome.finished:
            step_s = float("inf")
        return Prediction(step_s, busy, outcome.peak + state, outcome.host_peak, outcome, self.bound_s)


def plan_of(
    cluster: Cluster, instructions: tuple[Instruction, ...], orders: list[Ints] | list[list[int]], **more: Any
) -> Plan:
    """The plan with these orders; `more`: other fields of `Plan`."""
    return Plan(cluster, instructions, tuple(tuple(int(i) for i in order) for order in orders), **more)
