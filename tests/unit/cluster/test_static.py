"""Nodes that find each other by fixed addresses: who is a member, since when, and who is no more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.cluster import static
from dataplane.cluster.membership import Member
from dataplane.cluster.static import StaticMembership
from dataplane.errors import ProtocolMismatch
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers
from tests.unit.wire.test_peer import strays

BEAT_S = 0.1

MORTAL = {
    "test_a_watcher_sees_the_change_that_it_is_told_of",
    "test_one_that_does_not_answer_is_no_member",
    "test_removed_as_soon_as_it_is_dead",
    "test_one_that_was_silent_and_answers_again_is_the_same",
    "test_a_member_that_comes_back_with_another_major_version",
    "test_who_was_only_heard_of_is_given_up_in_the_end",
}
"""Tests in which somebody dies of silence, after 3.5 beats. In all others that takes ten times as long, so that a busy
machine kills nobody."""


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.originalname not in MORTAL:
        monkeypatch.setattr(static, "DEAD_S", 10 * static.DEAD_S)


class Node:
    """A membership, with a control channel of its own."""

    def __init__(self, number: bytes, join: tuple[Node | str, ...] = (), listen: str = "tcp://127.0.0.1:0") -> None:
        self.deaf = False
        self.major = pm.MAJOR
        self.greeted: list[pm.Greet] = []
        self.peers = Peers(listen, None, self._answer)
        self.peers.start()
        self.me = Member(number, self.peers.address, {"tcp": f"transport of {number!r}"})
        addresses = [each if isinstance(each, str) else each.address for each in join]
        self.membership = StaticMembership(self.peers, self.me, addresses, BEAT_S)
        self.changes: list[int] = []
        self.membership.watch(lambda: self.changes.append(self.membership.epoch))
        self.begun = 0
        self.membership.begin_anew_by(self._begin_anew)
        self.running = asyncio.get_running_loop().create_task(self.membership.run())

    @property
    def address(self) -> str:
        return self.me.address

    def _begin_anew(self) -> int:
        self.begun += 1
        return self.begun

    async def _answer(self, request: Any) -> Message:
        self.greeted.append(request)
        if self.deaf:
            await asyncio.Event().wait()
        if not isinstance(request, pm.Greet):
            return Done(request.id)
        answer = self.membership.greeted(request)
        return msgspec.structs.replace(answer, major=self.major, minor=0)

    @property
    def sees(self) -> set[bytes]:
        return set(self.membership.members)

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for stray in strays(self.peers):
            stray.close(linger=0)  # else the end would wait for it
        await self.peers.aclose()


Start = Callable[..., Node]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    nodes: list[Node] = []

    def one(number: bytes, *join: Node | str, **settings: Any) -> Node:
        nodes.append(Node(number, join, **settings))
        return nodes[-1]

    yield one
    failed = [node.running.exception() for node in nodes if node.running.done() and not node.running.cancelled()]
    for node in nodes:
        await node.stop()
    assert not failed


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def beats(node: Node, of: Node, count: int = 4) -> None:
    """Wait until the node has been greeted that often by the other."""
    before = sum(greet.node == of.me.node for greet in node.greeted)
    await until(lambda: sum(greet.node == of.me.node for greet in node.greeted) >= before + count)


async def awake_s(work: Awaitable[object]) -> float:
    """Seconds that this took, but for those in which a busy machine let the loop stand still."""
    loop = asyncio.get_running_loop()
    stood = 0.0

    async def tick() -> None:
        nonlocal stood
        while True:
            before = loop.time()
            await asyncio.sleep(0.005)
            stood += loop.time() - before - 0.005

    ticking, began = asyncio.ensure_future(tick()), loop.time()
    try:
        await work
    finally:
        ticking.cancel()
    return loop.time() - began - stood


async def test_alone(start: Start) -> None:
    one = start(b"one")
    await asyncio.sleep(0)
    assert one.membership.members == {b"one": one.me}
    assert one.membership.epoch == 1
    assert one.changes == []


async def test_two_of_which_one_names_the_other(start: Start) -> None:
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    assert one.membership.members == two.membership.members == {b"one": one.me, b"two": two.me}
    assert one.membership.members[b"two"].transports == {"tcp": "transport of b'two'"}


async def test_two_that_name_each_other_and_themselves(start: Start) -> None:
    one = start(b"one")
    address = one.address
    await one.stop()
    two = start(b"two", address)
    one = start(b"one again", address, two, listen=address)
    await until(lambda: one.sees == two.sees == {b"one again", b"two"})
    assert one.membership.epoch == two.membership.epoch == 2


async def test_three_that_all_name_the_first(start: Start) -> None:
    one = start(b"one")
    two, three = start(b"two", one), start(b"three", one)
    await until(lambda: one.sees == {b"one", b"two", b"three"})
    assert b"one" in two.sees
    assert b"one" in three.sees


async def test_three_in_a_chain_with_the_ends_named(start: Start) -> None:
    one = start(b"one")
    two = start(b"two", one)
    three = start(b"three", two, one)
    await until(lambda: one.sees == two.sees == three.sees == {b"one", b"two", b"three"})


async def test_all_members_know_each_other_though_only_some_were_named(start: Start) -> None:
    """`--join` may name a few that are always there: the others hear of each other through them."""
    one = start(b"one")
    two, three = start(b"two", one), start(b"three", one)
    async with asyncio.timeout(2):
        while not one.sees == two.sees == three.sees == {b"one", b"two", b"three"}:
            await asyncio.sleep(0.001)


async def test_epochs_go_up_with_changes_alone(start: Start) -> None:
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    for node, other in ((one, two), (two, one)):
        await beats(node, other)
        assert node.membership.epoch == 2
        assert node.changes == [2]
    start(b"three", one)
    await until(lambda: len(one.sees) == 3)
    assert one.changes == [2, 3]


async def test_a_watcher_sees_the_change_that_it_is_told_of(start: Start) -> None:
    one = start(b"one")
    seen: list[tuple[int, set[bytes]]] = []
    one.membership.watch(lambda: seen.append((one.membership.epoch, one.sees)))
    two = start(b"two", one)
    await until(lambda: seen)
    assert seen == [(2, {b"one", b"two"})]
    await two.stop()
    await until(lambda: len(seen) == 2)
    assert seen[1] == (3, {b"one"})


async def test_members_are_as_they_were_when_looked_at_and_nobody_elses_to_change(start: Start) -> None:
    one = start(b"one")
    before = one.membership.members
    with pytest.raises(AttributeError):
        before.clear()  # type: ignore[attr-defined]
    two = start(b"two", one)
    await until(lambda: one.sees == {b"one", b"two"})
    assert set(before) == {b"one"}
    await two.stop()


@pytest.mark.parametrize("how", ["stopped", "deaf"])
async def test_one_that_does_not_answer_is_no_member(start: Start, how: str) -> None:
    one = start(b"one")
    two, three = start(b"two", one), start(b"three", one)
    await until(lambda: one.sees == {b"one", b"two", b"three"})
    epoch = one.membership.epoch
    if how == "stopped":
        await two.stop()
    else:
        two.deaf = True
    assert await awake_s(until(lambda: b"two" not in one.sees)) < 20 * BEAT_S
    assert one.sees == {b"one", b"three"}
    assert one.membership.epoch == epoch + 1
    assert three.sees >= {b"one", b"three"}


async def test_removed_as_soon_as_it_is_dead(start: Start) -> None:
    """3.5 beats without an answer are enough; who waits for one more answer first is late."""
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: b"two" in one.sees)
    await beats(two, one, 2)
    two.deaf = True
    assert await awake_s(until(lambda: b"two" not in one.sees)) < 3.5 * BEAT_S + 0.05


async def test_one_that_was_silent_and_answers_again_is_the_same(start: Start) -> None:
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    two.deaf = True
    await until(lambda: one.sees == {b"one"})
    two.deaf = False
    await until(lambda: one.sees == {b"one", b"two"})
    assert one.changes == [2, 3, 4]
    assert one.membership.members[b"two"] == replace(two.me, since=1), "and it has begun anew"


async def test_one_restarted_at_the_same_address_is_another(start: Start) -> None:
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: b"two" in one.sees)
    address = two.address
    await two.stop()
    again = start(b"again", one, listen=address)
    await until(lambda: one.sees == {b"one", b"again"} and b"one" in again.sees)
    assert one.membership.members[b"again"].address == address
    assert one.membership.epoch >= 4  # the first came, went, and the other came


async def test_found_though_it_was_started_later(start: Start) -> None:
    two = start(b"two")
    address = two.address
    await two.stop()
    one = start(b"one", address)
    await until(lambda: one.peers._links)
    start(b"later", listen=address)
    await until(lambda: one.sees == {b"one", b"later"})


async def test_who_greets_is_greeted_back(start: Start) -> None:
    """And is a member by its own answers alone: a greeting proves nothing."""
    one, two = start(b"one"), start(b"two")
    greet = pm.Greet(two.peers.next_id(), pm.MAJOR, pm.MINOR, b"two", two.address, {})
    answer = await two.peers.request(one.address, greet, pm.Greeted, 5)
    assert (answer.node, answer.address, answer.transports) == (b"one", one.address, one.me.transports)
    assert answer.minor <= pm.MINOR
    await until(lambda: b"two" in one.sees)
    greet = pm.Greet(two.peers.next_id(), pm.MAJOR, pm.MINOR, b"ghost", "tcp://127.0.0.1:1", {})
    await two.peers.request(one.address, greet, pm.Greeted, 5)
    await beats(two, one)
    assert one.sees == {b"one", b"two"}


async def test_of_another_major_version_is_no_member(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    one = start(b"one")
    two = start(b"two", one)
    two.major = pm.MAJOR + 1
    await beats(two, one)
    assert one.sees == {b"one"}
    assert one.membership.epoch == 1


async def test_a_member_that_comes_back_with_another_major_version(start: Start) -> None:
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: b"two" in one.sees)
    two.major = pm.MAJOR + 1
    await until(lambda: one.sees == {b"one"})


async def test_two_names_of_one_node_are_one_member(start: Start) -> None:
    """A node may be joined by another name than it gives itself: it is there once, and nothing changes any more."""
    one = start(b"one")
    other_name = one.address.replace("127.0.0.1", "localhost")
    two = start(b"two", other_name)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    start(b"three", two)  # which makes all greet all
    one_greets = pm.Greet(one.peers.next_id(), pm.MAJOR, pm.MINOR, b"one", one.address, dict(one.me.transports))
    await one.peers.request(two.address, one_greets, pm.Greeted, 5)
    await until(lambda: len(two.sees) == 3)
    epoch = two.membership.epoch
    await beats(one, two, 10)
    assert two.membership.epoch == epoch


async def test_two_that_claim_one_number(start: Start) -> None:
    """Whoever it is, one of them is the member, and nothing flutters."""
    one = start(b"one")
    start(b"two", one)
    start(b"two", one)
    await until(lambda: b"two" in one.sees)
    two = one.membership.members[b"two"]
    epoch = one.membership.epoch
    for _ in range(3):
        await until(lambda: len(one.greeted) >= 4)
        one.greeted.clear()
    assert one.membership.epoch == epoch
    assert one.membership.members[b"two"] == two


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "tcp://", "tcp://127.0.0.1:x", "ipc:///tmp/x", "inproc://x", "tcp://*:1", "é" * 99],
)
async def test_who_says_that_it_is_nowhere(start: Start, address: str) -> None:
    """A greeting from an address that is none is not the end of the one who is greeted."""
    one = start(b"one")
    two = start(b"two", one)
    greet = pm.Greet(two.peers.next_id(), pm.MAJOR, pm.MINOR, b"nowhere", address, {})
    with suppress(Exception):
        await two.peers.request(one.address, greet, pm.Greeted, 0.5)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    await beats(two, one, 2)
    assert not one.running.done()


async def test_an_address_that_is_named_wrongly(start: Start) -> None:
    """In `--join`: nobody is found there, the others are, and it is no end."""
    one = start(b"one")
    two = start(b"two", "tcp://127.0.0.1:1", "tcp://no-such-host.invalid:7000", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    assert not two.running.done()


async def test_named_anew(start: Start) -> None:
    """Who is not named any more stays a member while it answers."""
    one, two = start(b"one"), start(b"two")
    one.membership.seek([two.address, one.address])
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    one.membership.seek([])
    epoch = one.membership.epoch
    await beats(one, two, 4)
    assert one.sees == two.sees == {b"one", b"two"}
    assert one.membership.epoch == epoch


async def test_who_was_only_heard_of_is_given_up_in_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts come and go: those that have gone for good are not greeted for ever, those that were named are."""
    monkeypatch.setattr(static, "FORGET_S", 8.0)
    one, three = start(b"one"), start(b"three")
    two = start(b"two", one, three)
    await until(lambda: one.sees == {b"one", b"two", b"three"} == two.sees)
    await three.stop()
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    await until(lambda: three.address not in one.peers._links)
    await beats(one, two, 4)
    assert three.address in two.peers._links


