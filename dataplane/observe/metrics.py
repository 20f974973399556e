"""A node's statistics for Prometheus: `/metrics` over HTTP, by `prometheus_client` (the extra `metrics`).

Invariants: names end in the unit, and in `_total` for counters; the number of series is bounded for any number of
streams (`observe.snapshot`), and each label value has at most `_LABEL` characters. A scrape asks the node's loop for a
value, and formats it in a thread of its own, so requests do not wait for it.

    from dataplane.observe.metrics import families      # to serve them in another way: a Collector over a Snapshot
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dataplane.observe.latency import BOUNDS_S, Histogram
from dataplane.observe.snapshot import Snapshot, StreamFigures

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LABEL = 100  # characters

_GAUGES = {
    "memory_used_bytes": ("memory_used", "Shared memory that is stored in, pinned or reserved."),
    "memory_budget_bytes": ("memory_budget", "Shared memory that may be used."),
    "memory_peak_bytes": ("memory_peak", "The most shared memory that was used."),
    "memory_resident_bytes": ("memory_resident", "Pages behind the shared memory, free ones kept warm included."),
    "disk_used_bytes": ("disk_used", "Spilled bytes on disk."),
    "disk_budget_bytes": ("disk_budget", "Bytes on disk that may be used."),
    "shards": ("shards", "Shards that are stored."),
    "spilled_shards": ("spilled_shards", "Shards that are on disk only."),
    "pinned_bytes": ("pinned_bytes", "Bytes that clients hold views of."),
    "reserved_bytes": ("reserved_bytes", "Bytes that are promised to writers."),
    "waiting_requests": ("waiting", "Requests that wait for memory now."),
    "waiting_bytes": ("waiting_bytes", "Bytes that those ask for."),
    "copies": ("copies", "Shards of other nodes that are known here."),
    "clients": ("clients", "Connected clients."),
    "uptime_seconds": ("uptime_s", "Seconds since the node's start."),
}
_COUNTERS = {
    "waits": ("waits", "Requests that ever waited for memory."),
    "waited_seconds": ("waited_s", "Seconds that they waited, all together."),
    "put_bytes": ("put_bytes", "Bytes that were put."),
    "freed_bytes": ("freed_bytes", "Bytes that were freed."),
    "spilled_bytes": ("spilled_bytes", "Bytes written to disk to make room."),
    "restored_bytes": ("restored_bytes", "Bytes read back from there."),
    "fetched_bytes": ("fetched_bytes", "Bytes fetched from other nodes."),
    "sent_bytes": ("sent_bytes", "Bytes that other nodes fetched from here."),
}
_ROWS = {
    "appended": "Rows appended to streams that this node leads.",
    "delivered": "Rows delivered to tasks.",
    "redelivered": "Rows delivered again, after a nack or a lease that ran out.",
    "acked": "Rows that tasks were done with.",
    "expired": "Rows that expired before tasks were done with them.",
}
_NAMES = {"consume": "consume_wait"}
_LATENCIES = {
    "put": "Seconds that clients' puts took.",
    "get": "Seconds that clients' gets took.",
    "append": "Seconds that appends took, waits for room included.",
    "extend": "Seconds that extends took.",
    "consume": "Seconds that consumes waited for rows.",
    "ack": "Seconds that acks took.",
    "fetch": "Seconds that fetches of shards from other nodes took.",
    "spill": "Seconds that writes to disk took.",
    "restore": "Seconds that reads from disk took.",
}


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """The metrics, as objects of `prometheus_client`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    stats = snapshot.stats
    info = InfoMetricFamily("dataplane_node", "The node.")
    info.add_metric([], {"node": stats.node, "version": _version()})
    yield info
    for name, (field, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"dataplane_{name}", text, getattr(stats, field))
    for name, (field, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"dataplane_{name}", text, getattr(stats, field))
    yield GaugeMetricFamily("dataplane_spill_failing", "1 while the disk refuses.", int(bool(stats.spill_error)))
    asked = CounterMetricFamily("dataplane_peer_requests", "Requests between nodes.", labels=["direction"])
    asked.add_metric(["sent"], stats.asked)
    asked.add_metric(["received"], stats.answered)
    yield asked
    yield from _cluster(snapshot)
    for name, text in _ROWS.items():
        yield CounterMetricFamily(f"dataplane_rows_{name}", text, getattr(snapshot, name))
    lost = "Events that came faster than they were counted: latencies and traces lack them."
    yield CounterMetricFamily("dataplane_missed_events", lost, snapshot.missed_events)
    yield from _of_streams({_label(name): figures for name, figures in snapshot.streams.items()})
    for operation, text in _LATENCIES.items():
        name = f"dataplane_{_NAMES.get(operation, operation)}_seconds"
        yield _histogram(name, text, snapshot.latencies.get(operation, Histogram()))


