"""Nodes that are members by their registrations at a coordinator: who is one, who is away, and who has gone.

Nothing here
depends on the pace of the machine: what is to happen is waited for, and what is not to happen is ruled out by something
later that has happened."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from dataplane.cluster.certificates import Certificates, certificates
from dataplane.cluster.cluster import access
from dataplane.cluster.detector import Detector, refused
from dataplane.cluster.membership import Member, Membership
from dataplane.cluster.placement import winner
from dataplane.cluster.server import EtcdServer, ServerAddress
from dataplane.config import ClusterConfig
from dataplane.coordinator.base import Coordinator, Registration, Unavailable
from dataplane.coordinator.etcd import EtcdCoordinator
from dataplane.wire import auth
from dataplane.wire import peer_messages as pm
from dataplane.wire.auth import Key
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers
from tests.coordinator import ProcessCoordinator
from tests.etcd import needs_etcd, ports
from tests.keys import KEY
from tests.processes import until

T = TypeVar("T")


class Line(Coordinator):
    """See the module. Closing it leaves the coordinator open."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._cut = asyncio.Event()

    @property
    def address(self) -> str:
        return self._coordinator.address

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        self._cut.clear()

    def check(self) -> None:
        if self._cut.is_set():
            raise Unavailable("the line is cut")

    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        self.check()
        return _LineRegistration(self, await self._coordinator.register(member, value, lease_s))

    async def members(self) -> Mapping[str, bytes]:
        self.check()
        return await self._coordinator.members()

    def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        return self._over(self._coordinator.watch_members())

    async def evict(self, member: str, value: bytes) -> None:
        self.check()
        await self._coordinator.evict(member, value)

    async def read(self, key: str) -> bytes | None:
        self.check()
        return await self._coordinator.read(key)

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        self.check()
        return await self._coordinator.swap(key, expected, value)

    def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        return self._over(self._coordinator.watch(key))

    async def _over(self, watch: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        async with aclosing(watch):
            while True:
                waits = asyncio.ensure_future(anext(watch)), asyncio.ensure_future(self._cut.wait())
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    self.check()
                    given = waits[0].result()
                finally:
                    for each in waits:
                        each.cancel()
                    await asyncio.gather(*waits, return_exceptions=True)
                yield given

    async def aclose(self) -> None:
        self.cut()


class _LineRegistration(Registration):
    def __init__(self, line: Line, registration: Registration) -> None:
        self._line, self._registration = line, registration

    async def renew(self) -> bool:
        self._line.check()
        return await self._registration.renew()

    async def leave(self) -> None:
        self._line.check()
        await self._registration.leave()


LEASE_S = 2.0
ONE, TWO, THREE = (name.hex() for name in (b"one.....", b"two.....", b"three..."))


class Clock:
    """The loop's, and what a test adds."""

    def __init__(self) -> None:
        self.more_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.more_s


class Node:
    """A membership with its detector and channel, and a line of its own to the coordinator."""

    def __init__(self, name: str, coordinator: Coordinator, life: int, key: Key | None, lease_s: float, **more: Any):
        self.peers = Peers(name, "tcp://127.0.0.1:0", KEY, lambda request: Done(request.id))
        self.peers.start()
        self.me = Member(life, self.peers.address, transports={"tcp": f"transport of {name}"}, node=name, **more)
        self.line = Line(coordinator)
        self.clock = Clock()
        self.membership = Membership(self.line, name, self.me, key=key, lease_s=lease_s, clock=self.clock)
        self.detector = Detector(self.peers, self.membership)
        self.changes: list[set[str]] = []
        self.membership.watch(lambda: self.changes.append(self.sees))
        self.over: list[str] = []
        self.membership.watch_ended(lambda node, before_s: self.over.append(node))
        self.running = [asyncio.ensure_future(work) for work in (self.membership.run(), self.detector.run())]

    @property
    def sees(self) -> set[str]:
        return set(self.membership.current)

    @property
    def answers(self) -> bool:
        return self.membership.coordination.answers

    async def end(self, *, kindly: bool = True) -> None:
        """Stop. Unkindly: as if killed, so that the coordinator is told nothing."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        if kindly:
            await self.membership.leave()
        await self.line.aclose()
        await self.peers.aclose()


Start = Callable[..., Node]


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = ProcessCoordinator(asyncio.get_running_loop().time)
    yield coordinator
    await coordinator.aclose()


@pytest.fixture
async def start(coordinator: Coordinator) -> AsyncIterator[Start]:
    nodes: list[Node] = []

    def one(name: str, life: int = 1, key: Key | None = None, lease_s: float = LEASE_S, **more: Any) -> Node:
        nodes.append(Node(name, coordinator, life, key, lease_s, **more))
        return nodes[-1]

    yield one
    failed = [task.exception() for node in nodes for task in node.running if task.done() and not task.cancelled()]
    for node in nodes:
        await node.end()
    assert not failed


async def settle(*nodes: Node) -> None:
    """As when the coordinator has answered them for a lease: what has gone is believed to have gone, now."""
    await until(lambda: all(node.answers for node in nodes))
    for node in nodes:
        assert node.membership._answers_since is not None
        node.membership._answers_since -= node.membership._lease_s
        node.membership._settle()


async def test_an_ended_process_is_detected_before_its_lease_expires(start: Start, coordinator: Coordinator) -> None:
    """By the word of its kernel; and everybody else looks when its registration goes."""
    nodes = [start(name, lease_s=3600.0) for name in (ONE, TWO, THREE)]
    await until(lambda: all(node.sees == {ONE, TWO, THREE} for node in nodes))
    await until(lambda: all(node.peers._links for node in nodes))
    await asyncio.gather(*(nodes[i].peers.request(nodes[j].me, ping(), Done, 10) for i, j in ((0, 1), (1, 2))))
    await nodes[1].end(kindly=False)
    await until(lambda: nodes[0].membership.gone(TWO) and nodes[2].membership.gone(TWO))
    assert nodes[0].sees == nodes[2].sees == {ONE, THREE}
    await until(lambda: nodes[0].over == nodes[2].over == [TWO])
    while set(await coordinator.members()) != {ONE, THREE}:
        await asyncio.sleep(0.01)


async def test_a_member_has_ended_when_another_node_registers_at_its_address(
    start: Start, coordinator: Coordinator
) -> None:
    """Its kernel does not say so, since the port is listened at. Who was seen before is not new."""
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == {ONE, TWO})
    await coordinator.register(THREE, msgspec.json.encode(Member(3, two.me.address)), 3600.0)
    await until(lambda: one.over == [TWO])
    await until(lambda: one.sees == {ONE, TWO, THREE})  # it lives after all, and registers again
    assert one.over == [TWO]


def ping() -> pm.DescribeShards:
    return pm.DescribeShards(1, [])


async def test_a_durable_member_is_away_and_not_lost_when_its_process_ends(start: Start) -> None:
    one, two = start(ONE), start(TWO, keeps=True)
    await until(lambda: one.sees == {ONE, TWO})
    await two.end()
    await until(lambda: one.over == [TWO])
    assert one.membership.away(TWO)
    assert not one.membership.gone(TWO)
    again = start(TWO, life=2, keeps=True)
    await until(lambda: one.sees == again.sees == {ONE, TWO})


async def test_a_node_with_a_data_directory_may_return_to_all_that_have_one_and_to_those_that_saw_it(
    start: Start,
) -> None:
    one, two = start(ONE), start(TWO, keeps=True)
    await until(lambda: one.sees == {ONE, TWO})
    await two.end()
    await until(lambda: one.over == [TWO])
    four = b"four....".hex()
    later, keeping = start(THREE), start(four, keeps=True)
    await until(lambda: later.sees == keeping.sees == {ONE, THREE, four})
    one.clock.more_s = keeping.clock.more_s = 2000.0
    returns = {each.membership.me: each.membership.may_return(TWO) for each in (one, later, keeping)}
    assert returns == {ONE: True, THREE: False, four: True}
    one.clock.more_s = keeping.clock.more_s = 25 * 3600.0
    assert not one.membership.may_return(TWO)
    assert not keeping.membership.may_return(TWO)
    assert one.membership.may_return(THREE)


async def test_a_durable_member_is_not_lost_when_its_process_ends_days_after_this_node_joined(start: Start) -> None:
    """The coordinator still has its registration then."""
    one, two = start(ONE), start(TWO, keeps=True)
    await until(lambda: one.sees == {ONE, TWO})
    one.clock.more_s = 25 * 3600.0
    here = one.membership
    heard: list[tuple[bool, bool]] = []
    here.watch(lambda: heard.append((here.gone(TWO, durable=True), here.may_return(TWO))))
    here.ended(TWO, two.me.life, one.clock())
    assert heard == [(False, True)]


async def test_a_silent_member_expires_with_its_lease_and_returns_unchanged(start: Start) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    await settle(one, two)
    two.line.cut()
    await until(lambda: one.sees == {ONE})
    assert two.sees == {ONE, TWO}, "nobody has told it"
    assert not one.membership.gone(TWO), "it is not known to have ended"
    two.line.mend()
    await until(lambda: one.sees == {ONE, TWO})
    assert one.membership.current[TWO] == two.me
    assert one.over == []
    one.clock.more_s = 1000.0
    two.line.cut()
    await settle(one)
    await until(lambda: one.sees == {ONE})
    assert not one.membership.gone(TWO), "it has just gone, though others joined long ago"
    one.clock.more_s = 2000.0
    assert one.membership.gone(TWO), "what is away for so long does not come back with what it had"


async def test_the_later_of_two_nodes_with_one_number_is_the_member(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == {ONE, TWO} and two.answers)
    again = start(TWO, life=2)
    await until(lambda: one.membership.current[TWO] == again.me)
    await until(lambda: "another node has this node's number" in caplog.text)
    epoch = one.membership.epoch
    three = start(THREE)
    await until(lambda: one.sees == three.sees == {ONE, TWO, THREE})
    assert one.membership.epoch == epoch + 1, "nothing flutters"
    assert one.membership.current[TWO] == again.me


async def test_members_stay_members_while_the_coordinator_is_away(start: Start, coordinator: Coordinator) -> None:
    one, two = start(ONE), start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    for node in (one, two):
        node.line.cut()

    async def forgotten() -> bool:
        return not await coordinator.members()

    await until(forgotten)
    for node in (one, two):
        node.line.mend()
    await until(lambda: one.answers and two.answers)
    await until(lambda: TWO in one.membership._registered and ONE in two.membership._registered)
    await settle(one, two)
    assert one.sees == two.sees == {ONE, TWO}
    assert (one.changes, two.changes) == ([{ONE, TWO}], [{ONE, TWO}]), "nothing has changed"


def entry(**changed: Any) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(Member(1, "tcp://127.0.0.1:1"), **changed))


GARBAGE = {
    "no JSON": b"\x00\x01{",
    "another shape": b"[1, 2]",
    "no address": b'{"life": 1}',
    "no port": entry(address="tcp://127.0.0.1"),
    "another scheme": entry(address="ipc:///tmp/x"),
    "a type that is none": b'{"life": "x", "address": ["x"]}',
    "too deep": b"[" * 100_000,
    "another major version": entry(major=pm.MAJOR + 1),
}


async def test_invalid_registrations_are_ignored(
    start: Start, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    async def write(head: str) -> None:
        for number, value in enumerate(GARBAGE.values()):
            await coordinator.register(f"{number:02x}" + head, value, 3600)
            await coordinator.register(f"{head}\0{number}" * (number + 1), entry(), 3600)

    await write("ee" * 7)
    one = start(ONE)
    await until(lambda: one.answers)
    await write("ff" * 7)
    for value in GARBAGE.values():
        await coordinator.register(THREE, value, 3600)
    two = start(TWO)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    assert "invalid entry for member" in caplog.text
    assert "protocol version" in caplog.text


async def test_registrations_without_the_cluster_key_create_no_member(
    start: Start, coordinator: Coordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, other = auth.generate(tmp_path / "key"), auth.generate(tmp_path / "other")
    one, two, stranger = start(ONE, key=key), start(TWO, key=key), start(THREE, key=other)
    await coordinator.register(b"nokey...".hex(), entry(), 3600.0)
    await until(lambda: one.sees == two.sees == {ONE, TWO})
    await settle(stranger)
    assert stranger.sees == {THREE}
    assert "it was not written with the cluster's key" in caplog.text
    mine = (await coordinator.members())[ONE]
    await coordinator.register(b"copied..".hex(), mine, 3600.0)  # another's entry is not one's own
    four = start(b"four....".hex(), key=key)
    await until(lambda: one.sees == four.sees == {ONE, TWO, b"four....".hex()})


# The proof that a process has ended: its host refuses connections.


async def test_a_host_refuses_when_its_name_has_addresses_and_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        async def resolve(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        assert not await refused(f"tcp://trainer-3:{port}"), "one of them listens"
    assert await refused(f"tcp://trainer-3:{port}")

    async def fail(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fail)
    assert not await refused(f"tcp://trainer-3:{port}")


# Placement by rendezvous hashing: the same for all, evenly, and moving no more than must.

NODES = [bytes([i]) * 8 for i in range(16)]
NAMES = [f"rollouts-{i}" for i in range(2000)]


def test_only_placements_of_a_leaving_node_move() -> None:
    was = [winner(NODES, "stream", name) for name in NAMES]
    now = [winner(NODES[1:], "stream", name) for name in NAMES]
    moved = [a != b for a, b in zip(was, now, strict=True)]
    assert moved == [node == NODES[0] for node in was]


# An external etcd over TLS: whom it answers, whom a node believes, and files that are refused.


def private(path: Path, content: bytes) -> Path:
    path.touch(0o600)
    path.write_bytes(content)
    return path


def files(directory: Path, made: Certificates) -> dict[str, Path]:
    """The settings of a node with these certificates."""
    directory.mkdir()
    content = {"etcd_ca": made.authority, "etcd_cert": made.own, "etcd_cert_key": made.private}
    return {name: private(directory / name, each) for name, each in content.items()}


def config(**settings: Path) -> ClusterConfig:
    return ClusterConfig("tcp://127.0.0.1:0", "etcd://127.0.0.1:1", **settings)


@needs_etcd
async def test_etcd_over_tls_answers_only_clients_with_a_certificate(tmp_path: Path) -> None:
    mine, others = (certificates(auth.generate(tmp_path / name), ["127.0.0.1"]) for name in ("key", "other"))
    [seed] = ports(1)
    host, _, port = seed.rpartition(":")
    place = ServerAddress(seed, seed, f"{host}:{int(port) + 1}")
    (tmp_path / "etcd").mkdir()
    server = EtcdServer(tmp_path / "etcd", place, "token", "127.0.0.1", mine)
    own = files(tmp_path / "mine", mine)
    stranger = files(tmp_path / "others", others)

    async def new() -> tuple[str, str]:
        return "new", place.listed

    running = asyncio.ensure_future(server.run(new))
    clients = [
        EtcdCoordinator([seed], "test", tls=access(config(**settings))[0])
        for settings in (
            own,
            {"etcd_ca": own["etcd_ca"]},  # shows nothing
            own | {"etcd_cert": stranger["etcd_cert"], "etcd_cert_key": stranger["etcd_cert_key"]},
            stranger,  # believes another
        )
    ]
    try:
        async with asyncio.timeout(40):
            while True:
                try:
                    assert await clients[0].swap("k", None, b"1") == b"1"
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        for client in clients[1:]:
            with pytest.raises(Unavailable):
                await client.read("k")
    finally:
        for client in clients:
            await client.aclose()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_an_etcd_login_file_is_one_private_line(tmp_path: Path) -> None:
    ca = private(tmp_path / "ca", certificates(auth.generate(tmp_path / "key"), ["a"]).authority)
    login = private(tmp_path / "login", b"root:pass:word\n")
    assert access(config(etcd_ca=ca, etcd_login=login))[1] == ("root", "pass:word")
    assert access(config()) == (None, None)
    login.write_text("root")
    with pytest.raises(ValueError, match="USER:PASSWORD"):
        access(config(etcd_ca=ca, etcd_login=login))
    os.chmod(login, 0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        access(config(etcd_ca=ca, etcd_login=login))
    with pytest.raises(ValueError, match="no certificate"):
        access(config(etcd_ca=login))
    with pytest.raises(OSError, match="nowhere"):
        access(config(etcd_ca=tmp_path / "nowhere", etcd_login=tmp_path / "nowhere"))
