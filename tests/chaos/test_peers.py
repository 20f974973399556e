"""What strangers, and members that lie, say to a node on its two ports: nobody else notices, and nothing is given away.

The ports are real nodes'; what is said is random from a fixed seed.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import dataplane as dp
from dataplane.cluster.membership import Member
from dataplane.coordinator.etcd import EtcdCoordinator
from dataplane.wire import auth
from dataplane.wire import peer_messages as pm
from tests import keys
from tests.integration.test_hosts import Host, connected, members
from tests.processes import MIB, WAIT_S, eventually, pattern

encode = msgspec.msgpack.encode
SIZE = 2 * MIB


@pytest.fixture(params=["no key", "a key"])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    if request.param == "no key":
        return None
    auth.generate(tmp_path / "key")
    return tmp_path / "key"


Nodes = tuple[list[Host], list[Any]]


@pytest.fixture
def nodes(tmp_path: Path, key: Path | None) -> Iterator[Nodes]:
    with connected(tmp_path, key=key) as made:
        yield made


def still_well(nodes: Nodes) -> None:
    """Fails where one of the two is no member, can not be read from, or holds something for nobody."""
    hosts, planes = nodes
    assert members(planes[0]) >= {plane.stats().node for plane in planes}
    for seed, (owner, reader) in enumerate([planes, planes[::-1]]):
        ref = owner.put({"x": pattern(seed, MIB)})
        assert np.array_equal(reader.get(ref)["x"].numpy(), pattern(seed, MIB))
        reader.free(ref)
    eventually(lambda: all(host.facts()["offers"] == 0 for host in hosts), "nothing is held for strangers")
    eventually(lambda: not any(plane.stats().pinned_bytes for plane in planes), "nothing is pinned any more")


class Voice:
    """A ZeroMQ socket that speaks to the node of `host`: with the cluster's key, another, or none. `key`: the
    cluster's; None for that of nodes that are given none."""

    def __init__(
        self,
        context: zmq.Context[Any],
        host: Any,
        key: auth.Key | None,
        own: auth.Key | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        if not plain:
            keys.speak(self._socket, key or keys.of_this_user(), own)
        self._socket.connect(host.listens)
        with dp.connect(host.address) as plane:
            self._node = plane.stats().node.encode()

    def say(self, what: bytes, *, wait_s: float = 0.0) -> None:
        """Send it, unless there is nobody or too much lies in the queue already; for that it waits so long."""
        self._socket.poll(int(wait_s * 1000), zmq.POLLOUT)
        with suppress(zmq.Again):
            self._socket.send_multipart([self._node, what], zmq.NOBLOCK)

    def hear(self, timeout_s: float = 5.0) -> Any:
        """What is answered, or None."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return msgspec.msgpack.decode(self._socket.recv(), type=pm.PeerReply)

    def ask(self, message: Any) -> Any:
        """The answer to this message, after those to others."""
        self.say(encode(message))
        while (reply := self.hear(WAIT_S)) is not None and reply.id != message.id:
            pass
        return reply

    def close(self) -> None:
        self._socket.close()


@contextmanager
def voices() -> Iterator[Callable[..., Voice]]:
    context: zmq.Context[Any] = zmq.Context()
    made: list[Voice] = []

    def one(*arguments: Any, **settings: Any) -> Voice:
        made.append(Voice(context, *arguments, **settings))
        return made[-1]

    try:
        yield one
    finally:
        for voice in made:
            voice.close()
        context.destroy(linger=0)


def loaded(key: Path | None) -> auth.Key | None:
    return None if key is None else auth.load(key)


def test_random_bytes_on_both_ports_do_not_affect_the_nodes(nodes: Nodes) -> None:
    chance = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x00" * 32
    ports = [nodes[0][0].listens.removeprefix("tcp://"), port_of_bytes(nodes)]
    for turn in range(60):
        host, _, port = ports[turn % 2].rpartition(":")
        said = chance.randbytes(chance.choice([1, 16, 32, 36, 64, 1000, 100_000]))
        with socket.create_connection((host, int(port)), timeout=60) as stranger, suppress(OSError):
            stranger.sendall(greeting[: chance.randrange(len(greeting))] * (turn % 3 == 0) + said)
            if turn % 4 < 2:
                stranger.shutdown(socket.SHUT_WR)
    still_well(nodes)


def port_of_bytes(nodes: Nodes) -> str:
    plane = nodes[1][0]
    return str(plane.members()["members"][plane.stats().node]["transports"]["tcp"])


def test_strangers_without_the_cluster_key_are_not_answered(nodes: Nodes, key: Path | None) -> None:
    right = loaded(key) or keys.of_this_user()
    other = auth.Key(*zmq.curve_keypair())
    ref = nodes[1][0].put({"x": pattern(1, SIZE)})
    (_, shard) = ref.shards()[0]
    with voices() as voice:
        host = nodes[0][0]
        strangers = [voice(host, None, plain=True), voice(host, other), voice(host, right, own=other)]
        for stranger in strangers:
            for number in range(50):
                stranger.say(encode(pm.Offer(number, b"stranger", shard, "tcp", 5.0)))
        assert [stranger.hear(0.3) for stranger in strangers] == [None] * 3
        assert nodes[0][0].facts()["offers"] == 0
        assert isinstance(voice(host, right).ask(pm.DescribeShards(1, [shard])), pm.Described), "who has it, is"
    still_well(nodes)


async def register(joins: str, node: bytes, address: str) -> None:
    """Be a member of a cluster without a key that listens there, for a minute."""
    servers, name = joins.removeprefix("etcd://").split("/")
    coordinator = EtcdCoordinator([servers], name)
    member = Member(1, address, transports={"tcp": "127.0.0.1:1"})
    await coordinator.register(node.hex(), msgspec.json.encode(member), 60.0)
    await coordinator.aclose()
