"""The example: its parts by themselves, and then all its processes."""

from __future__ import annotations

import io
import itertools
import multiprocessing
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

import torch
from rich.console import Console

from examples.multimodal_grpo import crew, grpo, killed, ledger, patches, reward, summary, tokens
from examples.multimodal_grpo.__main__ import main
from examples.multimodal_grpo.job import Failed, Job, Killed
from examples.multimodal_grpo.watch import Watch
from tests.cases import each_case
from tests.examples.workers import live, report_and_wait
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


def an_image(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).random((3, height, width), dtype=np.float32)


def patches_of(image: np.ndarray) -> np.ndarray:
    out = np.full((np.prod(patches.grid_of(*image.shape[1:])), patches.PATCH_VALUES), np.nan, dtype=np.float32)
    patches.write_patches(image, out)
    return out


# Patches


def test_a_patch_has_1176_values_and_an_image_as_many_patches_as_its_grid_says() -> None:
    assert patches.PATCH_VALUES == 1176
    assert patches.grid_of(112, 168) == (1, 8, 12)
    assert patches_of(an_image(112, 168)).shape == (96, 1176)


@each_case("size", [(28, 28), (112, 168), (168, 112)])
def test_patches_lie_as_the_published_processor_lays_them(size: tuple[int, int]) -> None:
    """`Qwen2VLImageProcessor._preprocess`: the image in two frames, split into nine dimensions, these transposed."""
    image = an_image(*size)
    frames = np.stack([(image - patches.MEAN) / patches.DEVIATION] * 2)
    split = frames.reshape(1, 2, 3, size[0] // 28, 2, 14, size[1] // 28, 2, 14)
    published = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 1176)
    np.testing.assert_array_equal(patches_of(image), published)


def test_each_patch_is_the_square_of_pixels_at_its_position() -> None:
    image = an_image(56, 84)
    lines, columns = patches.positions(4, 6)
    assert list(zip(lines[:6], columns[:6], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    for patch, line, column in zip(patches_of(image), lines, columns, strict=True):
        square = image[:, line * 14 : line * 14 + 14, column * 14 : column * 14 + 14]
        expected = (square - patches.MEAN) / patches.DEVIATION
        for frame in range(2):
            np.testing.assert_array_equal(patch.reshape(3, 2, 14, 14)[:, frame], expected)


def test_an_image_comes_back_from_its_patches() -> None:
    image = an_image(140, 112)
    again = patches.read_patches(patches_of(image), patches.grid_of(140, 112))
    np.testing.assert_allclose(again, image, atol=1e-6)


# Tokens, rewards, GRPO


def test_the_right_answer_is_rewarded() -> None:
    said = [tokens.response(7), tokens.response(1), []]
    assert reward.verify(said, ["7", "7", "7"]).tolist() == [1, 0, 0]


def test_advantages_compare_within_a_group_and_a_group_of_equals_teaches_nothing() -> None:
    found = grpo.advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]]))
    assert found[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3)
    assert found[1].tolist() == [0, 0, 0, 0]


def test_a_response_that_was_followed_far_enough_pulls_no_further() -> None:
    new = torch.tensor([0.0, 0.5], requires_grad=True)
    grpo.loss(new, torch.zeros(2), torch.ones(2), clip=0.2).backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-0.5, 0]


# The board, the count


def drained(appended: int, *, expired: int = 0) -> dict[str, Any]:
    return {"appended": appended, "task": {"actor": {"expired": expired, "left": 0, "dead": 0}}}


def test_the_count_tells_workers_and_their_lives_apart() -> None:
    counted = ledger.Ledger()
    counted.count(ledger.keys(1, 1, 0, 8))
    counted.count(ledger.keys(1, 0, 0, 16))
    counted.count(ledger.keys(1, 0, 16, 8))
    books = counted.books(drained(32))
    assert books.counted == {"1.0": 24, "1.1": 8}
    assert books.exact


def test_the_count_is_wrong_where_a_row_is_lost_or_doubled_or_both() -> None:
    counted = ledger.Ledger()
    counted.count(ledger.keys(0, 0, 0, 8))
    assert not counted.books(drained(9)).exact
    assert counted.books(drained(9, expired=1)).exact
    counted.count(ledger.keys(0, 0, 7, 1))
    assert counted.books(drained(9)).again == 1
    assert not counted.books(drained(8)).exact
    assert not counted.books(drained(9)).exact


def test_a_process_that_the_crew_kills_is_no_failure_and_one_that_others_kill_is() -> None:
    with crew.Crew() as several:
        for name in ("first", "second"):
            several.start(name, report_and_wait)
        for _ in range(2):
            assert list(itertools.islice(_told(several), 1)) == ["here"]
        several.kill("first")
        [process] = [child for child in multiprocessing.active_children() if child.name == "second"]
        process.kill()
        assert next(_told(several)) == Failed("second", "ended with exit code -9")
        assert list(several.reports(0)) == []


def _told(several: crew.Crew) -> Iterator[Any]:
    while True:
        yield from several.reports(1)


# All of it


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


@pytest.mark.timeout(LONG_S + 100)
@pytest.mark.usefixtures("_no_other_node")
def test_two_ranks_learn_together(tmp_path: Path) -> None:
    small = {"in_flight": "4MiB", "smallest": 56, "largest": 84, "pauses": (0.0, 0.1), "prompts": 8, "seconds": LONG_S}
    job = Job(spill_dir=str(tmp_path), steps=6, kill_at=3, target=0.0, averaged=50, ranks=2, **small)
    with Watch(job, Console(file=io.StringIO())) as watch:
        crew.run(job, watch)
    assert watch.failed is None
    assert watch.finished is not None
    assert watch.finished.books.exact
    steps = [step for _, step in watch.steps]
    assert [step.rows for step in steps] == [job.prompts * job.responses] * 6


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_S + 100)
@pytest.mark.usefixtures("_no_other_node")
def test_the_job_goes_on_where_it_was_after_all_of_its_processes_were_killed(tmp_path: Path) -> None:
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
