"""The example: its parts by themselves, and then all its processes."""

from __future__ import annotations

import io
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

import torch
from matplotlib.figure import Figure
from rich.console import Console

import dataplane as dp
from examples.multimodal_grpo import crew, digits, grpo, patches, reward, summary, tokens
from examples.multimodal_grpo.__main__ import main
from examples.multimodal_grpo.job import Job
from examples.multimodal_grpo.watch import Watch
from examples.multimodal_grpo.wires import Board, Stopped, wires


@pytest.fixture(scope="session", autouse=True)
def _warm_examples() -> None:
    """What others keep for as long as the process lives: multiprocessing's shared heap, and matplotlib's open fonts."""
    multiprocessing.get_context("spawn").Array("c", 1 << 16)
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


@pytest.mark.parametrize("size", [(28, 28), (112, 168), (168, 112)])
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


@pytest.mark.parametrize("size", [(0, 28), (28, 42), (100, 112)])
def test_sides_that_do_not_fit_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 28"):
        patches.grid_of(*size)


def test_a_picture_keeps_its_brightness_in_every_size() -> None:
    np.testing.assert_allclose(digits.draw(np.full((8, 8), 0.25), 112, 140), 0.25, rtol=1e-6)
    half = digits.draw(np.repeat([[0.0], [1.0]], 4, axis=0).repeat(8, axis=1), 112, 112)
    assert half[:, :40].max() == 0
    assert half[:, -40:].min() == 1


# Tokens, rewards, GRPO


def test_a_prompt_has_a_placeholder_for_each_four_patches() -> None:
    assert tokens.prompt((1, 8, 12)).count(tokens.IMAGE_PAD) == 24


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


# Wires


def a_ref(plane: dp.Plane, value: int) -> dp.BatchRef:
    return plane.put({"value": np.array([value])})


@pytest.mark.timeout(20)
def test_a_wire_keeps_order_holds_its_depth_and_counts_its_bytes() -> None:
    context = multiprocessing.get_context("spawn")
    leash, hand = context.Pipe(duplex=False)
    passed = context.RawValue("q")
    [outlet], inlet = wires(context, leash, 2, [passed])
    sent = []

    def send() -> None:
        for ref in refs:
            outlet.send(ref)
            sent.append(ref)

    with dp.connect(config=dp.NodeConfig(memory="2MiB", spill=0)) as plane:
        refs = [a_ref(plane, value) for value in range(5)]
        sender = threading.Thread(target=send)
        sender.start()
        taken = []
        for ref in inlet:
            taken.append(ref)
            assert len(sent) <= len(taken) + 2
            if len(taken) == len(refs):
                break
        sender.join()
    assert taken == refs
    assert 0 < passed.value < 5 * 1024

    hand.close()
    with pytest.raises(Stopped):
        next(iter(inlet))
    for end in (outlet, inlet, leash):
        end.close()


def test_a_wire_ends_when_the_process_at_its_other_end_is_gone() -> None:
    context = multiprocessing.get_context("spawn")
    leash, hand = context.Pipe(duplex=False)
    [outlet], inlet = wires(context, leash, 2, [context.RawValue("q")])
    outlet.close()
    with pytest.raises(Stopped):
        next(iter(inlet))
    for end in (inlet, leash, hand):
        end.close()


def test_the_board_shows_the_newest() -> None:
    context = multiprocessing.get_context("spawn")
    board = Board(context, context.RawValue("q"))
    assert board.read() is None
    with dp.connect(config=dp.NodeConfig(memory="2MiB", spill=0)) as plane:
        wide = plane.put({name: np.zeros(1) for name in "abcdef"})
        board.post(1, wide)
        newest = a_ref(plane, 1)
        board.post(2, newest)
    assert board.read() == (2, newest)


# All of it


@pytest.fixture
def _no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_no_other_node")
def test_the_job_runs_within_its_budget_and_leaves_nothing_behind(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    job = Job(spill_dir=str(spill), steps=25, target=0.0, averaged=30)
    console = Console(file=io.StringIO())
    with Watch(job, console) as watch:
        crew.run(job, watch)

    assert watch.failed is None
    assert watch.finished is not None
    assert watch.finished.examined == 297
    steps = [step for _, step in watch.steps]
    assert [step.number for step in steps] == list(range(1, 26))
    assert all(step.rows == job.prompts * job.responses for step in steps)

    stats = watch.samples[-1][1]
    assert all(sample.memory_used <= sample.memory_budget for _, sample in watch.samples)
    assert stats.memory_peak <= stats.memory_budget
    assert stats.spilled_bytes > 0
    assert stats.waits > 0
    assert sum(step.stored_bytes for step in steps) * 7.9 < sum(step.logical_bytes for step in steps)
    assert watch.passed_bytes < 4096 * len(steps), "more than references passed"
    assert list(spill.iterdir()) == []

    console.print(summary.table(job, watch))
    summary.plot(job, watch, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_no_other_node")
def test_a_process_that_fails_is_shown_and_ends_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--memory", "4MiB", "--spill-dir", str(tmp_path), "--no-plot"]) == 1
    said = capfd.readouterr().out
    assert "The rollout" in said
    assert "LimitExceeded" in said
    assert list(tmp_path.iterdir()) == []
