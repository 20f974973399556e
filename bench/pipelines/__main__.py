"""Measure pipelines: the performance model, plans of models, plans of jobs, and the time of planning.

    python -m bench.pipelines                       all, about ten minutes on two cores
    python -m bench.pipelines accuracy models       some: accuracy, models, executed, defaults, planning

`PIPELINES=name,...` in the environment selects pipelines, models or jobs of a part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dataplane as dp
from bench.measure import Row, row, table, write_json

Found = tuple[list[Row], dict[str, Any]]


def main() -> int:
    """Measure, print and write JSON. Returns 0, or 1 if a target is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which (default: all)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/pipelines.json"))
    chosen = parser.parse_args()
    rows: list[Row] = []
    extra: dict[str, Any] = {"load": []}
    for name in chosen.parts or PARTS:
        extra["load"].append(os.getloadavg()[0])
        found, more = PARTS[name]()
        extra["load"].append(os.getloadavg()[0])
        extra |= {name: more}
        rows += found
        print(table(found), flush=True)
    write_json(chosen.json, rows, extra)
    print(f"load {min(extra['load']):.1f} to {max(extra['load']):.1f}; written to {chosen.json}")
    return 0 if all(each.met for each in rows) else 1


def _only(names: Sequence[str]) -> Sequence[str]:
    """The names that the environment selects, or all."""
    return os.environ.get("PIPELINES", ",".join(names)).split(",")


def accuracy() -> Found:
    """Compare predicted with measured times of plans."""
    from bench.pipelines import accuracy as part

    with dp.connect(config=dp.NodeConfig(memory="256MiB")) as plane:
        found = [each for name in part.NAMES if name in _only(part.NAMES) for each in part.compared(plane, name)]
    for each in found:
        print(
            f"  {each.pipeline:<14} {each.plan:<50} {each.predicted_s:6.3f} s, "
            f"took {each.measured_s:6.3f}: {each.error:.1%}"
        )
    errors = [100 * each.error for each in found]
    rows = [
        row("model against runs, median error", errors, at_most=5, unit="%", detail=f"{len(errors)} plans"),
        row("model against runs, worst error", [max(errors)], at_most=10, unit="%"),
    ]
    return rows, {"plans": [asdict(each) for each in found]}


def models() -> Found:
    """Compare predicted plans of models with interleaved 1F1B."""
    from bench.pipelines import models as part
    from dataplane.pipeline import profiles

    found = []
    for name in profiles.SIZES:
        for workers in part.WORKERS:
            found.append(each := part.planned(name, workers, 4.0))
            print(
                f"  {name:<14} {workers:>3} workers: {each.ratio:.2f} x over {each.chunks} chunks a worker, "
                f"{each.best_usual_s / each.planned_s:.2f} x over the best number; {each.gap:.1%} above the bound, "
                f"{each.considered} plans in {each.planning_s:.1f} s",
                flush=True,
            )
    ratios = [each.ratio for each in found]
    mean = statistics.fmean(ratios)
    detail = f"{min(ratios):.2f} to {max(ratios):.2f}; geometric {statistics.geometric_mean(ratios):.2f}"
    best = statistics.fmean(each.best_usual_s / each.planned_s for each in found)
    rows = [
        row("planned over interleaved 1F1B, mean", [mean], at_least=1.42, unit="x", detail=detail),
        row("the same over its best number of chunks", [best], at_least=1.0, unit="x"),
    ]
    return rows, {"plans": [asdict(each) for each in found]}


def executed() -> Found:
    """Compare executed plans of models with the predictions."""
    from bench.pipelines import models as part

    with dp.connect(config=dp.NodeConfig(memory="256MiB")) as plane:
        found = [part.executed(plane, name) for name in part.EXECUTED if name in _only(part.EXECUTED)]
    rows = [
        row(
            f"{each.model} executed, off the model by",
            [100 * each.error],
            at_most=10,
            unit="%",
            detail=f"{each.ratio:.2f} x in fact, {each.predicted_ratio:.2f} x in the model",
        )
        for each in found
    ]
    return rows, {"models": [asdict(each) for each in found]}


def defaults() -> Found:
    """Compare executed plans of jobs with their default settings."""
    from bench.pipelines import defaults as part

    with dp.connect(config=dp.NodeConfig(memory="1GiB")) as plane:
        found = part.measured(plane, _only(part.NAMES))
    rows = [
        row(f"{each.name}: planned over default", each.ratios, at_least=1.0, unit="x", detail=each.detail)
        for each in found
    ]
    best = max(found, key=lambda each: statistics.median(each.ratios))
    rows.append(row(f"the best of them ({best.name})", best.ratios, at_least=1.2, unit="x"))
    return rows, {"jobs": [asdict(each) for each in found]}


def planning() -> Found:
    """Measure the time of planning for 64 workers."""
    from bench.pipelines import accuracy as part
    from bench.pipelines import models as of_models
    from bench.pipelines.running import timed_model, timed_plan

    pipeline, rows_of_it = part.rollouts(512)
    took = [timed_model(name, 64, of_models.PER_WORKER * 64) for name in ("gemma3_27b", "deepseek_v3")]
    stages = timed_plan(pipeline, rows_of_it, 64)
    rows = [
        row("planning a model for 64 workers", [max(took)], at_most=10, unit="s"),
        row("planning stages for 64 workers", [stages], at_most=10, unit="s"),
    ]
    return rows, {"seconds": [*took, stages]}


PARTS: dict[str, Callable[[], Found]] = {
    "accuracy": accuracy,
    "models": models,
    "executed": executed,
    "defaults": defaults,
    "planning": planning,
}

if __name__ == "__main__":
    sys.exit(main())
