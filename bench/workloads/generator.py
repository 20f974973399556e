"""Workloads generated from the tables of the seven tasks, at any size.

Invariants: the same task, sizes and seed give the same trace in any process. The distributions of a whole trace of n
values differ from the task's tables by at most 1/n (`quantiles`). All responses of a group have the prompt's input and
pixels.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.workloads import groups, mixture, searching, vision
from bench.workloads.quantiles import scattered, tokens
from bench.workloads.tables import Task, task
from bench.workloads.trace import ARRAYS, Ints, Step, Trace
from dataplane.errors import LimitExceeded

#: The limit of a trace, which is made in memory: about 120 bytes for each turn.
MOST_RESPONSES = 1 << 24

_REWARDED = 64  # samples of a value of `reward_seconds_per_64_samples`

Arrays = dict[str, npt.NDArray[Any]]


def generate(
    name: str,
    *,
    prompts: int | None = None,
    samples: int | None = None,
    steps: int = 4,
    seed: int = 0,
    scale: float = 1.0,
) -> Trace:
    """Generate a trace of a task: `steps` steps of `scale * prompts` prompts, with `samples` responses to each.

    prompts, samples: None for the task's own. Raises ValueError for an unknown task or invalid sizes, `LimitExceeded`
    for more than `MOST_RESPONSES` responses."""
    of = task(name)
    prompts = _positive("prompts", of.prompts_per_step if prompts is None else prompts)
    samples = _positive("samples", of.group_size if samples is None else samples)
    steps = _positive("steps", steps)
    if not 0 < scale < math.inf:
        raise ValueError(f"a scale is more than 0, not {scale}")
    if seed < 0:
        raise ValueError(f"a seed is not negative: {seed}")
    asked = max(1, scale * prompts) * samples * steps
    if asked > MOST_RESPONSES:
        raise LimitExceeded(
            f"a trace of {asked:,.0f} responses is more than {MOST_RESPONSES:,}; make several, each with its own seed",
            what="responses", asked=int(min(asked, 2**62)), limit=MOST_RESPONSES,
        )  # fmt: skip
    prompts = max(1, round(scale * prompts))
    source = np.random.default_rng([seed, zlib.crc32(name.encode())])
    made = _MAKERS.get(name, _text)(of, prompts * steps, samples, source)
    made |= {"reward_seconds": _rewards(of, prompts * samples, steps, source)}
    return Trace(name, of.modality, of.source, _steps(made, prompts, samples, steps))


def _positive(what: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{what} is at least 1, not {value}")
    if value > MOST_RESPONSES:
        raise LimitExceeded(f"{value} {what} are more than {MOST_RESPONSES:,}", what=what, limit=MOST_RESPONSES)
    return value


def _text(of: Task, prompts: int, samples: int, source: np.random.Generator) -> Arrays:
    """Text tasks: responses of one turn, with tokens by tables."""
    siblings, follows = of.figures["sibling_spearman"], of.figures["input_output_spearman"]
    inputs, outputs = groups.shares(prompts, samples, siblings, follows, source)
    prompt = tokens(of.quantiles["input_tokens"].at(inputs))
    return _one_turn(prompt, tokens(of.quantiles["output_tokens"].at(outputs), 0, of.output_clip))


def _video(of: Task, prompts: int, samples: int, source: np.random.Generator) -> Arrays:
    made = _text(of, prompts, samples, source)
    vision_tokens = vision.video_tokens(made["input_tokens"])
    return made | _pixels(vision_tokens, np.ones(prompts, np.int64))


def _image(of: Task, prompts: int, samples: int, source: np.random.Generator) -> Arrays:
    """Prompts of text and images of one size, with one answer. A prompt without images has some text."""
    of_images, of_text = (scattered(prompts, source) for _ in range(2))
    images = tokens(of.quantiles["images_per_prompt"].at(of_images))
    of_images[images > 0] = source.permutation(of_images[images > 0])  # so that sizes do not depend on numbers
    per_image = np.where(images > 0, tokens(of.quantiles["image_tokens_per_image"].at(of_images), 1), 0)
    text = tokens(of.quantiles["text_tokens"].at(of_text))
    _swap(text, np.flatnonzero((images == 0) & (text == 0)), np.flatnonzero((images > 0) & (text > 0)), source)
    outputs = tokens(of.quantiles["output_tokens"].at(scattered(prompts * samples, source)))
    return _one_turn(text + images * per_image, outputs) | _pixels(images * per_image, images)


def _swap(values: Ints, empty: Ints, others: Ints, source: np.random.Generator) -> None:
    """Exchange the values at `empty` with as many random ones at `others`."""
    n = min(len(empty), len(others))
    taken = source.permutation(others)[:n]
    values[empty[:n]], values[taken] = values[taken], values[empty[:n]]


def _mixture(of: Task, prompts: int, samples: int, source: np.random.Generator) -> Arrays:
    inputs, outputs = mixture.pairs(of.figures, prompts, samples, source)
    return _one_turn(tokens(inputs, 1), tokens(outputs, 1, of.output_clip))


def _calls(of: Task, prompts: int, samples: int, source: np.random.Generator) -> Arrays:
    made = mixture.calls(of.figures, prompts, samples, source)
    return dict(zip(("input_tokens", "turns", "turn_input_tokens", "turn_output_tokens"), made, strict=True))


def _search(of: Task, prompts: int, samples: int, source: np.random.Generator) -> Arrays:
    names = ("input_tokens", "turns", "turn_input_tokens", "turn_output_tokens", "engine_seconds", "tool_seconds")
    return dict(zip(names, searching.trajectories(of, prompts, samples, source), strict=True))


_MAKERS = {
    "video_understanding_7b": _video,
    "image_understanding": _image,
    "math_235b": _mixture,
    "tool_use_235b": _calls,
    "search_7b": _search,
}


def _one_turn(prompt: Ints, outputs: Ints) -> Arrays:
    samples = len(outputs) // len(prompt)
    turns = np.ones(len(outputs), np.int64)
    return {
        "input_tokens": prompt,
        "turns": turns,
        "turn_input_tokens": np.repeat(prompt, samples),
        "turn_output_tokens": outputs,
    }


def _pixels(vision_tokens: Ints, images: Ints) -> Arrays:
    return {
        "vision_tokens": vision_tokens,
        "images": images,
        "patches": vision.PATCHES_PER_TOKEN * vision_tokens,
    }


def _rewards(of: Task, responses: int, steps: int, source: np.random.Generator) -> npt.NDArray[np.float64]:
    """The seconds of rewards, which are computed for 64 responses of a step at a time. Each has the time of all 64."""
    if "reward_seconds_per_64_samples" not in of.quantiles:
        return np.zeros(responses * steps)
    batches = -(-responses // _REWARDED)
    shares = scattered(batches * steps, source)
    seconds = of.quantiles["reward_seconds_per_64_samples"].at(shares).reshape(steps, batches)
    return np.repeat(seconds, _REWARDED, axis=1)[:, :responses].ravel()


def _steps(made: Arrays, prompts: int, samples: int, steps: int) -> tuple[Step, ...]:
    """Cut the arrays into steps. Missing arrays are zero."""
    responses = prompts * samples
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(made["turns"])])[::responses]
    made["group"] = np.tile(np.repeat(np.arange(prompts), samples), steps)
    cut = []
    for i in range(steps):
        where = {
            "prompt": slice(i * prompts, (i + 1) * prompts),
            "response": slice(i * responses, (i + 1) * responses),
            "turn": slice(int(ends[i]), int(ends[i + 1])),
        }
        cut.append(Step(i, **{name: _part(made.get(name), where[per], kind) for name, (per, kind) in ARRAYS.items()}))
    return tuple(cut)


def _part(values: npt.NDArray[Any] | None, where: slice, kind: type) -> npt.NDArray[Any]:
    return np.zeros(where.stop - where.start, kind) if values is None else values[where]
