"""A node's statistics for monitoring, as a frozen value: shown by `/metrics`, the page and `ray.util.metrics`.

Its size is bounded for any number of streams: the `NAMED` streams with the most lag are reported by name, and the rest
is summed as `OTHERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from dataplane.observe.latency import Histogram
from dataplane.observe.stats import Stats

NAMED = 50
"""The number of streams that are reported by name."""

PAIRS = 200
"""The number of tasks that are reported by name, of all these streams together."""

OTHERS = "(others)"
"""The name of the sum of the streams or tasks that are not reported by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigures:
    """A task of a stream on this node. lag: rows that the task is not done with. waiting: consumers that wait. Other
    counts are of rows while this node led the stream; for the others' sum, since its start."""

    lag: int = 0
    waiting: int = 0
    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """A stream that this node leads. oldest_s: the age of the oldest row; unfinished: rows in progress; waiting:
    appends that wait."""

    rows: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    unfinished: int = 0
    oldest_unfinished_s: float = 0.0
    waiting: int = 0
    appended: int = 0
    tasks: Mapping[str, TaskFigures] = field(default_factory=dict)

    @property
    def lag(self) -> int:
        """The lag of the task that has the most."""
        return max((task.lag for task in self.tasks.values()), default=0)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StreamFigures:
        """The figures that a node sent."""
        tasks = {name: TaskFigures(**_known(TaskFigures, each)) for name, each in values.get("tasks", {}).items()}
        return cls(**_known(cls, {**values, "tasks": tasks}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The result of `dataplane.client.observing.snapshot`. Totals count from the node's start and never decrease.

    stats: the node's statistics, without those of streams and tables.
    streams: by name, the `NAMED` with the most lag, and `OTHERS` for the sum of the rest.
    streams_in_all: the number of streams that this node leads.
    appended, delivered, redelivered, acked, expired: rows of all streams that this node leads or led.
    led, followed: partitions; failovers: partitions whose lead this node took over.
    members: nodes of the cluster, 1 outside a cluster; coordinated: whether the coordinator answers.
    latencies: by operation, see `latency.MEASURED`; missed_events: events that histograms and traces lack.
    """

    stats: Stats
    streams: Mapping[str, StreamFigures] = field(default_factory=dict)
    streams_in_all: int = 0
    appended: int = 0
    delivered: int = 0
    redelivered: int = 0
    acked: int = 0
    expired: int = 0
    led: int = 0
    followed: int = 0
    failovers: int = 0
    members: int = 1
    coordinated: bool = True
    latencies: Mapping[str, Histogram] = field(default_factory=dict)
    missed_events: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Snapshot:
        """The snapshot that a node sent. Values unknown to this version are left out."""
        made = {
            "stats": Stats.of(values["stats"]),
            "streams": {name: StreamFigures.of(each) for name, each in values.get("streams", {}).items()},
            "latencies": {name: Histogram.of(each) for name, each in values.get("latencies", {}).items()},
        }
        return cls(**_known(cls, {**values, **made}))


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that this version knows."""
    names = _names(kind)
    return {name: value for name, value in values.items() if name in names}


@cache
def _names(kind: Any) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind))
