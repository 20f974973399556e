"""Runs plans on the executor, by turns, and says what they took."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import dataplane as dp
from dataplane.pipeline import Cluster, Executor, Host, Pipeline, Plan, Result, Rows, plan, plan_model, profiles

REST_S = 0.2  # between steps: what one has left to be done is not done in the next


def by_turns(
    plane: dp.Plane, executor: Executor, plans: Sequence[Plan], refs: Sequence[Any], rounds: int
) -> list[list[Result]]:
    """The results of each plan: A, B, ..., A, B, ..., so many times. refs: the rows of each plan's step."""
    found: list[list[Result]] = [[] for _ in plans]
    for _ in range(rounds):
        for at, (each, ref) in enumerate(zip(plans, refs, strict=True)):
            executor.use(each)
            gc.collect()  # not in a step
            time.sleep(REST_S)
            result = executor.step(ref)
            if result.ref is not None:
                plane.free(result.ref)
            found[at].append(result)
    return found


def median_s(results: Sequence[Result]) -> float:
    """Of a step."""
    return statistics.median(result.step_s for result in results)


def timed_plan(pipeline: Pipeline, rows: Rows, workers: int) -> float:
    """Seconds that it takes to plan the stages for so many workers."""
    began = time.perf_counter()
    plan(pipeline, rows, Cluster((Host(workers),), hop_s=5e-4, overhead_s=1e-3), seconds=5.0)
    return time.perf_counter() - began


def timed_model(name: str, workers: int, micro_batches: int) -> float:
    """Seconds that it takes to plan a published model for so many workers."""
    began = time.perf_counter()
    plan_model(profiles.model(name), Cluster.uniform(workers, 8), micro_batches, seconds=5.0)
    return time.perf_counter() - began
