"""Chunks of a model, run by real processes: whatever the schedule, the same gradients."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import dataplane as dp
from dataplane.pipeline import (
    Adaptive,
    Cluster,
    Cost,
    Executor,
    Layer,
    Model,
    Pipeline,
    Plan,
    Rows,
    Stage,
    fifo,
    gpipe,
    in_turn,
    interleaved,
    plan_model,
)
from dataplane.pipeline import messages as m
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


def test_a_new_chunk_is_not_given_the_state_of_other_layers(
    node: StandingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not by a step that began before the plan changed, and in which a worker died after that."""
    plan = interleaved(MODEL, CLUSTER, 4, 1, (0, 2, 8))
    with (
        dp.connect(node.address) as plane,
        Executor(plane, MODEL, PLANS["1F1B"], build=stages.chunk, method="forkserver") as executor,
    ):
        hear, crew = executor._hear, cast(Any, executor.crew)

        def heard(w: int, message: m.FromWorker) -> None:
            if isinstance(message, m.Ended) and (w, message.step) == (0, 1):
                executor.use(plan)
                os.kill(crew.pid(0), signal.SIGKILL)
            else:
                hear(w, message)

        monkeypatch.setattr(executor, "_hear", heard)
        ref = plane.put({"x": X})
        assert [executor.step(ref).replaced for _ in range(2)] == [0, 1]
        assert not executor._states
        executor.step(ref)
        assert gradients(plane, executor) == expected(plan)


# Work that drifts: another plan is looked for, and used from the next step on.

PIPELINE = Pipeline(
    [
        Stage("one", stages.Wait("a", "y"), ("a",), ("y",), Cost(token_s=1e-3, tokens="a"), replicas=None),
        Stage("two", stages.Wait("b", "z"), ("b", "y"), ("z",), Cost(token_s=1e-3, tokens="b"), replicas=None),
    ]
)
HEAVY, LIGHT = [12] * 8, [2] * 8


def step(plane: dp.Plane, adaptive: Adaptive, a: list[int], b: list[int]) -> None:
    ref = plane.put({"a": np.array(a), "b": np.array(b)})
    result = adaptive.step(ref, Rows.of(a, a=a, b=b))
    assert result.ref is not None
    assert plane.get(result.ref)["z"].numpy().tolist() == b, "rows are in their order, whatever the plan"
    plane.free(result.ref)
    plane.free(ref)


def test_a_plan_adapts_to_changed_work(node: StandingNode) -> None:
    cluster = Cluster.uniform(3)
    first = Rows.of(HEAVY, a=HEAVY, b=LIGHT)
    begun = fifo(PIPELINE, first, cluster, {"one": [0, 1], "two": [2]}, in_turn(first, 4))
    with dp.connect(node.address) as plane, Executor(plane, PIPELINE, begun, method="forkserver") as executor:
        adaptive = Adaptive(executor, PIPELINE, seconds=0.3, drift=0.2)
        for _ in range(2):
            step(plane, adaptive, HEAVY, LIGHT)
        while len(executor.plan.workers_of[1]) < 2:  # a busy machine's steps may hide for a while what drifts
            step(plane, adaptive, LIGHT, HEAVY)
        last = adaptive.switches[-1]
        assert last.after_s < last.before_s
        assert executor.plan is not begun
        assert len(executor.plan.workers_of[1]) >= 2, "the stage that has become heavy has more workers"
