"""The seven tasks, as `tables.json` has them: read once, when first asked for, and checked then.

The file is data that was transcribed, with sources; nothing in it is computed. What it calls `assumed` the sources do
not say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bench.workloads.quantiles import Quantiles

#: Their names.
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
    """What is known of one."""

    name: str
    modality: str
    source: str
    #: Responses that share one prompt.
    group_size: int
    prompts_per_step: int
    #: No response is longer; None: not known.
    output_clip: int | None
    #: Which of its figures were not measured.
    assumed: tuple[str, ...]
    #: What was measured, as a distribution, by name.
    quantiles: Mapping[str, Quantiles]
    #: The other figures.
    figures: Mapping[str, Any]


@cache
def _tables() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(resources.files("bench.workloads").joinpath("tables.json").read_text())
    return loaded


def percentiles() -> list[float]:
    """Those that every table of quantiles has."""
    found: list[float] = _tables()["percentiles"]
    return found


@cache
def task(name: str) -> Task:
    """The task of that name. Raises ValueError if there is none."""
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
