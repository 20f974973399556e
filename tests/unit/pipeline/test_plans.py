"""Plans that are known and plans that are found: what they take, what they hold, and what no plan beats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.pipeline import (
    Cluster,
    Cost,
    Layer,
    Model,
    Pipeline,
    Result,
    Rows,
    Span,
    Stage,
    fifo,
    gpipe,
    in_turn,
    interleaved,
    measure,
    plan,
    plan_model,
)
from dataplane.pipeline.partition import balanced, lower_bound
from dataplane.pipeline.search import lower_bound as stages_bound
from tests.cases import each_case


def model_of(seconds: list[float], **more: float) -> Model:
    usual = {"activation_bytes": 2.0, "weight_bytes": 1.0, "state_bytes": 10.0, "output_bytes": 1.0} | more
    return Model("m", [Layer(f"l{i}", s, s, s, **usual) for i, s in enumerate(seconds)])


EVEN = model_of([1e-3] * 32)


class TestKnownSchedules:
    """The bubbles that their papers say, for layers that are all alike."""

    def test_memory_of_1f1b_grows_with_workers_and_of_gpipe_with_micro_batches(self) -> None:
        cluster, each = Cluster.uniform(4), 8 * 2.0
        assert interleaved(EVEN, cluster, 16, 1).predict(EVEN).worker_bytes.tolist() == [
            80.0 + held * each for held in (4, 3, 2, 1)
        ]
        assert gpipe(EVEN, cluster, 16).predict(EVEN).worker_bytes.tolist() == [80.0 + 16 * each] * 4


class TestPartition:
    @given(st.lists(st.integers(1, 50), min_size=4, max_size=14), st.integers(1, 4))
    def test_balanced_chunks_minimize_the_longest_chunk(self, seconds: list[int], chunks: int) -> None:
        model = model_of([float(s) for s in seconds])
        bounds = balanced(model, chunks)
        assert len(bounds) == chunks + 1
        assert (np.diff(bounds) > 0).all()
        at = np.concatenate([[0], np.cumsum(seconds)]) * 3.0
        assert float(np.diff(at[bounds]).max()) == pytest.approx(least_longest(at, chunks))


def least_longest(at: np.ndarray, chunks: int) -> float:
    """By dynamic programming."""
    best = at[1:] - at[0]
    for _ in range(chunks - 1):
        best = np.array(
            [min((max(best[j - 1], at[i] - at[j]) for j in range(1, i)), default=np.inf) for i in range(1, len(at))]
        )
    return float(best[-1])


class TestModels:
    def test_a_plan_of_uneven_layers_beats_interleaved_1f1b_with_no_more_memory(self) -> None:
        model = model_of([1e-3] * 24 + [6e-3])
        usual = interleaved(model, Cluster.uniform(4), 8, 2)
        before = usual.predict(model)
        room = float(before.worker_bytes.max())
        found = plan_model(model, Cluster.uniform(4, worker_bytes=room), 8, seconds=1.0)
        after = found.predict(model)
        assert after.step_s < 0.8 * before.step_s
        assert (after.worker_bytes <= room).all()
        assert 0 <= after.gap < 0.25
        assert found.considered >= 1  # how many depends on the machine

    def test_no_plan_is_faster_than_the_lower_bound(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(8):
            model = model_of((rng.integers(1, 20, int(rng.integers(6, 14))) * 1e-3).tolist())
            workers, count = int(rng.integers(1, 5)), int(rng.integers(1, 7))
            bound = lower_bound(model, workers, count, np.ones(workers))
            assert plan_model(model, Cluster.uniform(workers), count, seconds=0.05).predict(model).step_s >= bound * (
                1 - 1e-9
            )

    def test_a_plan_respects_a_tight_memory_limit(self) -> None:
        room = 80.0 + 2 * 16.0  # two micro-batches a worker
        found = plan_model(EVEN, Cluster.uniform(4, worker_bytes=room), 8, seconds=0.3)
        assert (found.predict(EVEN).worker_bytes <= room).all()


ROWS = Rows.of(np.random.default_rng(1).integers(10, 200, 32), np.repeat(np.arange(8), 4))


class TestStages:
    def test_a_found_plan_is_faster_than_the_given_one_and_respects_the_bound(self) -> None:
        first = Stage("rollout", None, ("x",), ("y",), Cost(1e-3, token_s=1e-4), replicas=None, output_bytes=10.0)
        pipeline = Pipeline([first, Stage("train", None, ("y",), ("z",), Cost(1e-3, token_s=5e-5))])
        cluster = Cluster.uniform(4)
        given_plan = fifo(pipeline, ROWS, cluster, {"rollout": [0], "train": [1]}, in_turn(ROWS, 2))
        found = plan(pipeline, ROWS, cluster, given=given_plan, seconds=0.5)
        step_s = found.predict(pipeline, ROWS).step_s
        assert step_s < 0.7 * given_plan.predict(pipeline, ROWS).step_s
        assert step_s >= stages_bound(pipeline, ROWS, cluster)
        assert len(found.workers_of[1]) == 1, "no more replicas than it may have"

    @each_case(
        ("stages", "reason"),
        [
            ([], "has stages"),
            ([Stage("a"), Stage("a")], "each with a name"),
            ([Stage("a", outputs=("x",)), Stage("b", outputs=("x",))], "columns of its own"),
            ([Stage("a", after=("b",)), Stage("b")], "a follows stages that do not come before it"),
            ([Stage("a", after=("nobody",))], "nobody"),
            ([Stage("a", inputs=("y",)), Stage("b", outputs=("y",))], "a follows"),
        ],
    )
    def test_invalid_pipelines_are_refused_with_a_reason(self, stages: list[Stage], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            Pipeline(stages)


# Costs from finished steps.


def test_a_token_cost_without_measured_tokens_is_unchanged() -> None:
    pipeline = Pipeline([Stage("see", None, ("x",), ("y",), Cost(token_s=1e-3, tokens="images"))])
    rows = Rows.of([5, 6], images=[0, 0])
    plan = fifo(pipeline, rows, Cluster.uniform(1), {"see": [0]}, in_turn(rows, 1))
    result = Result(0, None, 1.0, 1.0, (Span(0, 0, 0.0, 1.0, 0.5, 0.5),))
    assert measure(pipeline, [(plan, rows, result)]) == pipeline
