"""Streams over several nodes on loopback: the same calls, wherever a row's home is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.cluster.placement import winner
from tests.etcd import needs_etcd
from tests.integration.test_hosts import Host, members
from tests.processes import WAIT_S, eventually

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


def test_streams_are_listed_by_the_host_that_leads_them_though_it_never_opened_them(planes: list[Any]) -> None:
    names = [f"s{number}" for number in range(6)]
    for name in names:
        planes[0].stream(name, tasks=["actor"]).append({"x": [1]})
    eventually(lambda: sorted(name for plane in planes for name in plane.streams()) == names, "each is listed once")
    for name in names:
        planes[0].stream(name).drop()
    eventually(lambda: not any(plane.streams() for plane in planes), "no dropped stream is listed")


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


def test_blocks_of_an_appender_are_on_two_hosts_and_restored_on_one(planes: list[Any], tmp_path: Path) -> None:
    stream = planes[0].stream("rollouts", tasks=["actor"], replicas=2)
    with stream.appender() as appender:
        for first in range(0, 24, 4):
            for sent in [appender.send(ids(1, at)) for at in range(first, first + 4)]:
                sent.result()
    stream.checkpoint(tmp_path / "stream")
    with dp.connect(config=dp.NodeConfig(memory="64MiB", spill=0, prewarm=0)) as alone:
        again = alone.restore(tmp_path / "stream", replicas=1)
        again.close()
        assert drained(again, "actor", ["id"]) == [*range(24)]


def test_rows_appended_by_reference_or_restored_are_on_two_hosts(
    hosts: list[Any], planes: list[Any], tmp_path: Path
) -> None:
    a, b, c = planes
    streams = {name: a.stream(name, tasks=["actor"], replicas=2) for name in ("far", "part", "all", "written")}
    streams["far"].append(c.put(ids(4)))
    c.stream("part").append(c.retain(c.put(ids(8))[4:]))
    b.stream("all").append(dp.concat([plane.put(ids(2, 2 * number)) for number, plane in enumerate(planes)]))
    streams["written"].append(ids(4))
    streams["written"].checkpoint(tmp_path / "stream")
    c.restore(tmp_path / "stream", name="restored")
    later = a.stream("later", tasks=["actor"], replicas=2)
    hosts[2].kill()
    eventually(lambda: len(a.members()["members"]) == 2, "it has died")
    for name, found in {
        "far": [0, 1, 2, 3],
        "part": [4, 5, 6, 7],
        "all": [*range(6)],
        "restored": [0, 1, 2, 3],
    }.items():
        stream = b.stream(name)
        assert stream.lost() == []
        with stream.consume("actor", rows=8, columns=["id"]) as delivery:
            assert delivery.get()["id"].to_list() == found
            later.append(delivery.ref)
        with later.consume("actor", rows=8, min_rows=len(found), columns=["id"]) as delivery:
            assert delivery.get()["id"].to_list() == found


def test_columns_that_are_copied_twice_are_freed_everywhere(planes: list[Any]) -> None:
    stream = planes[0].stream("rollouts", tasks=["actor"], replicas=2)
    refs = [planes[2].put({**ids(4), "x": [np.arange(9)] * 4}, replicas=2) for _ in range(6)]
    planes[2].stream("rollouts").append(dp.concat(refs))
    more = planes[1].put(ids(4))
    planes[1].stream("rollouts").append(refs[0].select("x").union(more))
    planes[1].free(more)
    mine = planes[2].retain(refs[0][:2])
    for ref in refs:
        planes[2].free(ref)
    with stream.consume("actor", rows=28, min_rows=28, columns=["id", "x"]):
        pass
    planes[2].free(mine)
    for plane in planes[:2] * 3:  # also from a node that has a replica of some of these
        plane.stream("rollouts").append(dp.concat([planes[2].put(ids(4), replicas=2) for _ in range(4)]))
    with stream.consume("actor", rows=96, min_rows=96, columns=["id"]):
        pass
    eventually(lambda: all(plane.stats().shards == plane.stats().copies for plane in planes), "all are freed")


# Tables over several nodes on loopback: the same calls wherever they are led, whichever node dies.


def at(planes: list[Any], which: int) -> str:
    """A name whose table is made at the node of this plane."""
    nodes = {plane.stats().node: number for number, plane in enumerate(planes)}
    encoded = [node.encode() for node in nodes]
    names = (f"table-{number}" for number in range(1000))
    return next(name for name in names if nodes[winner(encoded, "table", name).decode()] == which)


def columns(rows: int, first: int = 0) -> dict[str, Any]:
    return {"id": np.arange(first, first + rows), "text": [f"row {i}" for i in range(first, first + rows)]}


@needs_etcd
def test_a_table_survives_the_death_of_any_host(hosts: list[Host], planes: list[Any]) -> None:
    name = at(planes, 2)
    tables = [plane.table(name) for plane in planes]
    tables[0].upsert(["a", "b"], columns(2), tags=[{"n": 1}, {"n": 2}])
    tables[2].upsert(["c"], columns(1))
    assert list(planes[2].stats().tables) == [name]
    assert tables[1].claim("train", [1], claim_id="step").tolist() == [1]
    found: list[list[int]] = []
    waiting = threading.Thread(
        target=lambda: found.append(tables[0].ready(["id", "reward"], least=2, timeout=60).tolist())
    )
    waiting.start()
    planes[2].close()
    hosts[2].kill()
    assert planes[1].get(tables[1].read(["b", "a"]))["id"].to_list() == [1, 0]
    for table in tables[:2]:
        assert table.look().tags == [{"n": 1}, {"n": 2}, {}]
        assert table.claim("train", [0], claim_id="step").tolist() == [1]
    tables[1].upsert(["a", "b"], {"reward": np.array([0.5, 0.25])})
    waiting.join(WAIT_S)
    assert found == [[0, 1]]
    eventually(lambda: len(members(planes[0])) == 2)
    with pytest.raises(dp.OwnerDied):
        planes[0].get(tables[0].read(["c"]))
    tables[1].upsert(["c"], columns(1, 9))  # what was lost with the host is mended
    assert planes[0].get(tables[0].read(["c", "a"], ["id"]))["id"].to_list() == [9, 0]
    tables[0].drop()
    eventually(lambda: all(map(nothing_kept, planes[:2])), "what it needed is freed")
