"""A replay: a trace, its processes, and the seconds that each of them waits instead of computing.

Invariants: a row is a response, and its number is its position among the rows of all steps. Responses to prompt p of a
step are made by rollout worker p modulo the number of workers. A worker's responses begin in the order of their
numbers, each as soon as a slot is free. A response of step s begins when all rows of the steps before s - `max_lag` are
trained or expired. Processes wait the seconds of the trace's job divided by `speed`.
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
"""The columns of a row, in the order of its checksums: prompt and response, the response, its log-probabilities, and,
in a trace with pixels, the prompt's patches."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """`dp` data-parallel ranks of `tp` tensor-parallel ranks each."""

    dp: int
    tp: int

    @classmethod
    def of(cls, text: str) -> Ranks:
        """Parse "2x4" (DP x TP) or "2". Raises ValueError."""
        dp, _, tp = text.partition("x")
        ranks = cls(int(dp), int(tp or 1))
        if min(ranks.dp, ranks.tp) < 1:
            raise ValueError(f"ranks are 1 or more, not {text}")
        return ranks

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.dp * self.tp


@dataclass(frozen=True, slots=True)
class Pace:
    """The speeds of the trace's job, and the factor by which the replay is faster."""

    #: Seconds a generated token of one response, as seen by a request to an engine that serves many.
    token_s: float = 1 / 50
    #: Seconds a token of prompt and response, of one data-parallel rank of the reference.
    reference_token_s: float = 1 / 50_000
    #: The same of the trainer.
    train_token_s: float = 1 / 10_000
    speed: float = 1.0


@dataclass(frozen=True)
class Plan:
    """The settings of a replay, which all processes get."""

    trace: Trace
    pace: Pace = Pace()
    workers: int = 2
    slots: int = 16
    reference: Ranks = Ranks(1, 1)
    trainer: Ranks = Ranks(2, 2)
    #: 0: synchronous, a step is trained when it has all rows. Else asynchronous, with this lag in policy versions.
    max_lag: int = 0
    #: Rows of a delivery to the reference.
    delivered: int = 8
    #: Rows whose columns a rank reads at a time.
    micro: int = 4
    payload_scale: float = 1.0

    @property
    def name(self) -> str:
        """The name of its figures."""
        return f"asynchronous, lag {self.max_lag}" if self.max_lag else "synchronous"

    @property
    def processes(self) -> int:
        """The number of processes, without the node and the main process."""
        return self.workers + 1 + self.reference.count + self.trainer.count

    @cached_property
    def starts(self) -> Ints:
        """The number of each step's first row, and, at the end, the number of all rows."""
        return np.cumsum([0, *(step.responses for step in self.trace.steps)])

    @property
    def rows(self) -> int:
        """The number of rows of all steps."""
        return int(self.starts[-1])

    def begins_at(self, step: int) -> int:
        """The number of rows that must be trained or expired before the responses of a step begin."""
        return int(self.starts[max(0, step - self.max_lag)])

    def wanted(self, update: int) -> int:
        """The number of rows of an update."""
        return self.trace.steps[min(update, len(self.trace.steps) - 1)].responses

    @cached_property
    def response_tokens(self) -> Ints:
        """The tokens of each row's response: those of the model and of tools' answers."""
        return _joined([step.response_tokens for step in self.trace.steps])

    @cached_property
    def tokens(self) -> Ints:
        """The tokens of each row: of its prompt and its response."""
        return self.response_tokens + _joined([step.input_tokens[step.group] for step in self.trace.steps])

    @cached_property
    def made_s(self) -> Floats:
        """The seconds of each row's response: of generated tokens and tool calls."""
        seconds = [
            step.of_responses(step.turn_output_tokens * self.pace.token_s + step.tool_seconds)
            for step in self.trace.steps
        ]
        return _joined(seconds).astype(np.float64) / self.pace.speed

    @cached_property
    def reward_s(self) -> Floats:
        """The seconds from each row's append to its reward."""
        return _joined([step.reward_seconds for step in self.trace.steps]) / self.pace.speed

    @property
    def reference_token_s(self) -> float:
        """The seconds that the reference waits for a token."""
        return self.pace.reference_token_s / self.pace.speed

    @property
    def train_token_s(self) -> float:
        """The seconds that the trainer waits for a token."""
        return self.pace.train_token_s / self.pace.speed

    @cached_property
    def pixels(self) -> bool:
        """Whether rows carry patches."""
        return any(bool(step.patches.any()) for step in self.trace.steps)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a row."""
        return COLUMNS if self.pixels else COLUMNS[:-1]

    def patches(self, step: Step) -> Ints:
        """The number of patches of each prompt, scaled by `payload_scale`."""
        scaled: Ints = np.ceil(step.patches * self.payload_scale).astype(np.int64)
        return scaled

    def groups(self, step: int, worker: int) -> list[tuple[int, list[int]]]:
        """The prompts of a step for which a worker makes responses, each with the numbers of its rows."""
        group = self.trace.steps[step].group
        ends = np.searchsorted(group, np.arange(self.trace.steps[step].prompts + 1)) + self.starts[step]
        mine = range(worker, len(ends) - 1, self.workers)
        return [(prompt, list(range(ends[prompt], ends[prompt + 1]))) for prompt in mine]

    def stored_bytes(self, step: Step) -> int:
        """The bytes of a step in the plane: tokens, log-probabilities of the policy and of the reference, and each
        prompt's pixels once."""
        text = 8 * int(step.input_tokens[step.group].sum()) + 24 * int(step.response_tokens.sum())
        return text + 64 * step.responses + PATCH_BYTES * int(self.patches(step).sum())


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, arrays[0].dtype), *arrays])
