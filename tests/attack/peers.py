"""Forged frames on the port that a node has for other nodes: changed ones, and values that nobody sends."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

import dataplane as dp
from dataplane.wire import peer_messages as pm
from tests import etcd, keys
from tests.attack.neighbour import Neighbour, Node, Unharmed
from tests.chaos.frames import Frames

_TOGETHER = 64  # requests that are sent before answers are read
_ANSWER_MS = 20_000


def attack(seed: int, seconds: float, directory: Path) -> Mapping[str, object]:
    chance = random.Random(seed)
    sent = 0
    number = 1000  # above what the number of a changed frame becomes most often
    context: zmq.Context[Any] = zmq.Context()
    try:
        with (
            etcd.shared(),
            Node(
                directory,
                *("--memory", "32MiB", "--spill", 0, "--listen", "tcp://127.0.0.1:0", "--join", etcd.cluster()),
            ) as node,
            dp.connect(node.address) as plane,
            Neighbour(node.address) as neighbour,
        ):
            unharmed = Unharmed(node, neighbour)
            plane.stream("kept", tasks=["a task"]).append({"x": np.arange(4)})
            ref = plane.put({"x": np.arange(8)})
            made = Frames(seed, pm.PeerRequest, [ref.encode(), bytes.fromhex(plane.stats().node)])
            to = plane.stats().node.encode()
            until = time.monotonic() + seconds  # once all has started, which a busy machine takes its time for
            while time.monotonic() < until:
                socket = _connected(context, node)
                for _ in range(chance.randrange(1, 40)):
                    for _ in range(chance.randrange(4)):
                        junk = bytearray(made.body(chance.choice(made.kinds), 1))
                        junk[chance.randrange(len(junk))] = chance.randrange(256)
                        socket.send_multipart([to, bytes(junk[: chance.randrange(len(junk) + 1)])])
                        sent += 1
                    asked = {
                        each: made.body(chance.choice(made.kinds), each) for each in range(number, number + _TOGETHER)
                    }
                    number += _TOGETHER
                    for body in asked.values():
                        socket.send_multipart([to, body])
                    sent += _TOGETHER
                    while asked:
                        assert socket.poll(_ANSWER_MS), f"not answered: {[body[:200] for body in asked.values()]}"
                        asked.pop(msgspec.msgpack.decode(socket.recv(), type=pm.PeerReply).id, None)
                socket.close()
                unharmed.look(sent)
            figures = unharmed.end()
    finally:
        context.destroy(linger=0)
    return {"frames": sent, **figures}


def _connected(context: zmq.Context[Any], node: Node) -> zmq.Socket[Any]:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    keys.speak(socket, keys.of_this_user())
    socket.connect(node.listens)
    return socket
