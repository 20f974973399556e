"""A workload: a trace of steps, and a step of arrays with an entry for each prompt, response or turn.

Invariants, checked when a step is created: all arrays are one-dimensional, read-only, and without negative values. The
responses of a prompt are adjacent, in the order of the prompts. Each response has at least one turn. Figures that a
task does not have are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.workloads.vision import PATCH_BYTES
from dataplane.errors import SchemaMismatch

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

#: Bytes of verl's 13 text columns, for each token of the prompt and each of the response (docs/workloads.md).
PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES = 24, 72


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A training step: its prompts, their responses, and the turns of the responses."""

    #: Its number in the trace.
    number: int
    #: Of each prompt, its tokens, those of images and video included.
    input_tokens: Ints
    #: Of each prompt, its tokens of images or a video.
    vision_tokens: Ints
    #: Of each prompt, the number of images; 1 for a video.
    images: Ints
    #: Of each prompt, its patches: float32 rows of 1176 values.
    patches: Ints
    #: Of each response, the position of its prompt; ascending.
    group: Ints
    #: Of each response, seconds from the request of its reward to the reward.
    reward_seconds: Floats
    #: Of each response, the number of turns, at least one.
    turns: Ints
    #: Of each turn, tokens added before it: the prompt's for the first, a tool's answer for the others.
    turn_input_tokens: Ints
    #: Of each turn, tokens that the model generated.
    turn_output_tokens: Ints
    #: Of each turn, seconds of the engine.
    engine_seconds: Floats
    #: Of each turn, seconds of the tool that it called; 0 for the last of a response.
    tool_seconds: Floats

    def __post_init__(self) -> None:
        for name, (_, kind) in ARRAYS.items():
            object.__setattr__(self, name, np.array(getattr(self, name), kind))  # a copy of its own
        sizes = {"prompt": self.input_tokens.size, "response": self.group.size, "turn": int(self.turns.sum())}
        for name, (per, _) in ARRAYS.items():
            self._check(name, sizes[per])
        order = np.diff(self.group, prepend=-1)
        if ((order < 0) | (order > 1)).any() or self.group.max(initial=-1) != self.prompts - 1:
            raise SchemaMismatch(
                f"group of step {self.number} has not the responses of each prompt in order", column="group"
            )

    def _check(self, name: str, rows: int) -> None:
        values: npt.NDArray[Any] = getattr(self, name)
        if values.shape != (rows,):
            raise SchemaMismatch(
                f"{name} of step {self.number} has the shape {values.shape}, not ({rows},)",
                column=name, expected=f"({rows},)", found=str(values.shape),
            )  # fmt: skip
        wrong = ~(values >= (1 if name == "turns" else 0))  # NaN is wrong too
        if wrong.any():
            row = int(np.argmax(wrong))
            raise SchemaMismatch(f"{name} of step {self.number} is {values[row]}", column=name, row=row)
        values.flags.writeable = False

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return len(self.input_tokens)

    @property
    def responses(self) -> int:
        """The number of responses."""
        return len(self.group)

    @property
    def offsets(self) -> Ints:
        """The offsets of responses in arrays of turns: response i has the turns offsets[i] to offsets[i + 1] - 1."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.turns)])

    def of_responses(self, of_turns: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """The sums of an array of turns, for each response."""
        if not len(self.turns):
            return of_turns[:0]
        sums: npt.NDArray[np.generic] = np.add.reduceat(of_turns, self.offsets[:-1])
        return sums

    @property
    def response_tokens(self) -> Ints:
        """Of each response, all tokens after the prompt: those of the model and of tools' answers."""
        total = self.of_responses(self.turn_input_tokens + self.turn_output_tokens)
        return total.astype(np.int64) - self.turn_input_tokens[self.offsets[:-1]]

    @property
    def text_bytes(self) -> int:
        """The bytes of verl's text columns of all responses."""
        prompt = int(self.input_tokens[self.group].sum())
        return PROMPT_TOKEN_BYTES * prompt + RESPONSE_TOKEN_BYTES * int(self.response_tokens.sum())

    @property
    def patch_bytes(self) -> int:
        """The bytes of the pixels, once for each prompt."""
        return PATCH_BYTES * int(self.patches.sum())

    @property
    def repeated_patch_bytes(self) -> int:
        """The bytes of the pixels, once for each response."""
        return PATCH_BYTES * int(self.patches[self.group].sum())


#: The arrays of a step: the kind of their entries, and their type.
ARRAYS: Mapping[str, tuple[str, type]] = {
    "input_tokens": ("prompt", np.int64),
    "vision_tokens": ("prompt", np.int64),
    "images": ("prompt", np.int64),
    "patches": ("prompt", np.int64),
    "group": ("response", np.int64),
    "reward_seconds": ("response", np.float64),
    "turns": ("response", np.int64),
    "turn_input_tokens": ("turn", np.int64),
    "turn_output_tokens": ("turn", np.int64),
    "engine_seconds": ("turn", np.float64),
    "tool_seconds": ("turn", np.float64),
}


@dataclass(frozen=True, eq=False)
class Trace:
    """Steps, and their source."""

    #: The task's name, or the file's.
    name: str
    #: "text", "image", "video", or "text, multi-turn".
    modality: str
    #: The source of the figures.
    source: str
    steps: tuple[Step, ...]

    def each(self, of: Callable[[Step], npt.NDArray[np.generic]]) -> Floats:
        """The results of `of` for all steps, concatenated."""
        return np.concatenate([np.zeros(0), *(of(step) for step in self.steps)]).astype(np.float64)

    @cached_property
    def multi_turn(self) -> bool:
        """Whether any response has more than one turn."""
        return any(bool((step.turns > 1).any()) for step in self.steps)
