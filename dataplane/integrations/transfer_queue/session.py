"""The membership of this process in a job: its plane, the job's settings, and its sampler.

Invariants: there is no controller. A process has one session, and a forked child has its own. All processes of a job
use the same node or cluster; others raise. `close()` deletes the partitions only in the process whose `init()` was the
job's first; in other processes it only leaves the job.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from dataplane.batch import images
from dataplane.client.sync import Plane
from dataplane.config import environment
from dataplane.errors import Closed, DataplaneError, Misuse, OutcomeUnknown, OwnerDied, PeerUnavailable
from dataplane.integrations import process
from dataplane.integrations.transfer_queue import job_registry, module_patch
from dataplane.integrations.transfer_queue import settings as job_settings
from dataplane.integrations.transfer_queue.errors import InvalidSetting, NotStarted
from dataplane.integrations.transfer_queue.partition import JobPartition, prefix
from dataplane.integrations.transfer_queue.settings import JOB_VARIABLE, Job, JobSettings

if TYPE_CHECKING:
    from transfer_queue import BaseSampler

_NOT_STARTED = (
    "no data plane is known to this process: call transfer_queue.init() here, or first in the process that starts this"
    " one; or start a node (`dataplane node`) and put its address into DATAPLANE_ADDRESS"
)
_NO_JOB = (
    f"this process does not know whose job it is of: call transfer_queue.init(job=...) here, start it from a process"
    f" that has called init(), or put the job's name into its environment as {JOB_VARIABLE}; the node is that of"
    " DATAPLANE_ADDRESS"
)

_CLOSED = "transfer_queue.close() has ended the job of this process: call transfer_queue.init() again"

_KEPT = 1024  # partitions that are remembered

_lock = threading.Lock()
_session: Session | None = None
_pid = 0
_closed = False
"""Whether this process has ended its job, and has called no `init()` since."""


class Session:
    """The state that the calls of this process use. `first`: this process wrote the job's settings."""

    def __init__(
        self, plane: Plane, job: Job, settings: JobSettings, sampler: BaseSampler | None, *, first: bool
    ) -> None:
        self.plane = plane
        self.job = job
        self.settings = settings
        self.sampler = sampler or settings.made()
        self.first = first
        self.left = False
        """Whether this process has left the job."""
        self._by_ray = process.by_ray()
        self._partitions: dict[str, JobPartition] = {}

    def check(self) -> None:
        """Raises NotStarted if its plane was that of a Ray job that has ended."""
        if self._by_ray is not None and self._by_ray != process.ray_job():
            raise NotStarted(
                "the Ray job that transfer_queue.init() was called in has ended, with all rows: call init() again,"
                " after ray.init()"
            )

    def partition(self, name: str) -> JobPartition:
        """The partition with this name. Raises ValueError for an invalid name."""
        found = self._partitions.get(name)
        if found is None:
            if len(self._partitions) >= _KEPT:
                self._partitions.clear()
            lost = partial(self._partitions.pop, name, None)
            found = self._partitions[name] = JobPartition(self.plane, self.job.name, name, lost, self.partitions)
        return found

    def partitions(self) -> list[str]:
        own = prefix(self.job.name)
        return [name.removeprefix(own) for name in self.plane.tables() if name.startswith(own)]


def init(conf: Any = None, *, job: str | None = None) -> Any:
    """Join the job, and start a plane for it if there is none. Returns the configuration in use.

    With Ray initialised, each Ray node gets a node. Without it, `$DATAPLANE_ADDRESS` names a node, or one is started
    for this process and its children. Of `conf`, a mapping as TransferQueue takes it, these settings are used:
    `controller.sampler`, `controller.polling_mode`, `metrics`, and `backend.Dataplane` with `dense`, `job` and those of
    the nodes: the arguments of `NodeConfig`, `transports` and `key`.
    The settings of the first `init()` hold for the whole job, except samplers of the user's own.

    job: its name, as `backend.Dataplane.job`: only processes with the same name share keys. None: $DATAPLANE_JOB, or
        the name of the Ray job, or else a job of this process and its children.

    Raises InvalidSetting for an invalid `conf`, Misuse if it contradicts the job's first `init()` and for a second job
    without a name, PeerUnavailable, Rejected (a host cannot meet the settings).
    """
    global _closed
    wanted, own = job_settings.read(conf, dense=module_patch.dense())
    named, port = job_settings.job_name(conf, job), job_settings.metrics_port(conf)
    with _lock, ExitStack() as undo:
        posted = job_registry.read()
        if posted is None:
            job_registry.check()
        plane, started = _plane(job_settings.nodes(wanted.nodes), posted, undo)
        chosen = named or _job(posted) or job_settings.new_job()
        settings = _join(plane, chosen, conf, wanted, own, started, undo)
        if port is not None:
            if _serving is None:
                undo.callback(_end_metrics)
            job_settings.tell_endpoint(plane, chosen, _serve_metrics(port))
        agreed = job_settings.merged(conf, settings, chosen, job_settings.endpoint(plane, chosen))
        if posted is None:
            job_registry.post(chosen, agreed)
        undo.pop_all()
        _closed = False
    if "verl" in sys.modules:  # its controller opens images, which Ray pickles before anything is stored
        images.pickle_as_files()
    return agreed


