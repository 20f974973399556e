"""Streams over several nodes on loopback: the same calls, wherever a row's home is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import eventually

GROUPS = [f"prompt-{i}" for i in range(24)]


def drained(stream: Any, task: str, columns: list[str], rows: int = 64) -> list[int]:
    """All that the task is still given, by the column "id"."""
    found: list[int] = []
    while True:
        try:
            with stream.consume(task, rows=rows, columns=columns, timeout=60) as delivery:
                found += [int(i) for i in delivery.get()["id"].to_list()]
        except dp.Closed:
            return found


def nothing_kept(plane: Any) -> bool:
    """Whether all that was put on the plane's host has been freed."""
    stats = plane.stats()
    return bool(stats.put_bytes == stats.freed_bytes)


def ids(rows: int, first: int = 0) -> dict[str, Any]:
    return {"id": np.arange(first, first + rows)}


def test_a_delivery_not_acked_by_one_replica_is_redelivered(planes: list[Any]) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in planes]
    streams[0].append(ids(24), group=GROUPS)
    how: dict[str, Any] = {"rows": 24, "min_rows": 24, "columns": ["id"], "member": "dp0", "replicas": 2, "timeout": 10}
    first, second = (streams[rank].consume("actor", replica=rank, lease=0.5, **how).__enter__() for rank in (0, 1))
    first.ack()
    with streams[2].consume("actor", rows=24, min_rows=24, columns=["id"], timeout=60) as delivery:
        assert len(delivery) == 24
        with pytest.raises(dp.LeaseExpired):
            second.ack()
    second._inner.settled = True


def test_a_stream_over_hosts_is_written_to_a_file_and_restored(planes: list[Any], tmp_path: Path) -> None:
    streams = [plane.stream("rollouts", tasks=["reward", "actor"], max_rows=1000) for plane in planes]
    for number, stream in enumerate(streams):
        stream.append(ids(24, 24 * number), group=GROUPS, version=number, tags={"n": list(range(24))})
    with streams[1].consume("reward", rows=72, min_rows=72, columns=["id"], timeout=60) as delivery:
        streams[1].extend(delivery.ref, {"reward": delivery.get()["id"].numpy() * 3.0})
    with streams[2].consume("actor", rows=12, columns=["id"], timeout=60) as delivery:
        done = {int(i) for i in delivery.get()["id"].to_list()}
    streams[0].checkpoint(tmp_path / "stream")
    streams[0].drop()
    restored = planes[2].restore(tmp_path / "stream")
    with pytest.raises(dp.Misuse, match="already"):
        planes[1].restore(tmp_path / "stream")
    left = 72 - len(done)
    with restored.consume(
        "actor", rows=72, min_rows=left, columns=["id", "reward"], sampler=dp.Fifo(), timeout=60
    ) as delivery:
        batch = delivery.get()
        got = [int(i) for i in batch["id"].to_list()]
        assert sorted(got) == sorted(set(range(72)) - done)
        assert (batch["reward"].numpy() == batch["id"].numpy() * 3.0).all()
        assert delivery.groups == [GROUPS[i % 24] for i in got]
        assert delivery.versions == [i // 24 for i in got]
        del batch
    again = planes[0].stream("rollouts")
    again.append(ids(24, 100), group=GROUPS)
    again.close()
    assert sorted(drained(again, "actor", ["id"])) == list(range(100, 124))


def test_a_put_with_copies_passes_over_a_host_that_has_just_died(hosts: list[Any], planes: list[Any]) -> None:
    """The other hosts take it for a member still, and choose it for some of these puts."""
    hosts[1].kill()
    refs = [planes[0].put({"x": np.arange(4)}, replicas=2) for _ in range(12)]
    hosts[0].kill()
    eventually(lambda: len(planes[2].members()["members"]) == 1, "both have died")
    for ref in refs:
        assert planes[2].get(ref)["x"].to_list() == [0, 1, 2, 3]
    with pytest.raises(dp.Retryable, match="replicas=2, and the cluster has 1 nodes now: start another"):
        planes[2].put({"x": np.arange(4)}, replicas=2)
