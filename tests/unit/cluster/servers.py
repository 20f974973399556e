"""An etcd's servers for tests, without processes: what it answers of its members, and servers that run at a word.

`before[path]` is awaited before a request takes effect, `after[path]` once it has, so that a test can put something in
between.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from dataplane.cluster.server import Place
from dataplane.coordinator import gateway
from dataplane.coordinator.gateway import Answer, Refused
from dataplane.coordinator.process import ProcessCoordinator

Step = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """A step that does nothing."""


class FakeEtcd:
    """What all clients of it share."""

    def __init__(self) -> None:
        self.values = ProcessCoordinator()
        self.members: dict[int, gateway.Server] = {}
        self.running: dict[str, FakeServer] = {}
        self.starts: list[Place] = []
        self.fails = False
        """Whether servers end as soon as they are started."""
        self.before: defaultdict[str, Step] = defaultdict(lambda: nothing)
        self.after: defaultdict[str, Step] = defaultdict(lambda: nothing)
        self._numbers = iter(range(1, 1000))

    def add(self, peer_url: str, name: str = "", *, learner: bool = False) -> int:
        """A server is a member now; its number."""
        number = next(self._numbers)
        self.members[number] = gateway.Server(number, name, [peer_url], [], learner)
        return number

    async def ask(self, path: str, question: dict[str, Any], *, writes: bool = False) -> Answer:
        """As `Gateway.ask`."""
        await self.before[path]()
        number = question.get("ID", 0)
        if path == "cluster/member/add":
            if any(each.isLearner for each in self.members.values()):
                raise Refused("etcd refuses: etcdserver: too many learner members in cluster")
            self.add(question["peerURLs"][0], learner=True)
        elif path == "cluster/member/remove":
            self._found(number)
            del self.members[number]
        elif path == "cluster/member/promote":
            found = self._found(number)
            if not found.isLearner:
                raise Refused("etcd refuses: etcdserver: can only promote a learner member")
            if not any(each.place.peer_url in found.peerURLs for each in self.running.values()):
                raise Refused(
                    "etcd refuses: etcdserver: can only promote a learner member which is in sync with leader"
                )
            self.members[number] = gateway.Server(number, found.name, found.peerURLs, [], isLearner=False)
        answer = Answer(members=list(self.members.values()))
        await self.after[path]()
        return answer

    def _found(self, number: int) -> gateway.Server:
        if number not in self.members:
            raise Refused("etcd refuses: etcdserver: member not found")
        return self.members[number]


class FakeServer:
    """As `EtcdServer`."""

    def __init__(self, etcd: FakeEtcd, place: Place) -> None:
        self.place = place
        self._etcd = etcd

    async def run(self, state: Callable[[], Awaitable[tuple[str, str]]], proven: asyncio.Event | None = None) -> None:
        """As `EtcdServer.run`."""
        await state()
        self._etcd.starts.append(self.place)
        if self._etcd.fails:
            raise OSError("etcd has ended (1); it said: address already in use")
        self._etcd.running[self.place.name] = self
        try:
            await asyncio.Event().wait()
        finally:
            del self._etcd.running[self.place.name]


class FakeCoordinator(ProcessCoordinator):
    """As `EtcdCoordinator`: one client of the values."""

    def __init__(self, etcd: FakeEtcd) -> None:
        super().__init__()
        self._registry = etcd.values._registry
        self._registry.value_changed = self._wake

    def use(self, endpoints: object) -> None:
        """It has one place."""


class FakeGateway:
    """As `Gateway`."""

    def __init__(self, etcd: FakeEtcd) -> None:
        self.ask = etcd.ask

    def use(self, endpoints: object) -> None:
        """It has one place."""

    async def aclose(self) -> None:
        """Nothing is open."""
