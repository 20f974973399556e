"""Plans, run by real processes over a node: right rows, right times, and workers that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.pipeline import Cluster, Executor, Pipeline, Plan, Stage, StageFailed, fifo, in_turn
from dataplane.pipeline import Host as PlanHost
from dataplane.pipeline import messages as m
from tests.cases import each_case
from tests.integration.pipeline import stages
from tests.integration.pipeline.stages import ROWS
from tests.integration.test_hosts import connected
from tests.processes import StandingNode, eventually

METHOD = "forkserver"
X = np.arange(8)


def planned(pipeline: Pipeline, workers: int = 2, micro: int = 4, **members: list[int]) -> Plan:
    names = [stage.name for stage in pipeline.stages]
    members = members or {name: [at % workers] for at, name in enumerate(names)}
    return fifo(pipeline, ROWS, Cluster.uniform(workers), members, in_turn(ROWS, micro))


@pytest.fixture
def plane(node: StandingNode) -> Iterator[dp.Plane]:
    with dp.connect(node.address) as plane:
        yield plane


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a worker leaves word that it has died already. Workers are told by what they are given."""
    return tmp_path / "died"


def values(plane: dp.Plane, ref: dp.BatchRef | None, name: str) -> list[float]:
    assert ref is not None
    found = plane.get(ref)[name].numpy().tolist()
    plane.free(ref)
    return found


def nothing_is_left(plane: dp.Plane) -> None:
    eventually(lambda: plane.stats().shards == 0, "what the steps made was freed")


def test_a_result_is_given_out_before_an_error_of_the_source_of_steps(plane: dp.Plane) -> None:
    def source(ref: dp.BatchRef) -> Iterator[dp.BatchRef]:
        yield ref
        raise RuntimeError("no more rows")

    pipeline = stages.pipeline()
    with Executor(plane, pipeline, planned(pipeline), method=METHOD) as executor:
        ref = plane.put({"x": X})
        results = executor.run(source(ref))
        assert values(plane, next(results).ref, "z") == (3 * X).tolist()
        with pytest.raises(RuntimeError, match="no more rows"):
            next(results)
        plane.free(ref)
        nothing_is_left(plane)


@each_case("error", [dp.PeerUnavailable, dp.OutcomeUnknown])
def test_outputs_that_cannot_be_freed_do_not_fail_their_step(
    plane: dp.Plane, monkeypatch: pytest.MonkeyPatch, error: type[dp.DataplaneError]
) -> None:
    free, away = plane.free, []

    def fails(ref: dp.BatchRef | None = None, *, scope: str | None = None) -> None:
        if ref is not None:
            away.append(ref)
            raise error("the node is away")
        free(scope=scope)

    pipeline = stages.pipeline()
    with Executor(plane, pipeline, planned(pipeline), method=METHOD) as executor:
        ref = plane.put({"x": X})
        with monkeypatch.context() as patched:
            patched.setattr(plane, "free", fails)
            (result,) = executor.run([ref])
        assert away
        assert values(plane, result.ref, "z") == (3 * X).tolist()
    plane.free(ref)
    nothing_is_left(plane)


@each_case("rows", [7, 12])
def test_a_step_of_another_number_of_rows_than_the_plan_is_refused(plane: dp.Plane, rows: int) -> None:
    pipeline = stages.pipeline()
    with Executor(plane, pipeline, planned(pipeline), method=METHOD) as executor:
        ref = plane.put({"x": np.arange(rows)})
        with pytest.raises(ValueError, match=f"of 8 rows, and the step has {rows}"):
            executor.step(ref)
        plane.free(ref)
        ref = plane.put({"x": X})
        assert values(plane, executor.step(ref).ref, "z") == (3 * X).tolist()
        plane.free(ref)


def test_a_step_without_a_valid_result_leaves_nothing(plane: dp.Plane) -> None:
    pipeline = Pipeline([Stage("mixed", stages.mixed, ("x",), ("y",))])
    with Executor(plane, pipeline, planned(pipeline, workers=1), method=METHOD) as executor:
        ref = plane.put({"x": X})
        with pytest.raises(dp.SchemaMismatch):
            executor.step(ref)
        plane.free(ref)
    nothing_is_left(plane)


def test_outputs_of_a_step_that_was_given_up_are_freed_on_other_hosts(tmp_path: Path) -> None:
    pipeline = Pipeline([Stage("double", stages.double, ("x",), ("y",)), Stage("no", stages.read_on, ("y",), ("z",))])
    with connected(tmp_path) as ((_, there), (plane, other)):
        cluster = Cluster((PlanHost(address=there.address), PlanHost()))
        plan = fifo(pipeline, ROWS, cluster, {"double": [0], "no": [1]}, in_turn(ROWS, 1))
        with Executor(plane, pipeline, plan, method=METHOD) as executor:
            ref = plane.put({"x": X})
            with pytest.raises(StageFailed, match="no more records"):
                executor.step(ref)
            plane.free(ref)
            stats = other.stats()
            assert stats.put_bytes > 0
            assert stats.freed_bytes == stats.put_bytes


