"""The example, with all its processes; and its count of rows."""

from __future__ import annotations

import io
import multiprocessing
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from rich.console import Console

from examples.multimodal_grpo import crew, killed, ledger, summary
from examples.multimodal_grpo.__main__ import main
from examples.multimodal_grpo.job import Job, Killed
from examples.multimodal_grpo.watch import Watch
from tests.examples.workers import live
from tests.optional import needs
from tests.processes import eventually
from tests.torches import torches

pytestmark = needs("sklearn", "matplotlib")

LONG_S = 400.0  # more than a job takes on the busiest machine


@pytest.fixture(scope="session", autouse=True)
def _warm_examples() -> None:
    """What others keep for as long as the process lives: matplotlib's open fonts."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "a")
    figure.savefig(io.BytesIO())


def drained(appended: int, *, expired: int = 0) -> dict[str, Any]:
    return {"appended": appended, "task": {"actor": {"expired": expired, "left": 0, "dead": 0}}}


def test_the_ledger_detects_lost_and_duplicated_rows() -> None:
    counted = ledger.Ledger()
    counted.count(ledger.keys(0, 0, 0, 8))
    assert not counted.books(drained(9)).exact
    assert counted.books(drained(9, expired=1)).exact
    counted.count(ledger.keys(0, 0, 7, 1))
    assert counted.books(drained(9)).again == 1
    assert not counted.books(drained(8)).exact
    assert not counted.books(drained(9)).exact


@pytest.fixture
def _no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)


@pytest.mark.timeout(LONG_S + 100)
@pytest.mark.usefixtures("_no_other_node")
def test_the_job_runs_within_its_budget_and_leaves_nothing_behind(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    small = {
        "memory": "16MiB",
        "in_flight": "24MiB",
        "smallest": 56,
        "largest": 84,
        "pauses": (0.0, 0.1),
        "seconds": LONG_S,
    }
    job = Job(spill_dir=str(spill), steps=40, kill_at=10, target=0.0, averaged=50, **small)
    console = Console(file=io.StringIO())
    with Watch(job, console) as watch:
        crew.run(job, watch)

    assert watch.failed is None
    assert watch.finished is not None
    assert watch.finished.examined == 297
    steps = [step for _, step in watch.steps]
    assert [step.number for step in steps] == list(range(1, 41))
    assert all(step.rows == job.prompts * job.responses for step in steps)

    stats = watch.samples[-1][1]
    assert all(sample.memory_used <= sample.memory_budget for _, sample in watch.samples)
    assert stats.memory_peak <= stats.memory_budget
    assert stats.spilled_bytes > 0
    assert stats.waits > 0
    assert sum(step.stored_bytes for step in steps) * 7.9 < sum(step.logical_bytes for step in steps)
    assert all(step.reference_bytes < 4096 for step in steps)
    assert list(spill.iterdir()) == []

    books = watch.finished.books
    assert watch.killed == [Killed("rollout 1", 10)]
    assert books.exact
    assert books.left_out == 0
    assert books.appended == sum(books.counted.values()) >= len(steps) * job.prompts * job.responses
    assert {"0.0", "1.0"} <= books.counted.keys()

    console.print(summary.table(job, watch))
    console.print(summary.meaning(job, watch, Path("plot.png")), soft_wrap=True)
    shown = console.file.getvalue()
    assert shown.count("The processes start") == 1
    assert "reward starting" not in shown
    assert "rollout 1 was killed at step 10, as planned" in shown
    assert f"the picture is {Path.cwd() / 'plot.png'}" in shown
    assert "At step 10 a rollout worker is killed on purpose" in summary.introduction(job)
    summary.plot(job, watch, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_S + 100)
@pytest.mark.usefixtures("_no_other_node")
def test_the_job_resumes_after_all_its_processes_were_killed(tmp_path: Path) -> None:
    heard, told = torches.Pipe(duplex=False)
    first = torches.Process(target=live, args=(tmp_path, 0, None, told))
    second = torches.Process(target=live, args=(tmp_path, 1, 8, told))
    try:
        first.start()
        eventually(lambda: (tmp_path / "trainer").exists() or not first.is_alive(), "a step", LONG_S)
        assert first.pid is not None
        assert killed.kill_all(first.pid) > 4, "the node, the trainer, the reward worker and the rollouts"
        second.start()
        assert heard.poll(LONG_S)
        steps, failed, books = heard.recv()
        second.join()
    finally:
        for process in (first, second):
            if process.pid is not None and process.is_alive():
                killed.kill_all(process.pid)
            with suppress(AssertionError):  # it was not started
                process.join()
    assert failed is None
    assert books.exact
    assert books.counted.keys() == {"0.0", "0.2"}, "rows of both lives"
    assert steps < 8, "updates of the life before were not made again"


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_S + 100)
@pytest.mark.usefixtures("_no_other_node")
def test_a_job_in_the_directory_of_one_that_has_ended_counts_its_own_rows_alone(tmp_path: Path) -> None:
    for _ in range(2):
        heard, told = torches.Pipe(duplex=False)
        job = torches.Process(target=live, args=(tmp_path, 0, 2, told))
        job.start()
        try:
            assert heard.poll(LONG_S)
            steps, failed, books = heard.recv()
            job.join()
        finally:
            if job.pid is not None and job.is_alive():
                killed.kill_all(job.pid)
                job.join()
        assert failed is None
        assert steps == 2
        assert books.exact


@pytest.mark.long
@pytest.mark.usefixtures("_no_other_node")
def test_a_process_that_fails_is_shown_and_ends_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "CONTEXT", multiprocessing.get_context("spawn"))  # as users have it
    monkeypatch.setattr("examples.multimodal_grpo.__main__.Job", partial(Job, pauses=(0.0,)))  # one rollout is enough
    assert main(["--memory", "4MiB", "--spill-dir", str(tmp_path), "--no-plot"]) == 1
    said = capfd.readouterr().out
    assert "The rollout" in said
    assert "LimitExceeded" in said
    assert list(tmp_path.iterdir()) == []
