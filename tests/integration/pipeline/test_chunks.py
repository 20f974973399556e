"""Chunks of a model, run by real processes: whatever the schedule, the same gradients."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.pipeline import Cluster, Executor, Layer, Model, Plan, gpipe, interleaved, plan_model
from tests.integration.pipeline import stages
from tests.processes import StandingNode

MODEL = Model("eight", [Layer(f"layer {i}", 1e-3 * (1 + i % 2), 1e-3, 1e-3, 1.0, 0.5, 1.0, 8.0) for i in range(8)])
CLUSTER = Cluster.uniform(2)
X = np.arange(4)

PLANS = {
    "gpipe": gpipe(MODEL, CLUSTER, 4),
    "1F1B": interleaved(MODEL, CLUSTER, 4, 1),
    "interleaved": interleaved(MODEL, CLUSTER, 4, 2),
    "found": plan_model(MODEL, CLUSTER, 4, seconds=0.2),
}


def gradients(plane: dp.Plane, executor: Executor) -> list[float]:
    """What each chunk has added up, by the states that it left."""
    refs = [dp.BatchRef.decode(ref) for _, ref in sorted(executor._states.items())]
    return [float(plane.get(ref)["total"].numpy()[0]) for ref in refs]


def expected(plan: Plan) -> list[float]:
    """A chunk is given x * 2^first, and its gradient is 2^(8 - end)."""
    return [float(X.sum()) * 2.0**a * 2.0 ** (8 - b) for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)]


@pytest.mark.parametrize("name", list(PLANS))
def test_every_schedule_computes_the_gradients_of_the_model(node: StandingNode, name: str) -> None:
    plan = PLANS[name]
    with (
        dp.connect(node.address) as plane,
        Executor(plane, MODEL, plan, build=stages.chunk, method="forkserver") as executor,
    ):
        result = executor.step(plane.put({"x": X}))
        assert len(result.spans) == len(plan.instructions)
        assert gradients(plane, executor) == expected(plan)


def test_a_worker_that_is_killed_does_its_step_again_from_the_state_before(node: StandingNode) -> None:
    plan = PLANS["found"]
    with (
        dp.connect(node.address) as plane,
        Executor(plane, MODEL, plan, build=stages.chunk, method="forkserver") as executor,
    ):
        ref = plane.put({"x": X})
        executor.step(ref)
        crew: Any = executor.crew
        os.kill(crew.pid(0), signal.SIGKILL)
        executor.step(ref)
        assert gradients(plane, executor) == [2 * each for each in expected(plan)]


def test_chunks_that_another_plan_gives_to_other_workers_move_with_their_state(node: StandingNode) -> None:
    plan = PLANS["1F1B"]
    turned = replace(plan, orders=plan.orders[::-1])
    with (
        dp.connect(node.address) as plane,
        Executor(plane, MODEL, plan, build=stages.chunk, method="forkserver") as executor,
    ):
        ref = plane.put({"x": X})
        executor.step(ref)
        executor.use(turned)
        executor.step(ref)
        assert gradients(plane, executor) == [2 * each for each in expected(plan)]
