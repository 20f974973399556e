"""Every request with a number is answered under it, whatever is in it: of clients, and of other nodes.

What is said is random from a fixed seed. Each request is followed by another that does not wait for its answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

import dataplane as dp
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.client_messages import AnyRequest
from tests.attack.neighbour import Node
from tests.chaos.frames import Frames
from tests.chaos.raw import Raw, framed
from tests.chaos.test_peers import voices
from tests.etcd import cluster
from tests.processes import WAIT_S

ROUNDS = 30  # requests of each kind


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    options = ["--memory", "16MiB", "--spill", 0, "--listen", "tcp://127.0.0.1:0", "--join", cluster()]
    with Node(tmp_path_factory.mktemp("node"), *options) as node:
        yield node


@pytest.fixture
def tokens(node: Node, request: pytest.FixtureRequest) -> Iterator[list[bytes]]:
    """Of a stream with rows and a reference; a client goes on working meanwhile."""
    name = request.node.name  # a stream of its own: one of the requests may close it
    with dp.connect(node.address) as plane, Raw(node.address) as raw:
        plane.stream(name, tasks=["a task"]).append({"x": np.arange(4)})
        opened = raw.ask(rm.OpenStream(raw.next(), name, None))
        yield [opened.stream, plane.put({"x": np.arange(8)}).encode(), bytes.fromhex(plane.stats().node)]
        assert plane.get(plane.put({"x": np.arange(8)}))["x"].to_list() == list(range(8))


def in_order(node: Node) -> None:
    """Fails where the log has what is no line about its sender."""
    lines = [line for line in node.about_others() if not re.search(r"others.*: \d+ more of this kind", line)]
    assert lines == []


def test_every_request_of_a_client_is_answered(node: Node, tokens: list[bytes]) -> None:
    frames, raw, number, cut = Frames(1, AnyRequest, tokens), Raw(node.address), 100, 0
    try:
        for kind in frames.kinds * ROUNDS:
            number += 1
            raw.socket.sendall(framed(frames.body(kind, number)))
            raw.send(m.Cancel(number))
            answers = []
            try:
                while number not in answers:
                    answers.append(raw.hear().id)
            except EOFError:
                pytest.fail(f"{kind.__name__} was not answered")
            if 0 in answers:
                assert raw.is_cut_off()
                raw.close()
                raw, cut = Raw(node.address), cut + 1
        assert isinstance(raw.ask(m.ReadStats(1)), m.Figures)
    finally:
        raw.close()
    assert cut < 0.7 * number, "much of it is dealt with"
    in_order(node)


def test_every_request_of_another_node_is_answered(node: Node, tokens: list[bytes]) -> None:
    frames, number = Frames(2, pm.PeerRequest, tokens), 100
    with voices() as voice:
        other, missing = voice(node, None), set()
        for kind in frames.kinds * ROUNDS:
            number += 1
            missing.add(number)
            other.say(frames.body(kind, number), wait_s=WAIT_S)
        while missing:
            answer = other.hear(WAIT_S)
            assert answer is not None, f"{len(missing)} are not answered"
            missing.remove(answer.id)
        assert other.hear(0.1) is None, "each is answered once"
    in_order(node)


def test_a_disconnected_client_gets_an_error_for_each_pending_request(node: Node) -> None:
    with Raw(node.address) as raw:
        raw.reserve(14 << 20)
        waiting = [raw.next() for _ in range(5)]
        raw.send(*(sm.Reserve(number, [8 << 20], 60.0) for number in waiting))
        raw.socket.sendall(framed(msgspec.msgpack.encode(["steal", 77])))
        heard = [raw.hear() for _ in range(7)]
        assert {(each.id, each.name) for each in heard} == {
            (number, "ProtocolMismatch") for number in (0, 77, *waiting)
        }
        assert raw.is_cut_off()
