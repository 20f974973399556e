"""A job's figures for Prometheus, at the address that `get_metrics_endpoint()` gives.

    tq.init({"metrics": {"enabled": True}})
    requests.get(f"http://{tq.get_metrics_endpoint()}/metrics")

The process whose `init()` asks for it serves them, in threads of its own, until it leaves the job. What is served is
read as it is asked for. The names of partitions' figures are TransferQueue's, so that its dashboards show them; those
of the node begin with `dataplane_`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.errors import DataplaneError, Misuse
from dataplane.integrations import process
from dataplane.integrations.transfer_queue import settings as job_settings

if TYPE_CHECKING:
    from dataplane.integrations.transfer_queue.partition import Partition
    from dataplane.integrations.transfer_queue.session import Session

_serving: Server | None = None


def get_metrics_endpoint() -> str | None:
    """Where the job's figures are served, HOST:PORT; None where no `init()` of the job has asked for it, or none was
    called."""
    from dataplane.integrations.transfer_queue.errors import NotStarted
    from dataplane.integrations.transfer_queue.session import session

    try:
        own = session()
    except NotStarted:
        return None
    return job_settings.endpoint(own.plane, own.job)


def serve(own: Session, port: int) -> str:
    """Serve the figures of this session's job at this port, or 0 for any; where. Raises Misuse for a port in use."""
    global _serving
    if _serving is None:
        _serving = Server(_host(), port, own)
    return _serving.endpoint


def end() -> None:
    """Serve them no more. Idempotent."""
    global _serving
    serving, _serving = _serving, None
    if serving is not None:
        serving.close()


class Server:
    """What serves them. `endpoint` is where, HOST:PORT."""

    def __init__(self, host: str, port: int, own: Session) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "the figures are at /metrics")
                    return
                try:
                    page, code = "".join(lines(own)).encode(), 200
                except DataplaneError as error:
                    page, code = f"# {error}\n".encode(), 503
                self.send_response(code)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: a scrape is no news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise Misuse(
                f"metrics can not be served at {host}:{port}: {error}; leave metrics.port out for any"
            ) from error
        self.endpoint = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="dataplane-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def lines(own: Session) -> Iterator[str]:
    """The figures of the job and of this host's node, in Prometheus' text format. Raises as the plane's calls."""
    stats = own.plane.stats()
    for each in fields(stats):
        value = getattr(stats, each.name)
        if isinstance(value, int | float) and each.name != "pid":
            yield f"dataplane_{each.name} {value}\n"
    names = own.partitions()
    yield f"tq_partitions_total {len(names)}\n"
    for name in names:
        yield from _partition(own.partition(name), own.plane.tables())


def _partition(partition: Partition, tables: dict[str, Any]) -> Iterator[str]:
    label = f'partition_id="{_escaped(partition.name)}"'
    columns = list(partition.table.schema())
    rows = partition.all(columns, tags=False)
    if rows is None:
        return
    produced = float(rows.have.mean()) if rows.have.size else 0.0
    yield f"tq_partition_samples_total{{{label}}} {len(rows)}\n"
    yield f"tq_partition_production_progress{{{label}}} {produced}\n"
    for task in tables.get(partition.table.name, {}).get("tasks", []):
        taken = partition.table.taken(task)
        done = float(np.mean(taken)) if len(taken) else 0.0
        yield f'tq_partition_consumption_progress{{{label},task_name="{_escaped(task)}"}} {done}\n'


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _host() -> str:
    if process.ray_job() is None:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())
