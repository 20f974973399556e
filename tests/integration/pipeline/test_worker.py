"""One worker, told by a script: what it does with messages that arrive while it works."""

from __future__ import annotations

from collections import deque

import numpy as np

import dataplane as dp
from dataplane.pipeline import Plan
from dataplane.pipeline import messages as m
from dataplane.pipeline.functions import Functions
from dataplane.pipeline.stages import Pipeline, Stage
from dataplane.pipeline.worker import ExecutorGone, ExecutorLink, Worker
from tests.integration.pipeline import stages
from tests.integration.pipeline.test_executor import nothing_is_left, planned
from tests.processes import StandingNode

X = np.arange(8)


class Script(ExecutorLink):
    """An executor that has said all before the worker begins, and goes once it is waited for."""

    def __init__(self, *told: m.ToWorker) -> None:
        self.told = deque(told)
        self.said: list[m.FromWorker] = []

    def send(self, message: bytes) -> None:
        self.said.append(m.from_worker.decode(message))

    def receive(self, *, wait: bool) -> bytes | None:
        if self.told:
            return m.encode(self.told.popleft())
        if wait:
            raise ExecutorGone
        return None


def use(plan: Plan) -> m.Use:
    told = [(i, each.kind, each.stage, each.micro, list(each.needs)) for i, each in enumerate(plan.instructions)]
    return m.Use(told, plan.micro_batches, list(plan.bounds))


def begin(number: int, plan: Plan, ref: dp.BatchRef) -> m.BeginStep:
    parts = {micro: ref[np.array(rows)].encode() for micro, rows in enumerate(plan.parts)}
    return m.BeginStep(number, f"script-{number}", parts, list(plan.orders[0]))


def done(node: StandingNode, pipeline: Pipeline, *plans: Plan) -> list[m.FromWorker]:
    """What a worker says of a step by each plan."""
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": X})
        told = [each for at, plan in enumerate(plans) for each in (use(plan), begin(at, plan, ref))]
        link = Script(*told)
        Worker(link, plane, Functions(pipeline)).run()
        plane.free(ref)
    return link.said


def test_another_plan_that_arrives_in_mid_step_is_used_from_the_next_step_on(node: StandingNode) -> None:
    pipeline = stages.pipeline()
    plans = [planned(pipeline, workers=1, micro=micro) for micro in (4, 2)]
    said = done(node, pipeline, *plans)
    assert [(each.step, each.instruction) for each in said if isinstance(each, m.Did)] == [
        (step, i) for step, plan in enumerate(plans) for i in plan.orders[0]
    ]
    assert [each.step for each in said if isinstance(each, m.Ended)] == [0, 1]


def test_a_function_that_raises_eoferror_ends_the_step_and_not_the_worker(node: StandingNode) -> None:
    pipeline = stages.pipeline(stages.read_on)
    plan = planned(pipeline, workers=1)
    said = done(node, pipeline, plan, plan)
    failed = [each for each in said if isinstance(each, m.Failed)]
    assert [each.step for each in failed] == [0, 1]
    assert "EOFError: no more records" in failed[0].trace


def test_a_worker_whose_executor_has_gone_frees_what_its_steps_stored(node: StandingNode) -> None:
    pipeline = Pipeline([Stage("n", stages.Counting("n"), ("x",), ("n",), factory=True, stateful=True)])
    plan = planned(pipeline, workers=1)
    with dp.connect(node.address) as plane:
        ref, state = plane.put({"x": X}), plane.put({"count": np.array([3])})
        link = Script(m.Load(0, state.encode()), use(plan), begin(0, plan, ref))
        Worker(link, plane, Functions(pipeline)).run()
        assert [each.stage for each in link.said if isinstance(each, m.StepState)] == [0]
        plane.free(ref)
        nothing_is_left(plane)
