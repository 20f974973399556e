"""Plans that are known and plans that are found: what they take, what they hold, and what no plan beats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.pipeline import (
    Cluster,
    Cost,
    Host,
    Layer,
    Model,
    Pipeline,
    Plan,
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
    profiles,
)
from dataplane.pipeline.partition import balanced, even_out, lower_bound
from dataplane.pipeline.search import lower_bound as stages_bound
from tests.cases import each_case


def model_of(seconds: list[float], **more: float) -> Model:
    usual = {"activation_bytes": 2.0, "weight_bytes": 1.0, "state_bytes": 10.0, "output_bytes": 1.0} | more
    return Model("m", [Layer(f"l{i}", s, s, s, **usual) for i, s in enumerate(seconds)])


EVEN = model_of([1e-3] * 32)


class TestKnownSchedules:
    """The bubbles that their papers say, for layers that are all alike."""

    @each_case("chunks", [1, 2, 4])
    def test_the_bubbles_of_1f1b_shrink_with_chunks(self, chunks: int) -> None:
        workers, count = 4, 16
        predicted = interleaved(EVEN, Cluster.uniform(workers), count, chunks).predict(EVEN)
        work = EVEN.seconds * count / workers
        waited = (workers - 1) * EVEN.seconds / workers / chunks  # arXiv 2104.04473, section 2.2
        assert predicted.step_s == pytest.approx(work + waited)

    def test_1f1b_holds_as_many_micro_batches_as_workers_and_gpipe_all(self) -> None:
        cluster, each = Cluster.uniform(4), 8 * 2.0
        assert interleaved(EVEN, cluster, 16, 1).predict(EVEN).worker_bytes.tolist() == [
            80.0 + held * each for held in (4, 3, 2, 1)
        ]
        assert gpipe(EVEN, cluster, 16).predict(EVEN).worker_bytes.tolist() == [80.0 + 16 * each] * 4

    def test_interleaving_needs_a_multiple_of_the_workers(self) -> None:
        with pytest.raises(ValueError, match="no multiple"):
            interleaved(EVEN, Cluster.uniform(4), 6, 2)

    def test_hops_and_bytes_between_hosts_cost_time(self) -> None:
        near = Cluster((Host(2), Host(2)), hop_s=1e-4)
        far = replace(near, latency_s=1e-3, hosts=tuple(replace(host, bytes_per_s=1e3) for host in near.hosts))
        quick = interleaved(EVEN, near, 8, 1)
        assert (
            quick.on(far).predict(EVEN).step_s
            > quick.predict(EVEN).step_s
            > quick.on(Cluster.uniform(4)).predict(EVEN).step_s
        )


class TestPartition:
    @given(st.lists(st.integers(1, 50), min_size=4, max_size=14), st.integers(1, 4))
    def test_the_longest_chunk_is_as_short_as_can_be(self, seconds: list[int], chunks: int) -> None:
        model = model_of([float(s) for s in seconds])
        bounds = balanced(model, chunks)
        assert len(bounds) == chunks + 1
        assert (np.diff(bounds) > 0).all()
        at = np.concatenate([[0], np.cumsum(seconds)]) * 3.0
        assert float(np.diff(at[bounds]).max()) == pytest.approx(least_longest(at, chunks))

    def test_evening_out_never_makes_the_busiest_busier(self) -> None:
        model = model_of([1.0] * 20 + [7.0])
        workers = np.arange(8) % 4
        before = balanced(model, 8)
        after = even_out(model, before, workers, np.ones(4))

        def busiest(bounds: np.ndarray) -> float:
            return float(np.bincount(workers, np.diff(model.sums[bounds, :3].sum(axis=1))).max())

        assert busiest(after) <= busiest(before)


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
        assert found.considered > 100

    def test_no_plan_is_below_the_bound(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(8):
            model = model_of((rng.integers(1, 20, int(rng.integers(6, 14))) * 1e-3).tolist())
            workers, count = int(rng.integers(1, 5)), int(rng.integers(1, 7))
            bound = lower_bound(model, workers, count, np.ones(workers))
            assert plan_model(model, Cluster.uniform(workers), count, seconds=0.05).predict(model).step_s >= bound * (
                1 - 1e-9
            )

    def test_memory_that_holds_no_plan_is_told(self) -> None:
        with pytest.raises(ValueError, match="fits the memory"):
            plan_model(EVEN, Cluster.uniform(4, worker_bytes=50.0), 8, seconds=0.2)

    def test_tight_memory_is_kept_to(self) -> None:
        room = 80.0 + 2 * 16.0  # two micro-batches a worker
        found = plan_model(EVEN, Cluster.uniform(4, worker_bytes=room), 8, seconds=0.3)
        assert (found.predict(EVEN).worker_bytes <= room).all()

    def test_the_same_arguments_give_the_same_plan(self) -> None:
        model = model_of([1e-3] * 9 + [3e-3])
        plans = [plan_model(model, Cluster.uniform(3), 6, seconds=30.0) for _ in range(2)]
        assert plans[0].orders == plans[1].orders

    @each_case("name", list(profiles.SIZES))
    def test_a_published_model_has_the_parameters_that_it_is_named_for(self, name: str) -> None:
        """Of state, 18 bytes a parameter; experts are shared, so that models of experts have less here."""
        billions = float(profiles.model(name).sums[-1, 5]) / 18e9
        least, most = {
            "llama3_8b": (7.5, 8.1),
            "gemma3_27b": (26, 28),
            "qwen25_vl_7b": (7.5, 8.5),
            "nemotron_h_8b": (7.5, 8.5),
        }.get(name, (3.0, 40.0))
        assert least < billions < most


ROWS = Rows.of(np.random.default_rng(1).integers(10, 200, 32), np.repeat(np.arange(8), 4))


def stages_of(**more: object) -> Pipeline:
    first = Stage("rollout", None, ("x",), ("y",), Cost(1e-3, token_s=1e-4), replicas=None, output_bytes=10.0)
    return Pipeline([first, Stage("train", None, ("y",), ("z",), Cost(1e-3, token_s=5e-5), **more)])


def default_of(pipeline: Pipeline, cluster: Cluster) -> Plan:
    return fifo(pipeline, ROWS, cluster, {"rollout": [0], "train": [1]}, in_turn(ROWS, 2))


class TestStages:
    def test_a_found_plan_is_better_than_what_was_given_and_not_below_the_bound(self) -> None:
        pipeline, cluster = stages_of(), Cluster.uniform(4)
        given_plan = default_of(pipeline, cluster)
        found = plan(pipeline, ROWS, cluster, given=given_plan, seconds=0.5)
        step_s = found.predict(pipeline, ROWS).step_s
        assert step_s < 0.7 * given_plan.predict(pipeline, ROWS).step_s
        assert step_s >= stages_bound(pipeline, ROWS, cluster)
        assert len(found.workers_of[1]) == 1, "no more replicas than it may have"

    def test_groups_stay_together_and_all_rows_are_there(self) -> None:
        found = plan(stages_of(), ROWS, Cluster.uniform(3), seconds=0.3)
        assert sorted(i for part in found.parts for i in part) == list(range(32))
        assert ROWS.group is not None
        where = {i: m for m, part in enumerate(found.parts) for i in part}
        assert all(len({where[i] for i in np.flatnonzero(ROWS.group == g)}) == 1 for g in range(8))

    def test_a_stage_goes_where_its_resource_is(self) -> None:
        cluster = Cluster((Host(2), Host(1, resources=frozenset({"gpu"}))))
        found = plan(stages_of(resource="gpu"), ROWS, cluster, seconds=0.2)
        assert found.workers_of[1] == (2,)
        with pytest.raises(ValueError, match="train needs gpu"):
            plan(stages_of(resource="gpu"), ROWS, Cluster.uniform(2), seconds=0.1)

    def test_what_the_plane_may_hold_is_kept_to(self) -> None:
        found = plan(stages_of(), ROWS, Cluster.uniform(3, store_bytes=200.0), seconds=0.3)
        assert found.predict(stages_of(), ROWS).host_bytes.max() <= 200
        with pytest.raises(ValueError, match="fits the memory"):
            plan(stages_of(), ROWS, Cluster.uniform(3, store_bytes=10.0), seconds=0.1)

    def test_a_lag_hides_what_a_step_waits_for(self) -> None:
        pipeline, cluster = stages_of(), Cluster.uniform(2)
        asynchronous = Pipeline(pipeline.stages, lag=1)
        given_plan = default_of(pipeline, cluster)
        rollouts = 1e-4 * float(ROWS.tokens("tokens").sum()) + 2e-3
        assert given_plan.predict(asynchronous, ROWS).step_s == pytest.approx(rollouts)
        assert given_plan.predict(pipeline, ROWS).step_s > rollouts

    def test_costs_are_fitted_to_what_steps_took(self) -> None:
        pipeline, rows = Pipeline([Stage("wait", None, ("x",), ("y",), Cost())]), Rows.of([1] * 8)
        made = fifo(pipeline, rows, Cluster.uniform(1), {"wait": [0]}, [[0], [1, 2], [3, 4, 5, 6, 7]])
        took = [0.01 * len(made.parts[each.micro]) for each in made.instructions]
        spans = tuple(Span(0, at, 0.0, seconds, seconds, seconds) for at, seconds in enumerate(took))
        found = measure(pipeline, [(made, rows, Result(0, None, 0.1, 0.1, spans))])
        assert found.stages[0].cost.seconds(np.ones(8, np.int64)) == pytest.approx(0.08)

    def test_computing_on_shared_cores_is_no_faster_with_more_workers(self) -> None:
        first = Stage("draw", None, (), ("a",), Cost(token_s=1e-4, cores=1), replicas=None)
        pipeline = Pipeline([first])
        two = plan(pipeline, ROWS, Cluster((Host(2, cores=2),)), seconds=0.2).predict(pipeline, ROWS).step_s
        six = plan(pipeline, ROWS, Cluster((Host(6, cores=2),)), seconds=0.2).predict(pipeline, ROWS).step_s
        assert six == pytest.approx(two, rel=0.1)

    @each_case(
        ("stages", "reason"),
        [
            ([], "has stages"),
            ([Stage("a"), Stage("a")], "each with a name"),
            ([Stage("a", outputs=("x",)), Stage("b", outputs=("x",))], "columns of its own"),
            ([Stage("a", after=("b",)), Stage("b")], "a follows what there is not before it"),
            ([Stage("a", after=("nobody",))], "nobody"),
            ([Stage("a", inputs=("y",)), Stage("b", outputs=("y",))], "a follows"),
        ],
    )
    def test_what_is_no_pipeline_is_told(self, stages: list[Stage], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            Pipeline(stages)
