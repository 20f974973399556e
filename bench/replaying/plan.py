"""What is replayed: a trace, the processes it is run by, and how long each of them waits in the place of computing.

What always holds: a row is a response, and its number is its position among those of all steps. Prompt p of a step is
made by the rollout worker p modulo their number; a worker's responses begin in the order of their numbers, each as soon
as one of its slots is free. A response of step s begins once all rows of the steps before s - `max_lag` are trained, or
have expired. Seconds are those of the trace's job; what a process waits is those over `speed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.workloads import Step, Trace
from bench.workloads.trace import Floats, Ints
from bench.workloads.vision import PATCH_BYTES

COLUMNS = ("input_ids", "response_ids", "log_probs", "pixel_values")
"""What a row carries, in the order of its checksums: prompt and response, the response, its log-probabilities, and the
prompt's patches, of a trace with pixels alone."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """So many data-parallel ranks, of so many tensor-parallel ones each."""

    dp: int
    tp: int

    @classmethod
    def of(cls, text: str) -> Ranks:
        """From "2x4", or "2". Raises ValueError."""
        dp, _, tp = text.partition("x")
        ranks = cls(int(dp), int(tp or 1))
        if min(ranks.dp, ranks.tp) < 1:
            raise ValueError(f"ranks are 1 or more, not {text}")
        return ranks

    @property
    def count(self) -> int:
        """How many processes."""
        return self.dp * self.tp


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in the job that the trace is of, and how much faster the replay is."""

    #: Seconds a token of one response being made: what a request sees of an engine that makes many at once.
    token_s: float = 1 / 50
    #: Seconds a token of prompt and response, of one data-parallel rank of the reference.
    reference_token_s: float = 1 / 50_000
    #: The same of the trainer.
    train_token_s: float = 1 / 10_000
    speed: float = 1.0


@dataclass(frozen=True)
class Plan:
    """A replay. Processes are given it as it is."""

    trace: Trace
    pace: Pace = Pace()
    workers: int = 2
    slots: int = 16
    reference: Ranks = Ranks(1, 1)
    trainer: Ranks = Ranks(2, 2)
    #: 0: synchronous, a step's rows are all there before it is trained. Else asynchronous: so many policy versions.
    max_lag: int = 0
    #: Rows that the reference is given at a time.
    delivered: int = 8
    #: Rows whose columns a rank reads at a time.
    micro: int = 4
    payload_scale: float = 1.0

    @property
    def name(self) -> str:
        """How its figures are called."""
        return f"asynchronous, lag {self.max_lag}" if self.max_lag else "synchronous"

    @property
    def processes(self) -> int:
        """How many it is run by, without the node and the one that watches."""
        return self.workers + 1 + self.reference.count + self.trainer.count

    @cached_property
    def starts(self) -> Ints:
        """The number of each step's first row, and the number of all."""
        return np.cumsum([0, *(step.responses for step in self.trace.steps)])

    @property
    def rows(self) -> int:
        """How many, of all steps."""
        return int(self.starts[-1])

    def begins_at(self, step: int) -> int:
        """How many rows must be done with before the responses of a step begin."""
        return int(self.starts[max(0, step - self.max_lag)])

    def wanted(self, update: int) -> int:
        """How many rows an update takes."""
        return self.trace.steps[min(update, len(self.trace.steps) - 1)].responses

    @cached_property
    def response_tokens(self) -> Ints:
        """Of each row: what the model made and what tools answered."""
        return _joined([step.response_tokens for step in self.trace.steps])

    @cached_property
    def tokens(self) -> Ints:
        """Of each row: those of its prompt, and of its response."""
        return self.response_tokens + _joined([step.input_tokens[step.group] for step in self.trace.steps])

    @cached_property
    def made_s(self) -> Floats:
        """Of each row, how long its response takes: tokens that the model makes, and tools that it calls."""
        seconds = [
            step.of_responses(step.turn_output_tokens * self.pace.token_s + step.tool_seconds)
            for step in self.trace.steps
        ]
        return _joined(seconds).astype(np.float64) / self.pace.speed

    @cached_property
    def reward_s(self) -> Floats:
        """Of each row, how long its reward takes from when the row is there."""
        return _joined([step.reward_seconds for step in self.trace.steps]) / self.pace.speed

    @property
    def reference_token_s(self) -> float:
        """A token, as the reference waits it."""
        return self.pace.reference_token_s / self.pace.speed

    @property
    def train_token_s(self) -> float:
        """A token, as the trainer waits it."""
        return self.pace.train_token_s / self.pace.speed

    @cached_property
    def pixels(self) -> bool:
        """Whether rows carry patches."""
        return any(bool(step.patches.any()) for step in self.trace.steps)

    @property
    def columns(self) -> tuple[str, ...]:
        """What a row carries."""
        return COLUMNS if self.pixels else COLUMNS[:-1]

    def patches(self, step: Step) -> Ints:
        """Of each prompt, scaled."""
        scaled: Ints = np.ceil(step.patches * self.payload_scale).astype(np.int64)
        return scaled

    def groups(self, step: int, worker: int) -> list[tuple[int, list[int]]]:
        """The prompts of a step that a worker makes responses to, and the numbers of those."""
        group = self.trace.steps[step].group
        ends = np.searchsorted(group, np.arange(self.trace.steps[step].prompts + 1)) + self.starts[step]
        mine = range(worker, len(ends) - 1, self.workers)
        return [(prompt, list(range(ends[prompt], ends[prompt + 1]))) for prompt in mine]

    def stored_bytes(self, step: Step) -> int:
        """What a step holds in the plane: tokens, log-probabilities of the policy and of the reference, and each
        prompt's pixels once."""
        text = 8 * int(step.input_tokens[step.group].sum()) + 24 * int(step.response_tokens.sum())
        return text + 64 * step.responses + PATCH_BYTES * int(self.patches(step).sum())


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, arrays[0].dtype), *arrays])
