"""The synchronous face from many threads at once, closed under them, and interrupted."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.cases import each_case
from tests.processes import MIB, WAIT_S, StandingNode, eventually, pattern


class Threads:
    """Threads that each call `work(number)` again and again, until it raises or they are stopped."""

    def __init__(self, count: int, work: Callable[[int], object]) -> None:
        self.ended: list[BaseException] = []
        self.calls = [0] * count
        self._stop = threading.Event()
        self._work = work
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        try:
            while not self._stop.is_set():
                self._work(number)
                self.calls[number] += 1
        except BaseException as error:
            self.ended.append(error)

    def end(self, count: int) -> None:
        eventually(lambda: len(self.ended) == count, f"{count} threads ended")
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        deadline = time.monotonic() + WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = [thread for thread in self._threads if thread.is_alive()]
        assert not hanging, f"{len(hanging)} of {len(self._threads)} threads hang"


def test_a_waiting_call_does_not_block_calls_of_other_threads(tmp_path: Path) -> None:
    with StandingNode(tmp_path, spill=0) as node, dp.connect(node.address) as plane:
        held = plane.put({"x": pattern(0, 12 * MIB)})
        large = Threads(1, lambda _: plane.free(plane.put({"x": pattern(1, 12 * MIB)}, timeout=600)))
        eventually(lambda: plane.stats().waiting == 1, "it waits")
        assert [plane.stats().waiting for _ in range(20)] == [1] * 20, "it waits meanwhile"
        assert [f"pid {os.getpid()}" in each for each in plane.stats().waiters] == [True], "its process is named"
        plane.free(held)
        eventually(lambda: large.calls[0] >= 1, "it goes on")
        large.stop()
        assert not large.ended


@each_case("size", [4 << 10, 2 * MIB], ids=["small", "large"])
def test_a_close_during_calls_of_other_threads_raises_closed_in_them(tmp_path: Path, size: int) -> None:
    with StandingNode(tmp_path) as node:
        for _ in range(10):
            plane = dp.connect(node.address)

            def work(seed: int, plane: dp.Plane = plane) -> None:
                ref = plane.put({"x": pattern(seed, size)}, timeout=60)
                assert np.array_equal(plane.get(ref, timeout=60)["x"].numpy(), pattern(seed, size))
                plane.free(ref)

            threads = Threads(4, work)
            eventually(lambda threads=threads: min(threads.calls) >= 2, "all call")
            plane.close()
            threads.end(4)
            assert [type(error) for error in threads.ended] == [dp.Closed] * 4


def test_a_close_ends_waiting_calls_of_other_threads(tmp_path: Path) -> None:
    with StandingNode(tmp_path, spill=0) as node, dp.connect(node.address) as watcher:
        watcher.put({"x": pattern(0, 12 * MIB)})
        plane = dp.connect(node.address)
        threads = Threads(4, lambda seed: plane.put({"x": pattern(seed, 8 * MIB)}, timeout=600))
        eventually(lambda: watcher.stats().waiting == 4, "all wait")
        plane.close()
        threads.end(4)
        assert [type(error) for error in threads.ended] == [dp.Closed] * 4
        eventually(lambda: watcher.stats().waiting == 0, "the node noticed")


async def test_the_synchronous_plane_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook: the caller's thread runs a loop already, which stands still while the call lasts."""
    config = dp.NodeConfig(memory="16MiB", spill=0, spill_dir=tmp_path, prewarm=0)
    with dp.connect(config=config) as plane:
        with plane.draft({"x": dp.dense((1, MIB // 8), "uint64")}) as draft:
            draft["x"][:] = pattern(1, MIB)
            ref = draft.seal()
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(1, MIB))
        with pytest.raises(dp.Backpressure):
            plane.put({"x": pattern(2, 16 * MIB)}, timeout=0.05)
        plane.free(plane.put({"x": [1]}))
        async with dp.aio.connect(plane.address) as other:
            assert np.array_equal((await other.get(ref))["x"].numpy(), pattern(1, MIB))


def within_a_call(plane: dp.Plane, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do this within a small call, as a finalizer or a signal's handler may."""
    only = plane._turns._selector.only

    def wait(*how: Any) -> bool:
        patched.undo()
        work()
        return only(*how)

    with monkeypatch.context() as patched:
        patched.setattr(plane._turns._selector, "only", wait)
        plane.free(plane.put({"x": pattern(0, 8)}))
        assert plane._turns._selector.only == only, "the work was done"


def test_a_call_or_close_within_a_call_is_misuse_and_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(0, 8)})
        stream = plane.stream("s", ["t"])
        stream.append(ref)
        deliveries = stream.deliveries("t", rows=1, columns=["x"], lease=3600, prefetch=0)
        next(deliveries)

        def nested() -> None:
            for call in (plane.stats, plane.close, lambda: plane.get(ref), lambda: stream.append(ref)):
                with pytest.raises(dp.Misuse, match="within"):
                    call()
            deliveries.close()

        within_a_call(plane, monkeypatch, nested)
        stream.consume("t", rows=1, columns=["x"], timeout=60).ack()


INTERRUPTED = """
import os, signal, sys
import numpy as np
import dataplane as dp
with dp.connect(sys.argv[1]) as plane:
    held = plane.put({"x": np.zeros((1, 12 << 20), np.uint8)})
    print("waits", flush=True)
    try:
        plane.put({"x": np.ones((1, 12 << 20), np.uint8)}, timeout=60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    while plane.stats().waiting:  # it was cancelled
        pass
    plane.free(held)
    batch = plane.get(plane.put({"x": np.full((1, 12 << 20), 7, np.uint8)}, timeout=5))
    print(int(batch["x"].numpy().min()), plane.stats().shards, flush=True)
"""


def test_an_interrupted_call_is_cancelled_and_the_plane_stays_usable(tmp_path: Path) -> None:
    with StandingNode(tmp_path, spill=0) as node, dp.connect(node.address) as watcher:
        command = [sys.executable, "-c", INTERRUPTED, node.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            eventually(lambda: watcher.stats().waiting == 1, "it waits")
            os.kill(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert process.stdout.readline() == "7 1\n"
        assert process.returncode == 0


def test_a_dropped_plane_is_closed_once_nothing_of_it_is_used(tmp_path: Path) -> None:
    """Rows that its appenders have accepted are appended, and views stay valid."""
    with StandingNode(tmp_path, memory=16 * MIB) as node, dp.connect(node.address) as plane:
        rows = plane.stream("s", ["t"])
        before, batches = threading.active_count(), []
        for number in range(3):
            dropped = dp.connect(node.address)
            batches.append(dropped.get(dropped.put({"x": [number]})))
            stream = dropped.stream("s")
            del dropped
            gc.collect()
            stream.appender(max_rows=100, max_delay=WAIT_S).send({"x": [number]})
            del stream
            gc.collect()
        eventually(lambda: threading.active_count() == before, "their threads have ended")
        eventually(lambda: rows.stats()["rows"] == 3, "their rows are appended")
        assert [batch["x"].to_list() for batch in batches] == [[0], [1], [2]]
