"""The workloads by name: the rows that are moved, and how often they are read, at a scale.

A step of the video task is read three times, for reference, log-prob and update, like in verl's trainer. The scale is
the share of the task's prompts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from bench.peers.work import HIDDEN, LAYERS, SINGLE, TEACHER_TOP, TOP, Share
from bench.workloads import generate, tables
from bench.workloads.trace import Step

PRODUCERS = CONSUMERS = 2
FIELDS, WIDTH = 9, 8192
_SINGLES = 200
ROWS = {"dense 1 MiB": 4, "dense 18 MiB": 64, "dense 288 MiB": 1024}


@dataclass(frozen=True)
class Workload:
    """A workload: a share for each producer, and how often all rows are read."""

    name: str
    what: str
    shares: tuple[Share, ...]
    reads: int
    ranks: bool = False
    """Whether each consumer reads its share of the tokens of every row, instead of a part of the rows."""

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, with repeated values."""
        return sum(share.nbytes for share in self.shares)

    @property
    def memory_needed(self) -> int:
        """The bytes of memory that must be free: five copies of the rows, from generation to reading, and 2 GiB."""
        return 5 * self.nbytes + (2 << 30)


SINGLES = "rows, one by one"
TOKENS = {
    "r3": ("routed", f"experts of {LAYERS} layers x top {TOP} a token, a context-parallel share to each consumer"),
    "top_k": ("teacher", f"a teacher's top {TEACHER_TOP} ids and log-probs a token"),
    "hidden_states": ("hidden", f"{HIDDEN} float16 a token"),
}
NAMES = ("video", "video, one response", "math", SINGLES, *TOKENS, *ROWS)
#: For steps with a mixture of experts or a teacher: prompts, responses to each, and tokens of the longest.
PROMPTS, SAMPLES, LONGEST = 96, 16, 32_768


def workload(name: str, scale: float) -> Workload:
    """The workload of this name at this scale. Raises ValueError for an unknown name."""
    if name in ROWS:
        share = Share(ROWS[name] // PRODUCERS, FIELDS, WIDTH)
        what = f"{ROWS[name]} rows of {FIELDS} fields of {WIDTH} float32"
        return Workload(name, what, (share,) * PRODUCERS, 1)
    if name == SINGLES:
        what = f"{PRODUCERS} x {_SINGLES} rows of {SINGLE} token ids, as many float32 and a float: a put and a get each"
        return Workload(name, what, (Share(singles=_SINGLES),) * PRODUCERS, 1)
    if name == "math":
        step = _step("math_dapo_32b", min(1.0, 8 * scale), None)
        return Workload(name, f"{step.responses} rows of text of math_dapo_32b", _shares(step), 3)
    if name in TOKENS:
        return _of_tokens(name, scale)
    if name not in NAMES:
        raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")
    samples = 8 if name == "video" else 1
    step = _step("video_understanding_7b", scale, samples)
    what = f"{step.responses} rows, {samples} a prompt, of video_understanding_7b"
    return Workload(name, what, _shares(step), 3)


def _of_tokens(name: str, scale: float) -> Workload:
    """Rows with approximately log-normal lengths. They are shorter if the scale leaves fewer than `PRODUCERS`
    prompts."""
    of, what = TOKENS[name]
    prompts = max(PRODUCERS, round(PROMPTS * scale))
    longest = max(64, round(LONGEST * min(1.0, PROMPTS * scale / PRODUCERS)))
    lengths = np.random.default_rng(0).lognormal(np.log(longest / 4), 0.8, prompts * SAMPLES)
    tokens = np.clip(lengths, 16, longest).astype(int)
    shares = [Share(tokens=tuple(map(int, part)), of=of) for part in np.array_split(tokens, PRODUCERS)]
    about = f"{len(tokens)} rows of {int(tokens.min())} to {int(tokens.max())} tokens: {what}"
    return Workload(name, about, tuple(shares), 1, ranks=name == "r3")


def _step(task: str, scale: float, samples: int | None) -> Step:
    least = PRODUCERS if samples != 1 else PRODUCERS * CONSUMERS  # each producer has a row for each consumer
    prompts = max(least, round(scale * tables.task(task).prompts_per_step))
    return generate(task, prompts=prompts, samples=samples, steps=1).steps[0]


def _shares(step: Step) -> tuple[Share, ...]:
    shares = []
    for prompts in np.array_split(np.arange(step.prompts), PRODUCERS):
        answers = [tuple(int(n) for n in step.response_tokens[step.group == prompt]) for prompt in prompts]
        inputs = tuple(int(n) for n in step.input_tokens[prompts])
        patches = tuple(int(n) for n in step.patches[prompts])
        shares.append(Share(inputs=inputs, patches=patches, responses=tuple(answers)))
    return tuple(shares)


def largest_scale(available: int, names: Collection[str]) -> float | None:
    """The largest power of 1/2 as scale at which these workloads fit into `available` bytes. None if none of eight
    does."""
    for power in range(8):
        if all(workload(name, 0.5**power).memory_needed <= available for name in names):
            return 0.5**power
    return None
