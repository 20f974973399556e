"""Compares plans of the demo and of two replays with their default settings, by executing both in turn.

By default, the demo has three rollout workers with a batch of 32 prompts each, a reward worker and a trainer. A replay
(`bench.replay`) has two rollout workers that share a step's prompts, a reward worker, a reference and a trainer of two
data-parallel ranks. Plans have the same workers and rows, and are run by the same executor. They know the lengths of
responses, in place of predicted ones. The demo's costs are measured first; a replay's stages wait as in its trace.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp
from bench.pipelines import demo, waits
from bench.pipelines.running import by_turns
from bench.workloads import generate
from dataplane.pipeline import (
    Cluster,
    Cost,
    Executor,
    Host,
    Pipeline,
    Plan,
    Rows,
    Stage,
    fifo,
    in_turn,
    measure,
    measure_cluster,
    plan,
)

ROUNDS = 5
MODEL_ERROR = 0.1  # the largest error of the performance model; a smaller predicted gain may be none
STEP_S = 3.0  # seconds of a replay's default step, by which its pace is set
NAMES = ("demo", "video_understanding_7b", "code_14b")


@dataclass(frozen=True)
class Job:
    """Ratios of the default's step times to the plan's, one a turn, and the predicted seconds of both."""

    name: str
    ratios: list[float]
    default_s: list[float]
    planned_s: list[float]
    predicted_s: tuple[float, float]
    schedule: str
    detail: str = field(default="")


def measured(plane: dp.Plane, chosen: Sequence[str]) -> list[Job]:
    """The comparisons of the jobs with these names."""
    return [of_demo(plane) if name == "demo" else of_replay(plane, name) for name in chosen]


def of_demo(plane: dp.Plane) -> Job:
    """Compare plans of the demo, whose stages compute."""
    with tempfile.TemporaryDirectory() as directory:
        columns, rows = demo.step(0)
        pipeline = demo.described(Path(directory, "weights.npz"))
        cluster = Cluster((Host(5, cores=len(os.sched_getaffinity(0))),))
        default = fifo(pipeline, rows, cluster, {"rollout": [0, 1, 2], "reward": [3], "learn": [4]}, in_turn(rows, 3))
        small = fifo(pipeline, rows, cluster, {"rollout": [0, 1, 2], "reward": [3], "learn": [4]}, in_turn(rows, 12))
        ref = plane.put(columns)
        with Executor(plane, pipeline, default, method="forkserver") as executor:
            by_turns(plane, executor, [default, small], [ref, ref], 1)
            pilot = by_turns(plane, executor, [default, small], [ref, ref], 2)
            steps = [(p, rows, r) for p, results in zip((default, small), pilot, strict=True) for r in results]
            alone = _uncontended(steps)
            fitted = measure(pipeline, alone)
            known = measure_cluster(cluster, [(p, r) for p, _, r in alone])
            return _job(plane, executor, "demo", fitted, rows, ref, default.on(known))


def _uncontended(steps: list[Any]) -> list[Any]:
    """The fastest step of each plan, which other processes disturbed least."""
    best: dict[int, Any] = {}
    for each in steps:
        if id(each[0]) not in best or each[2].step_s < best[id(each[0])][2].step_s:
            best[id(each[0])] = each
    return list(best.values())


def of_replay(plane: dp.Plane, task: str) -> Job:
    """Compare plans of a task's step of 8 prompts by 4 responses, whose stages wait, like in `bench.replay`."""
    [step] = generate(task, prompts=8, samples=4, steps=1, seed=0).steps
    response = np.asarray(step.response_tokens)
    whole = response + np.asarray(step.input_tokens)[step.group]
    tools_us = np.asarray(step.of_responses(step.tool_seconds) * 1e6, np.int64)
    made = response + (tools_us * 50 / 1e6).astype(np.int64)  # seconds of tools count as tokens at the engine's pace
    rewards_us = np.asarray(step.reward_seconds * 1e6, np.int64)
    rows = Rows.of(whole, step.group, made=made, reward_us=rewards_us)
    pace = 1.0
    for _ in range(3):  # finds the pace at which the default step takes STEP_S
        pipeline = _stages(pace)
        pace *= _default(pipeline, rows, Cluster.uniform(6)).predict(pipeline, rows).step_s / STEP_S
    pipeline = _stages(pace)
    default = _default(pipeline, rows, Cluster.uniform(6))
    ref = plane.put(dict(rows.lengths))
    with Executor(plane, pipeline, default, method="forkserver") as executor:
        by_turns(plane, executor, [default], [ref], 1)
        [pilot] = by_turns(plane, executor, [default], [ref], 1)
        known = measure_cluster(default.cluster, [(default, result) for result in pilot])
        return _job(plane, executor, task, pipeline, rows, ref, default.on(known))


def _stages(pace: float) -> Pipeline:
    """The pipeline of a replay, `pace` times as fast. An engine slows down with its load: each token adds a 64th of its
    time."""
    costs = {
        "rollout": Cost(1e-3, longest_s=1 / 50 / pace, token_s=1 / 50 / 64 / pace, tokens="made"),
        "reward": Cost(1e-3, longest_s=1e-6 / pace, tokens="reward_us"),
        "reference": Cost(1e-3, token_s=1 / 50_000 / pace),
        "train": Cost(1e-3, token_s=1 / 10_000 / pace),
    }

    def stage(name: str, inputs: tuple[str, ...], output: str, replicas: int | None) -> Stage:
        wait = waits.Wait(output, costs[name])
        return Stage(name, wait, (costs[name].tokens, *inputs), (output,), costs[name], replicas=replicas)

    return Pipeline(
        [
            stage("rollout", (), "response", None),
            stage("reward", ("response",), "score", None),
            stage("reference", ("response",), "log_prob", None),
            stage("train", ("response", "score", "log_prob"), "loss", 2),
        ]
    )


def _default(pipeline: Pipeline, rows: Rows, cluster: Cluster) -> Plan:
    """Two rollout workers that take prompts in turn, a reward worker, a reference, a trainer of two ranks."""
    assert rows.group is not None
    parts = [np.flatnonzero(rows.group % 2 == worker) for worker in range(2)]
    members = {"rollout": [0, 1], "reward": [2], "reference": [3], "train": [4, 5]}
    return fifo(pipeline, rows, cluster, members, parts)


def _job(
    plane: dp.Plane, executor: Executor, name: str, pipeline: Pipeline, rows: Rows, ref: dp.BatchRef, default: Plan
) -> Job:
    found = plan(pipeline, rows, default.cluster, given=default, gain=MODEL_ERROR, seconds=4.0)
    by_turns(plane, executor, [found], [ref], 1)
    before, after = by_turns(plane, executor, [default, found], [ref, ref], ROUNDS)
    plane.free(ref)
    default_s, planned_s = [r.step_s for r in before], [r.step_s for r in after]
    predicted = (default.predict(pipeline, rows).step_s, found.predict(pipeline, rows).step_s)
    same = found.orders == default.orders and found.parts == default.parts
    ratios = [1.0] if same else [a / b for a, b in zip(default_s, planned_s, strict=True)]
    detail = (
        "the default is kept"
        if same
        else f"{predicted[0] / predicted[1]:.2f} x predicted; {found.micro_batches} micro-batches"
    )
    return Job(name, ratios, default_s, planned_s, predicted, found.schedule, detail)