def _cluster(snapshot: Snapshot) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    roles = GaugeMetricFamily("dataplane_partitions", "Partitions that this node keeps.", labels=["role"])
    roles.add_metric(["leader"], snapshot.led)
    roles.add_metric(["follower"], snapshot.followed)
    yield roles
    yield GaugeMetricFamily("dataplane_members", "Nodes of the cluster.", snapshot.members)
    answers = "1 while the coordinator answers; of a node that is alone, always."
    yield GaugeMetricFamily("dataplane_coordinator_up", answers, int(snapshot.coordinated))
    failed = "Partitions that this node took over from a leader that had gone."
    yield CounterMetricFamily("dataplane_failovers", failed, snapshot.failovers)
    yield GaugeMetricFamily("dataplane_streams", "Streams that this node leads.", snapshot.streams_in_all)


def _of_streams(streams: dict[str, StreamFigures]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    of = ["stream"]
    gauges: dict[str, tuple[str, Callable[[StreamFigures], float]]] = {
        "rows": ("Rows that are there.", lambda each: each.rows),
        "bytes": ("Bytes of those.", lambda each: each.bytes),
        "oldest_row_age_seconds": ("Seconds since the oldest came.", lambda each: each.oldest_s),
        "unfinished_rows": ("Rows in progress.", lambda each: each.unfinished),
        "oldest_unfinished_row_age_seconds": (
            "Seconds since the row began that is in progress since longest.",
            lambda each: each.oldest_unfinished_s,
        ),
        "waiting_appends": ("Appends that wait for room.", lambda each: each.waiting),
    }
    labelled = [({"stream": stream}, figures) for stream, figures in streams.items()]  # shared by all families
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"dataplane_stream_{name}", text, labels=of)
        for labels, figures in labelled:
            gauge.add_sample(gauge.name, labels, value(figures))
        yield gauge
    appended = CounterMetricFamily("dataplane_stream_appended_rows", "Rows that were appended.", labels=of)
    for labels, figures in labelled:
        appended.add_sample("dataplane_stream_appended_rows_total", labels, figures.appended)
    yield appended
    pairs = [
        ({"stream": stream, "task": _label(t)}, task)
        for stream, each in streams.items()
        for t, task in each.tasks.items()
    ]
    lag = GaugeMetricFamily("dataplane_task_lag_rows", "Rows the task is not done with.", labels=[*of, "task"])
    waiting = GaugeMetricFamily("dataplane_task_waiting_consumers", "Consumers that wait.", labels=[*of, "task"])
    for labels, task in pairs:
        lag.add_sample(lag.name, labels, task.lag)
        waiting.add_sample(waiting.name, labels, task.waiting)
    yield lag
    yield waiting
    for count in ("delivered", "redelivered", "acked", "expired"):
        text = _ROWS[count]
        counter = CounterMetricFamily(f"dataplane_task_{count}_rows", text, labels=[*of, "task"])
        for labels, task in pairs:
            counter.add_sample(f"dataplane_task_{count}_rows_total", labels, getattr(task, count))
        yield counter


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    buckets, total = [], 0
    for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.sum_s)


@functools.cache
def _version() -> str:
    from importlib import metadata  # takes 20 ms, so it is imported only where metrics are served

    with suppress(metadata.PackageNotFoundError):  # it runs from a source tree
        return metadata.version("rollout-dataplane")
    return "unknown"


def _label(name: str) -> str:
    """The name. A long one is cut, and ends in a checksum to stay distinct."""
    if len(name) <= _LABEL:
        return name
    return f"{name[: _LABEL - 9]}~{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


class Exporter:
    """An HTTP server of `/metrics`, in threads of its own, until `close`."""

    def __init__(self, host: str, port: int, snapshot: Callable[[], Snapshot]) -> None:
        """Listen. `snapshot` is called by a thread for each scrape. Raises OSError if it cannot listen, ValueError
        if `prometheus_client` is not installed."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise ValueError("metrics need prometheus_client: pip install 'rollout-dataplane[metrics]'") from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(snapshot))
        host = host or "0.0.0.0"
        self._server, self._thread = start_http_server(port, host, registry)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        """The HOST:PORT on which it listens."""

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """The collector in the registry of `prometheus_client`."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Any]:
        return families(self._snapshot())
