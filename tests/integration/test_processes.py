"""Several processes: references handed on, nodes that live as long as the process that started them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import dataplane as dp
from dataplane.client import embedded
from dataplane.integrations import process
from tests.cases import each_case
from tests.processes import MIB, WAIT_S, StandingNode, eventually, gone, pattern


@pytest.mark.long
def test_a_get_of_more_shards_than_fit_a_message_is_refused(tmp_path: Path) -> None:
    """Small puts of many columns with long names, no two of which lie alike: refused as a limit, and fewer are read;
    of those that lie alike, many more are."""
    with StandingNode(tmp_path, memory="128MiB") as node, dp.connect(node.address) as plane:
        names = [f"{i} a column whose name says all that there is to be said about it" for i in range(100)]
        alike = [plane.put({name: ["x"] for name in names} | {"row": [row]}) for row in range(450)]
        assert plane.get(dp.concat(alike))["row"].numpy().tolist() == list(range(450))
        plane.free(dp.concat(alike))
        refs = [plane.put({name: ["x" * row] for name in names} | {"row": [row]}) for row in range(450)]
        with pytest.raises(dp.LimitExceeded, match="fewer"):
            plane.get(dp.concat(refs))
        assert plane.stats().pinned_bytes == 0
        batch = plane.get(dp.concat(refs[:100]))
        assert batch["row"].numpy().tolist() == list(range(100))
        del batch
        plane.free(dp.concat(refs))
        eventually(lambda: plane.stats().memory_used == 0, "all freed")


def get_in_spawned(ref: dp.BatchRef, pipe: Any) -> None:
    with dp.connect() as plane:  # $DATAPLANE_ADDRESS
        batch = plane.get(ref)
        pipe.send((plane.stats().pid, batch["x"].numpy().sum(), plane.put({"y": [1, 2]})))


@each_case("method", ["spawn", "fork"])
def test_children_attach_to_the_embedded_node(tmp_path: Path, method: str) -> None:
    config = dp.NodeConfig(memory="16MiB", spill_dir=tmp_path, prewarm=0)
    context = multiprocessing.get_context(method)
    with dp.connect(config=config) as plane:
        assert os.environ["DATAPLANE_ADDRESS"] == plane.address
        ref = plane.put({"x": pattern(1, MIB)})
        mine, theirs = context.Pipe()
        child = context.Process(target=get_in_spawned, args=(ref, theirs))
        child.start()
        theirs.close()
        assert mine.poll(WAIT_S)
        pid, total, answer = mine.recv()
        child.join(WAIT_S)
        assert child.exitcode == 0
        child.close()
        mine.close()
        assert pid == plane.stats().pid
        assert total == pattern(1, MIB).sum()
        assert plane.get(answer)["y"].to_list() == [1, 2]
    assert "DATAPLANE_ADDRESS" not in os.environ


def test_an_embedded_node_waits_for_the_last_of_its_clients(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="16MiB", spill_dir=tmp_path, prewarm=0)
    plane = dp.connect(config=config)
    other = dp.connect(plane.address)
    ref = other.put({"x": pattern(1, MIB)})
    view = plane.get(ref)["x"].numpy()
    pid = other.stats().pid
    plane.close()
    assert np.array_equal(other.get(ref)["x"].numpy(), pattern(1, MIB))
    other.close()
    assert not gone(pid)  # a view of the first still needs it
    assert np.array_equal(view, pattern(1, MIB))
    del view
    eventually(lambda: not psutil.pid_exists(pid), "it ends once nobody is connected, and is reaped")


async def test_a_node_that_a_cancelled_connect_has_started_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[embedded.EmbeddedNode | None] = []
    begun, cancelled = threading.Event(), threading.Event()
    find_or_start = embedded.find_or_start

    def start(config: dp.NodeConfig | None) -> Any:
        begun.set()
        cancelled.wait()
        found = find_or_start(config)
        started.append(found[1])
        return found

    monkeypatch.setattr(embedded, "find_or_start", start)
    config = dp.NodeConfig(memory="16MiB", spill_dir=tmp_path, prewarm=0)

    async def connecting() -> None:
        await dp.aio.connect(config=config)

    task = asyncio.create_task(connecting())
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cancelled.set()
    await asyncio.to_thread(eventually, lambda: bool(started), "the node was started")
    node = started[0]
    assert node is not None
    await asyncio.to_thread(eventually, lambda: node.ended, "it ended")
    assert "DATAPLANE_ADDRESS" not in os.environ


def test_a_child_that_is_forked_while_a_thread_starts_a_node_can_connect() -> None:
    with embedded._starting:
        pid = os.fork()
        if not pid:
            os._exit(0 if embedded._starting.acquire(blocking=False) else 1)
    assert os.waitpid(pid, 0)[1] == 0


STARTER = """
import os, sys
import dataplane as dp
plane = dp.connect(config=dp.NodeConfig(memory="16MiB", spill_dir=sys.argv[1], prewarm=0))
ref = plane.put({"x": [bytes(1 << 20)]})
view = plane.get(ref)["x"].arrow()
print(plane.stats().pid, plane.address.removeprefix("unix://"), flush=True)
sys.stdin.readline()
exec(sys.argv[2])
"""

ENDS = {"without closing": ("", 0), "by SIGKILL": ("os.kill(os.getpid(), 9)", -9)}


@each_case("how", ENDS)
def test_an_embedded_node_ends_when_its_starter_ends(tmp_path: Path, how: str) -> None:
    code, expected = ENDS[how]
    command = [sys.executable, "-W", "ignore", "-c", STARTER, str(tmp_path), code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid, path = starter.stdout.readline().split()
        assert Path(path).is_socket()
        starter.communicate("\n")
    assert starter.returncode == expected
    left(tmp_path, pid, path)


def left(tmp_path: Path, pid: str, path: str) -> None:
    """The node of that starter ends and leaves nothing."""
    eventually(lambda: gone(int(pid)), "its node ended")
    assert not Path(path).exists()
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_does_not_end_the_node_before_its_starter(tmp_path: Path) -> None:
    """A terminal sends it to the whole process group; the starter may still have to clean up with the plane."""
    command = [sys.executable, "-c", STARTER, str(tmp_path), "print(plane.stats().shards); plane.close()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as starter:
        assert starter.stdout is not None
        pid, path = starter.stdout.readline().split()
        os.kill(int(pid), signal.SIGINT)
        out, _ = starter.communicate("\n")
    assert out == "1\n"
    assert starter.returncode == 0
    left(tmp_path, pid, path)


# `dataplane.integrations.process`: one plane a process.


@pytest.fixture
def _let_go() -> Iterator[None]:
    process.close()
    yield
    process.close()


@pytest.mark.leaks(reason="a node of this process ends a moment after its last client")
@pytest.mark.usefixtures("_let_go")
def test_a_forked_child_connects_a_plane_separately() -> None:
    plane = process.start(dp.NodeConfig(memory="32MiB", spill=0))
    ref = plane.put({"a": [1, 2]})
    if (child := os.fork()) == 0:
        os._exit(0 if process.plane().get(ref)["a"].to_list() == [1, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert plane.get(ref)["a"].to_list() == [1, 2]


@pytest.mark.leaks(reason="a node of this process ends a moment after its last client")
@pytest.mark.usefixtures("_let_go")
def test_a_closed_process_plane_is_connected_again() -> None:
    plane = process.start(dp.NodeConfig(memory="32MiB", spill=0))
    process.close()
    process.close()
    assert process.start(dp.NodeConfig(memory="32MiB", spill=0)) is not plane
