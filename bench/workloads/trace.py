"""What a workload is: a trace of steps, and a step as arrays with an entry a prompt, a response or a turn.

What always holds, and is checked when a step is made: all arrays are one-dimensional, read-only, without negative
values; the responses of one prompt are neighbours, in the order of the prompts; each has one turn at least. What a
task has no figures for is zero.
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
    """One training step: its prompts, their responses, the turns of those."""

    #: The number the trace gives it.
    number: int
    #: Of each prompt, its tokens, those of images and video included.
    input_tokens: Ints
    #: Of each prompt, how many of those are images' or a video's.
    vision_tokens: Ints
    #: Of each prompt, how many images, or 1 for a video.
    images: Ints
    #: Of each prompt, its patches: float32 rows of 1176 values.
    patches: Ints
    #: Of each response, the position of its prompt; ascending.
    group: Ints
    #: Of each response, seconds until its reward is known, from when it is asked for.
    reward_seconds: Floats
    #: Of each response, how many turns it has, at least one.
    turns: Ints
    #: Of each turn, tokens that came in just before it: the prompt's for the first, a tool's answer for the others.
    turn_input_tokens: Ints
    #: Of each turn, tokens the model made.
    turn_output_tokens: Ints
    #: Of each turn, seconds the engine took.
    engine_seconds: Floats
    #: Of each turn, seconds the tool took that it called; 0 for the last of a response.
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
        """How many."""
        return len(self.input_tokens)

    @property
    def responses(self) -> int:
        """How many."""
        return len(self.group)

    @property
    def offsets(self) -> Ints:
        """Where each response's turns begin, and the end: those of response i are offsets[i] up to offsets[i + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.turns)])

    def of_responses(self, of_turns: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """The sums of an array of turns, for each response."""
        if not len(self.turns):
            return of_turns[:0]
        sums: npt.NDArray[np.generic] = np.add.reduceat(of_turns, self.offsets[:-1])
        return sums

    @property
    def response_tokens(self) -> Ints:
        """Of each response, all tokens after the prompt: those the model made, and what tools answered."""
        total = self.of_responses(self.turn_input_tokens + self.turn_output_tokens)
        return total.astype(np.int64) - self.turn_input_tokens[self.offsets[:-1]]

    @property
    def text_bytes(self) -> int:
        """Of all responses' text columns in verl."""
        prompt = int(self.input_tokens[self.group].sum())
        return PROMPT_TOKEN_BYTES * prompt + RESPONSE_TOKEN_BYTES * int(self.response_tokens.sum())

    @property
    def patch_bytes(self) -> int:
        """Of the pixels, once a prompt."""
        return PATCH_BYTES * int(self.patches.sum())

    @property
    def repeated_patch_bytes(self) -> int:
        """Of the pixels, once a response, as they are where each response carries its own."""
        return PATCH_BYTES * int(self.patches[self.group].sum())


#: The arrays of a step: what each has an entry of, and its type.
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
    """Steps, and where they come from."""

    #: The task's name, or the file's.
    name: str
    #: "text", "image", "video", or "text, multi-turn".
    modality: str
    #: Where the figures are from.
    source: str
    steps: tuple[Step, ...]

    def each(self, of: Callable[[Step], npt.NDArray[np.generic]]) -> Floats:
        """What `of` gives of every step, in one array."""
        return np.concatenate([np.zeros(0), *(of(step) for step in self.steps)]).astype(np.float64)

    @cached_property
    def multi_turn(self) -> bool:
        """Whether any response has more than one turn."""
        return any(bool((step.turns > 1).any()) for step in self.steps)
