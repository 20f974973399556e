"""Forking after connect: the child's use of the plane raises Forked, and the parent never notices."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.cases import each_case
from tests.processes import MIB, WAIT_S, StandingNode, eventually, pattern

NODE = {"spill": 0}


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, or the error it raises."""
    mine, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(WAIT_S))
        try:
            try:
                theirs.send(work())
            except BaseException as error:
                theirs.send(error)
        finally:
            os._exit(0)
    theirs.close()
    try:
        assert mine.poll(WAIT_S), "the child hangs"
        return mine.recv()
    finally:
        mine.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


USES: dict[str, Callable[[dp.Plane, dp.BatchRef], Any]] = {
    "put": lambda plane, ref: plane.put({"x": [1]}),
    "get": lambda plane, ref: plane.get(ref),
    "free": lambda plane, ref: plane.free(ref),
    "stats": lambda plane, ref: plane.stats(),
    "draft": lambda plane, ref: plane.draft({"x": dp.dense((1,), "uint8")}),
}


@each_case("use", USES)
def test_use_in_the_child_raises_forked(node: StandingNode, use: str) -> None:
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, MIB)})
        error = in_child(lambda: USES[use](plane, ref))
        assert isinstance(error, dp.Forked)
        assert error.connected_in == os.getpid()
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(1, MIB))


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Forks a process that says what `work` returns each time it is asked; `ask()` is what to ask by."""
    mine, theirs = multiprocessing.Pipe()
    pids: list[int] = []

    def fork(work: Callable[[], Any]) -> Callable[[], Any]:
        pids.append(os.fork())
        if pids[-1] == 0:
            signal.alarm(int(WAIT_S))
            while theirs.poll(WAIT_S):
                theirs.recv()
                theirs.send(work())
            os._exit(0)
        return ask

    def ask() -> Any:
        mine.send(None)
        assert mine.poll(WAIT_S), "the child hangs or has ended"
        return mine.recv()

    yield fork
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    mine.close()
    theirs.close()


@pytest.mark.parametrize("closed", [False, True], ids=["plane open", "plane closed"])
def test_views_in_a_forked_child_are_pinned_separately(node: StandingNode, child: Any, closed: bool) -> None:
    with dp.connect(node.address) as watcher:
        plane = dp.connect(node.address)
        ref = plane.put({"x": pattern(1, MIB)})
        batch = plane.get(ref)
        views = [batch["x"].numpy(), batch["x"].torch(), batch["x"].arrow()]
        del batch
        if closed:
            plane.close()
        # A sum by NumPy: torch's threads do not survive a fork, and a child that waits for them hangs.
        ask = child(lambda: (np.array_equal(views[0], pattern(1, MIB)), int(views[1].numpy().sum()), views.clear())[:2])
        views.clear()
        plane.close()
        watcher.free(ref)
        eventually(lambda: watcher.stats().clients == 2, "the parent's connection ended, and the child has its own")
        assert watcher.stats().pinned_bytes == MIB
        assert any("child of" in holder["holder"] for holder in watcher.stats().holders)
        for seed in range(2, 6):
            watcher.free(watcher.put({"x": pattern(seed, 15 * MIB)}, timeout=60))
        assert ask() == (True, int(pattern(1, MIB).sum()))
        eventually(lambda: watcher.stats().clients == 1, "the child dropped its views, and so its pins")
        assert watcher.stats().memory_used == 0


def test_views_in_a_forked_child_stay_readable_while_another_thread_of_the_parent_reads(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, MIB)})
        view, ended = plane.get(ref)["x"].numpy(), threading.Event()

        def read() -> None:
            while not ended.is_set():
                held.append(plane.get(ref))
                del held[:-2]

        held: list[dp.Batch] = []
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(10):
                assert in_child(lambda: np.array_equal(view, pattern(1, MIB)))
        finally:
            ended.set()
            reader.join()
            held.clear()


@pytest.mark.long
def test_writes_of_a_forked_child_to_an_open_draft_are_private(node: StandingNode, child: Any) -> None:
    with dp.connect(node.address) as plane:
        draft = plane.draft({"x": dp.dense((1, MIB // 8), "uint64")})
        array = draft["x"]
        array[:] = pattern(1, MIB)

        def write() -> bool:
            array[:] = 7
            return bool((array == 7).all())

        ask = child(write)
        assert ask(), "the child sees what it wrote"
        ref = draft.seal()
        assert ask()
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(1, MIB))


@pytest.mark.long
def test_a_forked_child_cannot_read_views_when_its_node_is_frozen(
    node: StandingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read other people's bytes later. The parent's views stay."""
    monkeypatch.setattr("dataplane.client.pins.ANSWER_S", 0.2)
    with dp.connect(node.address) as plane:
        view = plane.get(plane.put({"x": pattern(1, MIB)}))["x"].numpy()
        node.freeze()
        try:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                os._exit(int(view[0, 0]) % 2)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
        finally:
            node.thaw()
        assert np.array_equal(view, pattern(1, MIB))


PROGRAM = """
import os, sys
import dataplane as dp
plane = dp.connect(config=dp.NodeConfig(memory="16MiB", spill=0, spill_dir=sys.argv[1], prewarm=0))
node = plane.stats().pid
if not (child := os.fork()):
    with dp.connect() as own:  # finds the parent's node
        sys.exit(own.stats().pid != node)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert plane.stats().pid == node
"""


@pytest.mark.long
def test_a_forked_child_leaves_the_embedded_node_running(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)], check=True, timeout=WAIT_S)
