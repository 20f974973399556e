"""Calls of the disk that hang: one file, or all of it; and a node that is told to end meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from tests.cases import each_case
from tests.faults.shim import EVERY, HANG
from tests.faults.subject import Subject
from tests.processes import eventually, pattern

pytestmark = pytest.mark.long

SHARD = 512 << 10


@contextmanager
def spilled(tmp_path: Path, shim: Path, size: int = SHARD) -> Iterator[tuple[Subject, dp.Plane, list[dp.BatchRef]]]:
    """A node of 4 MiB, and 12 shards, of which the last are in memory no more."""
    with Subject(tmp_path, shim) as node, dp.connect(node.address) as plane:
        refs = [plane.put({"x": pattern(seed, size)}, timeout=60) for seed in range(12)]
        eventually(lambda: plane.stats().spilled_shards >= 4, "some are on disk alone")
        yield node, plane, refs


def read(plane: dp.Plane, ref: dp.BatchRef, seed: int, timeout_s: float) -> bool:
    """Whether it was read in time."""
    try:
        got = plane.get(ref, timeout=timeout_s)["x"].numpy()
    except dp.Backpressure:
        return False
    assert np.array_equal(got, pattern(seed, len(got.ravel()) * 8))
    return True


def test_a_hanging_read_blocks_only_its_request(tmp_path: Path, shim: Path) -> None:
    with spilled(tmp_path, shim) as (node, plane, refs):
        node.rule.arm("read", HANG, target=".spill")  # of the first that is read
        with ThreadPoolExecutor(len(refs)) as pool:
            reading = [pool.submit(read, plane, ref, seed, 600) for seed, ref in enumerate(refs)]
            try:
                eventually(lambda: [each.done() for each in reading].count(False) == 1, "all others are read")
                assert node.rule.hung == 1
            finally:
                node.rule.disarm()
            assert all(each.result() for each in reading)
        assert node.stop() == 0
    assert not list(tmp_path.rglob("*.spill"))


def test_spilling_waits_for_a_hanging_write_and_goes_on_after_it(tmp_path: Path, shim: Path) -> None:
    with Subject(tmp_path, shim) as node, dp.connect(node.address) as plane:
        node.rule.arm("write", HANG, target=".spill")
        refs: list[dp.BatchRef] = []
        with pytest.raises(dp.Backpressure):
            for seed in range(16):
                refs.append(plane.put({"x": pattern(seed, SHARD)}, timeout=2))
        assert read(plane, refs[0], 0, 60), "it is in memory"
        node.rule.disarm()
        refs += [plane.put({"x": pattern(seed, SHARD)}, timeout=60) for seed in range(len(refs), 16)]
        assert all(read(plane, ref, seed, 60) for seed, ref in enumerate(refs))
        eventually(lambda: plane.stats().spill_error == "", "nothing hangs any more")
        for ref in refs:
            plane.free(ref)
        eventually(lambda: plane.stats().memory_used == plane.stats().disk_used == 0, "nothing is left")


@each_case("call", ["open", "write", "read", "unlink"])
def test_a_hanging_disk_blocks_neither_memory_reads_nor_termination(tmp_path: Path, shim: Path, call: str) -> None:
    with spilled(tmp_path, shim) as (node, plane, refs):
        kept = plane.get(refs[0])["x"].numpy()
        node.rule.arm(call, HANG, count=EVERY, target=".spill")
        for seed, ref in enumerate(refs[1:], 1):
            read(plane, ref, seed, 0.02)
        for ref in refs[1:]:
            plane.free(ref)
        with suppress(dp.Backpressure):
            for seed in range(12):
                refs.append(plane.put({"x": pattern(seed, SHARD)}, timeout=0.1))
        eventually(lambda: node.rule.hung, "a thread hangs")
        assert plane.stats().clients == 1
        assert np.array_equal(plane.get(refs[0], timeout=60)["x"].numpy(), kept)
        assert node.stop() == 0
        assert node.rule.hung, "what hung did so to the end"


def test_a_hanging_disk_is_reported_and_used_again_after_recovery(tmp_path: Path, shim: Path) -> None:
    with spilled(tmp_path, shim) as (node, plane, refs):
        node.rule.arm("open", HANG, count=EVERY, target=".spill")
        with pytest.raises(dp.Backpressure) as caught:
            for seed in range(20):
                plane.put({"x": pattern(seed, SHARD)}, timeout=2)
        assert "have not been answered" in caught.value.spill_error
        node.rule.disarm()
        eventually(lambda: plane.stats().spill_error == "", "it answers")
        assert all(read(plane, ref, seed, 60) for seed, ref in enumerate(refs))


def test_hanging_reads_of_a_large_file_leave_threads_for_other_files(tmp_path: Path, shim: Path) -> None:
    """A file of several chunks: one that hangs leaves threads for the next."""
    with Subject(tmp_path, shim, memory=48 << 20) as node, dp.connect(node.address) as plane:
        size = 16 << 20
        refs = [plane.put({"x": pattern(seed, size)}, timeout=60) for seed in range(4)]
        eventually(lambda: plane.stats().spilled_shards >= 1, "one is on disk alone")
        node.rule.arm("read", HANG, first=2, count=2, target=".spill")  # after its record, two chunks
        hung: list[int] = []
        for seed, ref in enumerate(refs):
            if not read(plane, ref, seed, 60 if hung else 0.5):
                hung.append(seed)
        assert len(hung) == 1
        assert node.rule.hung == 2
        node.rule.disarm()
        assert read(plane, refs[hung[0]], hung[0], 60)
