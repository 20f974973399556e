"""A data directory whose disk fails: typed errors, nothing half written, and all that was answered is there again."""

from __future__ import annotations

import os
import subprocess
import sys
from errno import EIO, ENOSPC
from pathlib import Path

import pytest

from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.replication.messages import LogEntry
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.durable.log import SQLiteStorage
from dataplane.store.store import Store
from tests.faults.durable_subject import ME, MIB
from tests.faults.shim import EVERY, Rule

pytestmark = pytest.mark.long

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