async def test_away_for_long_it_begins_anew(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a SIGSTOP: noticed by who first looks, and nobody is taken for dead by who was away itself."""
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    before, begun, changes = one.membership.epoch, one.begun, len(two.changes)
    loop = asyncio.get_running_loop()
    real = loop.time
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", lambda: real() + 10.0)
        one.membership.look()
    assert (one.membership.epoch, one.begun) == (before + 1, begun + 1)
    assert one.sees == {b"one", b"two"}
    await until(lambda: two.membership.members[b"one"].since == one.begun and len(two.changes) > changes)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})


async def test_who_says_that_it_has_begun_anew_is_another_from_then_on(start: Start) -> None:
    """Also before it is greeted: what it has said before and what it says now are not taken for one."""
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    seen: list[set[bytes]] = []
    one.membership.watch(lambda: seen.append(one.sees))
    one.membership.met(b"two", 0)
    one.membership.met(b"another", 7)
    one.membership.met(b"one", 7)
    assert seen == []
    one.membership.met(b"two", 4)
    assert seen == [{b"one"}, {b"one", b"two"}]
    assert one.membership.members[b"two"].since == 4
    assert one.membership.fences(b"two", 3)


async def test_away_for_less_than_that_it_takes_nobody_for_dead(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have taken it for dead already: they heard of it last before it was stopped."""
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    loop = asyncio.get_running_loop()
    now, dead_s = loop.time(), one.membership._dead_s
    one.membership.look()
    one.membership._heard[b"two"] = now - 0.5 * dead_s
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", lambda: now + 0.9 * dead_s)
        one.membership._bury(two.address, loop.time())
    assert one.sees == {b"one", b"two"}
    assert one.begun == 0


async def test_an_answer_from_before_it_was_away_makes_nobody_dead(start: Start) -> None:
    """It was asked for before, and read after."""
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    loop, dead_s = asyncio.get_running_loop(), one.membership._dead_s
    heard = one.membership._heard[b"two"] = loop.time() + dead_s  # as if all that was asked was asked long ago
    await until(lambda: loop.time() > heard - 0.5 * dead_s)
    assert one.membership._heard[b"two"] == heard


async def test_who_begins_anew_takes_nobody_for_dead_that_answered_it(start: Start) -> None:
    """Of two of which one was taken for dead, and begins anew when it is told, the other need not."""
    one, two = start(b"one....."), start(b"two.....")
    two.membership.seek([one.address])
    await until(lambda: len(one.sees) == len(two.sees) == 2)
    take_for_dead(one, two)
    two.membership._heard[one.me.node] -= 0.9 * two.membership._dead_s
    await until(lambda: two.begun == 1)
    two.membership._bury(one.address, asyncio.get_running_loop().time() + 0.5 * two.membership._dead_s)
    await until(lambda: len(one.sees) == len(two.sees) == 2)
    assert (one.begun, two.begun) == (0, 1)


async def test_away_for_long_and_alone_it_goes_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = start(b"one")
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    real = loop.time
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", lambda: real() + 10.0)
        one.membership.look()
    assert one.begun == 0


async def test_cancelled_it_leaves_nothing(start: Start) -> None:
    one = start(b"one")
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    before = asyncio.all_tasks()
    await two.stop()
    assert asyncio.all_tasks() < before


def take_for_dead(who: Node, dead: Node) -> None:
    """As when it does not answer for long enough."""
    who.membership._heard[dead.me.node] = -1e9
    who.membership._bury(dead.address, asyncio.get_running_loop().time())


async def test_who_was_taken_for_dead_and_did_not_notice_begins_anew(start: Start) -> None:
    """One hears nothing for a while, the other hears all."""
    one, two = start(b"one....."), start(b"two.....")
    both = {one.me.node, two.me.node}
    two.membership.seek([one.address])
    await until(lambda: one.sees == two.sees == both)
    seen: list[set[bytes]] = []
    one.membership.watch(lambda: seen.append(one.sees))
    take_for_dead(one, two)
    assert one.membership.fences(two.me.node, 0)
    await until(lambda: seen == [{one.me.node}, both])
    assert (one.begun, two.begun) == (0, 1)
    assert one.membership.members[two.me.node].since == 1
    assert (one.membership.fences(two.me.node, 0), one.membership.fences(two.me.node, 1)) == (True, False)
    epochs = one.membership.epoch, two.membership.epoch
    await beats(one, two)
    await beats(two, one)
    assert (one.membership.epoch, two.membership.epoch) == epochs


async def test_who_was_cut_off_begins_anew_and_not_all_others(start: Start) -> None:
    nodes = [start(b"one....."), start(b"two....."), start(b"three...")]
    for node in nodes[1:]:
        node.membership.seek([each.address for each in nodes])
    three = {node.me.node for node in nodes}
    await until(lambda: all(node.sees == three for node in nodes))
    cut = nodes[0]
    for node in nodes[1:]:
        take_for_dead(node, cut)
        take_for_dead(cut, node)
    await until(lambda: all(node.sees == three for node in nodes))
    assert [node.begun for node in nodes] == [1, 0, 0]


async def test_of_two_that_took_each_other_for_dead_one_begins_anew(start: Start) -> None:
    one, two = start(b"one....."), start(b"two.....")
    two.membership.seek([one.address])
    await until(lambda: len(one.sees) == len(two.sees) == 2)
    take_for_dead(one, two)
    take_for_dead(two, one)
    await until(lambda: len(one.sees) == len(two.sees) == 2)
    assert (one.begun, two.begun) == (0, 1)


# Addresses that others name


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://*:1",
        "tcp://127.0.0.1;127.0.0.2:1",
        "tcp://127.0.0.1:1\n",
        "tcp://" + "x" * 400 + ":1",
        "inproc://x",
        "udp://127.0.0.1:1",
    ],
)
async def test_nobody_is_greeted_but_at_a_host_and_port(start: Start, address: str) -> None:
    one, two = start(b"one"), start(b"two")
    greet = pm.Greet(two.peers.next_id(), pm.MAJOR, pm.MINOR, b"ghost", address, {})
    with pytest.raises(ProtocolMismatch):
        await two.peers.request(one.address, greet, pm.Greeted, 5)
    assert set(one.peers._links) <= {two.address}


