"""Nodes that find each other by an etcd, a real one: who is a member, what etcd's absence changes, and what not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataplane.cluster.etcd import EtcdMembership
from dataplane.cluster.membership import Member
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Message
from dataplane.wire.peer import Peers
from tests.etcd import EtcdServer, needs_etcd
from tests.unit.wire.test_peer import strays

pytestmark = [needs_etcd, pytest.mark.timeout(60)]

BEAT_S = 0.1
LEASE_S = 2.0
ONE, TWO, THREE = b"one.....", b"two.....", b"three..."
NODES = "/dataplane/test/nodes/"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


class Node:
    """A membership by etcd, with a control channel of its own."""

    def __init__(
        self, number: bytes, *etcds: str, name: str = "test", listen: str = "tcp://127.0.0.1:0", says: str = ""
    ) -> None:
        self.deaf = False
        self.peers = Peers(listen, None, self._answer)
        self.peers.start()
        self.me = Member(number, says or self.peers.address, {"tcp": f"transport of {number!r}"})
        self.membership = EtcdMembership(self.peers, self.me, etcds, name, BEAT_S, LEASE_S)
        self.changes: list[int] = []
        self.membership.watch(lambda: self.changes.append(self.membership.epoch))
        self.running = asyncio.get_running_loop().create_task(self.membership.run())

    async def _answer(self, request: Any) -> Message:
        if self.deaf:
            await asyncio.Event().wait()
        assert isinstance(request, pm.Greet)
        return self.membership.greeted(request)

    @property
    def sees(self) -> set[bytes]:
        return set(self.membership.members)

    async def end(self, *, kindly: bool = True) -> None:
        """Stop. Unkindly: as if killed, so that etcd is told nothing."""
        if not kindly:
            self.membership._lease = 0
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for stray in strays(self.peers):
            stray.close(linger=0)
        await self.peers.aclose()


Start = Callable[..., Node]


@pytest.fixture
async def start(etcd: EtcdServer) -> AsyncIterator[Start]:
    nodes: list[Node] = []

    def one(number: bytes, *etcds: str, **settings: Any) -> Node:
        nodes.append(Node(number, *(etcds or (etcd.address,)), **settings))
        return nodes[-1]

    yield one
    failed = [node.running.exception() for node in nodes if node.running.done() and not node.running.cancelled()]
    for node in nodes:
        await node.end()
    assert not failed


async def until(condition: Callable[[], object], timeout_s: float = 15) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def for_a_while(always: Callable[[], object], seconds: float) -> None:
    """It holds all the time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        assert always()
        await asyncio.sleep(0.01)


def key_of(node: Node) -> str:
    return NODES + node.me.node.hex()


# Who is there


async def test_nodes_that_name_the_same_etcd_find_each_other(start: Start, etcd: EtcdServer) -> None:
    one, two, three = start(ONE), start(TWO), start(THREE)
    await until(lambda: one.sees == two.sees == three.sees == {ONE, TWO, THREE})
    assert one.membership.members[TWO] == two.me
    assert etcd.count(NODES) == 3


async def test_epochs_go_up_beyond_what_etcd_counts(start: Start, etcd: EtcdServer) -> None:
    for turn in range(20):
        etcd.put("/elsewhere", str(turn))
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    assert one.membership.epoch > 20
    assert sorted(set(one.changes)) == one.changes


async def test_clusters_of_two_names_do_not_meet(start: Start) -> None:
    one, other = start(ONE), start(TWO, name="test2")
    third = start(THREE)
    await until(lambda: one.sees == third.sees == {ONE, THREE})
    assert other.sees == {TWO}


