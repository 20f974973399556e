"""Hosts that are Ray nodes: `up()` starts a node of the data plane on each, and every stage connects to "ray".

Without an address, three Ray nodes are started on this machine, and stopped at the end. An actor, the desk, keeps
reports of the stages and the reference of the newest weights. No batch passes through it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import dataplane as dp
from dataplane.integrations.ray import up
from examples.multi_host.job import HOSTS, Accident, Begin
from examples.multi_host.view import Figures
from examples.multimodal_grpo.job import Failed

_ROOT = Path(__file__).parents[2]
_NODE = {"num_cpus": 4, "object_store_memory": 80 << 20}
_ASK_S = 30.0


class _Desk:
    """The actor that keeps reports and the newest weights' reference."""

    def __init__(self) -> None:
        self._reports: list[Any] = []
        self._newest: tuple[int, dp.BatchRef] | None = None

    def send(self, report: Any) -> None:
        self._reports.append(report)

    def taken(self) -> list[Any]:
        taken, self._reports = self._reports, []
        return taken

    def post(self, version: int, weights: dp.BatchRef) -> None:
        self._newest = (version, weights)

    def read(self) -> tuple[int, dp.BatchRef] | None:
        return self._newest


class Desk:
    """A handle of the actor: a `stages.Board` and a `stages.Reports`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def send(self, report: Any) -> None:
        """Send a report to the main process."""
        ray.get(self._actor.send.remote(report), timeout=_ASK_S)

    def post(self, version: int, weights: dp.BatchRef) -> None:
        """Replace the published version by this one."""
        ray.get(self._actor.post.remote(version, weights), timeout=_ASK_S)

    def read(self) -> tuple[int, dp.BatchRef] | None:
        """The newest version and the reference to its weights, if any."""
        newest: tuple[int, dp.BatchRef] | None = ray.get(self._actor.read.remote(), timeout=_ASK_S)
        return newest


class _Stage:
    """An actor that runs a stage."""

    def run(self, desk: Desk, target: Callable[..., None], *args: Any) -> None:
        with suppress(dp.Closed):
            target(desk, *args)


class _Lookout:
    """An actor on each Ray node that reads the figures of its host."""

    def __init__(self) -> None:
        self._plane = dp.connect("ray")

    def figures(self) -> Figures:
        stats = self._plane.stats()
        asked = stats.asked + stats.answered
        memory = stats.memory_used, stats.memory_budget, stats.memory_peak
        return Figures(*memory, stats.fetched_bytes, stats.sent_bytes, asked)


class OnRay:
    """`count` Ray nodes of a cluster, of a new one if `address` is None. A context manager. Raises RuntimeError if the
    cluster has too few nodes."""

    def __init__(self, count: int, memory: str, address: str | None) -> None:
        self._count = count
        self._memory = memory
        self._address = address
        self._local: Any = None
        self._running: dict[Any, str] = {}
        self._on: dict[str, int] = {}
        self._dead: set[int] = set()
        self._undo = ExitStack()

    def __enter__(self) -> OnRay:
        with ExitStack() as undo:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            address = self._address or self._start(undo)
            undo.callback(ray.shutdown)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            up(dp.NodeConfig(memory=self._memory, spill="1GiB", prewarm=0))
            self.plane = undo.enter_context(dp.connect("ray"))
            here = ray.get_runtime_context().get_node_id()
            alive = sorted((node["NodeID"] for node in ray.nodes() if node["Alive"]), key=lambda name: name != here)
            if len(alive) < self._count:
                raise RuntimeError(f"{self._count} Ray nodes are needed, and there are {len(alive)}")
            self._places = alive[: self._count]
            self._desk = self._actor(0, _Desk)
            self.board = Desk(self._desk)
            self._lookouts = [self._actor(host, _Lookout) for host in range(self._count)]
            while len(self.plane.members()["members"]) < self._count:
                time.sleep(0.05)
            self._undo = undo.pop_all()
        return self

    def _start(self, undo: ExitStack) -> str:
        self._local = RayCluster(initialize_head=True, head_node_args=_NODE | {"include_dashboard": False})
        undo.callback(self._local.shutdown)
        self._others = [self._local.add_node(**_NODE) for _ in range(self._count - 1)]
        return str(self._local.address)

    def _actor(self, host: int, kind: type) -> Any:
        where = NodeAffinitySchedulingStrategy(self._places[host], soft=False)
        return ray.remote(kind).options(num_cpus=0, scheduling_strategy=where).remote()

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def address(self, host: int) -> str:
        """The address for `dp.connect`: that of the node on the caller's Ray node."""
        return "ray"

    def start(self, host: int, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a stage in an actor on this host."""
        self._running[self._actor(host, _Stage).run.remote(self.board, target, *args)] = name
        self._on[name] = host

    def reports(self, wait_s: float) -> Iterator[Any]:
        """Wait up to `wait_s` seconds for a stage to end. Yields new reports, and `Failed` for a stage with an error on
        a living host."""
        ended, _ = ray.wait(list(self._running), timeout=wait_s)
        yield from ray.get(self._desk.taken.remote(), timeout=_ASK_S)
        for each in ended:
            name = self._running.pop(each)
            try:
                ray.get(each)
            except ray.exceptions.RayError as error:
                if self._on[name] not in self._dead:
                    yield Failed(name, str(error))

    def figures(self) -> Sequence[Figures]:
        """The figures of each host."""
        living = [host for host in range(self._count) if host not in self._dead]
        told = ray.get([self._lookouts[host].figures.remote() for host in living], timeout=_ASK_S)
        found = dict(zip(living, told, strict=True))
        return [found.get(host, Figures()) for host in range(self._count)]

    def accidents(self, begin: Begin) -> Iterator[Accident]:
        """Kill the second host, for good."""
        self.kill(1)
        yield Accident(f"host {HOSTS[1]} is killed, with its node and all that runs there")

    def kill(self, host: int) -> None:
        """Kill the Ray node and its processes. Raises RuntimeError if the cluster was not started here."""
        if self._local is None:
            raise RuntimeError("--kill ends a Ray node that this started: use it without --ray-address")
        self._dead.add(host)
        [node] = [node for node in self._others if node.node_id == self._places[host]]
        self._local.remove_node(node, allow_graceful=False)