async def test_a_socket_in_the_file_system_is_not_connected_to(start: Start, tmp_path: Path) -> None:
    """Named in a greeting, or among those whom a member knows."""
    one, two = start(b"one"), start(b"two")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "x.sock"))
        listener.listen()
        listener.setblocking(False)
        address = f"ipc://{tmp_path}/x.sock"
        greet = pm.Greet(two.peers.next_id(), pm.MAJOR, pm.MINOR, b"ghost", address, {})
        with pytest.raises(ProtocolMismatch):
            await two.peers.request(one.address, greet, pm.Greeted, 5)
        ghost = replace(two.me, node=b"ghost", address=address)
        two.membership._put(ghost)  # it tells of it
        one.membership.seek([two.address])
        await until(lambda: b"two" in one.sees)
        await beats(two, one)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert address not in one.peers._links


async def test_what_others_say_makes_a_node_connect_to_no_more_than_so_many(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last ones: who is there is told of again. Members, and those that were named, stay."""
    monkeypatch.setattr(static, "MAX_UNPROVEN", 5)
    named = "tcp://127.0.0.1:9"
    one = start(b"one", named)
    two = start(b"two", one)
    await until(lambda: one.sees == two.sees == {b"one", b"two"})
    for port in range(10, 40):
        greet = pm.Greet(two.peers.next_id(), pm.MAJOR, pm.MINOR, b"ghost", f"tcp://127.0.0.1:{port}", {})
        await two.peers.request(one.address, greet, pm.Greeted, 5)
    expected = {named, two.address, *(f"tcp://127.0.0.1:{port}" for port in range(35, 40))}
    await until(lambda: one.peers._links.keys() == expected)
    assert one.membership._greeted.keys() == expected
    await beats(two, one, 2)
    assert one.sees == {b"one", b"two"}
