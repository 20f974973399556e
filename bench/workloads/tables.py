"""The seven tasks of `tables.json`, which is read once, at the first use.

The file has transcribed data with their sources, and nothing computed. Its `assumed` figures are not in the sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bench.workloads.quantiles import Quantiles

#: The names of the tasks.
TASKS = (
    "video_understanding_7b",
    "math_dapo_32b",
    "code_14b",
    "search_7b",
    "math_235b",
    "tool_use_235b",
    "image_understanding",
)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """The figures of a task."""

    name: str
    modality: str
    source: str
    #: Responses that share one prompt.
    group_size: int
    prompts_per_step: int
    #: The most tokens of a response; None: not known.
    output_clip: int | None
    #: The names of figures that were not measured.
    assumed: tuple[str, ...]
    #: Measured distributions, by name.
    quantiles: Mapping[str, Quantiles]
    #: The other figures.
    figures: Mapping[str, Any]


@cache
def _tables() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(resources.files("bench.workloads").joinpath("tables.json").read_text())
    return loaded


def percentiles() -> list[float]:
    """The percentiles of every table of quantiles."""
    found: list[float] = _tables()["percentiles"]
    return found


@cache
def task(name: str) -> Task:
    """The task of this name. Raises ValueError if there is none."""
    if name not in TASKS:
        raise ValueError(f"no task is called {name!r}; they are {', '.join(TASKS)}")
    row = _tables()[name]
    quantiles = {key: Quantiles.of(percentiles(), v, row["gaps"].get(key, ())) for key, v in row["quantiles"].items()}
    return Task(
        name=name,
        modality=row["modality"],
        source=row["source"],
        group_size=row["group_size"],
        prompts_per_step=row["prompts_per_step"],
        output_clip=row.get("output_clip"),
        assumed=tuple(row["assumed"]),
        quantiles=quantiles,
        figures=row,
    )
