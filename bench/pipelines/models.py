"""Compares plans of published models with interleaved 1F1B in the performance model, and executes some of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import dataplane as dp
from bench.pipelines import waits
from bench.pipelines.accuracy import scaled
from bench.pipelines.running import by_turns, median_s
from dataplane.pipeline import Cluster, Executor, Model, Plan, interleaved, measure_cluster, plan_model, profiles
from dataplane.pipeline.schedules import uniform

WORKERS = (4, 8, 16, 32)
PER_WORKER = 4  # micro-batches
HOP_S, BYTES_PER_S = 2e-5, 400e9  # between devices; a host of eight has one port of 400 Gbit/s for each
EXECUTED = ("gemma3_27b", "qwen3_30b_a3b", "nemotron_h_8b")
EXECUTED_S = 0.03  # seconds of all passes of the model's median layer when it is executed


@dataclass(frozen=True)
class Planned:
    """A model on `workers` workers: seconds a step of interleaved 1F1B with `chunks` chunks a worker, with the best
    number, and of the plan."""

    model: str
    workers: int
    chunks: int
    usual_s: float
    best_usual_s: float
    planned_s: float
    gap: float
    planning_s: float
    considered: int

    @property
    def ratio(self) -> float:
        """The speed-up over interleaved 1F1B with two chunks a worker, or one if there are too few layers."""
        return self.usual_s / self.planned_s


def usual(model: Model, cluster: Cluster, chunks: int, count: int) -> Plan:
    """Interleaved 1F1B with equal numbers of layers. The embedding and the head go to the first and the last chunk."""
    at = uniform(model, chunks * cluster.workers, profiles.body(model.name))
    return interleaved(model, cluster, count, chunks, at)


def planned(name: str, workers: int, seconds: float) -> Planned:
    """Plan a model, with as much memory a worker as the largest worker of interleaved 1F1B uses."""
    model, count = profiles.model(name), PER_WORKER * workers
    cluster = replace(Cluster.uniform(workers, min(workers, 8), bytes_per_s=BYTES_PER_S), hop_s=HOP_S)
    first, end = profiles.body(name)
    most = [chunks for chunks in (1, 2, 3, 4) if chunks * workers <= end - first]
    predicted = {chunks: usual(model, cluster, chunks, count).predict(model) for chunks in most}
    chunks = min(2, most[-1])
    room = float(predicted[chunks].worker_bytes.max())
    bounded = replace(cluster, hosts=tuple(replace(host, worker_bytes=room) for host in cluster.hosts))
    began = time.perf_counter()
    found = plan_model(model, bounded, count, seconds=seconds)
    took = time.perf_counter() - began
    result = found.predict(model)
    best = min(each.step_s for each in predicted.values())
    return Planned(
        name, workers, chunks, predicted[chunks].step_s, best, result.step_s, result.gap, took, found.considered
    )


@dataclass(frozen=True)
class Executed:
    """A model on four workers: the predicted and the measured seconds of interleaved 1F1B and of the plan."""

    model: str
    usual_predicted_s: float
    usual_s: float
    planned_predicted_s: float
    planned_s: float

    @property
    def error(self) -> float:
        """The larger error of both predictions."""
        return max(abs(self.usual_predicted_s / self.usual_s - 1), abs(self.planned_predicted_s / self.planned_s - 1))

    @property
    def ratio(self) -> float:
        """The measured speed-up by the plan."""
        return self.usual_s / self.planned_s

    @property
    def predicted_ratio(self) -> float:
        """The predicted speed-up by the plan."""
        return self.usual_predicted_s / self.planned_predicted_s


def executed(plane: dp.Plane, name: str, rounds: int = 3) -> Executed:
    """Execute both plans in turn, with chunks that wait. Overheads are measured in a first step of each."""
    whole = profiles.model(name)
    layers = sorted(layer.forward_s + layer.backward_input_s + layer.backward_weight_s for layer in whole.layers)
    scale = EXECUTED_S / layers[len(layers) // 2]
    model, workers = scaled(whole, scale), 4
    cluster, count = Cluster.uniform(workers), 2 * workers
    before = usual(model, cluster, 2, count)
    room = float(before.predict(model).worker_bytes.max())
    bounded = Cluster.uniform(workers, worker_bytes=room)
    found = plan_model(model, bounded, count, seconds=3.0)
    plans = [before, found]
    with Executor(plane, model, before, build=waits.Build(name, scale), method="forkserver") as executor:
        by_turns(plane, executor, plans, [None, None], 1)  # chunks are made
        first = by_turns(plane, executor, plans, [None, None], 1)
        known = measure_cluster(cluster, [(plan, each[0]) for plan, each in zip(plans, first, strict=True)])
        took = [median_s(each) for each in by_turns(plane, executor, plans, [None, None], rounds)]
    predicted = [plan.on(known).predict(model).step_s for plan in plans]
    return Executed(name, predicted[0], took[0], predicted[1], took[1])
