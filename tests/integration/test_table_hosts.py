"""Tables over several nodes on loopback: the same calls wherever they are led, whichever node dies."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.cluster.placement import Rendezvous
from tests.etcd import needs_etcd
from tests.integration.test_hosts import Host, members
from tests.integration.test_stream_hosts import nothing_kept
from tests.processes import WAIT_S, eventually

pytestmark = needs_etcd


def at(planes: list[Any], which: int) -> str:
    """A name whose table is made at the node of this plane."""
    nodes = {plane.stats().node: number for number, plane in enumerate(planes)}
    placement = Rendezvous(node.encode() for node in nodes)
    names = (f"table-{number}" for number in range(1000))
    return next(name for name in names if nodes[placement.winner("table", name).decode()] == which)


def columns(rows: int, first: int = 0) -> dict[str, Any]:
    return {"id": np.arange(first, first + rows), "text": [f"row {i}" for i in range(first, first + rows)]}


def test_rows_are_written_and_read_on_any_host(planes: list[Any]) -> None:
    name = at(planes, 1)
    tables = [plane.table(name) for plane in planes]
    assert tables[0].upsert(["a", "b"], columns(2), tags=[{"n": 1}, {}]).tolist() == [0, 1]
    assert tables[1].upsert(["b", "c"], columns(2, 5)).tolist() == [1, 2]
    for plane in planes[:2]:  # the columns stay where they were written
        assert [holder["owner"] for holder in plane.stats().holders] == [f"table {name}"]
    tables[2].upsert(["c", "a"], {"reward": np.array([0.5, 0.25])})
    for plane, table in zip(planes, tables, strict=True):
        batch = plane.get(table.read(["c", "b", "a"], ["id", "text"]))
        assert batch["id"].to_list() == [6, 5, 0]
        assert batch["text"].to_list() == ["row 6", "row 5", "row 0"]
        assert plane.get(table.read([0, 2]))["reward"].to_list() == [0.25, 0.5]
        assert table.look().tags == [{"n": 1}, {}, {}]
        assert table.ready(["id", "reward"]).tolist() == [0, 2]
        assert sorted(table.schema()) == ["id", "reward", "text"]
        assert list(plane.tables()) == [name]
    assert [list(plane.stats().tables) for plane in planes] == [[name] if i == 1 else [] for i in range(3)]
    tables[1].clear(["a", "b", "c"])
    assert tables[2].look().keys == []
    eventually(lambda: all(map(nothing_kept, planes)), "every column is freed where it is")


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
