"""Costs from finished steps."""

from __future__ import annotations

from dataplane.pipeline import Cluster, Cost, Pipeline, Result, Rows, Span, Stage, fifo, in_turn, measure


def test_a_token_cost_without_measured_tokens_is_unchanged() -> None:
    pipeline = Pipeline([Stage("see", None, ("x",), ("y",), Cost(token_s=1e-3, tokens="images"))])
    rows = Rows.of([5, 6], images=[0, 0])
    plan = fifo(pipeline, rows, Cluster.uniform(1), {"see": [0]}, in_turn(rows, 1))
    result = Result(0, None, 1.0, 1.0, (Span(0, 0, 0.0, 1.0, 0.5, 0.5),))
    assert measure(pipeline, [(plan, rows, result)]) == pipeline