async def test_one_that_does_not_answer_is_no_member_whatever_its_lease(start: Start, etcd: EtcdServer) -> None:
    """Its lease lives on; it is removed in the time of a greeting, and comes back as the same."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    two.deaf = True
    loop = asyncio.get_running_loop()
    began = loop.time()
    await until(lambda: one.sees == {ONE})
    assert loop.time() - began < 20 * BEAT_S
    assert etcd.count(NODES) == 2
    two.deaf = False
    await until(lambda: one.sees == {ONE, TWO})
    assert one.membership.members[TWO] == replace(two.me, since=1), "and it has begun anew"


async def test_one_that_ends_takes_its_key_away(start: Start, etcd: EtcdServer) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == {ONE, TWO} and etcd.count(NODES) == 2)
    await two.end()
    assert etcd.count(NODES) == 1
    await until(lambda: one.sees == {ONE})


async def test_one_that_was_killed_goes_from_etcd_with_its_lease(start: Start, etcd: EtcdServer) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == {ONE, TWO})
    await two.end(kindly=False)
    await until(lambda: one.sees == {ONE})
    await until(lambda: etcd.count(NODES) == 1)
    await until(lambda: two.me.address not in one.membership._greetings._named)


# etcd comes and goes


@pytest.mark.parametrize("how", ["killed", "wiped", "frozen"])
async def test_members_stay_members_while_etcd_is_away(start: Start, etcd: EtcdServer, how: str) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    before = one.membership.epoch
    if how == "frozen":
        etcd.freeze()
    else:
        etcd.stop()
    await for_a_while(lambda: one.sees == two.sees == {ONE, TWO}, 1.5 * LEASE_S)
    if how == "frozen":
        etcd.thaw()
    else:
        if how == "wiped":
            etcd.wipe()
        await asyncio.to_thread(etcd.start)
    await until(lambda: etcd.count(NODES) == 2)
    await for_a_while(lambda: one.sees == two.sees == {ONE, TWO}, 1.5 * LEASE_S)
    assert one.membership.epoch == before, "nothing has changed"
    three = start(THREE)  # and it serves again
    await until(lambda: one.sees == two.sees == three.sees == {ONE, TWO, THREE})
    assert one.membership.epoch > before


async def test_an_etcd_that_comes_later(start: Start, etcd: EtcdServer) -> None:
    etcd.stop()
    one, two = start(ONE), start(TWO)
    await for_a_while(lambda: one.sees == {ONE}, 0.5)
    await asyncio.to_thread(etcd.start)
    await until(lambda: one.sees == two.sees == {ONE, TWO})


async def test_one_of_several_etcds_is_enough(start: Start, etcd: EtcdServer) -> None:
    one, two = start(ONE, "127.0.0.1:1", etcd.address), start(TWO, etcd.address, "no-such-host.invalid:2379")
    await until(lambda: one.sees == two.sees == {ONE, TWO})


@pytest.mark.parametrize("what", ["key", "lease"])
async def test_a_key_that_was_taken_away_is_written_again(start: Start, etcd: EtcdServer, what: str) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    if what == "key":
        etcd.delete(key_of(two))
    else:
        etcd.ask("lease/revoke", {"ID": str(two.membership._lease)})
    await until(lambda: etcd.count(key_of(two)) == 1)
    assert one.sees == two.sees == {ONE, TWO}


async def test_a_history_that_was_compacted(start: Start, etcd: EtcdServer) -> None:
    """What a watch would go on from is not there any more: all is read anew."""
    one = start(ONE)
    await until(lambda: etcd.count(NODES) == 1)
    etcd.stop()
    await asyncio.to_thread(etcd.start)
    for turn in range(10):
        etcd.put("/elsewhere", str(turn))
    etcd.compact()
    two = start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})


async def test_lost_by_the_others_and_back(start: Start, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose loop stands still past its lease: its epoch passes as soon as it looks, and it is back as the same
    member, with a lease."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    before = two.membership.epoch
    lease = two.membership._lease
    await asyncio.to_thread(_revoke, etcd, lease)
    loop = asyncio.get_running_loop()
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + 10.0)  # as after a SIGSTOP of 10 s
    two.membership.look()
    assert two.membership.epoch == before + 1
    assert two.changes[-1] == before + 1
    await until(lambda: etcd.count(key_of(two)) == 1 and two.membership._lease != lease)
    await until(lambda: one.sees == two.sees == {ONE, TWO})


def _revoke(etcd: EtcdServer, lease: int) -> None:
    etcd.ask("lease/revoke", {"ID": str(lease)})


# What is no node's


GARBAGE = {
    "no JSON": "\x00\x01{",
    "another shape": "[1, 2]",
    "no address": '{"node": "NODE"}',
    "another node": '{"node": "00", "address": "tcp://127.0.0.1:1"}',
    "no port": '{"node": "NODE", "address": "tcp://127.0.0.1"}',
    "another scheme": '{"node": "NODE", "address": "ipc:///tmp/x"}',
    "a type that is none": '{"node": 7, "address": ["x"]}',
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_what_no_node_writes_is_passed_over(
    start: Start, etcd: EtcdServer, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    etcd.put(NODES + "feed", GARBAGE[what].replace("NODE", "feed"))
    one = start(ONE)
    await until(lambda: etcd.count(NODES) == 2)
    etcd.put(NODES + "f00d", GARBAGE[what].replace("NODE", "f00d"))
    two = start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    assert "what no node writes" in caplog.text
    await until(lambda: one.membership._greetings._named == {two.me.address})


async def test_a_node_that_is_only_said_to_be_there_is_no_member(start: Start, etcd: EtcdServer) -> None:
    entry = {"node": THREE.hex(), "address": "tcp://127.0.0.1:1", "transports": {}}
    etcd.put(NODES + THREE.hex(), json.dumps(entry))
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    await for_a_while(lambda: one.sees == {ONE, TWO}, 0.5)


# Two who claim the same


async def test_started_again_at_the_same_address_is_another(start: Start, etcd: EtcdServer) -> None:
    """While the lease of the first lives: who answers there is the member."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == {ONE, TWO})
    await two.end(kindly=False)
    three = start(THREE, listen=two.me.address)
    await until(lambda: one.sees == three.sees == {ONE, THREE})
    await until(lambda: etcd.count(NODES) == 2)


async def test_two_that_claim_one_address(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Who answers there is the member. The other is none, and both say so in their logs."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    start(THREE, says=two.me.address)
    await until(lambda: "says that it listens at" in caplog.text)
    await for_a_while(lambda: one.sees == two.sees == {ONE, TWO}, 0.5)


async def test_two_that_claim_one_number(start: Start) -> None:
    """Who was there first is the member, and nothing flutters."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == {ONE, TWO})
    start(TWO)
    epoch = one.membership.epoch
    await for_a_while(lambda: one.membership.members.get(TWO) == two.me, 1.0)
    assert one.membership.epoch == epoch
