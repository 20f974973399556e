"""Forking after connect: the child's use of the plane raises Forked, and the parent never notices."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import MIB, WAIT_S, StandingNode, eventually, pattern


def in_child(work: Callable[[], Any], *, end: Callable[[int], Any] = os._exit) -> Any:
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
            end(0)
    theirs.close()
    try:
        assert mine.poll(WAIT_S), "the child hangs"
        return mine.recv()
    finally:
        mine.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def node(tmp_path: Path) -> Any:
    with StandingNode(tmp_path, spill=0) as node:
        yield node


USES: dict[str, Callable[[dp.Plane, dp.BatchRef], Any]] = {
    "put": lambda plane, ref: plane.put({"x": [1]}),
    "get": lambda plane, ref: plane.get(ref),
    "free": lambda plane, ref: plane.free(ref),
    "stats": lambda plane, ref: plane.stats(),
    "draft": lambda plane, ref: plane.draft({"x": dp.dense((1,), "uint8")}),
}


@pytest.mark.parametrize("use", USES)
def test_use_in_the_child_raises_forked(node: StandingNode, use: str) -> None:
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, MIB)})
        error = in_child(lambda: USES[use](plane, ref))
        assert isinstance(error, dp.Forked)
        assert error.connected_in == os.getpid()
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(1, MIB))


@pytest.mark.parametrize("use", ["seal", "drop"])
def test_a_parents_draft_in_the_child(node: StandingNode, use: str) -> None:
    with dp.connect(node.address) as plane, plane.draft({"x": dp.dense((1, MIB // 8), "uint64")}) as draft:
        draft["x"][:] = pattern(1, MIB)
        outcome = in_child(getattr(draft, use))
        assert isinstance(outcome, dp.Forked) or (use == "drop" and outcome is None)
        assert np.array_equal(plane.get(draft.seal())["x"].numpy(), pattern(1, MIB))


def test_closing_in_the_child_closes_nothing_of_the_parents(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        view = plane.get(plane.put({"x": pattern(1, MIB)}))["x"].numpy()
        assert in_child(plane.close) is None
        assert plane.stats().pinned_bytes == MIB
        assert np.array_equal(view, pattern(1, MIB))


@pytest.mark.parametrize("closed", [False, True], ids=["plane open", "plane closed"])
def test_the_childs_end_drops_no_pin_of_the_parent(node: StandingNode, closed: bool) -> None:
    with dp.connect(node.address) as watcher:
        plane = dp.connect(node.address)
        batch = plane.get(plane.put({"x": pattern(1, MIB)}))
        views = [batch["x"].numpy(), batch["x"].torch(), batch["x"].arrow()]
        del batch
        if closed:
            plane.close()

        def drop_all() -> int:
            total = int(views[0].sum())
            views.clear()
            return total

        assert in_child(drop_all) == int(pattern(1, MIB).sum())
        assert watcher.stats().pinned_bytes == MIB
        for seed in range(2, 6):
            watcher.free(watcher.put({"x": pattern(seed, 8 * MIB)}, timeout=5))
        assert np.array_equal(views[0], pattern(1, MIB))
        views.clear()
        eventually(lambda: watcher.stats().pinned_bytes == 0, "the parent's own pin drops")
        plane.close()


@pytest.mark.parametrize("closed", [False, True], ids=["plane open", "plane closed"])
def test_a_living_child_keeps_no_pin_of_the_parent(node: StandingNode, closed: bool) -> None:
    """The child has the parent's socket, from the fork; it must not keep the connection up."""
    with dp.connect(node.address) as watcher:
        plane = dp.connect(node.address)
        view = plane.get(plane.put({"x": pattern(1, MIB)}))["x"].numpy()
        if closed:
            plane.close()
        mine, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            theirs.send("alive")
            mine.close()
            theirs.poll(WAIT_S)
            os._exit(0)
        try:
            assert mine.recv() == "alive"
            del view
            plane.close()
            eventually(lambda: watcher.stats().clients == 1, "the connection ended")
            assert watcher.stats().pinned_bytes == 0
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            mine.close()
            theirs.close()


def test_the_child_connects_by_itself(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, MIB)})

        def work() -> bytes:
            with dp.connect(node.address) as own:
                assert np.array_equal(own.get(ref)["x"].numpy(), pattern(1, MIB))
                return pickle.dumps(own.put({"x": pattern(2, MIB)}))

        ref = pickle.loads(in_child(work))
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(2, MIB))


def test_a_fork_while_other_threads_use_the_plane(node: StandingNode) -> None:
    """The parent's messages must not be disturbed, whatever was half sent when it forked."""
    with dp.connect(node.address) as plane:
        stop = threading.Event()
        errors: list[Exception] = []

        def use(seed: int) -> None:
            try:
                while not stop.is_set():
                    ref = plane.put({"x": pattern(seed, 4 << 10)})
                    assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(seed, 4 << 10))
                    plane.free(ref)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert isinstance(in_child(plane.stats), dp.Forked)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors


def use_in_process(plane: dp.Plane, pipe: Any) -> None:
    try:
        plane.stats()
    except dp.Forked as error:
        pipe.send(error)


def test_a_process_forked_by_multiprocessing(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        view = plane.get(plane.put({"x": pattern(1, MIB)}))["x"].numpy()
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe()
        child = context.Process(target=use_in_process, args=(plane, theirs))
        child.start()
        assert mine.poll(WAIT_S)
        error = mine.recv()
        child.join(WAIT_S)
        assert child.exitcode == 0
        child.close()
        mine.close()
        theirs.close()
        assert isinstance(error, dp.Forked)
        assert plane.stats().pinned_bytes == MIB
        assert np.array_equal(view, pattern(1, MIB))


async def test_the_asynchronous_plane_in_the_child(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        ref = await plane.put({"x": pattern(1, MIB)})

        def work() -> None:
            coroutine = plane.get(ref)
            coroutine.send(None)

        assert isinstance(in_child(work), dp.Forked)
        assert np.array_equal((await plane.get(ref))["x"].numpy(), pattern(1, MIB))


def test_a_forked_child_leaves_the_embedded_node_running(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="16MiB", spill=0, spill_dir=tmp_path, prewarm=0)
    with dp.connect(config=config) as plane:

        def work() -> int:
            with dp.connect() as own:  # finds the parent's node
                return own.stats().pid

        def leave(code: int) -> None:
            import atexit

            atexit._run_exitfuncs()
            os._exit(code)

        node = plane.stats().pid
        assert in_child(work, end=leave) == node
        assert plane.stats().pid == node
