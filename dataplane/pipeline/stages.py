"""The definition of a pipeline: stages over the columns of a stream, the cost of each, and the rows of a step.

A stage reads columns of a micro-batch and produces columns for the same rows. It follows the stages that produce its
inputs, and those in `after`. Consecutive steps are ordered: the stages of step s begin after all of step s - 1 - lag
has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a stage for a micro-batch: seconds by its rows and their tokens."""

    fixed_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    #: For each token of the longest row: rows that are made side by side take as long as the longest.
    longest_s: float = 0.0
    #: The name of the lengths in `Rows` that count as tokens.
    tokens: str = "tokens"
    #: Cores that the stage uses; 0 if it waits, or computes elsewhere.
    cores: float = 0.0

    def seconds(self, lengths: Lengths) -> float:
        """The seconds of a micro-batch whose rows have this many tokens each."""
        longest = self.longest_s * float(lengths.max(initial=0)) if self.longest_s else 0.0
        return self.fixed_s + self.row_s * len(lengths) + self.token_s * float(lengths.sum()) + longest


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    function: called with a `Batch` of the columns `inputs`, in a process that has imported its module; returns the
        columns `outputs`, one row for each input row.
    factory: whether `function` is called once in each worker, without arguments, and returns the function.
    stateful: whether it depends on its earlier calls. The factory's object then has `state()`, called after each step,
        which returns columns, and `load(batch)`, by which another worker continues.
    replicas: the largest number of workers that run it at the same time; None: any number.
    whole: whether it begins only when all micro-batches of the step exist.
    ordered: whether micro-batches pass it in order.
    after: stages that it follows without reading their outputs.
    resource: the required resource of its workers' hosts.
    output_bytes, token_bytes: of the output for each row, and additionally for each token.
    worker_bytes: the memory of the stage in each of its workers.
    """

    name: str
    function: Callable[..., Any] | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    cost: Cost = Cost()
    factory: bool = False
    stateful: bool = False
    replicas: int | None = 1
    whole: bool = False
    ordered: bool = False
    after: tuple[str, ...] = ()
    resource: str = ""
    output_bytes: float = 0.0
    token_bytes: float = 0.0
    worker_bytes: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """Stages, in an order in which each follows those that it needs.

    lag: the number of steps in progress beside the oldest one. Raises ValueError for a negative lag, equal names or
    outputs of stages, and a stage that follows one not before it.
    """

    stages: tuple[Stage, ...]
    lag: int = 0

    def __init__(self, stages: Sequence[Stage], lag: int = 0) -> None:
        object.__setattr__(self, "stages", tuple(stages))
        object.__setattr__(self, "lag", lag)
        names = [stage.name for stage in self.stages]
        made = [name for stage in self.stages for name in stage.outputs]
        if not names or len(set(names)) < len(names) or len(set(made)) < len(made):
            raise ValueError("a pipeline has stages, each with a name and with columns of its own")
        if lag < 0:
            raise ValueError(f"a lag is 0 or more, not {lag}")
        _ = self.needs

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each stage follows, by number."""
        by_name = {stage.name: i for i, stage in enumerate(self.stages)}
        made = {name: i for i, stage in enumerate(self.stages) for name in stage.outputs}
        found = []
        for i, stage in enumerate(self.stages):
            unknown = [name for name in stage.after if name not in by_name]
            needed = {made[name] for name in stage.inputs if name in made} | {
                by_name.get(name, i) for name in stage.after
            }
            if unknown or any(other >= i for other in needed):
                raise ValueError(f"{stage.name} follows stages that do not come before it: {unknown or sorted(needed)}")
            found.append(tuple(sorted(needed)))
        return tuple(found)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The columns that the rows of a step must have."""
        made = {name for stage in self.stages for name in stage.outputs}
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.inputs if name not in made))

    @cached_property
    def last(self) -> tuple[int, ...]:
        """The stages that no stage follows."""
        followed = {i for needed in self.needs for i in needed}
        return tuple(i for i in range(len(self.stages)) if i not in followed)


@dataclass(frozen=True)
class Rows:
    """The rows of a step, for costs: their lengths, int64 `[rows]` under each name, and their groups.

    group: int64 `[rows]`; rows of a group stay in one micro-batch. None: each row is a group.
    Raises ValueError without rows.
    """

    lengths: Mapping[str, Lengths]
    group: Lengths | None = None

    def __post_init__(self) -> None:
        if not len(self):
            raise ValueError("a step has a row or more")

    @classmethod
    def of(cls, tokens: Sequence[int] | Lengths, group: Sequence[int] | Lengths | None = None, **more: Any) -> Rows:
        """Rows with this many `tokens`; `more` are other lengths."""
        lengths = {name: np.asarray(values, np.int64) for name, values in {"tokens": tokens, **more}.items()}
        return cls(lengths, None if group is None else np.asarray(group, np.int64))

    def __len__(self) -> int:
        return len(next(iter(self.lengths.values())))

    def tokens(self, name: str) -> Lengths:
        """The lengths with this name, int64 `[rows]`. Raises ValueError for a name that the rows do not have."""
        if name not in self.lengths:
            raise ValueError(f"the rows have {', '.join(self.lengths)}, and no {name}")
        return self.lengths[name]

    @cached_property
    def groups(self) -> list[Lengths]:
        """The rows of each group."""
        if self.group is None:
            return [np.array([i]) for i in range(len(self))]
        order = np.argsort(self.group, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.group[order])) + 1)
