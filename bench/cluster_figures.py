"""A cluster that is not there: figures of hosts and streams as nodes tell them, made from a seed and the time.

`GeneratedPlane` answers what `dataplane.web` asks of a plane, so the whole way from a node's answers to the page can be
measured at sizes that no machine here has. What it tells is consistent: totals only grow, ranks are steps of one loop,
leaders are spread evenly, and what is named in `ill` goes wrong at `ill_s`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

from dataplane.errors import PeerUnavailable
from dataplane.observe.stats import Stats

GIB = 1 << 30
TASKS = ("reward", "reference", "actor")


class GeneratedPlane:
    """`ill`: of "host" (one moves a tenth of what it did), "task" (one holds up its stream), "left" (one has ended),
    "silent" (one does not answer), "disk" (one disk refuses)."""

    address = "unix:///run/dataplane/node.sock"

    def __init__(
        self,
        hosts: int,
        streams: int,
        *,
        seed: int = 0,
        ill: Collection[str] = (),
        ill_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        draw = random.Random(seed)
        self._clock = clock
        self._began_s = clock()
        self._ill = ill
        self._ill_s = ill_s
        self.nodes = [f"{draw.getrandbits(64):016x}" for _ in range(hosts)]
        self._names = ["rollouts", "prompts", "judged", "replay"][:streams]
        self._names += [f"experiment-{i:03d}" for i in range(len(self._names), streams)]
        self._speed = {name: draw.uniform(40, 400) for name in self._names}
        self._phase = {name: draw.uniform(0, 2 * math.pi) for name in [*self._names, *self.nodes]}
        self._step_s = {name: draw.uniform(9, 22) for name in self._names}
        self._parts = max(1, min(hosts, 64))

    async def __aenter__(self) -> GeneratedPlane:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def check(self) -> None:
        """It is always connected."""

    def _now_s(self) -> float:
        return self._clock() - self._began_s

    def _is(self, what: str) -> bool:
        return what in self._ill and self._now_s() >= self._ill_s

    async def members(self) -> dict[str, Any]:
        nodes = self.nodes[:-1] if self._is("left") else self.nodes
        members = {node: {"address": f"tcp://{self._host(node)}:7070", "transports": {"tcp": ""}} for node in nodes}
        return {"epoch": 1, "members": members, "coordination": {"coordinator": "etcd at seeds", "answers": True}}

    def _host(self, node: str) -> str:
        return f"gpu-{self.nodes.index(node):02d}"

    async def stats(self, node: str | None = None) -> Stats:
        node = node or self.nodes[0]
        at = self.nodes.index(node)
        if (self._is("left") and at == len(self.nodes) - 1) or (self._is("silent") and at == 3 % len(self.nodes)):
            raise PeerUnavailable("no answer", address=node)
        now_s, phase = self._now_s(), self._phase[node]
        wave = 1 + 0.3 * math.sin(now_s / 40 + phase)
        moved = _moved(now_s, 180e6, phase)
        if "host" in self._ill and at == 5 % len(self.nodes) and now_s > self._ill_s:
            moved = _moved(self._ill_s, 180e6, phase) + 18e6 * (now_s - self._ill_s)
        return Stats(
            node=node,
            pid=1000 + at,
            uptime_s=now_s + 7200,
            memory_used=int(GIB * 96 * (0.42 + 0.11 * wave)),
            memory_budget=128 * GIB,
            disk_used=int(GIB * 200 * wave),
            disk_budget=1024 * GIB,
            spill_error="No space left on device" if self._is("disk") and at == 2 % len(self.nodes) else "",
            put_bytes=int(moved),
            fetched_bytes=int(0.4 * moved),
            sent_bytes=int(0.4 * moved),
            clients=8,
            shards=12_000 + at,
            holders=({"holder": f"trainer.py (pid {4000 + at})", "bytes": 30 * GIB, "how": "pinned"},),
            streams=self._streams(at),
            streams_in_all=len(self._names),
            leads={self._key(name, at): 3 for name in self._names if at < self._parts},
            follows={self._key(name, (at + 1) % self._parts): 3 for name in self._names if at < self._parts},
        )

    async def streams(self, node: str | None = None) -> dict[str, Any]:
        return self._streams(self.nodes.index(node or self.nodes[0]))

    def _key(self, name: str, number: int) -> str:
        return f"{name}/s{self._speed[name]:08.0f}/{number}-{self.nodes[number]}"

    def _streams(self, at: int) -> dict[str, Any]:
        return {name: self._stream(name, at) for name in self._names}

    def _stream(self, name: str, at: int) -> dict[str, Any]:
        now_s, phase, share = self._now_s(), self._phase[name], 1 / len(self.nodes)
        appended = int(_moved(now_s, self._speed[name], phase) * share)
        held_up = self._is("task") and name == "rollouts"
        late_s = {"reward": 1.5, "reference": 2.5, "actor": 6.0}
        tasks = {}
        for task in TASKS:
            done = _moved(max(0.0, now_s - late_s[task]), self._speed[name], phase)
            if held_up and task == "reward":
                done = _moved(self._ill_s, self._speed[name], phase) + 0.1 * self._speed[name] * (now_s - self._ill_s)
            acked = min(appended, int(done * share))
            hungry = task == "actor" and math.sin(now_s / 3 + phase) > 0.6
            tasks[task] = {
                "pending": appended - acked,
                "leased": 4,
                "dead": 0,
                "delivered": acked,
                "redelivered": 0,
                "acked": acked,
                "expired": 0,
                "left": 0,
                "waiting": int(hungry and at == 0),
                "ready": {"ids,reward": 0} if hungry else {},
                "incomplete": [],
            }
        rows = appended - min(task["acked"] for task in tasks.values())
        return {
            "tasks": [*TASKS],
            "max_bytes": 0,
            "max_rows": 65_536,
            "rows": rows,
            "bytes": rows * 40_000,
            "appended": appended,
            "oldest_s": 6.0,
            "latest_version": int(now_s / self._step_s[name]),
            "closed": False,
            "waiting": int(held_up and at < 8),
            "groups": 0,
            "behind": ["reward"] if held_up else [],
            "task": tasks,
        }


def _moved(now_s: float, speed: float, phase: float) -> float:
    """A total that grows at `speed`, in waves of a step's length."""
    return speed * (now_s + 0.8 * 7 * (1 - math.cos(now_s / 7 + phase)))