def _plane(given: job_settings.Nodes, posted: job_registry.Posted | None, undo: ExitStack) -> tuple[Plane, bool]:
    """The plane of this process, and whether the nodes of the Ray job were started for it. `undo` ends a node of this
    process that was."""
    process.notice_end()
    if posted is not None:
        posted.attach()
    if process.ray_job() is not None and environment().address is None:
        from dataplane.integrations import ray as nodes

        running = nodes.running()
        if posted is None or not running:
            nodes.up(given.config, transports=given.transports, key=given.key, keep=False)
        else:  # whose settings `JobSettings` has
            nodes.up(keep=False)
        return process.plane(), not running
    if (given.transports or given.key) and process.would_start():
        raise InvalidSetting(
            "backend.Dataplane.transports and .key are for the nodes of a Ray job: call ray.init() first"
        )
    if not process.is_connected():
        undo.callback(process.close)
    return process.start(given.config), False


def _join(
    plane: Plane, job: Job, conf: Any, wanted: JobSettings, sampler: BaseSampler | None, started: bool, undo: ExitStack
) -> JobSettings:
    """Make the session. Returns the settings of the job. `undo` restores the former state; only the process that wrote
    the settings ends nodes that were `started`, since others may use them."""
    global _session, _pid
    before = _session if _session is not None and _pid == os.getpid() and _session.job == job else None
    settings, first = job_settings.agree(plane, job, wanted, partial(undo.callback, _forget, plane, job, started))
    job_settings.compare(conf, wanted, settings)
    if sampler is None and before is not None and settings == before.settings:
        sampler = before.sampler
    made = Session(plane, job, settings, sampler, first=first or (before is not None and before.first))
    undo.callback(_restore, _session, _pid, os.environ.get(JOB_VARIABLE))
    job.export()
    _session, _pid = made, os.getpid()
    return settings


def _forget(plane: Plane, job: Job, started: bool) -> None:
    with suppress(DataplaneError):
        job_settings.forget(plane, job)
    if started:
        from dataplane.integrations import ray as nodes

        nodes.down()


def _restore(before: Session | None, pid: int, named: str | None) -> None:
    global _session, _pid
    _session, _pid = before, pid
    os.environ.pop(JOB_VARIABLE, None)
    if named is not None:
        os.environ[JOB_VARIABLE] = named


def _job(posted: job_registry.Posted | None) -> Job | None:
    return posted.job if posted is not None else job_settings.known_job()


def has_rows() -> bool:
    """Whether this process has a session, or this Ray job has one in another process."""
    if joined() is not None:
        return True
    from dataplane.integrations import ray as nodes

    job = job_settings.known_job()
    return job is not None and nodes.running() and job_settings.find(process.plane(), job) is not None


def joined() -> Session | None:
    """The session of this process, if there is one."""
    return _session if _pid == os.getpid() else None


def session() -> Session:
    """The session of this process; if there is none, it joins the job that it knows of. Raises NotStarted."""
    global _session, _pid
    found = _session
    if found is None and _closed:
        raise NotStarted(_CLOSED)
    if found is not None and _pid == os.getpid():
        found.check()
        return found if found.first or not process.has_ended(found.plane) else _joined_again(found)
    with _lock:
        if _session is None or _pid != os.getpid():
            posted = job_registry.read()
            job = _job(posted)
            try:
                if posted is not None:
                    posted.attach()
                plane = process.plane()
            except Misuse as error:
                raise NotStarted(f"{_NOT_STARTED} ({error})") from error
            if job is None:
                raise NotStarted(_NO_JOB)
            settings = job_settings.find(plane, job) or JobSettings(dense=module_patch.dense())
            sampler = _session.sampler if _session is not None else None  # the parent's, in a forked child
            _session, _pid = Session(plane, job, settings, sampler, first=False), os.getpid()
        return _session


