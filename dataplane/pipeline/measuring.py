"""Costs from the measurements of an executor: the times of stages by rows and tokens, and the times of transfers.

A stage's seconds are fitted by nonnegative least squares. Of terms that the measured micro-batches do not
distinguish, the simplest are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from dataplane.pipeline.cluster import Cluster
from dataplane.pipeline.events import Floats
from dataplane.pipeline.executor import Result, Span
from dataplane.pipeline.plans import Plan
from dataplane.pipeline.programs import BACKWARD_WEIGHT
from dataplane.pipeline.stages import Cost, Lengths, Pipeline, Rows

_QUICK = 0.1

Measured = Sequence[tuple[Plan, Rows, Result]]
"""Finished steps, with the plan and the rows of each."""


def measure(pipeline: Pipeline, steps: Measured) -> Pipeline:
    """The pipeline with costs fitted to these steps. A stage without measurements keeps its costs.

    A cost keeps its form: terms that are zero stay zero, unless all are. For a stage that computes, the processor time
    divided by its cores is fitted, because other computations do not change it. The cores are not measured, and stay as
    declared.
    """
    stages = []
    for s, stage in enumerate(pipeline.stages):
        points = [
            (rows.tokens(stage.cost.tokens)[np.array(plan.parts[micro], np.int64)], _seconds(stage.cost, span))
            for plan, rows, result in steps
            for span in result.spans
            for kind, micro in [(plan.instructions[span.instruction].stage, plan.instructions[span.instruction].micro)]
            if kind == s
        ]
        stages.append(replace(stage, cost=_fitted(stage.cost, points)) if points else stage)
    return Pipeline(stages, pipeline.lag)


def _seconds(cost: Cost, span: Span) -> float:
    return span.computed / cost.cores if cost.cores else span.worked


def _fitted(cost: Cost, points: list[tuple[Lengths, float]]) -> Cost:
    seconds = np.array([worked for _, worked in points])
    terms = {
        "fixed_s": np.ones(len(points)),
        "token_s": np.array([float(tokens.sum()) for tokens, _ in points]),
        "row_s": np.array([float(len(tokens)) for tokens, _ in points]),
        "longest_s": np.array([float(tokens.max(initial=0)) for tokens, _ in points]),
    }
    chosen = dict.fromkeys(terms, 0.0)
    said = [name for name in terms if getattr(cost, name)]
    used: list[str] = []
    for name in said or terms:  # a term that depends linearly on earlier ones is left out
        columns = np.stack([terms[each] / max(terms[each].max(), 1e-12) for each in [*used, name]], axis=1)
        if np.linalg.matrix_rank(columns, tol=1e-6) == len(used) + 1:
            used.append(name)
    if not used:  # all terms were zero in these steps
        return cost
    scales = [max(terms[name].max(), 1e-12) for name in used]
    found = nonnegative(
        np.stack([terms[name] / scale for name, scale in zip(used, scales, strict=True)], axis=1), seconds
    )
    chosen |= {name: float(x / scale) for name, x, scale in zip(used, found, scales, strict=True)}
    return replace(cost, **chosen)  # type: ignore[arg-type]


def nonnegative(matrix: Floats, values: Floats) -> Floats:
    """The x >= 0 with minimal |matrix x - values|, by enumeration of the nonzero columns, which must be few."""
    count, best, least = matrix.shape[1], np.zeros(matrix.shape[1]), float("inf")
    for chosen in range(1, 2**count):
        columns = [i for i in range(count) if chosen >> i & 1]
        x, *_ = np.linalg.lstsq(matrix[:, columns], values, rcond=None)
        error = float(np.linalg.norm(matrix[:, columns] @ x - values))
        if (x >= 0).all() and error < least * (1 - 1e-9):
            best, least = np.zeros(count), error
            best[columns] = x
    return best


def measure_cluster(cluster: Cluster, steps: Iterable[tuple[Plan, Result]]) -> Cluster:
    """The cluster with the transfer costs measured in these steps: the first decile over all instructions. Longer times
    mostly come from waits for other computations, which the simulation models itself.

    overhead_s: of an instruction, beyond its function. hop_s: from an instruction's end until a worker that waited for
    its output continued.
    """
    overheads: list[float] = []
    hops: list[float] = []
    for plan, result in steps:
        overheads += [
            span.ended - span.began - span.worked
            for span in result.spans
            if plan.instructions[span.instruction].kind != BACKWARD_WEIGHT
        ]
        hops += list(_hops(plan, result.spans))
    return replace(
        cluster,
        overhead_s=float(np.quantile(overheads, _QUICK)) if overheads else cluster.overhead_s,
        hop_s=max(0.0, float(np.quantile(hops, _QUICK))) if hops else cluster.hop_s,
    )


def _hops(plan: Plan, spans: Sequence[Span]) -> Iterable[float]:
    ended = {span.instruction: span for span in spans}
    free: dict[int, float] = {}
    for span in spans:
        idle_since, free[span.worker] = free.get(span.worker, 0.0), span.ended
        needs = [ended[need] for need in plan.instructions[span.instruction].needs if need in ended]
        if needs:
            last = max(needs, key=lambda need: need.ended)
            if last.worker != span.worker and last.ended > idle_since:
                yield span.began - last.ended
