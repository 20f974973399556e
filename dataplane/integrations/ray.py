"""Nodes of a cluster on Ray nodes: a node on each Ray node, and `dataplane.connect("ray")` in every task and actor.

    ray.init()
    dataplane.integrations.ray.up()         # once, in the driver

An actor of the job, the manager, creates an actor on each live Ray node, including later ones. That actor starts the
process of the node, which ends with it. The nodes of the driver's host run the cluster's etcd (`cluster.seeds`), which
the extra installs there.

Invariants: the nodes belong to one Ray job, share a key that was created for it, and end with the job, or with the
process that called `up`. If the process of a node ends, another node is started in its place. Ray's list of live Ray
nodes decides only where nodes run.

The actor with the process of a node reads its statistics every `EVERY_S` and reports them as metrics of Ray
(`Exporting`), next to those of its actors: `dataplane_put_bytes_total` of `/metrics` is `ray_dataplane_put_bytes_total`
there, with the tag `node`. If the statistics cannot be read, they are read at the next interval; no such error ends the
node.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane.client.connecting import Connecting
from dataplane.client.embedded import ClusterNode, claimed_directory, new_key
from dataplane.client.observing import series
from dataplane.client.sync import connect
from dataplane.clock import Deadline
from dataplane.config import ClusterConfig, NodeConfig, check_host
from dataplane.errors import DataplaneError, Misuse, PeerUnavailable, Rejected
from dataplane.integrations import process

if TYPE_CHECKING:
    from ray.actor import ActorHandle


log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at the list of Ray nodes
_AGAIN_S = 1.0  # before another try
_START_S = 60.0
_KNOWN_S = 0.02  # between reads of the members
_AT_ONCE = 16  # calls of a host: one waits for its end, and each `up` for its members
_DOWN_S = 10.0
_keeping: Any = None  # the manager's handle: it would end with its last


def up(
    config: NodeConfig | None = None,
    *,
    transports: Sequence[str] = (),
    key: str | os.PathLike[str] | None = None,
    timeout: float = _START_S,
    keep: bool = True,
) -> None:
    """Start a node on every Ray node of this Ray job, and return once each runs and knows the others, so that a put of
    one can be read on any. The nodes end with the process that calls this: call it in the driver, or in the actor that
    drives the job. Running nodes are unchanged.

    config: the settings of each node. None: chosen for each host.
    transports: the data transports between them, the preferred one first. Empty: chosen for each host.
    key: the file with their key, on this host. None: a key is created for the job. Nodes with a `data_dir` keep durable
        streams and tables for the next job, on the same driver's host, and need the key of the first.
    timeout: seconds to wait until they run.
    keep: after a failure, try again until `down`. False: undo everything, so that the next call may have other
        settings.

    Raises Misuse if Ray has not been initialised or the key cannot be read or is missing, Rejected if a host cannot
    meet the settings, PeerUnavailable if a node does not run, or does not know the others, in time.
    """
    global _keeping
    ray, manager = _ray(), _manager()
    if manager is None and config is not None and config.data_dir is not None and key is None:
        raise Misuse(
            "nodes with a data_dir need the same key in every job: key=FILE; `dataplane keygen FILE` makes one"
        )
    first = manager is None
    if manager is None:
        _check_seed(config)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
        here = ray.get_runtime_context().get_node_id()
        made = ray.remote(_DataplaneManager).options(
            name=_name(), get_if_exists=True, scheduling_strategy=_on(here), **options
        )
        _keeping = manager = made.remote(config, new_key() if key is None else _read(key), tuple(transports))
    elif config is not None or transports or key is not None:
        log.warning("the nodes of this Ray job run already and keep their own settings: config is not used")
    try:
        _ask(manager.up.remote(timeout), timeout)
    except (Rejected, PeerUnavailable):
        if first and not keep:
            down()
        raise


def down() -> None:
    """End the nodes of this Ray job with all their data, soon after this returns. The plane of this process's
    integrations is closed, because its node may still answer for a moment, and would not know the nodes of the next
    `up`. Idempotent."""
    global _keeping
    _keeping = None
    if process.by_ray() is not None:
        with suppress(DataplaneError):
            process.close()
    ray, manager = _ray(), _manager()
    if manager is not None:
        ray.kill(manager)
    deadline = Deadline.after(_DOWN_S)
    while _manager() is not None and deadline.remaining_s > 0:  # its name would be mistaken for another
        time.sleep(0.01)


def running() -> bool:
    """Whether this Ray job has nodes. Raises Misuse if Ray has not been initialised."""
    return _manager() is not None


def find(config: NodeConfig | None = None, dead: str = "") -> str:
    """Return the address of the node on this Ray node, for `connect("ray")`: waits until the node runs, at another
    address than `dead`. In a driver that has not called `up`, calls `up`. Raises as `up`."""
    ray, manager = _ray(), _manager()
    context = ray.get_runtime_context()
    if manager is None:
        if context.worker.mode != ray.SCRIPT_MODE:
            raise PeerUnavailable("no nodes run in this Ray job: call dataplane.integrations.ray.up()", address="ray")
        up(config)
        manager = _manager()  # which another process of the job may have made first
    elif config is not None:
        log.warning("the nodes of this Ray job run already and keep their own settings: config is not used")
    if manager is None:
        raise PeerUnavailable("the nodes of this Ray job have ended: connect again", address="ray")
    return _ask(manager.where.remote(context.get_node_id(), dead, _START_S), _START_S)


def _ask(asked: Any, timeout_s: float) -> str:
    """The answer of the manager. Raises Rejected if a host cannot meet the settings, PeerUnavailable if a node
    does not run or the manager does not answer in time."""
    import ray
    from ray.exceptions import RayError

    try:
        answer, why, refused = ray.get(asked, timeout=timeout_s + 5.0)
    except RayError as error:
        raise PeerUnavailable(f"the nodes of this Ray job can not be reached: {error}", address="ray") from error
    if refused:
        raise Rejected(why)
    if why:
        raise PeerUnavailable(f"not every node runs that should: {why}", address="ray")
    return str(answer)


def _read(key: str | os.PathLike[str]) -> bytes:
    try:
        return Path(key).read_bytes()
    except OSError as error:
        raise Misuse(f"the key can not be read: {error}; `dataplane keygen FILE` makes one") from error


def _ray() -> Any:
    """Ray, initialised. Raises Misuse if it is not, or is not installed."""
    try:
        import ray
    except ImportError as error:
        raise Misuse("Ray is not installed: pip install 'rollout-dataplane[ray]'") from error
    if not ray.is_initialized():
        raise Misuse("Ray has not been initialised in this process: call ray.init() first")
    return ray


def _manager() -> ActorHandle | None:
    """The manager of this job, if there is one. Raises as `_ray`."""
    with suppress(ValueError):  # no manager exists
        found: ActorHandle = _ray().get_actor(_name())
        return found
    return None


def _name() -> str:
    import ray

    return f"dataplane-{ray.get_runtime_context().get_job_id()}"


def _on(place: str) -> Any:
    """Scheduling on this Ray node only."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(place, soft=False)


