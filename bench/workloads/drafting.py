"""A step that is built response by response, in the order of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.workloads.trace import ARRAYS, Step


class StepDraft:
    """A builder of a step. Responses are added in the order of their prompts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._columns: dict[str, list[Any]] = {name: [] for name in ARRAYS}

    def prompt(self, tokens: int, vision_tokens: int = 0, images: int = 0, patches: int = 0) -> None:
        """Add a prompt. The next responses are responses to it."""
        values = (tokens, vision_tokens, images, patches)
        for name, value in zip(("input_tokens", "vision_tokens", "images", "patches"), values, strict=True):
            self._columns[name].append(value)

    def response(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        reward_seconds: float = 0.0,
        engine_seconds: Sequence[float] = (),
        tool_seconds: Sequence[float] = (),
    ) -> None:
        """Add a response to the last prompt, with a value for each turn. Seconds are 0 by default."""
        into, none = self._columns, [0.0] * len(outputs)
        into["group"].append(len(into["input_tokens"]) - 1)
        into["turns"].append(len(outputs))
        into["reward_seconds"].append(reward_seconds)
        into["turn_input_tokens"] += inputs
        into["turn_output_tokens"] += outputs
        into["engine_seconds"] += engine_seconds or none
        into["tool_seconds"] += tool_seconds or none

    def step(self) -> Step:
        """The step of all prompts and responses. Raises SchemaMismatch."""
        arrays: dict[str, Any] = {name: np.array(self._columns[name], kind) for name, (_, kind) in ARRAYS.items()}
        return Step(self.number, **arrays)
