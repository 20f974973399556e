"""Hosts on this machine: network namespaces with a link each, or nodes that share its loopback.

Invariants: after its `with` block, the processes, nodes and namespaces of a `Machine` are gone. A host is killed with
all of its processes. Each host runs a server of the cluster's etcd. The first host, where the trainer runs, does not
lead the stream at first.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dataplane as dp
from bench.namespaces import Host, crossed, enter, ip, nodes, switch, together
from dataplane.cluster.placement import winner
from examples.multi_host.job import HOSTS, Accident, Begin
from examples.multi_host.servers import Servers
from examples.multi_host.stages import STREAM
from examples.multi_host.view import Figures
from examples.multimodal_grpo.board import Board
from examples.multimodal_grpo.crew import Crew
from examples.multimodal_grpo.killed import descendants

APART = 8  # updates between two accidents
DEAD_S = 3.0  # from the kill of a host to its restart
CUT, CUT_S = 1, 3.0  # the host that is cut off, and for how long


class Machine:
    """`count` hosts, numbered from 0. A context manager. memory: each node's budget."""

    def __init__(self, count: int, memory: str, *, loopback: bool) -> None:
        self._count = count
        self._silent: set[int] = set()
        self._memory = memory
        self._loopback = loopback
        self._on: dict[str, int] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Machine:
        with ExitStack() as undo:
            directory = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            ends = [("", "127.0.0.1")] * self._count if self._loopback else undo.enter_context(switch(self._count))
            settings: dict[str, Any] = {"memory": self._memory, "options": ("--spill", "1GiB", "--prewarm", "0")}
            started = undo.enter_context(nodes(ends, directory, self._count, **settings))
            planes = [undo.enter_context(dp.connect(host.address)) for host in started]
            together(planes)
            numbers = [plane.stats().node for plane in planes]
            leader = winner([node.encode() for node in numbers], "stream", STREAM).decode()
            order = sorted(range(self._count), key=lambda host: numbers[host] == leader)  # it dies; the first one stays
            self._hosts, self._planes, self._ends = ([of[i] for i in order] for of in (started, planes, ends))
            self._key, self._settings = directory / "cluster.key", settings
            self._later = undo.enter_context(ExitStack())
            self._crew = undo.enter_context(Crew())
            self.board = Board(directory / "newest")
            self.plane = self._planes[0]
            self._dead: set[int] = set()
            self._last = [Figures()] * self._count
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def address(self, host: int) -> str:
        """The address of the host's node."""
        return self._hosts[host].address

    def start(self, host: int, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a process on this host. Its target gets a pipe for reports first."""
        self._crew.start(name, _there, self._hosts[host].name, target, *args)
        self._on[name] = host

    def reports(self, wait_s: float) -> Iterator[Any]:
        """The reports that arrive within `wait_s` seconds."""
        return self._crew.reports(wait_s)

    def figures(self) -> Sequence[Figures]:
        """The figures of each host; the last known ones if it is cut off."""
        self._last = [self._look(host) for host in range(self._count)]
        return self._last

    def _look(self, host: int) -> Figures:
        if host in self._dead:
            return Figures()
        if host in self._silent:
            return self._last[host]
        stats, name = self._planes[host].stats(), self._hosts[host].name
        over = crossed(name) if name else {"rx": stats.fetched_bytes, "tx": stats.sent_bytes}
        asked = stats.asked + stats.answered
        return Figures(stats.memory_used, stats.memory_budget, stats.memory_peak, over["rx"], over["tx"], asked)

    def accidents(self, begin: Begin) -> Iterator[Accident]:
        """Kill and restart a host that leads partitions, then the host of etcd's leader; cut a host off and reconnect
        it. Each call of `next` does one of these steps. Raises TimeoutError if etcd has no leader again in time."""
        together(self._planes)
        servers = self._servers(self._count)
        host, leads = self._leading(servers)
        self.kill(host)
        yield Accident(f"host {HOSTS[host]}, which leads {leads}, is killed with all that runs there", seconds=DEAD_S)
        yield self._again(host, begin)
        servers = self._servers(self._count)  # all of them answer again
        host = servers.leader()
        if host == 0:  # it has the trainer
            host = servers.hand_over()
        self.kill(host)
        yield Accident(
            f"host {HOSTS[host]}, which runs etcd's leader, is killed with all that runs there", seconds=DEAD_S
        )
        yield self._again(host, begin)
        self._cut(CUT)
        how = "does not run" if self._loopback else "is cut off"
        yield Accident(f"host {HOSTS[CUT]} {how}", seconds=CUT_S)
        self._heal(CUT)
        yield Accident(f"host {HOSTS[CUT]} is back after {CUT_S:.0f} s: all are members still", APART)
        together(self._planes)

    def _leading(self, servers: Servers) -> tuple[int, str]:
        """A host, not the first, that leads partitions, if possible without etcd's leader; the partitions' names."""
        members, other = self.plane.members()["members"], servers.leader()
        leads = {host: members[self._planes[host].stats().node]["leads"] for host in range(1, self._count)}
        host = max(leads, key=lambda host: (bool(leads[host]), host != other))
        return host, ", ".join(leads[host]) or "none"

    def _again(self, host: int, begin: Begin) -> Accident:
        """Start the host again, with a new node and its workers."""
        fresh = Host(self._ends[host], self._key, self._hosts[0].seeds, **self._settings)
        self._later.callback(fresh.stop)
        self._hosts[host] = fresh
        self._planes[host] = self._later.enter_context(dp.connect(fresh.address))
        self._dead.discard(host)
        together(self._planes)
        begin(host)
        return Accident(f"host {HOSTS[host]} is started again, with what ran there", APART)

    def _servers(self, count: int) -> Servers:
        """The hosts' etcd servers, once `count` of them answer."""
        return Servers({i: host for i, host in enumerate(self._hosts) if i not in self._dead}, self._key, count)

    def _cut(self, host: int) -> None:
        """Take the host's link down; on loopback, stop its node and etcd server (SIGSTOP)."""
        self._silent.add(host)
        if self._loopback:
            for pid in self._processes(host):
                os.kill(pid, signal.SIGSTOP)
        else:
            ip("-n", self._hosts[host].name, "link", "set", self._hosts[host].name, "down")

    def _heal(self, host: int) -> None:
        """Undo `_cut`."""
        if self._loopback:
            for pid in self._processes(host):
                os.kill(pid, signal.SIGCONT)
        else:
            ip("-n", self._hosts[host].name, "link", "set", self._hosts[host].name, "up")
        self._silent.discard(host)

    def _processes(self, host: int) -> list[int]:
        node = self._hosts[host].process.pid
        return [node, *descendants(node)]

    def kill(self, host: int) -> None:
        """Kill the host's node, etcd server and processes."""
        self._dead.add(host)
        for name in [name for name, on in self._on.items() if on == host]:
            self._crew.kill(name)
        self._hosts[host].stop(signal.SIGKILL)  # its server of etcd ends with it


def _there(reports: Connection, namespace: str, target: Callable[..., None], *args: Any) -> None:
    """Enter the host's namespace, and run the process's main function."""
    enter(namespace)
    target(reports, *args)
