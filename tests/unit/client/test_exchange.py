"""Requests of a thread without the loop: what happens meanwhile, what fails, and what is left to the loop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import StandingNode, eventually

ROW = {"ids": [[1, 2, 3]], "x": np.array([0.5])}


@pytest.fixture
def plane(node: StandingNode) -> Iterator[dp.Plane]:
    with dp.connect(node.address) as plane:
        yield plane


@pytest.fixture
def node(tmp_path: Any) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, memory="16MiB", spill=0) as node:
        yield node


def test_an_interrupted_append_is_not_performed(plane: dp.Plane) -> None:
    stream = plane.stream("s", tasks=["t"], max_rows=1)
    stream.append(ROW)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        stream.append(ROW)
    timer.join()
    with stream.consume("t", rows=1, columns=["x"], timeout=30):
        pass
    assert eventually(lambda: stream.stats()["rows"] == 0)
    stream.append(ROW)  # the connection lives on
