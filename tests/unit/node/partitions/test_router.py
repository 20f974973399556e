"""A request finds the leader of its partition, and ends in an answer, a refusal or a typed error in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.clock import Deadline
from dataplane.cluster.membership import Member
from dataplane.coordinator.base import Unavailable
from dataplane.errors import Lost, NotReady, OutcomeUnknown, PeerUnavailable
from dataplane.node.partitions.partitions import ClientDepartures
from dataplane.stream.requests import EndClients, decode_request
from tests.coordinator import ProcessCoordinator
from tests.unit.node.partitions.bench import SETTINGS, WAIT_S, benches, until

P = "streams/rollouts/1"


class Leaving(ProcessCoordinator):
    """A coordinator that does not answer reads while it is `away`."""

    away = False

    async def read(self, key: str) -> bytes | None:
        if self.away:
            raise Unavailable("it is away")
        return await super().read(key)


async def test_a_request_to_a_missing_partition_raises_lost() -> None:
    async with benches(1) as (a,):
        with pytest.raises(Lost, match="no partition"):
            await a.router.ask(P, b"", Deadline.after(5.0))


async def test_a_leader_is_found_while_the_coordinator_is_unavailable() -> None:
    coordinator = Leaving()
    async with benches(3, coordinator) as (a, b, c):
        await a.replicas.create(P, "n0")
        await until(lambda: a.led(P))
        await c.append(P, "x")
        await b.append(P, "x", sequence=9)
        coordinator.away = True
        c.router._leaders.clear()
        assert await c.append(P, "y") == (2,)
        with pytest.raises(PeerUnavailable, match="in time: it is away"):
            await c.router.ask("streams/other/1", b"", Deadline.after(0.2))


async def test_an_error_names_the_coordinator_that_does_not_answer() -> None:
    coordinator = Leaving()
    async with benches(2, coordinator) as (a, b):
        await a.replicas.create(P, "n0")
        await until(lambda: a.led(P))
        await b.append(P, "x")
        coordinator.away = True
        await a.aclose()
        b.members._answers_since = None
        with pytest.raises(OutcomeUnknown, match=r"the coordinator \(.*\) does not answer either"):
            await b.append(P, "y", timeout_s=0.5)


async def test_a_waiting_request_moves_from_a_silent_leader_to_the_next_one() -> None:
    """The node is a member as long as its registration lasts: so long the request waited there."""
    async with benches(3) as nodes:
        await nodes[0].replicas.create(P, "n0")
        await until(lambda: nodes[0].led(P))
        (asking,) = (node for node in nodes[1:] if node.at(P) is None and node.replicas.find(P) is None)
        silent = asyncio.Event()

        @asynccontextmanager
        async def needing(node: str) -> AsyncIterator[None]:
            async with asyncio.timeout(None) as end:
                waiting = asyncio.create_task(silent.wait())
                waiting.add_done_callback(lambda _: end.reschedule(0.0) if node == "n0" else None)
                try:
                    yield
                finally:
                    waiting.cancel()

        asking.router._needing = needing
        leased = asyncio.create_task(asking.lease(P, "t", 1, timeout_s=10 * WAIT_S))
        await until(lambda: len(nodes[0].replicas.find(P).waiters) == 1)  # type: ignore[union-attr]
        nodes[0].receive = lambda _: None  # type: ignore[method-assign]
        await nodes[0].replicas.aclose()  # it stays a member
        silent.set()
        (other,) = (node for node in nodes[1:] if node is not asking)
        await until(lambda: other.at(P))
        await other.append(P, "x")
        async with asyncio.timeout(WAIT_S):
            assert len((await leased).rows) == 1


@pytest.mark.long
async def test_a_suspended_node_does_not_expire_its_peers() -> None:
    async with benches(2) as (a, b):
        await a.replicas.create(P, "n0")
        await until(lambda: a.led(P))
        configuration = a.at(P).configuration  # type: ignore[union-attr]
        time.sleep(2 * SETTINGS.grace_s)  # noqa: ASYNC251 - both, as a host is suspended
        await asyncio.sleep(2 * SETTINGS.beat_s)
        assert await b.append(P, "x") == (0,)
        found = a.replicas.find(P) or b.replicas.find(P)
        assert found is not None
        assert found.configuration == configuration


# Clients of ended processes leave every partition that is led here, also those that are led later.


class Hosted:
    """A partition with a client of a process."""

    def __init__(self, partition: str, process: str, *, led: bool) -> None:
        self.partition, self.led, self.there = partition, led, {process}
        self.machine = self.replica = self

    def serves(self, now: float) -> bool:
        return self.led

    def clients(self) -> set[str]:
        return self.there


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
        ended = decode_request(request)
        assert isinstance(ended, EndClients)
        there = next(hosted for hosted in self.hosted if hosted.partition == partition).there
        there.discard(ended.clients.removesuffix("/"))

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
