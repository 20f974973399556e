"""Memory that is full or asked for too much: typed errors that name the holders, never more than the budget."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import dataplane as dp
from tests.cases import each_case
from tests.processes import MIB, StandingNode, Worker, eventually, pattern


def holder(pipe: Any, address: str) -> None:
    plane = dp.connect(address)
    views = [plane.get(ref)["x"].numpy() for ref in pipe.recv()]
    pipe.send(os.getpid())
    pipe.recv()
    del views
    pipe.send("dropped")
    pipe.recv()


def test_backpressure_with_all_memory_pinned_names_the_holders(tmp_path: Path) -> None:
    with (
        StandingNode(tmp_path) as node,
        dp.connect(node.address) as plane,
        Worker(holder, node.address) as worker,
    ):
        mine = plane.put({"x": pattern(1, 6 * MIB)})
        theirs = [plane.put({"x": pattern(seed, 3 * MIB)}) for seed in (2, 3, 4)]
        view = plane.get(mine)["x"].numpy()
        pid = worker.ask(theirs)
        assert plane.stats().pinned_bytes == 15 * MIB
        with pytest.raises(dp.Backpressure) as caught:
            plane.put({"x": pattern(5, 2 * MIB)}, timeout=0.3)
        error = caught.value
        assert error.needed == 2 * MIB
        assert error.waited_s > 0
        first, second = error.holders[:2]
        assert (first["bytes"], first["how"]) == (9 * MIB, "pinned")
        assert f"(pid {pid})" in first["holder"]
        assert (second["bytes"], second["how"]) == (6 * MIB, "pinned")
        assert f"(pid {os.getpid()})" in second["holder"]
        assert first["holder"] in str(error)
        worker.ask()
        ref = plane.put({"x": pattern(5, 2 * MIB)}, timeout=60)  # one of them goes to disk
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(5, 2 * MIB))
        assert np.array_equal(view, pattern(1, 6 * MIB))


@pytest.mark.long
def test_backpressure_names_reservations_as_reserved(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        with plane.draft({"x": dp.dense((15, MIB), "uint8")}):
            with pytest.raises(dp.Backpressure) as caught:
                plane.put({"x": pattern(5, 2 * MIB)}, timeout=0.1)
            assert [h["how"] for h in caught.value.holders] == ["reserved"]
        plane.put({"x": pattern(5, 2 * MIB)}, timeout=60)


@each_case("how", ["put", "draft"])
def test_an_object_larger_than_the_budget_is_refused_at_once(tmp_path: Path, how: str) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        with pytest.raises(dp.LimitExceeded) as caught:
            if how == "put":
                plane.put({"x": pattern(1, 20 * MIB)}, timeout=600)
            else:
                plane.draft({"x": dp.dense((20, MIB), "uint8")}, timeout=600)
        assert (caught.value.what, caught.value.asked, caught.value.limit) == ("memory", 20 * MIB, 16 * MIB)
        assert plane.stats().memory_used == 0


BUDGET = 32 * MIB
PIECE = 2 * MIB
PIECES = 128


def produce(pipe: Any, address: str) -> None:
    plane = dp.connect(address)
    for seed in range(PIECES):
        pipe.send(plane.put({"x": pattern(seed, PIECE, 8)}, timeout=60))


def resident(pid: int) -> int:
    """Bytes of the process's own memory (not of what it shares)."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Rss")}
    return (kib["RssAnon"] + kib["RssFile"]) << 10


def shared(pid: int) -> int:
    """Bytes behind the node's segments, whoever has them mapped."""
    blocks = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:dataplane" in os.readlink(fd):
                segment = os.stat(fd)
                blocks[segment.st_ino] = segment.st_blocks
    return 512 * sum(blocks.values())


@pytest.mark.long
def test_node_memory_stays_bounded_with_a_slow_consumer(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory=BUDGET, spill="1GiB", spill_dir=tmp_path, prewarm=0)
    with dp.connect(config=config) as plane, Worker(produce, plane.address) as producer:
        node = plane.stats().pid
        peak = 0
        for seed in range(PIECES):
            ref = producer.hear()
            if seed == 0:  # slow: it lets the producer run into the budget before it takes the first
                eventually(lambda: plane.stats().spilled_bytes >= 2 * BUDGET, "it spills")
            batch = plane.get(ref)
            assert np.array_equal(batch["x"].numpy(), pattern(seed, PIECE, 8))
            peak = max(peak, resident(node) + shared(node))
            del batch
            plane.free(ref)
        stats = plane.stats()
        assert stats.memory_peak <= BUDGET
        assert stats.spilled_bytes >= 2 * BUDGET
        assert peak <= BUDGET + 100 * MIB
        assert shared(node) <= BUDGET
        assert psutil.Process(node).is_running()