def _joined_again(left: Session) -> Session:
    """The session at the node that runs now instead of that of `left`. If there is none, or no `init()` of the job was
    called there, `left`: its calls raise."""
    global _session
    with _lock, suppress(DataplaneError):
        if _session is left:
            plane = process.plane()
            settings = job_settings.find(plane, left.job)
            if settings is not None:
                sampler = left.sampler if settings == left.settings else None
                _session = Session(plane, left.job, settings, sampler, first=False)
    return _session or left


def close() -> None:
    """Leave the job. The first process of the job also deletes all partitions, unless their node has ended, and its
    calls raise NotStarted until it calls `init()` again. The index blocks stay, because other processes know them.
    Idempotent.

    The plane stays open, because other integrations of this process may use it; it ends with the process. If the
    calls of `transfer_queue` were replaced for this job (`module_patch.watch`), they are TransferQueue's again.
    """
    global _session, _closed
    with _lock:
        left, _session = _session, None
        _closed = left.first if left is not None and _pid == os.getpid() else _closed
    module_patch.leave()
    if left is None or _pid != os.getpid():
        return
    left.left = True
    images.pickle_as_pixels()
    end_threads()
    _end_metrics()
    if left.first:
        with suppress(PeerUnavailable, OutcomeUnknown, OwnerDied, Closed), ExitStack() as steps:
            steps.callback(job_registry.clear)
            steps.callback(job_settings.forget, left.plane, left.job)
            for name in left.partitions():
                steps.callback(left.partition(name).drop)


# A job's metrics for Prometheus, at the address that `get_metrics_endpoint()` returns.
#
# The process whose `init()` enables them serves them, in threads of its own, until it leaves the job. Values are read
# at the time of the request. The metrics of partitions have TransferQueue's names, so its dashboards show them; those
# of the node begin with `dataplane_`.

_serving: tuple[str, Any, Any, int] | None = None
"""The address, the server, its thread, and the process that has the thread."""


def get_metrics_endpoint() -> str | None:
    """The address of the job's metrics, HOST:PORT; None if no `init()` of the job has enabled them."""
    try:
        own = session()
    except NotStarted:
        return None
    return job_settings.endpoint(own.plane, own.job)


def _serve_metrics(port: int) -> str:
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


def _end_metrics() -> None:
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


# The asynchronous twins: each runs its synchronous call in a thread, so that any event loop can await it.
#
# Calls wait in pools of their own, so that a thread is free for the call for which they wait: fetches wait for puts,
# and puts wait for clears, which make room. A call that is cancelled is executed anyway.

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = {"calls": 8, "puts": 8, "waits": 64}

_pools_lock = threading.Lock()
_pools: dict[str, ThreadPoolExecutor] = {}
_pools_of = 0  # the process that has their threads


def twin(call: Callable[P, T], pool: str = "calls") -> Callable[P, Coroutine[Any, Any, T]]:
    """The call as a coroutine function. pool: see `executor`."""

    @wraps(call)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run(partial(call, *args, **kwargs), pool)

    awaited.__name__ = f"async_{call.__name__}"
    awaited.__qualname__ = call.__qualname__.replace(call.__name__, awaited.__name__)
    return awaited


async def run(call: Callable[[], T], pool: str = "calls") -> T:
    return await asyncio.get_running_loop().run_in_executor(executor(pool), call)


def executor(name: str) -> ThreadPoolExecutor:
    """The pool of threads: "puts" for puts, which may wait for room, "waits" for calls that may wait for puts, "calls"
    for all others."""
    global _pools_of
    with _pools_lock:
        if _pools_of != os.getpid():  # a forked child has none of the threads
            _pools_of = os.getpid()
            _pools.clear()
        if name not in _pools:
            _pools[name] = ThreadPoolExecutor(_THREADS[name], thread_name_prefix=f"dataplane-transfer-queue-{name}")
        return _pools[name]


def end_threads() -> None:
    """End the threads after their current calls. Idempotent; they start again when needed."""
    with _pools_lock:
        pools = list(_pools.values()) if _pools_of == os.getpid() else []
        _pools.clear()
    for pool in pools:
        pool.shutdown()


def _forked() -> None:
    global _lock, _pools_lock
    _lock, _pools_lock = threading.Lock(), threading.Lock()  # a thread of the parent may have held them


os.register_at_fork(after_in_child=_forked)
