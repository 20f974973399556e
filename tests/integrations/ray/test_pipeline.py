"""Workers of a pipeline as actors of Ray: the same plan, the same rows, and an actor that is killed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import ray

import dataplane as dp
from dataplane.integrations import ray as door
from dataplane.pipeline import Cluster, Executor, Pipeline, Rows, Stage, StageFailed, fifo, in_turn
from dataplane.pipeline.functions import Functions
from dataplane.pipeline.ray_workers import Actors, _QueueLink
from tests.integrations.marks import SYSTEMS

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # what else is installed may have other `tests`

pytestmark = SYSTEMS

X = np.arange(8)


def double(batch: Any) -> dict[str, Any]:
    if (batch["x"].numpy() < 0).any():
        raise ValueError("less than nothing")
    return {"y": batch["x"].numpy() * 2}


def add(batch: Any) -> dict[str, Any]:
    return {"z": batch["y"].numpy() + batch["x"].numpy()}


PIPELINE = Pipeline([Stage("double", double, ("x",), ("y",)), Stage("add", add, ("x", "y"), ("z",))])


def test_messages_that_overtake_each_other_are_put_in_order() -> None:
    link = _QueueLink()
    for number in (2, 0, 1, 3):
        link.tell(number, bytes([number]))
    assert [link.receive(wait=False) for _ in range(5)] == [b"\0", b"\1", b"\2", b"\3", None]


def test_pipeline_actors_without_ray_are_misuse() -> None:
    with pytest.raises(dp.Misuse, match=r"ray\.init"):
        Actors(Functions(PIPELINE))


@pytest.mark.usefixtures("driver")
def test_actors_execute_a_plan_and_a_killed_one_is_replaced() -> None:
    rows = Rows.of([1] * 8)
    plan = fifo(PIPELINE, rows, Cluster.uniform(2), {"double": [0], "add": [1]}, in_turn(rows, 4))
    door.up(dp.NodeConfig(memory="32MiB", spill=0, prewarm=0))
    with dp.connect("ray") as plane, Executor(plane, PIPELINE, plan, on="ray") as executor:
        ref = plane.put({"x": X})
        result = executor.step(ref)
        assert result.ref is not None
        assert plane.get(result.ref)["z"].numpy().tolist() == (3 * X).tolist()

        crew: Any = executor.crew
        ray.kill(crew.actor(1))
        result = executor.step(ref)
        assert result.ref is not None
        assert plane.get(result.ref)["z"].numpy().tolist() == (3 * X).tolist()

        with pytest.raises(StageFailed, match="less than nothing"):
            executor.step(plane.put({"x": X - 5}))
