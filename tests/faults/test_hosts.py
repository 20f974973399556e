"""Failed calls of a node that reads from another, and is read by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EAGAIN, EIO
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from tests import etcd
from tests.cases import each_case
from tests.faults.shim import EVERY, HANG, name
from tests.faults.subject import Subject
from tests.processes import eventually, pattern

pytestmark = pytest.mark.long

SHARD = 2 << 20
MEMORY = 16 << 20
ALONE = ["--listen", "tcp://127.0.0.1:0", "--transports", "tcp"]


class Pair:
    """A node whose calls fail, with shards in memory and on disk, and another with some; each wants the other's."""

    def __init__(self, node: Subject, mine: dp.Plane, theirs: dp.Plane) -> None:
        self.node = node
        self._planes = mine, theirs
        self._in_memory, self._here = 0, [mine.put({"x": pattern(i, SHARD)}) for i in range(12)]
        self._there = [theirs.put({"x": pattern(50 + i, SHARD)}) for i in range(3)]
        eventually(lambda: mine.stats().spilled_shards >= 3, "some are on disk alone")

    def ask(self, timeout_s: float) -> list[str]:
        """Read some from each side; what is not read is read elsewhere or later, with an error that says so."""
        mine, theirs = self._planes
        told = [self._read(mine, ref, 50 + i, timeout_s) for i, ref in enumerate(self._there)]
        told += [self._read(theirs, self._here[i], i, timeout_s) for i in (0, 9, 10, 11)]
        return [error for error in told if error]

    def _read(self, plane: dp.Plane, ref: dp.BatchRef, seed: int, timeout_s: float) -> str:
        try:
            assert np.array_equal(plane.get(ref, timeout=timeout_s)["x"].numpy(), pattern(seed, SHARD))
        except dp.Retryable as error:
            assert "the node failed on this request" not in str(error), str(error)
            return type(error).__name__
        return ""


@contextmanager
def pair(tmp_path: Path, shim: Path) -> Iterator[Pair]:
    how = [*ALONE, "--join", etcd.cluster()]
    with (
        Subject(tmp_path / "one", shim, *how, memory=MEMORY) as one,
        Subject(tmp_path / "two", shim, *how, memory=MEMORY) as two,
        dp.connect(one.address) as mine,
        dp.connect(two.address) as theirs,
    ):
        for plane in (mine, theirs):
            eventually(lambda plane=plane: len(plane.members()["members"]) == 2, "they know each other")  # type: ignore[misc]
        yield Pair(one, mine, theirs)


CELLS = [
    ("pthread_create", EAGAIN, 1, ""),
    ("pthread_create", EAGAIN, EVERY, ""),
    ("sendfile", EIO, EVERY, ".spill"),
    ("sendfile", HANG, 1, ".spill"),
]


def written(value: object) -> str | None:
    return name(value) if isinstance(value, int) and value < EVERY and value != 1 else None


@each_case(("call", "error", "count", "target"), CELLS, ids=written)
def test_reads_between_hosts_live_through_failed_calls(
    tmp_path: Path, shim: Path, call: str, error: int, count: int, target: str
) -> None:
    with pair(tmp_path, shim) as two:
        rule = two.node.rule
        rule.arm(call, error, count=count, target=target)
        two.ask(0.3)
        assert rule.failed
        assert rule.seen < 1000, "it is tried again and again without a pause"
        rule.disarm()
        assert two.node.alive
        eventually(lambda: not two.ask(3.0), "it recovers")
        assert "Traceback" not in two.node.logged(), two.node.logged()
        assert two.node.stop() == 0


def test_a_node_terminates_while_sending_a_file_hangs(tmp_path: Path, shim: Path) -> None:
    with pair(tmp_path, shim) as two:
        two.node.rule.arm("sendfile", HANG, count=EVERY, target=".spill")
        assert two.ask(0.2)
        assert two.node.rule.hung
        assert two.node.stop() == 0
