"""Clients of ended processes leave every partition that is led here, also those that are led later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from dataplane.cluster.membership import Member
from dataplane.errors import NotReady
from dataplane.node.partitions.partitions import ClientDepartures


class Hosted:
    """A partition with a client of a process."""

    def __init__(self, partition: str, process: str, *, led: bool) -> None:
        self.partition, self.led, self.there = partition, led, {process}
        self.machine = self.replica = self

    def serves(self, now: float) -> bool:
        return self.led

    def clients(self) -> set[str]:
        return self.there

    def leaving(self, process: str) -> bytes:
        return process.encode()


class Node:
    """The members and partitions of a node. Its first `failing` requests fail."""

    def __init__(self, *hosted: Hosted, failing: int = 0) -> None:
        self.hosted, self.failing = hosted, failing
        self.current = {"one": Member(1, "tcp://127.0.0.1:1"), "two": Member(1, "tcp://127.0.0.1:2")}
        self.coordination = SimpleNamespace(answers=True)
        self.over: list[Callable[[str, float], None]] = []
        self.watch_ended = self.over.append
        both: Any = self
        self.departures = ClientDepartures(both, both)

    def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def gone(self, node: str) -> bool:
        return False

    def __iter__(self) -> Iterator[Hosted]:
        return iter(self.hosted)

    async def request(self, partition: str, request: bytes, timeout_s: float) -> None:
        if self.failing:
            self.failing -= 1
            raise NotReady("no leader")
        next(hosted for hosted in self.hosted if hosted.partition == partition).there.discard(request.decode())

    async def look(self) -> list[set[str]]:
        """The clients of each partition after a look."""
        self.departures.look()
        while self.departures._leaving:
            await asyncio.sleep(0)
        return [set(hosted.there) for hosted in self.hosted]


async def test_clients_of_an_ended_process_leave_present_and_later_led_partitions() -> None:
    now, later, other = Hosted("p", "one/1", led=True), Hosted("q", "one/1", led=False), Hosted("r", "two/1", led=True)
    node = Node(now, later, other)
    node.changed()
    assert await node.look() == [{"one/1"}, {"one/1"}, {"two/1"}]
    node.over[0]("one", 0.0)
    assert await node.look() == [set(), {"one/1"}, {"two/1"}]
    later.led = True
    assert await node.look() == [set(), set(), {"two/1"}]


async def test_clients_of_the_previous_incarnation_leave_after_a_restart() -> None:
    node = Node(Hosted("p", "one/1", led=True))
    node.changed()
    assert await node.look() == [{"one/1"}]
    node.current["one"] = Member(2, "tcp://127.0.0.1:1")
    node.changed()
    assert await node.look() == [set()]


async def test_a_failed_client_removal_is_retried_at_the_next_check() -> None:
    node = Node(Hosted("p", "one/1", led=True), failing=1)
    node.changed()
    node.over[0]("one", 0.0)
    assert await node.look() == [{"one/1"}]
    assert await node.look() == [set()]
