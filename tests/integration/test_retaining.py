"""Rows that several own: by both faces, through spilling, streams and tables, over hosts, and as owners die."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.wire import shard_messages as sm
from tests.processes import StandingNode, Worker, before_requests, eventually, pattern

if multiprocessing.current_process().name == "MainProcess":  # as in test_hosts
    from tests.integration.test_hosts import Host, connected


def columns(rows: int = 8) -> dict[str, Any]:
    """A large column, which is a shard of its own, and small ones, which are one together."""
    return {
        "pixels": pattern(1, rows * (128 << 10), rows),
        "n": np.arange(rows),
        "text": [f"row {row}" for row in range(rows)],
    }


def check(plane: Any, ref: dp.BatchRef, rows: list[int]) -> None:
    """Fails where the reference does not read as these rows."""
    batch, expected = plane.get(ref), columns()
    for name in batch:
        values = batch[name].to_list()
        assert len(values) == len(rows)
        for value, row in zip(values, rows, strict=True):
            assert np.array_equal(value, expected[name][row])


def gone(plane: Any) -> None:
    eventually(lambda: plane.stats().memory_used == plane.stats().shards == 0, "nothing is left")


def _retains(pipe: Connection, address: str) -> None:
    with dp.connect(address) as plane:
        mine = plane.retain(pipe.recv())
        pipe.send(mine)
        pipe.recv()


def test_rows_retained_by_a_process_outlive_it(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        first = plane.put(columns())
        with Worker(_retains, node.address) as worker:
            worker.say(first)
            theirs = worker.hear()
            plane.free(first)
            worker.kill(signal.SIGKILL)
        check(plane, theirs, list(range(8)))
        plane.free(theirs)
        gone(plane)


def test_a_free_of_many_shards_lets_other_clients_in_between(
    node: StandingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dp.connect(node.address) as plane:
        ref = dp.concat([plane.put({"n": [row]}) for row in range(5)])
        freed: list[int] = []
        before_requests(plane._inner.connection, lambda asked: freed.append(len(asked.parts)))
        monkeypatch.setattr(sm, "MAX_RETAINED", 2)
        plane.free(ref)
        assert freed == [2, 2, 1]
    with dp.connect(node.address) as plane:
        gone(plane)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Any, Any, Host, Host]]:
    with connected(tmp_path) as ((one, two), (near, far)):
        yield near, far, one, two


def test_rows_of_another_host_are_retained_and_freed_from_here(hosts: tuple[Any, Any, Host, Host]) -> None:
    near, far, _, _ = hosts
    first = near.put(columns())
    mine = far.retain(first[2:6])
    check(far, first, list(range(8)))  # there is a copy there now
    far.free(far.retain(first[2:6]))
    check(far, first, list(range(8)))
    far.free(first)
    check(far, mine, [2, 3, 4, 5])
    check(near, mine, [2, 3, 4, 5])
    with pytest.raises(dp.Freed):
        far.get(first[:1])
    other = near.retain(mine[:2])
    far.free(mine)
    far.free(mine)
    check(far, other, [2, 3])
    with pytest.raises(dp.Freed):
        far.get(mine[2:])
    near.free(other)
    gone(near)


def test_a_replica_has_the_same_owners(hosts: tuple[Any, Any, Host, Host]) -> None:
    """The host that rows were put on dies; they are freed where they are kept, one owner after the other."""
    near, far, one, _ = hosts
    first = near.put(columns(), replicas=2)
    mine, other = near.retain(first[2:4]), far.retain(first[2:6])
    near.free(first)
    near.free(other[2:])
    eventually(lambda: len(far.get(mine)) == len(mine), "it was told of")
    one.kill()
    eventually(lambda: len(far.members()["members"]) == 1, "it has died")
    check(far, mine, [2, 3])
    with pytest.raises(dp.OwnerDied):
        far.retain(mine)
    far.free(first)
    far.free(mine)
    check(far, other[:2], [2, 3])
    far.free(other)
    gone(far)
