"""Work that drifts: another plan is looked for, and used from the next step on."""

from __future__ import annotations

import numpy as np

import dataplane as dp
from dataplane.pipeline import Adaptive, Cluster, Cost, Executor, Pipeline, Rows, Stage, fifo, in_turn
from tests.integration.pipeline import stages
from tests.processes import StandingNode

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
