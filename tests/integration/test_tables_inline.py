"""Writes to tables that carry their columns in one request: who waits, goes or lies leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.wire import messages as m
from tests.cases import each_case
from tests.chaos.raw import Raw, one_column
from tests.processes import MIB, StandingNode, eventually, pattern


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, spill=0, memory="8MiB") as node:
        yield node


def asked(table: Any) -> list[str]:
    """The kinds of the requests that the table's plane makes from now on."""
    connection = table._inner._connection
    kinds, original = [], connection.request

    async def request(what: Any, *args: Any) -> Any:
        kinds.append(type(what).__name__)
        return await original(what, *args)

    connection.request = request
    return kinds


def test_a_small_write_is_one_request_also_beside_columns_that_are_stored(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        table = plane.table("t")
        table.write(["a"], {"big": pattern(1, MIB)[None]})
        kinds = asked(table)
        table.write(["b"], {"x": [[1, 2, 3]], "big": table.read(["a"], ["big"])}, tags=[{"n": 1}])
        assert kinds == ["ReadRows", "WriteInline"]
        table.put(["b"], {"x": [[4]]})
        assert kinds[2:] == ["WriteInline"]
        batch = plane.get(table.read(["b"]))
        assert batch["x"].to_list() == [[4]]
        assert (batch["big"].numpy()[0] == pattern(1, MIB)).all()
        assert table.look().tags == [{}, {"n": 1}]
        del batch
        table.drop()
        eventually(lambda: plane.stats().shards == 0, "all of it is freed")


def test_a_small_write_waits_for_memory_and_leaves_nothing_where_there_is_none(node: StandingNode) -> None:
    with dp.connect(node.address) as plane, ThreadPoolExecutor(1) as pool:
        table = plane.table("t")
        held = plane.put({"x": np.zeros((1, 8 * MIB - 4096), np.uint8)})
        full, small = plane.stats().memory_used, pattern(2, 32 << 10)[None]
        with pytest.raises(dp.Backpressure):
            table.write(["a"], {"x": small}, timeout=0.1)
        assert plane.stats().memory_used == full
        assert len(table.look()) == 0
        writing = pool.submit(table.write, ["a"], {"x": small}, timeout=60)
        plane.free(held)
        assert writing.result(60).tolist() == [0]
        assert (plane.get(table.read(["a"]))["x"].numpy() == small).all()


ROW = one_column(64, rows=1, width=64)
FALSE: dict[str, Any] = {
    "bytes of two columns": ({"columns": m.Inline(bytes(64), ROW, [64, 64])}, {}),
    "two keys for a row": ({}, {"keys": ["a", "b"]}),
    "no table": ({}, {"table": ""}),
    "no reference": ({}, {"ref": b"\x93nonsense"}),
    "a row by a number that is not there": ({}, {"keys": [], "rows": bytes(8)}),
}


@each_case("what", FALSE)
def test_false_requests_leave_nothing(node: StandingNode, what: str) -> None:
    outer, inner = FALSE[what]
    with dp.connect(node.address) as plane, Raw(node.address) as raw:
        said: dict[str, Any] = {
            "table": "t",
            "home": b"",
            "staged": "",
            "ref": b"",
            "keys": ["a"],
            "rows": b"",
            "tags": [],
        }
        write = m.WriteRows(0, **(said | inner))
        request = {"columns": m.Inline(bytes(64), ROW, [64]), "write": write, "timeout_s": 1.0} | outer
        reply = raw.ask(m.WriteInline(9, **request))
        assert isinstance(reply, m.Failure), reply
        eventually(lambda: plane.stats().shards == 0, "nothing of it stays")
        assert len(plane.table("t").look()) == 0
