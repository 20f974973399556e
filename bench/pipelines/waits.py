"""Stages and chunks that wait or compute for a given time, so that many workers fit on a few cores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataplane.pipeline import Cost, Model, profiles

ROW = 64  # float32 values of a stage's output for a row
SPIN = 96  # the side of the matrices of one unit of computation


@dataclass(frozen=True)
class Wait:
    """A stage that waits for the seconds of its cost. The column `cost.tokens` has the tokens of each row."""

    output: str
    cost: Cost

    def __call__(self, batch: Any) -> dict[str, Any]:
        lengths = batch[self.cost.tokens].numpy()
        time.sleep(self.cost.seconds(lengths))
        return {self.output: np.zeros((len(lengths), ROW), np.float32)}


@dataclass(frozen=True)
class Spin:
    """A stage that multiplies matrices on one core, `units` times for each token."""

    output: str
    units: float

    def __call__(self, batch: Any) -> dict[str, Any]:
        tokens = batch["tokens"].numpy()
        matrix = np.eye(SPIN, dtype=np.float32)
        for _ in range(int(self.units * int(tokens.sum()))):
            matrix = matrix @ matrix
        return {self.output: np.full((len(tokens), ROW), matrix[0, 0], np.float32)}


class WaitingChunk:
    """A chunk of layers of a published model, which waits `scale` times their seconds."""

    def __init__(self, model: Model, first: int, end: int, scale: float) -> None:
        each = (model.sums[end] - model.sums[first]) * scale
        self._forward_s, self._input_s, self._weight_s = (float(x) for x in each[:3])
        self._last = end == len(model.layers)
        self._first = first == 0

    def forward(self, micro: int, batch: Any) -> dict[str, Any] | None:
        time.sleep(self._forward_s)
        return None if self._last else {"hidden": np.zeros((1, ROW), np.float32)}

    def backward_input(self, micro: int, gradient: Any) -> dict[str, Any] | None:
        time.sleep(self._input_s)
        return None if self._first else {"gradient": np.zeros((1, ROW), np.float32)}

    def backward_weight(self, micro: int) -> None:
        time.sleep(self._weight_s)

    def state(self) -> dict[str, Any]:
        return {"none": np.zeros(1, np.int8)}  # without a state, a plan could not move the chunk to another worker

    def load(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class Build:
    """Creates the chunks of a published model, `scale` times as slow."""

    name: str
    scale: float

    def __call__(self, first: int, end: int) -> WaitingChunk:
        return WaitingChunk(profiles.model(self.name), first, end, self.scale)