def _host(ip: str) -> str:
    """An address, in brackets if it is IPv6."""
    return f"[{ip}]" if ":" in ip else ip


def _free_seed() -> str:
    """HOST:PORT of this Ray node, for an etcd: the port and the next are free, and outside the ephemeral range, from
    which a connection could take one while etcd restarts."""
    import ray

    ip = ray.util.get_node_ip_address()
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, max(given, 20_000) - 1)
        with ExitStack() as taken, suppress(OSError):
            for each in (port, port + 1):
                taken.enter_context(socket.create_server((ip, each), family=_family(ip)))
            return f"{_host(ip)}:{port}"


def _seed_before(kept: Path) -> str:
    """The seed of the previous job, whose etcd has its data in this directory; empty for none."""
    for marks in kept.glob("dataplane-seed-*/seeds.json"):
        seed: str = json.loads(marks.read_text())["seeds"][0]
        return seed
    return ""


def _check_seed(config: NodeConfig | None) -> None:
    """Raises Rejected if the etcd of the previous job ran on a host without a Ray node now."""
    import ray

    seed = "" if config is None or config.data_path is None else _seed_before(config.data_path)
    host = seed.rpartition(":")[0]
    if host and host not in {_host(each["NodeManagerAddress"]) for each in ray.nodes() if each["Alive"]}:
        raise Rejected(
            f"the data_dir is of a job whose etcd ran at {host}, where no Ray node is now: run the driver and a Ray"
            " node there, or give the nodes another data_dir"
        )


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


