"""Nodes that are members by their registrations at a coordinator: who is one, who is no more, and under which
incarnation. Nothing here depends on the pace of the machine: what is to happen is waited for, and what is not to happen
is ruled out by something later that has happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.cluster.leases import Entry, LeaseMembership
from dataplane.cluster.membership import Member
from dataplane.coordinator.base import Coordinator
from dataplane.coordinator.etcd import EtcdCoordinator
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.wire import auth
from dataplane.wire import peer_messages as pm
from dataplane.wire.auth import Key
from tests.etcd import EtcdServer, needs_etcd
from tests.unit.cluster.line import Line

pytestmark = pytest.mark.timeout(60)

LEASE_S = 2.0
ONE, TWO, THREE = b"one.....", b"two.....", b"three..."
MEMBERS = "/dataplane/test/members/"


class Node:
    """A membership, with a line of its own to the coordinator."""

    def __init__(self, number: bytes, coordinator: Coordinator, port: int, key: Key | None, lease_s: float) -> None:
        self.me = Member(number, f"tcp://127.0.0.1:{port}", {"tcp": f"transport of {number!r}"})
        self.line = Line(coordinator)
        self.membership = LeaseMembership(self.line, self.me, key, lease_s=lease_s)
        self.changes: list[int] = []
        self.membership.watch(lambda: self.changes.append(self.membership.epoch))
        self.begun = 0
        self.membership.begin_anew_by(self._begin_anew)
        self.running = asyncio.get_running_loop().create_task(self.membership.run())

    def _begin_anew(self) -> int:
        self.begun += 1
        return self.begun

    @property
    def sees(self) -> set[bytes]:
        return set(self.membership.members)

    @property
    def registered(self) -> set[bytes]:
        """The others, as the coordinator said last."""
        return set(self.membership._entries)

    @property
    def connected(self) -> bool:
        """Whether the neighbour's pulse is held."""
        return bool(self.membership._neighbour._held)

    async def end(self, *, kindly: bool = True) -> None:
        """Stop. Unkindly: as if killed, so that the coordinator is told nothing."""
        if not kindly:
            self.line.cut()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.membership.aclose()


Start = Callable[..., Node]


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = ProcessCoordinator(asyncio.get_running_loop().time)
    yield coordinator
    await coordinator.aclose()


@pytest.fixture
async def start(coordinator: Coordinator) -> AsyncIterator[Start]:
    nodes: list[Node] = []

    def one(number: bytes, port: int = 0, key: Key | None = None, lease_s: float = LEASE_S) -> Node:
        nodes.append(Node(number, coordinator, port or 7000 + len(nodes), key, lease_s))
        return nodes[-1]

    yield one
    failed = [node.running.exception() for node in nodes if node.running.done() and not node.running.cancelled()]
    for node in nodes:
        await node.end()
    assert not failed


async def until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def settle(*nodes: Node) -> None:
    """As when the coordinator has answered them for a lease: what has gone is believed to have gone, now."""
    await until(lambda: all(node.membership.coordination.answers for node in nodes))
    for node in nodes:
        assert node.membership._answers_since is not None
        node.membership._answers_since -= node.membership._lease_s
        node.membership._sweep()


def settled(node: Node) -> bool:
    """Whether the coordinator has answered it for a lease, by the clock."""
    since = node.membership._answers_since
    return since is not None and asyncio.get_running_loop().time() > since + node.membership._lease_s


# Who is there


async def test_who_registers_is_a_member_of_all(start: Start) -> None:
    one, two, three = start(ONE), start(TWO), start(THREE)
    await until(lambda: one.sees == two.sees == three.sees == {ONE, TWO, THREE})
    assert one.membership.members[TWO] == two.me
    assert sorted(set(one.changes)) == one.changes
    assert one.membership.coordination.coordinator == "this process"
    await until(lambda: one.membership.coordination.answers)


async def test_one_that_leaves_is_removed_and_its_place_is_given_up(start: Start, coordinator: Coordinator) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == {ONE, TWO})
    await settle(one)
    await two.end()
    assert set(await coordinator.members()) == {ONE.hex()}
    await until(lambda: one.sees == {ONE})


async def test_one_whose_process_ends_is_removed_long_before_its_lease_runs_out(
    start: Start, coordinator: Coordinator
) -> None:
    """By the word of its kernel; and everybody else learns of it from the coordinator."""
    nodes = [start(number, lease_s=3600.0) for number in (ONE, TWO, THREE)]
    await until(lambda: all(node.sees == {ONE, TWO, THREE} and node.connected for node in nodes))
    await settle(*nodes)
    await nodes[1].end(kindly=False)
    await until(lambda: nodes[0].sees == nodes[2].sees == {ONE, THREE})
    assert set(await coordinator.members()) == {ONE.hex(), THREE.hex()}


