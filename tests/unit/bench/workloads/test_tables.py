"""The tables: whole, ordered, and each task with its source."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import bench.workloads
from bench.workloads.tables import TASKS, percentiles, task
from tests.cases import each_case


@each_case("name", TASKS)
def test_a_task_is_whole(name: str) -> None:
    known = task(name)
    assert known.source
    assert known.group_size == 8
    for column, values in known.figures["quantiles"].items():
        assert len(values) == len(percentiles()), column
        assert values == sorted(values), column
        pairs = list(pairwise(values))
        assert all(tuple(gap) in pairs for gap in known.figures["gaps"].get(column, ()))


def test_turns_have_tables_by_their_number() -> None:
    models = task("search_7b").figures["completion_tokens_by_turns"]
    assert models.keys() == task("search_7b").figures["turns"].keys()
    for n, model in models.items():
        correlation = np.array(model["spearman"])
        assert correlation.shape == (int(n), int(n))
        assert (correlation == correlation.T).all()
        assert (np.diag(correlation) == 1).all()
        assert np.linalg.eigvalsh(correlation).min() > 0
        assert [len(values) for values in model["quantiles"]] == [len(percentiles())] * int(n)
        assert all(values == sorted(values) for values in model["quantiles"])


def test_figures_that_must_agree_do() -> None:
    assert sum(task("search_7b").figures["turns"].values()) == task("search_7b").figures["trajectories"] == 3 * 256 * 8
    assert sum(task("tool_use_235b").figures["calls"].values()) == task("tool_use_235b").figures["sessions"]
    assert sum(task("math_235b").figures["weights"]) == pytest.approx(1, abs=1e-5)
    for n, moments in task("tool_use_235b").figures["tokens_per_call"].items():
        assert len(moments["input"]) == len(moments["output"]) == int(n)


def test_the_benchmarks_have_the_same_names() -> None:
    assert bench.workloads.__all__ == bench.workloads.__all__
    assert all(getattr(bench.workloads, name) is getattr(bench.workloads, name) for name in bench.workloads.__all__)
