"""Three hosts on this machine: network namespaces with a link each, or nodes that share its loopback.

What always holds: when it is left, its processes, nodes and namespaces are gone. A host that is killed takes with it
all that runs there, as a machine does.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dataplane as dp
from bench.namespaces import crossed, enter, nodes, switch, together
from examples.multi_host.view import Figures
from examples.multimodal_grpo.board import Board
from examples.multimodal_grpo.crew import Crew


class Machine:
    """So many hosts, 0 to `count - 1`. A context manager."""

    def __init__(self, count: int, memory: str, *, loopback: bool) -> None:
        self._count = count
        self._memory = memory
        self._loopback = loopback
        self._on: dict[str, int] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Machine:
        with ExitStack() as undo:
            directory = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            ends = [("", "127.0.0.1")] * self._count if self._loopback else undo.enter_context(switch(self._count))
            settings: dict[str, Any] = {"memory": self._memory, "options": ("--spill", "1GiB", "--prewarm", "0")}
            self._hosts = undo.enter_context(nodes(ends, directory, **settings))
            self._planes = [undo.enter_context(dp.connect(host.address)) for host in self._hosts]
            together(self._planes)
            self._crew = undo.enter_context(Crew())
            self.board = Board(directory / "newest")
            self.plane = self._planes[0]
            self._dead: set[int] = set()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def address(self, host: int) -> str:
        """What processes on that host connect to."""
        return self._hosts[host].address

    def start(self, host: int, name: str, target: Callable[..., None], *args: Any) -> None:
        """Start a process on that host."""
        self._crew.start(name, _there, self._hosts[host].name, target, *args)
        self._on[name] = host

    def reports(self, wait_s: float) -> Iterator[Any]:
        """What processes report within so many seconds."""
        return self._crew.reports(wait_s)

    def figures(self) -> Sequence[Figures]:
        """What each host does now."""
        return [self._look(host) for host in range(self._count)]

    def _look(self, host: int) -> Figures:
        if host in self._dead:
            return Figures()
        stats, name = self._planes[host].stats(), self._hosts[host].name
        over = crossed(name) if name else {"rx": stats.fetched_bytes, "tx": stats.sent_bytes}
        asked = stats.asked + stats.answered
        return Figures(stats.memory_used, stats.memory_budget, stats.memory_peak, over["rx"], over["tx"], asked)

    def kill(self, host: int) -> None:
        """The host dies: its node, and all processes there."""
        self._dead.add(host)
        for name in [name for name, on in self._on.items() if on == host]:
            self._crew.kill(name)
        self._hosts[host].stop(signal.SIGKILL)


def _there(reports: Connection, namespace: str, target: Callable[..., None], *args: Any) -> None:
    """What a process does first: move to its host."""
    enter(namespace)
    target(reports, *args)
