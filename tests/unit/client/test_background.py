"""Background work: what a plane that is being closed waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.client import background
from dataplane.client.background import Background, end_all
from dataplane.client.embedded import ClusterNode
from tests.processes import StandingNode, eventually


class Place:
    """The part of a connection that background work reads."""

    address, appenders = "unix:/nowhere", ()


class Work(Background):
    async def _run(self, plane: Any, stop: asyncio.Event) -> None:
        await stop.wait()


class Failing(Work):
    async def _connected(self) -> None:
        raise OSError("no node")


def test_finished_background_work_is_forgotten() -> None:
    place: Any = Place()
    work = Failing(place, "first").start()
    with pytest.raises(OSError, match="no node"):
        work.wait()
    waiting = Work(place, "second")
    assert background._begun[place] == [waiting]
    third = Work(place, "third")
    assert background._begun[place] == [waiting, third]


async def test_a_plane_does_not_wait_for_work_that_got_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    place: Any = Place()
    work = Work(place, "work")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            work.start()
    try:
        async with asyncio.timeout(30):
            await end_all(place)
    finally:
        work._begun.set()


# The end of a node of a cluster that this process started.


def test_a_node_that_ends_just_before_it_is_killed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ours, theirs = socket.socketpair()
    node = ClusterNode.__new__(ClusterNode)
    node._open, node._process = ours, os.pidfd_open(process.pid)

    def late(timeout_s: float | None) -> bool:
        process.communicate()  # it is reaped, after the node's time had passed
        return False

    monkeypatch.setattr(node, "_ended", late)
    with theirs:
        node.close()
    assert node._process == -1
    assert ours.fileno() == -1


# Requests of a thread without the loop: what happens meanwhile, what fails, and what is left to the loop.

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
