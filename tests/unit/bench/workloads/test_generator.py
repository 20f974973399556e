"""Made workloads against the tables of the even steps, and what holds of all of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.workloads import TASKS, Trace, generate
from bench.workloads.distance import distance, figures
from bench.workloads.tables import task
from bench.workloads.trace import ARRAYS
from tests.cases import each_case

ROOT = Path(__file__).parents[4]

each_task = each_case("name", TASKS)


def digest(trace: Trace) -> str:
    """Of all that is in it."""
    found = hashlib.sha256()
    for step in trace.steps:
        for array in ARRAYS:
            found.update(getattr(step, array).tobytes())
    return found.hexdigest()


@each_task
@each_case("seed", [0, 1, 2])
@each_case(("prompts", "steps"), [(32, 16), (512, 1)])
def test_distributions_are_those_of_the_even_steps(name: str, seed: int, prompts: int, steps: int) -> None:
    trace = generate(name, prompts=prompts, steps=steps, seed=seed)
    distances = {column: distance(made, other) for column, made, other in figures(trace)}
    sums = distances.pop("total_tokens", 0.0)
    assert max(distances.values()) <= 0.03, distances
    assert sums <= 0.036


def test_the_distance_tells_other_distributions_apart() -> None:
    assert distance([1, 2, 3, 4], [1, 2, 3, 4]) == 0
    assert distance([1, 1, 2, 2], [1, 2, 2, 2]) == 0.25
    assert distance([1, 2], [3, 4]) == 1
    trace = generate("math_dapo_32b", prompts=512)
    [_, (_, made, other)] = figures(trace)
    assert distance(made * 1.1, other) > 0.03


def test_a_process_makes_what_another_made() -> None:
    script = (
        "from tests.unit.bench.workloads.test_generator import TASKS, digest, generate\n"
        "print(*[digest(generate(name, prompts=24, samples=3, steps=3, seed=7)) for name in TASKS])"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1234", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    made = [[digest(generate(name, prompts=24, samples=3, steps=3, seed=seed)) for name in TASKS] for seed in (7, 8)]
    assert done.stdout.split() == made[0]
    assert not set(made[0]) & set(made[1])


@each_task
def test_a_task_has_sizes_of_its_own_and_takes_others(name: str) -> None:
    known, [step] = task(name), generate(name, steps=1).steps
    assert (step.prompts, step.responses) == (known.prompts_per_step, known.prompts_per_step * known.group_size)
    trace = generate(name, prompts=10, samples=3, steps=2, scale=2.5)
    assert [(step.number, step.prompts, step.responses) for step in trace.steps] == [(0, 25, 75), (1, 25, 75)]
    assert generate(name, prompts=1, samples=1, steps=1, scale=0.001).steps[0].responses == 1


@each_task
def test_what_holds_of_every_step(name: str) -> None:
    known = task(name)
    for step in generate(name, prompts=100, steps=3).steps:
        first = step.offsets[:-1]
        assert (step.turn_input_tokens[first] == step.input_tokens[step.group]).all()
        assert (step.vision_tokens <= step.input_tokens).all()
        assert (step.tool_seconds[step.offsets[1:] - 1] == 0).all()
        assert not any(getattr(step, array).flags.writeable for array in ARRAYS)
        if known.output_clip:
            assert step.turn_output_tokens.max() <= known.output_clip
        assert step.images.any() == (known.modality in ("image", "video"))
        assert (step.turns > 1).any() == ("multi-turn" in known.modality)


def test_rewards_come_for_64_responses_at_a_time() -> None:
    for step in generate("code_14b", prompts=20, samples=8, steps=2).steps:  # 160 a step: 64, 64 and 32
        batches = [step.reward_seconds[i : i + 64] for i in range(0, 160, 64)]
        assert [len(set(batch.tolist())) for batch in batches] == [1, 1, 1]
        assert step.reward_seconds.min() > 37


def test_the_mixture_keeps_how_prompts_and_responses_go_together() -> None:
    model = task("math_235b").figures
    [step] = generate("math_235b", prompts=20000, samples=2, steps=1).steps
    x, y = step.input_tokens[step.group].astype(float), step.turn_output_tokens.astype(float)
    weights, means, covariances = (np.array(model[key]) for key in ("weights", "means", "covariances"))
    mean = weights @ means / weights.sum()
    centred = means - mean
    joint = np.tensordot(weights, covariances + centred[:, :, None] * centred[:, None, :], 1) / weights.sum()
    assert np.corrcoef(x, y)[0, 1] == pytest.approx(joint[0, 1] / np.sqrt(joint[0, 0] * joint[1, 1]), abs=0.02)
    assert (x.mean(), y.mean()) == (pytest.approx(mean[0], rel=0.01), pytest.approx(mean[1], rel=0.01))


def test_moments_of_calls_are_those_published() -> None:
    [step] = generate("tool_use_235b", prompts=20000, steps=1).steps
    three = np.flatnonzero(step.turns == 3)
    moments = task("tool_use_235b").figures["tokens_per_call"]["3"]
    for part, values in (("input", step.turn_input_tokens), ("output", step.turn_output_tokens)):
        for i, (mean, deviation) in enumerate(moments[part]):
            cell = values[step.offsets[three] + i]
            assert cell.mean() == pytest.approx(mean, rel=0.05), (part, i)
            assert cell.std() == pytest.approx(deviation, rel=0.1), (part, i)


@each_case(
    "wrong",
    [{"prompts": 0}, {"samples": -1}, {"steps": 0}, {"scale": 0.0}, {"scale": float("nan")}, {"seed": -1}],
    ids=str,
)
def test_sizes_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        generate("code_14b", **wrong)  # type: ignore[arg-type]
