"""Latencies as histograms with fixed bounds: computed from the events of rings, in fixed memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataplane.observe.ring import CODE, Events

BOUNDS_S = (
    *(10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Upper bounds of the buckets in seconds. One more bucket has no bound."""

MEASURED = ("put", "get", "append", "extend", "consume", "ack", "fetch", "spill", "restore")
"""The operations that have a histogram."""

_BOUNDS_NS = np.array([round(bound * 1e9) for bound in BOUNDS_S], np.uint64)


@dataclass(frozen=True, slots=True)
class Histogram:
    """The latencies of an operation. counts: of each bucket of `BOUNDS_S` and of those above, not cumulative; sum_s: of
    all latencies."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """The number of operations."""
        return sum(self.counts)

    def quantile(self, part: float) -> float:
        """The approximate seconds within which the share `part` (0 to 1) of the operations ended: linear within a
        bucket, like Prometheus's `histogram_quantile`, and at most the last bound. NaN without any."""
        due = part * self.count
        seen, below = 0, 0.0
        for count, bound in zip(self.counts, (*BOUNDS_S, BOUNDS_S[-1]), strict=True):
            if count and seen + count >= due:
                return below + (bound - below) * (due - seen) / count
            seen, below = seen + count, bound
        return float("nan")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Histogram:
        """The histogram of plain values (`Latencies.values`)."""
        return cls(tuple(values["counts"]), float(values["sum_s"]))


class Latencies:
    """The histograms of a node, for its clients' requests and its own work."""

    def __init__(self) -> None:
        self._counts = np.zeros((len(MEASURED), len(BOUNDS_S) + 1), np.int64)
        self._sums_ns = np.zeros(len(MEASURED), np.int64)

    def fold(self, events: Events) -> None:
        """Count events. Those of other operations are ignored."""
        for row, name in enumerate(MEASURED):
            of = events[events["code"] == CODE[name]]
            of = of[of["ended"] >= of["began"]]
            if len(of):
                took = of["ended"] - of["began"]
                buckets = np.searchsorted(_BOUNDS_NS, took, side="left")
                self._counts[row] += np.bincount(buckets, minlength=len(BOUNDS_S) + 1)
                self._sums_ns[row] += int(np.minimum(took, np.uint64(1 << 53)).sum())

    def values(self) -> dict[str, dict[str, Any]]:
        """The histograms by operation, as plain values of a `Histogram`."""
        return {
            name: {"counts": self._counts[row].tolist(), "sum_s": int(self._sums_ns[row]) / 1e9}
            for row, name in enumerate(MEASURED)
        }