async def test_one_that_is_silent_goes_with_its_lease_and_comes_back_in_another_incarnation(start: Start) -> None:
    """Cut off from the coordinator alone. It has gone for the others, and what it says then is fenced."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    await settle(one, two)
    two.line.cut()
    await until(lambda: one.sees == {ONE})
    assert two.sees == {ONE, TWO}, "nobody has told it"
    assert two.membership.coordination.answers is False
    assert one.membership.fences(TWO, 0)
    two.line.mend()
    await until(lambda: two.begun == 1)
    await until(lambda: one.sees == {ONE, TWO})
    assert one.membership.members[TWO] == replace(two.me, since=1)
    assert (one.membership.fences(TWO, 0), one.membership.fences(TWO, 1)) == (True, False)
    assert one.begun == 0


async def test_started_again_at_the_same_address_is_another(start: Start) -> None:
    one, two = start(ONE), start(TWO, 7777)
    await until(lambda: one.sees == {ONE, TWO})
    await two.end(kindly=False)
    again = start(THREE, 7777)
    await until(lambda: one.sees == again.sees == {ONE, THREE})


async def test_two_that_claim_one_number(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The later one has the place; the earlier says so, and does not take it back."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == {ONE, TWO})
    again = start(TWO)
    await until(lambda: one.membership.members[TWO] == again.me)
    await until(lambda: "another node has this node's number" in caplog.text)
    epoch = one.membership.epoch
    three = start(THREE)
    await until(lambda: one.sees == three.sees == {ONE, TWO, THREE})
    await settle(one)
    assert one.membership.epoch == epoch + 1, "nothing flutters"
    assert two.begun == again.begun == 0


# The coordinator comes and goes


async def test_members_stay_members_while_the_coordinator_is_away(start: Start, coordinator: Coordinator) -> None:
    """Every registration runs out meanwhile: each is made again, under the same incarnation."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    for node in (one, two):
        node.line.cut()
    async with asyncio.timeout(20):
        while await coordinator.members():
            await asyncio.sleep(0.01)
    for node in (one, two):
        node.line.mend()
    await until(lambda: all(node.membership.coordination.answers for node in (one, two)))
    await until(lambda: TWO in one.registered and ONE in two.registered)
    await settle(one, two)
    assert one.sees == two.sees == {ONE, TWO}
    assert (one.begun, two.begun) == (0, 0)
    assert (one.changes, two.changes) == ([2], [2]), "nothing has changed"


# Incarnations


async def test_one_whose_registration_is_taken_away_begins_anew(start: Start, coordinator: Coordinator) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    await settle(one, two)
    await coordinator.evict(TWO.hex(), (await coordinator.members())[TWO.hex()])
    await until(lambda: two.begun == 1)
    await until(lambda: TWO in one.sees and one.membership.members[TWO].since == 1)


async def test_who_says_that_it_has_begun_anew_is_another_from_then_on(start: Start) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    seen: list[set[bytes]] = []
    one.membership.watch(lambda: seen.append(one.sees))
    for node, since in ((TWO, 0), (THREE, 7), (ONE, 7)):
        one.membership.met(node, since)
    assert seen == []
    one.membership.met(TWO, 4)
    assert seen == [{ONE}, {ONE, TWO}]
    assert one.membership.members[TWO].since == 4
    assert one.membership.fences(TWO, 3)


async def test_stopped_for_a_lease_it_begins_anew_and_takes_nobody_for_dead(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a SIGSTOP: noticed by who first looks. For less than that, nothing has happened."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO} and one.membership.coordination.answers)
    loop = asyncio.get_running_loop()
    for away_s, begun in ((0.8 * LEASE_S, 0), (10.0, 1)):
        now = loop.time()
        one.membership._awake = now
        with monkeypatch.context() as patched:
            patched.setattr(loop, "time", lambda at=now + away_s: at)
            one.membership.look()
        assert one.begun == begun
        assert not one.membership.coordination.answers, "others are not taken for dead on what was not heard meanwhile"
        one.membership._awake = loop.time()
    assert one.sees == {ONE, TWO}
    await until(lambda: two.membership.members[ONE].since == 1)


async def test_stopped_alone_it_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start(ONE)
    await until(lambda: one.membership.coordination.answers)
    loop = asyncio.get_running_loop()
    now = loop.time()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", lambda: now + 10.0)
        one.membership.look()
    assert one.begun == 0


async def test_cancelled_it_leaves_nothing(start: Start) -> None:
    before = len(asyncio.all_tasks())
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    for node in (one, two):
        await node.end()
    await until(lambda: len(asyncio.all_tasks()) == before)


# What is no node's


def entry(**changed: Any) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(Entry(THREE.hex(), "tcp://127.0.0.1:1"), **changed))