class _DataplaneHost:
    """The actor on a Ray node that runs the node's process."""

    def __init__(self, ip: str, config: NodeConfig | None, key: bytes, cluster: ClusterConfig) -> None:
        self._cluster = replace(cluster, listen=f"tcp://{_host(ip)}:0")
        self._config = config
        self._key = key
        self._node: ClusterNode | None = None
        self._exporting: Exporting | None = None

    def start(self) -> tuple[str, str]:
        """Start the process. Returns the addresses for clients and for other nodes. Raises DataplaneError,
        ValueError."""
        config = self._config or NodeConfig()
        check_host(config)
        self._node = ClusterNode(config, self._cluster, self._key)
        if find_spec("prometheus_client") is not None:
            self._exporting = Exporting(self._node.address)
        return self._node.address, self._node.listens

    def knows(self, addresses: list[str], timeout_s: float) -> bool:
        """Wait until its members include all nodes with these addresses. Returns whether they do in time. Raises
        DataplaneError if it has ended."""
        assert self._node is not None, "it was started"
        deadline = Deadline.after(timeout_s)
        with connect(self._node.address) as plane:
            while deadline.remaining_s > 0:
                members = plane.members().get("members", {})
                if {member["address"] for member in members.values()} >= set(addresses):
                    return True
                time.sleep(_KNOWN_S)
        return False

    def wait(self) -> None:
        """Wait until it has ended."""
        assert self._node is not None, "it was started"
        self._node.wait()
        if self._exporting is not None:
            self._exporting.close()
        self._node.close()


@dataclass(slots=True)
class _RayNode:
    """A Ray node, and the node on it. `address` is empty while no node runs there, and `why` is the reason."""

    ip: str
    task: asyncio.Task[None] | None = None
    host: Any = None
    address: str = ""
    listens: str = ""
    why: str = "it is being started"
    refused: bool = False


