"""Malformed frames of clients of one node: random bytes, frames that were changed, and values that nobody sends."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

import dataplane as dp
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire.client_messages import AnyRequest
from dataplane.wire.framing import frame
from tests.attack.neighbour import Neighbour, Node, Unharmed
from tests.chaos.frames import Frames
from tests.chaos.raw import Raw, framed

_TOGETHER = 64  # frames that are sent before answers are read


def _changed(chance: random.Random, body: bytes) -> bytes:
    """The frame of a body, cut, lengthened, or with some bytes changed."""
    changed = bytearray(framed(body))
    for _ in range(chance.choice([1, 1, 2, 8])):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed[: chance.choice([len(changed)] * 3 + [chance.randrange(len(changed))])])


def _answered(raw: Raw, numbers: list[int]) -> bool:
    """Whether the connection goes on. Fails unless the requests were answered: all, or those before it was cut off."""
    heard: set[int] = set()
    try:
        while not heard >= set(numbers):
            heard.add(raw.hear().id)
            assert 0 in heard or len(heard) <= len(numbers)
    except EOFError:
        answers = [number in heard for number in numbers]
        assert answers == sorted(answers, reverse=True), "a request before others that were answered was not"
        return False
    return True


def attack(seed: int, seconds: float, directory: Path) -> Mapping[str, object]:
    chance = random.Random(seed)
    sent = cut = number = 0
    with (
        Node(directory, "--memory", "32MiB", "--spill", "32MiB") as node,
        dp.connect(node.address) as plane,
        Neighbour(node.address) as neighbour,
    ):
        unharmed = Unharmed(node, neighbour)
        stream = plane.stream("kept", tasks=["a task"])
        stream.append({"x": np.arange(4)})
        with Raw(node.address) as opener:
            opened = opener.ask(rm.OpenStream(opener.next(), "kept", None))
        ref = plane.put({"x": np.arange(8)})
        made = Frames(seed, AnyRequest, [opened.stream, ref.encode(), bytes.fromhex(plane.stats().node)])
        until = time.monotonic() + seconds  # once all has started, which a busy machine takes its time for
        while time.monotonic() < until:
            with Raw(node.address, greet=chance.random() < 0.95) as raw:
                if chance.random() < 0.3:
                    junk = [chance.randbytes(chance.randrange(1, 200)) for _ in range(4)]
                    junk += [_changed(chance, made.body(chance.choice(made.kinds), 1)) for _ in range(8)]
                    for body in junk:
                        with suppress(BrokenPipeError, ConnectionResetError):
                            raw.socket.sendall(chance.choice([body, framed(body)]))
                        sent += 1
                    continue
                going = True
                while going and time.monotonic() < until:
                    numbers, bodies = [], []
                    for _ in range(_TOGETHER):
                        number += 1
                        numbers.append(number)
                        bodies.append(framed(made.body(chance.choice(made.kinds), number)))
                    cancels = [frame(m.Cancel(each)) for each in numbers]
                    with suppress(BrokenPipeError, ConnectionResetError):
                        raw.socket.sendall(b"".join(bodies + cancels))
                    sent += _TOGETHER
                    going = _answered(raw, numbers)
                cut += not going
            unharmed.look(sent)
        figures = unharmed.end()
    return {"frames": sent, "connections cut off": cut, **figures}
