"""Stages and chunks that workers of these tests run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.pipeline import Cost, Pipeline, Rows, Stage
from tests.processes import eventually

ROWS = Rows.of([1, 2, 3, 4, 5, 6, 7, 8])


def double(batch: Any) -> dict[str, Any]:
    return {"y": batch["x"].numpy() * 2}


def add(batch: Any) -> dict[str, Any]:
    return {"z": batch["y"].numpy() + batch["x"].numpy()}


def refuse(batch: Any) -> dict[str, Any]:
    if (batch["x"].numpy() == 5).any():
        raise ValueError("five is right out")
    return {"y": batch["x"].numpy()}


def read_on(batch: Any) -> dict[str, Any]:
    raise EOFError("no more records")


def mixed(batch: Any) -> dict[str, Any]:
    values = batch["x"].numpy()
    return {"y": values if (values < 4).all() else values.astype(np.float32)}


@dataclass(frozen=True)
class Late:
    """Ends once the file is there."""

    mark: str

    def __call__(self, batch: Any) -> dict[str, Any]:
        eventually(Path(self.mark).exists, "it may end")
        return {"late": batch["x"].numpy()}


def die_always(batch: Any) -> dict[str, Any]:
    os._exit(7)


@dataclass(frozen=True)
class Summing:
    """Makes a `Sum`."""

    mark: str

    def __call__(self) -> Sum:
        return Sum(Path(self.mark))


class Sum:
    """Adds up all that it was ever given; dies once at a 10, in its second step."""

    def __init__(self, mark: Path) -> None:
        self.mark, self.total, self.steps = mark, 0.0, 0

    def __call__(self, batch: Any) -> dict[str, Any]:
        values = batch["y"].numpy()
        if (values == 10).any() and self.steps == 1 and not self.mark.exists():
            self.mark.touch()
            os._exit(7)
        self.total += float(values.sum())
        return {"total": np.full(len(values), self.total)}

    def finish(self) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"total": np.array([self.total]), "steps": np.array([self.steps])}

    def load(self, batch: Any) -> None:
        self.total, self.steps = float(batch["total"].numpy()[0]), int(batch["steps"].numpy()[0])


@dataclass(frozen=True)
class Counting:
    output: str
    mark: str = ""

    def __call__(self) -> Count:
        return Count(self.output, self.mark)


class Count:
    """Counts its batches. With a mark it refuses one with a 5, once the mark is there."""

    def __init__(self, output: str, mark: str) -> None:
        self.output, self.mark, self.count = output, mark, 0

    def __call__(self, batch: Any) -> dict[str, Any]:
        values = batch["x"].numpy()
        if self.mark and (values == 5).any():
            eventually(Path(self.mark).exists, "it may refuse")
            raise ValueError("five is right out")
        self.count += 1
        return {self.output: np.full(len(values), self.count)}

    def state(self) -> dict[str, Any]:
        return {"count": np.array([self.count])}

    def load(self, batch: Any) -> None:
        self.count = int(batch["count"].numpy()[0])


def pipeline(first: Any = double, **more: Any) -> Pipeline:
    """Two stages, of which the second reads what the first makes and what the step came with."""
    one = Stage("double", first, ("x",), ("y",), Cost(row_s=0.01), replicas=2)
    return Pipeline([one, Stage("add", add, ("x", "y"), ("z",), Cost(row_s=0.005))], **more)


class Linear:
    """Layers that each multiply by two, with gradients of their one weight: exact in integers."""

    reads = ()

    def __init__(self, first: int, end: int) -> None:
        self.first, self.layers = first, end - first
        self.seen: dict[int, Any] = {}
        self.gradients: dict[int, Any] = {}
        self.total = 0.0
        if first == 0:
            self.reads = ("x",)

    def forward(self, micro: int, batch: Any) -> dict[str, Any]:
        self.seen[micro] = batch["x" if self.first == 0 else "h"].numpy().astype(float)
        return {"h": self.seen[micro] * 2**self.layers}

    def backward_input(self, micro: int, gradient: Any) -> dict[str, Any]:
        ones = np.ones_like(self.seen[micro])
        self.gradients[micro] = ones if gradient is None else gradient["g"].numpy()
        return {"g": self.gradients[micro] * 2**self.layers}

    def backward_weight(self, micro: int) -> None:
        self.total += float((self.seen.pop(micro) * self.gradients.pop(micro)).sum())

    def state(self) -> dict[str, Any]:
        assert not self.seen, "all weights have had their gradients"
        return {"total": np.array([self.total])}

    def load(self, batch: Any) -> None:
        self.total = float(batch["total"].numpy()[0])


def chunk(first: int, end: int) -> Linear:
    return Linear(first, end)


@dataclass(frozen=True)
class Wait:
    """Takes a millisecond a token, by the lengths of that name."""

    name: str
    output: str

    def __call__(self, batch: Any) -> dict[str, Any]:
        lengths = batch[self.name].numpy()
        time.sleep(1e-3 * float(lengths.sum()))
        return {self.output: lengths}
