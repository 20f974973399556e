"""OpenRLHF's own loop, `train_ppo_ray` from its command on, by reference and by value: each rank trains on the same.

Two ranks. Text, with critic and reward model; and pictures, with an agent and evaluation, by the asynchronous trainer
with partial rollouts, in a run that ends and goes on from its checkpoint in another Ray.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.openrlhf_rollout.vision import WORDS

pytestmark = pytest.mark.timeout(1200)  # processes that import OpenRLHF, torch and transformers

HERE = Path(__file__).parent
PROMPTS, ANSWERS, A_STEP = 8, 2, 4
STEPS = PROMPTS // A_STEP  # of an episode
KEPT = [json.loads(line) for line in (HERE / "loop_reference.jsonl").read_text().splitlines()]

TEXT = ["--critic.num_gpus_per_node", 1, "--reward.num_gpus_per_node", 1, "--algo.advantage.estimator", "gae"]
PICTURES = [
    *("--algo.advantage.estimator", "group_norm", "--data.max_images_per_prompt", 1),
    *("--train.async_enable", "--train.partial_rollout_enable"),
]


def prepare(where: Path, *, pictures: bool) -> list[Any]:
    """Prompts, and what serves as a model's directory."""
    where.mkdir(exist_ok=True)
    model = where / "model"
    model.mkdir()
    draw = np.random.default_rng(0)
    with (where / "prompts.jsonl").open("w") as lines:
        for i in range(PROMPTS):
            words = f"w{i % WORDS} w{(3 * i + 1) % WORDS}"
            row = {"input": words, "label": str(i), "datasource": "words"}
            if pictures:
                picture = where / f"{i}.png"
                Image.fromarray(draw.integers(0, 255, (56, 56, 3), np.uint8)).save(picture)
                row |= {"input": f"<vision> <image> </vision> {words}", "images": [str(picture)]}
            print(json.dumps(row), file=lines)
    if pictures:
        (model / "pictures").touch()
    return [
        *("--actor.model_name_or_path", model, "--reward.model_name_or_path", model),
        *("--data.prompt_dataset", where / "prompts.jsonl", "--data.input_key", "input", "--data.label_key", "label"),
        *("--actor.num_gpus_per_node", 2, "--ref.num_gpus_per_node", 1, "--vllm.num_engines", 1),
        *("--rollout.batch_size", A_STEP, "--rollout.n_samples_per_prompt", ANSWERS, "--rollout.micro_batch_size", 2),
        *("--train.batch_size", A_STEP * ANSWERS, "--train.micro_batch_size", 2, "--data.max_len", 256),
        *("--rollout.max_new_tokens", 8, "--ckpt.save_steps", 1, "--ckpt.path", "ckpt", "--ckpt.load_enable"),
    ]


def run(where: Path, way: str, agent: str, options: list[Any]) -> None:
    """Run it in a directory of its own, with the checkpoint that is there."""
    where.mkdir(exist_ok=True)
    log = where / "log"
    command = [sys.executable, HERE / "loop_job.py", way, agent, *options, "--ckpt.output_dir", where]
    with log.open("a") as output:
        done = subprocess.run(list(map(str, command)), cwd=where, stdout=output, stderr=output, timeout=500)
    assert done.returncode == 0, log.read_text()[-4000:]


def seen(where: Path) -> list[dict[str, Any]]:
    """Each row that a rank trained on, and at which step; in an order that does not depend on who was first."""
    lines = [line for each in where.glob("seen-*.jsonl") for line in each.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda row: (row["step"], row["prompt"], row["tokens"]))


def check_that_they_trained_on_the_same(mine: list[dict[str, Any]], theirs: list[dict[str, Any]], runs: int) -> None:
    assert len(theirs) == runs * PROMPTS * ANSWERS
    assert {row["step"] for row in theirs} == set(range(runs * STEPS))
    assert rounded(mine) == theirs


def rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums over all samples of a step are made in the order in which engines answered."""
    return [{**row, "advantages": pytest.approx(row["advantages"], abs=1e-4)} for row in rows]


def text(where: Path, way: str) -> list[dict[str, Any]]:
    """What ranks trained on, with critic and reward model, by this way."""
    run(where / way, way, "", [*prepare(where, pictures=False), *TEXT, "--train.num_episodes", 1])
    return seen(where / way)


def test_a_text_run_by_reference_trains_on_the_same_rows_as_by_value(tmp_path: Path) -> None:
    """What a run by value trains on is kept in a file; where it is not the same, as with another version of what is
    installed, that is run."""
    mine, theirs = text(tmp_path, "reference"), KEPT
    if rounded(mine) != theirs:
        theirs = text(tmp_path / "again", "value")
    check_that_they_trained_on_the_same(mine, theirs, runs=1)


@pytest.mark.long
def test_the_reference_rows_agree_with_a_run_by_value(tmp_path: Path) -> None:
    check_that_they_trained_on_the_same(text(tmp_path, "value"), KEPT, runs=1)


@pytest.mark.long
def test_an_asynchronous_image_run_resumes_and_trains_on_the_same_rows(tmp_path: Path) -> None:
    options = [*prepare(tmp_path, pictures=True), *PICTURES]
    options += ["--train.agent_func_path", "agent.py", "--eval.steps", 1, "--eval.split", "train"]
    options += ["--eval.dataset", tmp_path / "prompts.jsonl"]
    for way, agent in (("value", "plain"), ("reference", "lazy")):
        for episodes in (1, 2):
            run(tmp_path / way, way, agent, [*options, "--train.num_episodes", episodes])
    theirs = seen(tmp_path / "value")
    assert len({row["pixels"] for row in theirs}) == PROMPTS
    check_that_they_trained_on_the_same(seen(tmp_path / "reference"), theirs, runs=2)
