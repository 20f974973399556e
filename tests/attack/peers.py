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
from tests.attack.neighbour import Neighbour, Node
from tests.chaos.frames import Frames

_TOGETHER = 64  # requests that are sent before answers are read
_FLAT = 48 << 20  # bytes by which a node's memory may differ between two moments
_WARM = 20_000  # frames after which it should have all that it keeps for its peers
_ANSWER_MS = 20_000


def attack(seed: int, seconds: float, directory: Path) -> Mapping[str, object]:
    """See `tests.attack`."""
    chance = random.Random(seed)
    sent = warm = 0
    number = 1000  # above what the number of a changed frame becomes most often
    until = time.monotonic() + seconds
    context: zmq.Context[Any] = zmq.Context()
    try:
        with (
            Node(directory, "--memory", "32MiB", "--spill", 0, "--listen", "tcp://127.0.0.1:0") as node,
            dp.connect(node.address) as plane,
            Neighbour(node.address) as neighbour,
        ):
            plane.stream("kept", tasks=["a task"]).append({"x": np.arange(4)})
            ref = plane.put({"x": np.arange(8)})
            made = Frames(seed, pm.PeerRequest, [ref.encode(), bytes.fromhex(plane.stats().node)])
            while time.monotonic() < until:
                socket = _connected(context, node)
                for _ in range(chance.randrange(1, 40)):
                    for _ in range(chance.randrange(4)):
                        junk = bytearray(made.body(chance.choice(made.kinds), 1))
                        junk[chance.randrange(len(junk))] = chance.randrange(256)
                        socket.send(bytes(junk[: chance.randrange(len(junk) + 1)]))
                        sent += 1
                    asked = {
                        each: made.body(chance.choice(made.kinds), each) for each in range(number, number + _TOGETHER)
                    }
                    number += _TOGETHER
                    for body in asked.values():
                        socket.send(body)
                    sent += _TOGETHER
                    while asked:
                        assert socket.poll(_ANSWER_MS), f"not answered: {[body[:200] for body in asked.values()]}"
                        asked.pop(msgspec.msgpack.decode(socket.recv(), type=pm.PeerReply).id, None)
                socket.close()
                assert node.alive, node.log()[-2000:]
                if not warm and sent >= _WARM:
                    warm = node.memory()
            answers, slowest = neighbour.stop()
            grown = node.memory() - warm if warm else 0
            assert grown <= _FLAT, f"its memory grew by {grown >> 20} MiB"
            assert not node.about_others(), node.about_others()[:5]
    finally:
        context.destroy(linger=0)
    return {
        "frames": sent,
        "right answers of a neighbour": answers,
        "s the slowest": round(slowest, 2),
        "MiB grown": grown >> 20,
    }


def _connected(context: zmq.Context[Any], node: Node) -> zmq.Socket[Any]:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(node.listens)
    return socket
