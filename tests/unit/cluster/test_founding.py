"""Nodes agree on which of them runs the coordinator: one of them, whatever their lists, and whoever comes when."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.clock import monotonic
from dataplane.cluster.detector import Detector
from dataplane.cluster.founding import Found, Founding, _Pauses
from dataplane.cluster.membership import Member, Membership
from dataplane.coordinator.base import Unavailable
from dataplane.coordinator.current import CurrentCoordinator
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import ProtocolMismatch
from dataplane.wire import peer_messages as pm
from dataplane.wire.peer import Peers
from tests.etcd import ports


class Node:
    """A node that seeks, and starts no server when it is to found."""

    def __init__(self, number: int, port: str, *named: str, serves: bool = True) -> None:
        name = number.to_bytes(8, "big").hex()
        self.peers = Peers(f"tcp://{port}", None, lambda request: self.founding.answer(request))
        self.peers.start()
        coordinator = CurrentCoordinator()
        membership = Membership(coordinator, name, Member(number, self.peers.address, serves=serves))
        detector = Detector(self.peers, membership)
        addresses = [f"tcp://{each}" for each in named]
        self.founding = Founding(
            addresses, self.peers.address, "127.0.0.1", None, self.peers, coordinator, membership, detector
        )
        self.founds = False

    async def seek(self) -> Found:
        """What this node uses in the end."""
        if not self.founding._known:
            await self.founding._wanted.wait()
        found = await self.founding._seek()
        if not found.servers:
            self.founds = self.founding._founds = True
            await asyncio.sleep(
                0.2
            )  # as a server takes a while to start: who asks meanwhile hears that this one founds
            found = replace(found, servers=(self.peers.address,))
            self.founding._founds = False
        self.founding._granted = b"", 0.0
        self.founding._using = found
        return found

    async def over(self, found: Found, others: list[Node]) -> Found:
        """As when the processes that ran it have ended."""
        self.founding._using = None
        self.founding._over = found.generation
        self.founding.seek([other.peers.address for other in others])
        return await self.seek()


Start = Callable[..., Node]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    nodes: list[Node] = []

    def one(*arguments: Any, **more: Any) -> Node:
        nodes.append(Node(len(nodes) + 1, *arguments, **more))
        return nodes[-1]

    yield one
    for node in nodes:
        await node.peers.aclose()


async def agreed(nodes: list[Node], late: float = 0.0, seed: int = 0) -> Found:
    """The one coordinator of all; each begins to seek within `late` seconds."""
    chance = random.Random(seed)

    async def seek(node: Node) -> Found:
        await asyncio.sleep(chance.uniform(0, late))
        return await node.seek()

    async with asyncio.timeout(40):
        found = await asyncio.gather(*map(seek, nodes))
    assert len({each.name for each in found}) == 1, "two founded"
    assert sum(node.founds for node in nodes) == 1
    return found[0]


LISTS: dict[str, Callable[[int, list[str]], list[str]]] = {
    "all name all others": lambda i, at: [each for each in at if each != at[i]],
    "all name all": lambda i, at: at,
    "a ring": lambda i, at: [at[(i + 1) % len(at)]],
    "all name the first, that names nobody": lambda i, at: at[:1] if i else [],
    "each names the one before": lambda i, at: at[i - 1 : i],
    "all but one name the last, and that the first": lambda i, at: at[:1] if i == len(at) - 1 else at[-1:],
}


@pytest.mark.parametrize("late", [0.0, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("lists", LISTS)
async def test_one_of_them_founds(start: Start, lists: str, late: float) -> None:
    at = ports(4)
    nodes = [start(at[i], *LISTS[lists](i, at)) for i in range(len(at))]
    found = await agreed(nodes, late)
    assert found.generation == 1
    assert found.secret, "there is no key, so one is drawn"


async def test_a_node_that_was_told_of_nobody_waits_until_somebody_asks(start: Start) -> None:
    first, second = ports(2)
    lone = start(first)
    running = asyncio.ensure_future(lone.founding.run())
    try:
        other = start(second, first)
        answer = await other.founding._ask(lone.peers.address)
        assert answer is not None
        assert answer.servers == []
        assert lone.founding._coordinator.address == "this process"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_stranger_that_names_this_node_itself_has_it_found_nothing(start: Start) -> None:
    """Anybody may send that: a lone node would run an etcd for it."""
    lone = start(ports(1)[0])
    seeking = asyncio.ensure_future(lone.seek())
    alias = lone.peers.address.replace("127.0.0.1", "localhost")
    lone.founding.answer(pm.FindCoordinator(1, pm.MAJOR, b"stranger", alias, [alias], False, 0))
    async with asyncio.timeout(20):
        while lone.founding._known:
            await asyncio.sleep(0.01)
    done, _ = await asyncio.wait([seeking], timeout=0.5)  # some rounds
    assert not done
    found, _ = await asyncio.gather(start(ports(1)[0], lone.peers.address.removeprefix("tcp://")).seek(), seeking)
    assert found.generation == 1


@pytest.mark.long
async def test_alone_of_those_that_it_was_told_of_it_waits(start: Start) -> None:
    """Somebody else may have founded, and be cut off."""
    here, nobody, late = ports(3)
    one = start(here, nobody)
    seeking = asyncio.ensure_future(one.seek())
    while "do not answer" not in one.founding._why:
        await asyncio.sleep(0.01)
    assert nobody in one.founding._why
    assert not seeking.done()
    other = start(late, here)
    found, _ = await asyncio.wait_for(asyncio.gather(other.seek(), seeking), 30)
    assert found.generation == 1


async def test_when_it_is_over_the_others_found_the_next(start: Start) -> None:
    at = ports(3)
    nodes = [start(at[i], *LISTS["all name all others"](i, at)) for i in range(3)]
    first = await agreed(nodes)
    [gone] = [node for node in nodes if node.founds]
    await gone.peers.aclose()
    left = [node for node in nodes if node is not gone]
    async with asyncio.timeout(30):
        found = await asyncio.gather(*(node.over(first, [o for o in left if o is not node]) for node in left))
    assert [each.generation for each in found] == [2, 2]
    assert found[0].name == found[1].name != first.name


async def test_a_grant_is_for_one_node(start: Start) -> None:
    here, *others = ports(3)
    one = start(here, *others)

    def claim(node: bytes, **more: Any) -> bool:
        return one.founding.answer(
            pm.FindCoordinator(1, pm.MAJOR, node, f"tcp://{others[0]}", claims=True, **more)
        ).granted

    assert claim(b"a")
    assert not claim(b"b")
    assert claim(b"a")
    one.founding._granted = b"a", 0.0  # it has not founded in time
    assert claim(b"b")
    one.founding._over = 2
    one.founding._granted = b"", 0.0
    assert not claim(b"c", over=1), "it seeks a coordinator that is over"
    assert claim(b"c", over=2)


async def test_who_speaks_another_version_is_refused(start: Start) -> None:
    [here] = ports(1)
    one = start(here)
    with pytest.raises(ProtocolMismatch):
        one.founding.answer(pm.FindCoordinator(1, pm.MAJOR + 1, b"x", "tcp://127.0.0.1:1"))
    one.founding.answer(pm.FindCoordinator(1, pm.MAJOR, b"x", "ipc:///tmp/x", ["nonsense", "tcp://127.0.0.1:9"]))
    assert [*one.founding._known] == ["tcp://127.0.0.1:9"]


async def test_a_process_that_has_ended_is_not_waited_for_when_the_next_is_founded(start: Start) -> None:
    """Two are left, and one ends before it has granted anything."""
    at = ports(3)
    nodes = [start(at[i], *LISTS["all name all others"](i, at)) for i in range(3)]
    first = await agreed(nodes)
    one, other = [node for node in nodes if not node.founds]
    for each in nodes:
        if each is not one:
            await each.peers.aclose()
    async with asyncio.timeout(30):
        found = await one.over(first, [other])
    assert one.founds
    assert found.generation == 2


async def test_who_is_silent_is_waited_for_when_the_next_is_founded(start: Start) -> None:
    """It may live, and found with others."""
    here, there = ports(2)
    one = start(here, there)
    with socket.create_server(("127.0.0.1", int(there.rpartition(":")[2]))):
        silent: Any = SimpleNamespace(peers=SimpleNamespace(address=f"tcp://{there}"))
        seeking = asyncio.ensure_future(one.over(Found(("h:1",), "before", 1), [silent]))
        while "do not answer" not in one.founding._why:
            await asyncio.sleep(0.01)
        assert not seeking.done()
    async with asyncio.timeout(30):
        assert (await seeking).generation == 2, "now it has ended"


@pytest.mark.long
async def test_a_coordinator_that_never_answers_here_is_not_told_to_others(start: Start) -> None:
    """It was over before this node could reach it: who told of it was killed, and another is there."""
    here, there, closed = ports(3)
    one, other = start(here, there), start(there, here)
    other.founding._using = Found((closed,), "before", 1)
    told = asyncio.Event()

    async def refused(found: Found, before: object) -> None:
        if found.servers:
            told.set()
            raise Unavailable("nobody listens there")
        one.founding._using = replace(found, servers=(here,))
        await asyncio.Event().wait()

    one.founding._run = refused  # type: ignore[method-assign]
    running = asyncio.ensure_future(one.founding.run())
    try:
        async with asyncio.timeout(30):
            await told.wait()
            assert not one.founding.answer(pm.FindCoordinator(1, pm.MAJOR, b"x", f"tcp://{closed}")).servers
            other.founding._using = None  # another process, as its host says
            found = await other.seek()
        assert found.name != "before"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_who_was_named_and_is_absent_is_asked_soon_and_then_now_and_then() -> None:
    now = 100.0
    pauses = _Pauses(lambda: now)
    absent = frozenset({"tcp://h:1"})
    asked = []
    for tenth in range(200):
        now = 100.0 + tenth / 10
        if pauses.due(absent, 0.0):
            asked.append(round(now - 100.0, 1))
    assert asked[:5] == [0.0, 0.5, 1.5, 3.5, 5.5]
    assert not pauses.due(frozenset(), 0.0)
    assert pauses.due(absent, 20.0), "it has come, and gone again"
    now += 19.0
    assert not pauses.due(absent, 20.0), "a thousand nodes ask the same one"


class Ensemble:
    """As `cluster.ensemble.Ensemble`, of servers that are over."""

    def __init__(self, **how: Any) -> None:
        self.endpoints, self.servers, self.runs, self.coordinator = ("h:1",), (), False, SimpleNamespace()
        self.is_lost = how.get("lost", True)
        self.over = how.get("over_s", 7.0)

    def over_s(self) -> float:
        return self.over

    def lost(self) -> bool:
        return self.is_lost

    def strangers(self) -> list[Any]:
        return []

    async def look(self) -> None:
        """Nobody answers."""


@pytest.mark.parametrize("listed", [False, True])
async def test_who_was_no_member_when_it_ended_does_not_found_by_what_it_does_not_know(
    start: Start, listed: bool
) -> None:
    """It knows no members, so it would be alone; they found, and it asks those that it had asked before."""
    here, there = ports(2)
    one = start(here, there)
    founding, ended = one.founding, asyncio.Event()
    founding._using, founding._ensemble = Found(("h:1",), "before", 4), Ensemble()  # type: ignore[assignment]
    founding._membership.listed = listed
    running = asyncio.ensure_future(ended.wait())
    await founding._stay(running)  # type: ignore[arg-type]
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert founding._over == (4 if listed else 0)
    assert [*founding._known] == ([] if listed else [f"tcp://{there}"])


@pytest.mark.parametrize("how", ["seen", "told", "superseded"])
async def test_it_is_said_when_the_coordinator_had_ended_whoever_knew(start: Start, how: str) -> None:
    """Without that no follower may take a place that a leader had which ended with it."""
    here, there = ports(2)
    one, other = start(here, there), start(there, here)
    founding, ended = one.founding, asyncio.Event()
    await founding._coordinator.use(ProcessCoordinator())
    using = Found(("h:1",), "before", 4)
    founding._using, founding._ensemble = using, Ensemble(lost=how == "seen")  # type: ignore[assignment]
    founding._membership.listed = True
    founding._told_over = 4 if how == "told" else 0
    if how == "superseded":
        other.founding._using = Found(("h:2",), "after", 5)
    running, began_s = asyncio.ensure_future(ended.wait()), monotonic()
    await founding._stay(running)  # type: ignore[arg-type]
    await asyncio.gather(running, return_exceptions=True)
    over_s = founding._coordinator.over_s
    assert over_s == 7.0 if how == "seen" else began_s <= over_s <= monotonic()


async def test_who_joins_is_told_of_members_to_ask(start: Start) -> None:
    here, there = ports(2)
    one, other = start(here), start(there, here)
    one.founding._using = Found(("h:1",), "this", 1)
    members = dict(one.founding._membership.current)
    one.founding._membership.current = members | {"ab" * 8: Member(1, "tcp://127.0.0.1:9")}
    assert (await other.seek()).name == "this"
    assert "tcp://127.0.0.1:9" in other.founding._known