class _DataplaneManager:
    """The actor that keeps a node on each Ray node."""

    def __init__(self, config: NodeConfig | None, key: bytes, transports: tuple[str, ...]) -> None:
        self._config = config
        self._key = key
        kept = None if config is None else config.data_path
        self._directory = claimed_directory() if kept is None else None
        self._cluster = ClusterConfig(
            "tcp://127.0.0.1:0",  # each host listens at its own address
            key="passed in memory",
            transports=transports,
            seeds=_free_seed() if kept is None else _seed_before(kept) or _free_seed(),
            seed_dir=None if self._directory is None else str(self._directory.path),
        )
        self._places: dict[str, _RayNode] = {}
        self._changed = asyncio.Condition()
        self._looking = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    async def up(self, timeout_s: float) -> tuple[str, str, bool]:
        """Wait until all nodes run. Returns why some do not in time, and whether the settings are the reason."""
        deadline = Deadline.after(timeout_s)
        await self._look()
        await self._wait(lambda: all(place.address or place.refused for place in self._places.values()), timeout_s)
        late = [place for place in self._places.values() if not place.address]
        if not late:
            late = await self._strangers(deadline.remaining_s)
        return "", "; ".join(f"{place.ip}: {place.why}" for place in late), any(place.refused for place in late)

    async def _strangers(self, timeout_s: float) -> list[_RayNode]:
        """Wait until all running nodes are members of each other, so that a put of one can be read on any. Returns
        those that do not know the others in time. A node that ends meanwhile is replaced, and not waited for."""
        places = [place for place in self._places.values() if place.host is not None]
        listening = [place.listens for place in places]
        known = (place.host.knows.remote(listening, timeout_s) for place in places)
        answers = await asyncio.gather(*known, return_exceptions=True)
        found = [place for place, answer in zip(places, answers, strict=True) if answer is False]
        for place in found:
            place.why = "its node does not know the others"
        return found

    async def where(self, name: str, dead: str, timeout_s: float) -> tuple[str, str, bool]:
        """The address of the node on a Ray node, once it differs from that of the `dead` one; else why none runs,
        and whether the settings are the reason."""
        if name not in self._places:
            await self._look()
        await self._wait(lambda: self._place(name).address not in ("", dead) or self._place(name).refused, timeout_s)
        place = self._place(name)
        return place.address, "" if place.address not in ("", dead) else f"{place.ip}: {place.why}", place.refused

    def _place(self, name: str) -> _RayNode:
        return self._places.get(name, _RayNode(name, why="Ray does not know this Ray node"))

    async def _wait(self, until: Callable[[], object], timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(until)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except Exception:  # Ray's own state can not be read now; it can be again
                log.warning("Ray does not list its nodes", exc_info=True)

    async def _look(self) -> None:
        """Start missing nodes, and forget those of Ray nodes that are gone."""
        import ray

        async with self._looking:
            alive = {each["NodeID"]: each for each in await asyncio.to_thread(ray.nodes) if each["Alive"]}
            for name in self._places.keys() - alive.keys():
                task = self._places.pop(name).task
                if task is not None:
                    task.cancel()
                await self._tell()
            for name in alive.keys() - self._places.keys():
                self._places[name] = place = _RayNode(alive[name]["NodeManagerAddress"])
                place.task = asyncio.create_task(self._keep(name, place))
            if self._keeping is None:
                self._keeping = asyncio.create_task(self._look_on())

    async def _keep(self, name: str, place: _RayNode) -> None:
        """Keep a node on this Ray node, until cancelled."""
        import ray

        on = ray.remote(_DataplaneHost).options(num_cpus=0, max_concurrency=_AT_ONCE, scheduling_strategy=_on(name))
        while True:
            host = on.remote(place.ip, self._config, self._key, self._cluster)
            try:
                while True:
                    await self._keep_by(host, place)
            except Exception as error:  # Ray may raise anything, and a node must run all the same
                await self._lost(place, str(error))
            ray.kill(host)
            await asyncio.sleep(_AGAIN_S)

    async def _keep_by(self, host: Any, place: _RayNode) -> None:
        """Let this actor start a node, and wait until the node ends. Raises Ray's error if the actor has died."""
        from ray.exceptions import RayTaskError

        try:
            place.address, place.listens = await host.start.remote()
        except RayTaskError as error:  # it can not start there, now
            place.refused = isinstance(error.cause, Rejected)
            await self._lost(place, str(error.cause))
            await asyncio.sleep(_AGAIN_S)
            return
        place.host, place.refused = host, False
        place.why = "it does not answer"
        await self._tell()
        await host.wait.remote()
        await self._lost(place, "its process has ended")

    async def _lost(self, place: _RayNode, why: str) -> None:
        log.warning("the node on the Ray node at %s does not run; starting another: %s", place.ip, why)
        place.host, place.address, place.listens, place.why = None, "", "", why
        await self._tell()

    async def _tell(self) -> None:
        """Wake all that wait for a change of the running nodes."""
        async with self._changed:
            self._changed.notify_all()


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
        while not self._ended.is_set():
            try:
                asyncio.run(self._pass_on())
            except DataplaneError as error:
                log.info(
                    "reading the statistics of the node at %s failed, and is tried again: %s", self._address, error
                )
                self._ended.wait(self._every_s)

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