@each_case("killed", [False, True])
def test_outputs_stored_after_their_step_failed_are_freed_on_other_hosts(tmp_path: Path, killed: bool) -> None:
    mark = tmp_path / "mark"
    late = Stage("late", stages.Late(str(mark)), ("x",), ("late",))
    pipeline = Pipeline([late, Stage("refuse", stages.refuse, ("x",), ("y",))])
    with connected(tmp_path) as ((_, there), (plane, other)):
        cluster = Cluster((PlanHost(address=there.address), PlanHost()))
        plan = fifo(pipeline, ROWS, cluster, {"late": [0], "refuse": [1]}, in_turn(ROWS, 1))
        with Executor(plane, pipeline, plan, method=METHOD) as executor:
            with pytest.raises(StageFailed):
                executor.step(plane.put({"x": X}))
            mark.touch()
            eventually(lambda: other.stats().put_bytes > 0, "the late output is stored")
            if killed:
                crew: Any = executor.crew
                os.kill(crew.pid(0), signal.SIGKILL)
        stats = other.stats()
        assert stats.freed_bytes == stats.put_bytes


def test_outputs_of_repeated_instructions_are_freed_on_other_hosts(tmp_path: Path, mark: Path) -> None:
    pipeline = Pipeline([Stage("sum", stages.Summing(str(mark)), ("y",), ("total",), factory=True, stateful=True)])
    with connected(tmp_path) as ((_, there), (plane, other)):
        cluster = Cluster((PlanHost(address=there.address),))
        plan = fifo(pipeline, ROWS, cluster, {"sum": [0]}, in_turn(ROWS, 4))
        with Executor(plane, pipeline, plan, method=METHOD) as executor:
            ref = other.put({"y": 2 * X})
            for replaced in (0, 1):
                result = executor.step(ref)
                assert result.replaced == replaced
                plane.free(result.ref)
            plane.free(ref)
            assert other.stats().shards == 1, "the state alone is left"


def test_a_replaced_stateful_worker_restarts_from_the_last_step(plane: dp.Plane, mark: Path) -> None:
    """What it had added in the step that it died in is not added twice, and what it added before is not lost."""
    first = Stage("double", stages.double, ("x",), ("y",))
    summing = stages.Summing(str(mark))
    pipeline = Pipeline([first, Stage("sum", summing, ("y",), ("total",), factory=True, stateful=True)])
    with Executor(plane, pipeline, planned(pipeline, sum=[1], double=[0]), method=METHOD) as executor:
        ref = plane.put({"x": X})
        results = [executor.step(ref) for _ in range(3)]
        assert [result.replaced for result in results] == [0, 1, 0]
        assert len(results[1].spans) == 8, "each instruction counts once"
        step = 2 * int(X.sum())
        assert [max(values(plane, result.ref, "total")) for result in results] == [step, 2 * step, 3 * step]


def test_all_stages_restart_from_the_last_finished_step(
    plane: dp.Plane, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was at the end of the step that was given up."""
    counts = [("a", stages.Counting("a")), ("b", stages.Counting("b", str(mark)))]
    pipeline = Pipeline([Stage(name, each, ("x",), (name,), factory=True, stateful=True) for name, each in counts])
    with Executor(plane, pipeline, planned(pipeline, micro=1), method=METHOD) as executor:
        hear = executor._hear

        def heard(w: int, message: m.FromWorker) -> None:
            hear(w, message)
            if isinstance(message, m.StepState) and message.step == 1:
                mark.touch()

        monkeypatch.setattr(executor, "_hear", heard)
        refs = [plane.put({"x": X + 10}), plane.put({"x": X})]
        values(plane, executor.step(refs[0]).ref, "a")
        with pytest.raises(StageFailed, match="five is right out"):
            executor.step(refs[1])
        result = executor.step(refs[0]).ref
        assert result is not None
        assert [plane.get(result)[name].numpy()[0] for name in "ab"] == [2, 2]
        for ref in [*refs, result]:
            plane.free(ref)
    nothing_is_left(plane)


def test_workers_that_die_repeatedly_are_no_longer_replaced(plane: dp.Plane) -> None:
    pipeline = stages.pipeline(stages.die_always)
    with (
        Executor(plane, pipeline, planned(pipeline), method=METHOD, restarts=2) as executor,
        pytest.raises(dp.PeerUnavailable, match="no more are replaced"),
    ):
        executor.step(plane.put({"x": X}))
