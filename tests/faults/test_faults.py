"""Failed calls into the operating system: one occurrence of each call and errno, and each that can fail a start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from errno import EIO, ENOSPC
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.replication.messages import LogEntry
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.durable.log import SQLiteStorage
from dataplane.store.store import Store
from tests.cases import each_case
from tests.faults.cells import STARTING, sample
from tests.faults.driver import trials
from tests.faults.durable_subject import ME, MIB
from tests.faults.shim import EVERY, HANG, Rule, name
from tests.faults.subject import Subject
from tests.faults.trial import Outcome
from tests.processes import eventually, pattern

pytestmark = pytest.mark.long

SEED = 14
GROUPS = {
    "open": {"open"},
    "write": {"write", "close"},
    "read": {"read", "fstat"},
    "delete": {"unlink"},
    "serve": {"accept", "getsockopt", "epoll_ctl", "send", "sendmsg", "recv"},
    "memory": {"mmap", "memfd_create", "ftruncate", "fchmod", "fcntl", "madvise", "pthread_create"},
}


def test_every_sampled_system_call_belongs_to_a_group() -> None:
    assert {cell.call for cell in sample(SEED)} == set().union(*GROUPS.values())


@each_case("group", GROUPS)
def test_a_node_lives_through_failed_calls_and_recovers(tmp_path: Path, shim: Path, group: str) -> None:
    cells = [cell for cell in sample(SEED) if cell.call in GROUPS[group]]
    outcomes = list(trials(tmp_path, shim, cells))
    assert [outcome for outcome in outcomes if not isinstance(outcome, Outcome)] == []
    assert sum(isinstance(outcome, Outcome) and outcome.failed > 0 for outcome in outcomes) >= len(cells) / 2


@each_case(("call", "error", "target"), STARTING, ids=lambda value: name(value) if isinstance(value, int) else value)
def test_a_failing_node_start_reports_its_reason_and_leaves_nothing(
    tmp_path: Path, shim: Path, call: str, error: int, target: str
) -> None:
    with Subject(tmp_path, shim, armed=(call, error, target)) as node:
        assert node.address == ""
        assert node.wait() == 1
        assert node.rule.failed == 1
        assert any(line.startswith("dataplane node: ") for line in node.logged().splitlines()), node.logged()
        assert not [*node.runtime.iterdir(), *node.spill.glob("*")]


# A data directory whose disk fails: typed errors, nothing half written, and all that was answered is there again.

WAL, SHARDS = "node.sqlite-wal", ".shards"
STEPS = [
    ("log", "", 0, "", "1"),
    ("log", "write", ENOSPC, WAL, "Backpressure "),
    ("log", "", 0, "", "2"),
    ("shard", "write", ENOSPC, SHARDS, "Backpressure "),
    ("shard", "write", EIO, SHARDS, "DirectoryUnusable failed"),
    ("shard", "fsync", EIO, SHARDS, "DirectoryUnusable failed"),
    ("log", "", 0, "", "3"),
    ("shard", "", 0, "", "4"),
    ("log", "fsync", EIO, WAL, "DirectoryUnusable failed"),
    ("log", "", 0, "", "DirectoryUnusable failed"),  # nobody knows what is on the disk
]
"""What is written, which call fails, how and of what, and what is told."""


async def test_a_failing_disk_causes_typed_errors_and_loses_no_acknowledged_write(tmp_path: Path, shim: Path) -> None:
    rule = Rule(tmp_path / "rule")
    environment = os.environ | {"LD_PRELOAD": str(shim), "FAULTS_RULE": str(rule.path)}
    command = [sys.executable, "-m", "tests.faults.durable_subject", str(tmp_path / "data")]
    told = []
    with subprocess.Popen(  # noqa: ASYNC220
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    ) as subject:
        assert subject.stdin is not None
        assert subject.stdout is not None
        for what, call, error, target, _ in STEPS:
            if call:
                rule.arm(call, error, count=EVERY, target=target)
            subject.stdin.write(what + "\n")
            subject.stdin.flush()
            told.append(subject.stdout.readline().rstrip("\n"))
            assert not call or rule.failed, "it was failed"
            rule.disarm()
        subject.kill()
    rule.close()
    assert told == [expected for *_, expected in STEPS]
    directory = DataDirectory(tmp_path / "data")
    entries = SQLiteStorage(directory.database, "p", ME).load()[1].entries
    assert entries[:3] == [LogEntry(1, b"entry 1"), LogEntry(1, b"entry 2"), LogEntry(1, b"entry 3")]
    assert entries[3:] in ([], [LogEntry(1, b"entry 4")]), "what was told as failed may be there"
    store = Store(NodeConfig(memory=32 * MIB, spill=0, spill_dir=tmp_path, prewarm=0), directory=directory)
    assert await store.persistence.recover() == [4]
    (pinned,) = await store.pin("r", [4], Deadline.after(10))
    assert store.arena.read(pinned.extent) == b"x" * MIB
    assert len(list((tmp_path / "data" / "shards").iterdir())) == 1
    await store.aclose()


# Calls of the disk that hang: one file, or all of it; and a node that is told to end meanwhile.

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
        node.rule.arm("read", HANG, count=2, target=".spill")  # two chunks
        hung: list[int] = []
        for seed, ref in enumerate(refs):
            if not read(plane, ref, seed, 60 if hung else 0.5):
                hung.append(seed)
        assert len(hung) == 1
        assert node.rule.hung == 2
        node.rule.disarm()
        assert read(plane, refs[hung[0]], hung[0], 60)