GARBAGE = {
    "no JSON": b"\x00\x01{",
    "another shape": b"[1, 2]",
    "no address": b'{"node": "%s"}' % THREE.hex().encode(),
    "another node": entry(node="00"),
    "no port": entry(address="tcp://127.0.0.1"),
    "another scheme": entry(address="ipc:///tmp/x"),
    "a type that is none": b'{"node": 7, "address": ["x"]}',
    "too deep": b"[" * 100_000,
    "a number below 0": entry(since=-1),
    "another major version": entry(major=pm.MAJOR + 1),
}


async def test_what_no_node_writes_is_passed_over(
    start: Start, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """Before a node comes, and after; under its own name, and under names that are no nodes'."""

    async def write(head: str) -> None:
        for number, value in enumerate(GARBAGE.values()):
            await coordinator.register(
                f"{number:02x}" + head, value.replace(THREE.hex().encode(), b"%02x" % number), 3600
            )
            await coordinator.register(f"{head}\0{number}" * number, value, 3600)

    await write("ee" * 7)
    one = start(ONE)
    await until(lambda: one.membership.coordination.answers)
    await write("ff" * 7)
    for value in GARBAGE.values():
        await coordinator.register(THREE.hex(), value, 3600)
    two = start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    assert "what no node of this cluster writes" in caplog.text
    assert "speaks version" in caplog.text


async def test_who_has_not_the_key_makes_no_member(
    start: Start, coordinator: Coordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, other = auth.generate(tmp_path / "key"), auth.generate(tmp_path / "other")
    one, two, stranger = start(ONE, key=key), start(TWO, key=key), start(THREE, key=other)
    await coordinator.register(b"nokey...".hex(), entry(node=b"nokey...".hex()), 3600.0)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    await settle(stranger)
    assert stranger.sees == {THREE}
    assert "it was not written with the cluster's key" in caplog.text
    mine = (await coordinator.members())[ONE.hex()]
    await coordinator.register(b"copied..".hex(), mine, 3600.0)  # another's entry is not one's own
    four = start(b"four....", key=key)
    await until(lambda: one.sees == four.sees == {ONE, TWO, b"four...."})


# By a real etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


@needs_etcd
@pytest.mark.parametrize("how", ["killed", "wiped", "frozen"])
async def test_members_stay_members_while_etcd_is_away(etcd: EtcdServer, how: str) -> None:
    lease_s = (
        1.5 * LEASE_S if how == "frozen" else LEASE_S
    )  # etcd ends all leases then, and each node has that to return
    made = [EtcdCoordinator([etcd.address], "test", timeout_s=lease_s / 4) for _ in range(3)]
    clients = list(made)
    nodes = [Node(number, clients.pop(), port, None, lease_s) for number, port in ((ONE, 7000), (TWO, 7001))]
    one, two = nodes
    try:
        await until(lambda: one.sees == two.sees == {ONE, TWO})
        await settle(one, two)
        if how == "frozen":
            etcd.freeze()
        else:
            etcd.stop()
        await until(lambda: not any(node.membership.coordination.answers for node in nodes))
        if how == "wiped":
            etcd.wipe()
        if how == "frozen":
            await asyncio.sleep(1.5 * lease_s)  # for their leases to run out there
            etcd.thaw()
        else:
            await asyncio.to_thread(etcd.start)
        await until(lambda: settled(one) and settled(two))
        assert etcd.count(MEMBERS) == 2
        assert one.sees == two.sees == {ONE, TWO}
        assert (one.changes, two.changes) == ([2], [2]), "nothing has changed"
        assert (one.begun, two.begun) == (0, 0)
        nodes.append(Node(THREE, clients.pop(), 7002, None, lease_s))  # and it serves again
        await until(lambda: all(node.sees == {ONE, TWO, THREE} for node in nodes))
    finally:
        for node in nodes:
            await node.end()
        for client in made:
            await client.aclose()
