"""Planned pipelines: stages over the columns of a stream, or chunks of a model, on workers.

A performance model (`Plan.predict`) simulates a plan. `plan` and `plan_model` search for a good plan, over partition,
placement and schedule together. `Executor` runs any plan, on processes or on Ray, with batches by reference. `Adaptive`
plans again when the work has changed. Names are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane.pipeline.adaptive import Adaptive as Adaptive
    from dataplane.pipeline.cluster import Cluster as Cluster
    from dataplane.pipeline.cluster import Host as Host
    from dataplane.pipeline.executor import Executor as Executor
    from dataplane.pipeline.executor import Result as Result
    from dataplane.pipeline.executor import Span as Span
    from dataplane.pipeline.executor import StageFailed as StageFailed
    from dataplane.pipeline.functions import Chunk as Chunk
    from dataplane.pipeline.measuring import measure as measure
    from dataplane.pipeline.measuring import measure_cluster as measure_cluster
    from dataplane.pipeline.model_search import plan_model as plan_model
    from dataplane.pipeline.models import Layer as Layer
    from dataplane.pipeline.models import Model as Model
    from dataplane.pipeline.plans import Plan as Plan
    from dataplane.pipeline.plans import Prediction as Prediction
    from dataplane.pipeline.programs import Instruction as Instruction
    from dataplane.pipeline.schedules import fifo as fifo
    from dataplane.pipeline.schedules import gpipe as gpipe
    from dataplane.pipeline.schedules import in_turn as in_turn
    from dataplane.pipeline.schedules import interleaved as interleaved
    from dataplane.pipeline.search import plan as plan
    from dataplane.pipeline.stages import Cost as Cost
    from dataplane.pipeline.stages import Pipeline as Pipeline
    from dataplane.pipeline.stages import Rows as Rows
    from dataplane.pipeline.stages import Stage as Stage

_HOMES = {
    "adaptive": ("Adaptive",),
    "cluster": ("Cluster", "Host"),
    "executor": ("Executor", "Result", "Span", "StageFailed"),
    "functions": ("Chunk",),
    "measuring": ("measure", "measure_cluster"),
    "model_search": ("plan_model",),
    "models": ("Layer", "Model"),
    "plans": ("Plan", "Prediction"),
    "programs": ("Instruction",),
    "schedules": ("fifo", "gpipe", "in_turn", "interleaved"),
    "search": ("plan",),
    "stages": ("Cost", "Pipeline", "Rows", "Stage"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dataplane.pipeline.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
