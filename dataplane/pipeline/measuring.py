"""Costs from the measurements of an executor: the time of a stage by rows and tokens, and that of transfers.

A stage's seconds are fitted by nonnegative least squares (Lawson and Hanson's NNLS, from SciPy if it is installed);
of terms that the measured micro-batches do not distinguish, the simplest are kept.
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
    """The pipeline with costs measured in these steps; a stage without measurements keeps its own.

    A cost keeps its form: terms that are zero stay zero, unless all are. For a stage that computes, the processor's
    seconds over its cores count, which other computations do not change. The cores are not measured, and stay as
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
    for name in said or terms:  # a term that the others explain says nothing
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
    """x >= 0 with minimal |matrix x - values|, for few columns, by enumeration of the nonzero ones."""
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
    """The cluster with the transfer costs measured in these steps: the first decile over the instructions. Longer ones
    are mostly due to other computations, which are simulated.

    overhead_s: beyond an instruction's function. hop_s: until a worker that waited for another's output continued.
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
