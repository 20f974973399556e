"""The statistics of a Ray job's nodes as metrics of Ray: `ray.util.metrics`, next to those of its actors.

The actor with the process of a node reads its statistics every `EVERY_S` and reports them. Ray's agent on that host
exports them to Prometheus with the prefix `ray_`, so `dataplane_put_bytes_total` of `/metrics` is
`ray_dataplane_put_bytes_total` there, with the tag `node`.

Invariants: statistics that cannot be read now are read later; no error here ends the node.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from dataplane.client.connecting import Connecting
from dataplane.client.observing import series
from dataplane.errors import DataplaneError

log = logging.getLogger(__name__)

EVERY_S = 5.0


class Exporting:
    """A thread that reports a node's statistics until it is closed."""

    def __init__(self, address: str, every_s: float = EVERY_S) -> None:
        self._address = address
        self._every_s = every_s
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataplane-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._pass_on())
        except DataplaneError as error:  # the node has ended, and so does this
            log.info("the figures of the node at %s are passed on no more: %s", self._address, error)

    async def _pass_on(self) -> None:
        async with Connecting(self._address, None, writes=False) as plane:
            while not await asyncio.to_thread(self._ended.wait, self._every_s):
                self.export(await series(plane))

    def export(self, found: Iterable[tuple[str, str, str, Mapping[str, str], float]]) -> None:
        """Report series: for each its kind ("counter" or "gauge"), name, text, labels and value."""
        from ray.util.metrics import Counter, Gauge

        for kind, name, text, labels, value in found:
            metric = self._metrics.get(name)
            if metric is None:
                made = Counter if kind == "counter" else Gauge
                metric = self._metrics[name] = made(name, text, tag_keys=tuple(sorted(labels)))
            if kind == "gauge":
                metric.set(value, tags=dict(labels))
                continue
            key = name, tuple(sorted(labels.items()))
            more = value - self._counted.get(key, 0.0)
            self._counted[key] = value
            if more > 0:
                metric.inc(more, tags=dict(labels))

    def close(self) -> None:
        """Stop. Idempotent."""
        self._ended.set()
        self._thread.join(self._every_s)
