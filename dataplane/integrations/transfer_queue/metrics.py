"""A job's metrics for Prometheus, at the address that `get_metrics_endpoint()` returns.

    tq.init({"metrics": {"enabled": True}})
    requests.get(f"http://{tq.get_metrics_endpoint()}/metrics")

The process whose `init()` enables them serves them, in threads of its own, until it leaves the job. Values are read
at the time of the request. The metrics of partitions have TransferQueue's names, so its dashboards show them; those
of the node begin with `dataplane_`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from dataplane.errors import Misuse
from dataplane.integrations import process
from dataplane.integrations.transfer_queue import settings as job_settings

_serving: tuple[str, Any, Any, int] | None = None
"""The address, the server, its thread, and the process that has the thread."""


def get_metrics_endpoint() -> str | None:
    """The address of the job's metrics, HOST:PORT; None if no `init()` of the job has enabled them."""
    from dataplane.integrations.transfer_queue.errors import NotStarted
    from dataplane.integrations.transfer_queue.session import session

    try:
        own = session()
    except NotStarted:
        return None
    return job_settings.endpoint(own.plane, own.job)


def serve(port: int) -> str:
    """Serve the metrics of this process's job at this port, or 0 for any. Returns the address. Raises Misuse if the
    port is in use."""
    global _serving
    if _serving is None:
        from prometheus_client import CollectorRegistry, start_http_server

        registry, host = CollectorRegistry(), _host()
        registry.register(_Figures())
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise Misuse(
                f"metrics can not be served at {host}:{port}: {error}; leave metrics.port out for any"
            ) from error
        _serving = f"{host}:{server.server_port}", server, thread, os.getpid()
    return _serving[0]


def is_served() -> bool:
    return _serving is not None


def end() -> None:
    """Stop serving; in a forked child, which does not have the server's thread, only drop the server. Idempotent."""
    global _serving
    serving, _serving = _serving, None
    if serving is not None:
        _, server, thread, pid = serving
        if pid == os.getpid():
            server.shutdown()
            thread.join()
        server.server_close()


class _Figures:
    """The metrics of the process's current job and of this host's node, as a collector for the package
    `prometheus_client`."""

    def collect(self) -> Iterator[Any]:
        """Raises as the calls of the plane."""
        from prometheus_client.core import GaugeMetricFamily as Gauge

        from dataplane.integrations.transfer_queue.session import session

        own = session()
        stats = own.plane.stats()
        for each in fields(stats):
            value = getattr(stats, each.name)
            if isinstance(value, int | float) and each.name != "pid":
                yield Gauge(f"dataplane_{each.name}", "Of this host's node.", value)
        names, tables = own.partitions(), own.plane.tables()
        yield Gauge("tq_partitions_total", "Partitions.", len(names))
        rows = Gauge("tq_partition_samples_total", "Rows.", labels=["partition_id"])
        made = Gauge("tq_partition_production_progress", "Part of rows' fields there.", labels=["partition_id"])
        done = Gauge("tq_partition_consumption_progress", "Part taken.", labels=["partition_id", "task_name"])
        for name in names:
            table = own.partition(name).table
            found = table.look(columns=list(table.schema()), tags=False)
            rows.add_metric([name], len(found))
            made.add_metric([name], _part(found.have))
            for task in tables.get(table.name, {}).get("tasks", []):
                done.add_metric([name, task], _part(table.claimed(task)))
        yield from (rows, made, done)


def _part(flags: Any) -> float:
    return float(np.mean(flags)) if np.size(flags) else 0.0


def _host() -> str:
    if process.ray_job() is None:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())
