"""Runs plans on an executor in turn, and measures the time of planning."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import dataplane as dp
from dataplane.pipeline import Cluster, Executor, Host, Pipeline, Plan, Result, Rows, plan, plan_model, profiles

REST_S = 0.2  # seconds between steps, so that the cleanup of a step does not slow the next


def by_turns(
    plane: dp.Plane, executor: Executor, plans: Sequence[Plan], refs: Sequence[Any], rounds: int
) -> list[list[Result]]:
    """Execute a step of each plan in turn, `rounds` times. refs: the rows of each plan's step. Returns the results of
    each plan."""
    found: list[list[Result]] = [[] for _ in plans]
    for _ in range(rounds):
        for at, (each, ref) in enumerate(zip(plans, refs, strict=True)):
            executor.use(each)
            gc.collect()  # here, and not during a step
            time.sleep(REST_S)
            result = executor.step(ref)
            if result.ref is not None:
                plane.free(result.ref)
            found[at].append(result)
    return found


def median_s(results: Sequence[Result]) -> float:
    """The median seconds of a step."""
    return statistics.median(result.step_s for result in results)


def timed_plan(pipeline: Pipeline, rows: Rows, workers: int) -> float:
    """The seconds of planning these stages for `workers` workers."""
    began = time.perf_counter()
    plan(pipeline, rows, Cluster((Host(workers),), hop_s=5e-4, overhead_s=1e-3), seconds=5.0)
    return time.perf_counter() - began


def timed_model(name: str, workers: int, micro_batches: int) -> float:
    """The seconds of planning a published model for `workers` workers."""
    began = time.perf_counter()
    plan_model(profiles.model(name), Cluster.uniform(workers, 8), micro_batches, seconds=5.0)
    return time.perf_counter() - began
