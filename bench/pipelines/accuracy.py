"""Compares the performance model with real runs of the executor, for 20 plans of three pipelines.

For each pipeline, one more plan is run first, to measure costs and overheads. The others are predicted with these, and
run in turn. Two pipelines wait as long as real stages would, on 8 and 4 workers. The third computes, on the available
cores.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

import dataplane as dp
from bench.pipelines import waits
from bench.pipelines.running import by_turns, median_s
from dataplane.pipeline import (
    Cluster,
    Cost,
    Executor,
    Host,
    Model,
    Pipeline,
    Plan,
    Rows,
    Stage,
    gpipe,
    interleaved,
    measure,
    measure_cluster,
    plan_model,
    profiles,
)
from dataplane.pipeline.search import Search

ROUNDS = 3


@dataclass(frozen=True)
class Compared:
    """The predicted and the measured seconds of a plan."""

    pipeline: str
    plan: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The error as a share of the measured time."""
        return abs(self.predicted_s / self.measured_s - 1)


def rollouts(steps: int = 48) -> tuple[Pipeline, Rows]:
    """A pipeline of waiting stages, and a step of `steps` rows in groups of four."""
    rng = np.random.default_rng(3)
    rows = Rows.of(rng.integers(100, 1000, steps), np.repeat(np.arange(steps // 4), 4))
    costs = {
        "rollout": Cost(0.02, longest_s=2e-4, token_s=2e-5),
        "reward": Cost(0.01, row_s=4e-3),
        "reference": Cost(0.01, token_s=1e-5),
        "train": Cost(0.02, token_s=3e-5),
    }

    def stage(name: str, inputs: tuple[str, ...], output: str, replicas: int | None) -> Stage:
        return Stage(
            name, waits.Wait(output, costs[name]), ("tokens", *inputs), (output,), costs[name], replicas=replicas
        )

    stages = [
        stage("rollout", (), "response", None),
        stage("reward", ("response",), "score", None),
        stage("reference", ("response",), "log_prob", None),
        stage("train", ("response", "score", "log_prob"), "loss", 2),
    ]
    return Pipeline(stages), rows


def computing() -> tuple[Pipeline, Rows]:
    """A pipeline whose stages multiply matrices, and the rows of a step."""
    rng = np.random.default_rng(4)
    rows = Rows.of(rng.integers(100, 400, 24))

    def stage(name: str, inputs: tuple[str, ...], output: str, units: float) -> Stage:
        spin = waits.Spin(output, units)
        return Stage(
            name, spin, ("tokens", *inputs), (output,), Cost(0.001, token_s=units * 5e-5, cores=1), replicas=None
        )

    return Pipeline([stage("draw", (), "a", 2.4), stage("learn", ("a",), "b", 3.6)]), rows


def some_plans(pipeline: Pipeline, rows: Rows, cluster: Cluster, count: int, least: int, seed: int) -> list[Plan]:
    """`count` different random plans, each with `least` to 16 micro-batches."""
    search = Search(pipeline, rows, cluster, 0.0, seed)
    drawn = list(search.first())
    found: list[Plan] = []
    while len(found) < count:
        candidate = drawn[int(search.random.integers(len(drawn)))]
        for _ in range(int(search.random.integers(0, 6))):
            candidate = search.changed(candidate) or candidate
        played = search.play(candidate) if least <= candidate.micro_batches <= 16 else None
        if played is not None and all(played[1].orders != other.orders for other in found):
            found.append(played[1])
    return found


def of_stages(
    plane: dp.Plane, name: str, pipeline: Pipeline, rows: Rows, cluster: Cluster, count: int
) -> list[Compared]:
    """Predict and run `count` plans of a pipeline of stages."""
    plans = some_plans(pipeline, rows, cluster, count + 1, 3, 5)
    ref = plane.put({"tokens": rows.tokens("tokens")})
    with Executor(plane, pipeline, plans[0], method="forkserver") as executor:
        by_turns(plane, executor, plans[:1], [ref], 1)
        first = by_turns(plane, executor, plans[:1], [ref], ROUNDS)[0]
        fitted = measure(pipeline, [(plans[0], rows, result) for result in first])
        known = measure_cluster(cluster, [(plans[0], result) for result in first])
        predicted = [plan.on(known).predict(fitted, rows).step_s for plan in plans[1:]]
        took = by_turns(plane, executor, plans[1:], [ref] * count, ROUNDS)
    plane.free(ref)
    return [
        Compared(name, plan.schedule, p, median_s(t)) for plan, p, t in zip(plans[1:], predicted, took, strict=True)
    ]


def of_chunks(plane: dp.Plane, name: str, scale: float) -> list[Compared]:
    """Predict and run plans of a model on four workers, `scale` times as slow."""
    model = scaled(profiles.model(name), scale)
    cluster = Cluster.uniform(4)
    plans = [
        interleaved(model, cluster, 8, 1),
        gpipe(model, cluster, 8),
        interleaved(model, cluster, 4, 1),
        interleaved(model, cluster, 8, 2),
        interleaved(model, cluster, 12, 1),
        *(plan_model(model, cluster, count, seconds=1.0, seed=count) for count in (4, 8, 12)),
    ]
    with Executor(plane, model, plans[0], build=waits.Build(name, scale), method="forkserver") as executor:
        by_turns(plane, executor, plans[:1], [None], 1)
        first = by_turns(plane, executor, plans[:1], [None], ROUNDS)[0]
        known = measure_cluster(cluster, [(plans[0], result) for result in first])
        predicted = [plan.on(known).predict(model).step_s for plan in plans[1:]]
        took = by_turns(plane, executor, plans[1:], [None] * len(predicted), ROUNDS)
    return [
        Compared(name, plan.schedule, p, median_s(t)) for plan, p, t in zip(plans[1:], predicted, took, strict=True)
    ]


def scaled(model: Model, scale: float) -> Model:
    """The model with its seconds times `scale`."""
    from dataclasses import replace

    layers = [
        replace(
            layer,
            forward_s=layer.forward_s * scale,
            backward_input_s=layer.backward_input_s * scale,
            backward_weight_s=layer.backward_weight_s * scale,
        )
        for layer in model.layers
    ]
    return Model(model.name, layers, model.cuts)


NAMES = ("rollouts", "qwen3_30b_a3b", "computing")


def compared(plane: dp.Plane, name: str) -> list[Compared]:
    """Predict and run the 7, 7 or 6 plans of a pipeline."""
    if name == "rollouts":
        return of_stages(plane, name, *rollouts(), Cluster.uniform(8), 7)
    if name == "computing":
        return of_stages(plane, name, *computing(), Cluster((Host(3, cores=len(os.sched_getaffinity(0))),)), 6)
    return of_chunks(plane, name, 4.0)
