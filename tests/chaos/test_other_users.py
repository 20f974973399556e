"""Another user of the host, against nodes without a key on loopback: neither heard nor spoken to, by no way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import dataplane as dp
from dataplane.wire import peer_messages as pm
from tests import etcd
from tests.cases import each_case
from tests.chaos.test_peers import register
from tests.integration.test_hosts import Host, members, together
from tests.processes import MIB, eventually, pattern
from tests.users import OtherUser, needs_root

pytestmark = needs_root

ASK = """
c = zmq.Context(); s = c.socket(zmq.DEALER); s.linger = 0; s.connect(sys.argv[1])
for each in sys.argv[2:]: s.send(bytes.fromhex(each))
print(s.recv().hex() if s.poll(700) else "nothing", flush=True)
"""

LISTEN = """
c = zmq.Context(); s = c.socket(zmq.ROUTER); s.linger = 0
if sys.argv[1] == "keyed": s.curve_server = True; s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
print(s.bind_to_random_port("tcp://127.0.0.1"), flush=True)
print(s.recv().hex() if s.poll(1500) else "nothing", flush=True)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two nodes of this user, each in a directory of its own."""
    with Host(tmp_path / "one") as one, Host(tmp_path / "two", one) as two:
        with dp.connect(one.address) as here, dp.connect(two.address) as there:
            together(here, there)
        yield [one, two]


def encoded(*messages: Any) -> list[str]:
    return [msgspec.msgpack.encode(each).hex() for each in messages]


def test_another_user_reads_and_frees_nothing(hosts: list[Host]) -> None:
    with dp.connect(hosts[0].address) as here, dp.connect(hosts[1].address) as there:
        ref = here.put({"x": pattern(1, MIB)})
        (_, shard) = ref.shards()[0]
        asked = encoded(
            pm.DescribeShards(1, [shard]),
            pm.Offer(2, b"stranger", shard, "tcp", 5.0),
            pm.FreeParts(3, [(shard, [0], (0, 1, b""))]),
        )
        with OtherUser(ASK, hosts[0].listens, *asked) as other:
            assert other.hear() == "nothing"
        assert members(here) == {here.stats().node, there.stats().node}
        assert np.array_equal(there.get(ref)["x"].numpy(), pattern(1, MIB))


@pytest.mark.long
@each_case("how", ["plain", "keyed"])
def test_another_user_at_the_address_of_a_former_node_receives_nothing(tmp_path: Path, how: str) -> None:
    with OtherUser(LISTEN, how) as other:
        port = other.hear()
        joins = etcd.cluster()
        asyncio.run(register(joins, b"stranger", f"tcp://127.0.0.1:{port}"))
        with Host(tmp_path / "three", joins):
            assert other.hear() == "nothing"


@pytest.mark.long
def test_idle_connections_of_strangers_do_not_prevent_a_node_from_joining(hosts: list[Host], tmp_path: Path) -> None:
    program = """
host, port = sys.argv[1].removeprefix("tcp://").split(":")
print("here", flush=True)
kept = []
while True:
    kept.append(socket.create_connection((host, int(port))))
    del kept[:-300]
"""
    with OtherUser(program, hosts[0].listens) as other:
        assert other.hear() == "here"
        with Host(tmp_path / "three", hosts[0]) as three, dp.connect(three.address) as plane:
            eventually(lambda: len(members(plane)) == 3, "it has joined")
