"""Tables, end to end, by both faces: rows written, read, taken and cleared by several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.batch.locations import ref_to
from dataplane.table import requests as t
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire.row_messages import STAGED
from tests.cases import each_case
from tests.chaos.raw import Raw
from tests.processes import MIB, StandingNode, Worker, eventually, pattern

NODE = {"memory": "32MiB", "spill": 0}


def rows(count: int, first: int = 0) -> dict[str, Any]:
    return {
        "x": np.arange(first, first + count),
        "ids": [np.arange(1 + row % 4) for row in range(first, first + count)],
        "answer": [f"réponse {row}" for row in range(first, first + count)],
        "extra": [{"row": row, "seen": [None, True]} for row in range(first, first + count)],
    }


@pytest.mark.usefixtures("empty")
def test_columns_written_by_several_stages_can_be_read_repeatedly(plane: Any) -> None:
    table = plane.table("partition")
    assert table.upsert(["a", "b", "c"], rows(3), tags=[{"n": i} for i in range(3)]).tolist() == [0, 1, 2]
    table.upsert(["c", "a"], {"reward": np.array([0.5, 0.25], np.float32)}, tags=[{"done": True}, {"n": 7}])
    for _ in range(2):
        batch = plane.get(table.read(["c", "a"]))
        assert batch["x"].to_list() == [2, 0]
        assert batch["reward"].to_list() == [0.5, 0.25]
        assert batch["extra"].to_list() == [{"row": 2, "seen": [None, True]}, {"row": 0, "seen": [None, True]}]
        del batch
    assert table.look(["c", "never", "a"], missing_ok=True).keys == ["c", "a"]
    with pytest.raises(dp.Misuse, match="given twice"):
        plane.table("refused").upsert(["a", "a"], {"x": [1, 2]})
    assert "refused" not in plane.tables()
    assert plane.table("never").look(["a"], missing_ok=True).keys == table.look([], missing_ok=True).keys == []
    seen = table.look(columns=["x", "reward", "never"])
    assert seen.keys == ["a", "b", "c"]
    assert seen.tags == [{"n": 7}, {"n": 1}, {"n": 2, "done": True}]
    assert seen.have.tolist() == [[True, True, False], [True, False, False], [True, True, False]]
    assert {name: field.kind for name, field in table.schema().items()} == {
        "x": "dense",
        "ids": "ragged",
        "answer": "text",
        "extra": "struct",
        "reward": "dense",
    }
    assert plane.tables()["partition"]["rows"] == 3
    table.clear(["a", "b", "c"])
    assert len(table.look()) == 0


@pytest.mark.usefixtures("empty")
def test_a_reference_to_a_replaced_row_raises_freed(plane: Any) -> None:
    table = plane.table("t")
    table.upsert(["a", "b"], rows(2))
    old = table.read(["a", "b"], ["x"])
    table.upsert(["a"], {"x": np.array([9])})
    with pytest.raises(dp.Freed):
        plane.get(old)
    assert plane.get(old[1])["x"].to_list() == [1]
    assert plane.get(table.read(["a", "b"], ["x"]))["x"].to_list() == [9, 1]
    table.drop()


@pytest.mark.usefixtures("empty")
def test_keys_and_tags_that_fill_several_messages_are_looked_up(plane: Any) -> None:
    table, keys = plane.table("partition"), [f"{i:03}" + "é" * 900 for i in range(200)]
    tags = [{"text": chr(65 + i % 26) * 30_000} for i in range(200)]
    seen, columns = table.upsert_and_look(keys, rows(200), tags=tags)
    assert sorted(columns) == sorted(rows(1))
    for found in (seen, table.look(), table.look(keys), table.look(seen.numbers), table.look(keys, since=1)):
        assert (found.keys, found.tags, found.numbers.tolist()) == (keys, tags, seen.numbers.tolist())
    assert seen.have.shape == (200, 4)
    assert seen.have.all()
    assert len(table.look(keys, since=table.look().changes)) == 0
    assert table.keys(seen.numbers) == keys
    table.drop()


@pytest.mark.usefixtures("empty")
def test_released_rows_can_be_taken_again(plane: Any) -> None:
    table = plane.table("t")
    table.upsert([str(i) for i in range(8)], {"x": np.arange(8)})
    assert table.claim("train", [*range(8)]).tolist() == [*range(8)]
    assert table.claimed("train").all()
    table.release("train", [3, 5])
    assert table.ready(["x"], task="train").tolist() == [3, 5]
    table.release()
    assert len(table.ready(["x"], task="train")) == 8
    table.drop()


def asked(what: t.FromClient, table: str = "t", timeout_s: float = 0.0) -> rm.AskTable:
    return rm.AskTable(9, table, b"", what, timeout_s)


NOBODY = np.array([-1, 1 << 62])
FALSE: dict[str, Callable[[bytes], rm.AskTable]] = {
    "rows that are not there": lambda ref: asked(t.Read(rows=NOBODY, columns=["x"])),
    "a table without a name": lambda ref: asked(t.Read(keys=["a"], columns=["x"]), ""),
    "a long name": lambda ref: asked(t.Read(keys=["a"], columns=["x"]), "t" * 5000),
    "a key that is empty": lambda ref: asked(t.Upsert(keys=[""])),
    "a key that is long": lambda ref: asked(t.Upsert(keys=["k" * 5000])),
    "no reference": lambda ref: asked(t.Upsert(keys=["b"], ref=b"\x93nonsense")),
    "fewer rows than keys": lambda ref: asked(t.Upsert(keys=["b", "c"], ref=ref)),
    "fewer tags than keys": lambda ref: asked(t.Upsert(keys=["b", "c"], tags=[{}])),
    "tags that are large": lambda ref: asked(t.Upsert(keys=["b"], tags=[{"x": "y" * (100 << 10)}])),
    "more rows than go at once": lambda ref: asked(t.Upsert(rows=np.zeros(1 << 17, np.int64))),
    "a shard that is not there": lambda ref: asked(t.Upsert(keys=["b"], ref=forged(ref))),
    "somebody else's node": lambda ref: asked(t.Upsert(keys=["b"], ref=forged(ref, b"elsewher"))),
    "a column a hundred times": lambda ref: asked(t.Read(keys=["a"], columns=["x"] * 100)),
    "a task without a name": lambda ref: asked(
        t.Claim(task="", rows=np.zeros(1, np.int64), give=np.zeros(1, np.int64))
    ),
    "a time that is none": lambda ref: asked(t.FindReady(columns=["x"], least=5), timeout_s=float("nan")),
}


def forged(ref: bytes, node: bytes = b"") -> bytes:
    known = dp.BatchRef.decode(ref)
    own = known.shards()[0][0]
    return ref_to(node or own, 1, [("x", known.schema["x"], 8, 12345, 0)]).encode()


@each_case("what", FALSE)
def test_invalid_table_requests_change_nothing(node: StandingNode, what: str) -> None:
    with dp.connect(node.address) as plane, Raw(node.address) as raw:
        table = plane.table("t")
        table.upsert(["a"], {"x": np.arange(1)}, tags=[{"n": 1}])
        ref = plane.put({"x": np.arange(1)})
        before = table.look(columns=["x"])
        reply = raw.ask(FALSE[what](ref.encode()))
        assert isinstance(reply, m.Failure), reply
        assert reply.name in ("ProtocolMismatch", "LimitExceeded", "Misuse", "Freed", "OwnerDied"), reply
        assert len(table.look(since=before.changes)) == 0
        assert plane.get(table.read(["a"]))["x"].to_list() == [0]
        plane.free(ref)
        table.drop()
        assert plane.stats().shards == 0


def dies(pipe: Any, address: str, when: str) -> None:
    """Has something staged or written, and says so; to be killed."""
    with dp.connect(address) as plane:
        if when == "staged":
            plane.put({"x": pattern(3, MIB, 2)}, scope=f"{STAGED}mine")  # as a write does, before it says so
        else:
            plane.table("t").upsert(["a", "b"], {"x": pattern(3, MIB, 2)})
        pipe.send(when)
        pipe.recv()


@pytest.mark.usefixtures("empty")
def test_staged_columns_of_a_killed_process_are_freed(node: StandingNode, plane: Any) -> None:
    with Worker(dies, node.address, "staged") as worker:
        assert worker.hear() == "staged"
        assert plane.stats().shards == 1
        worker.kill()
        eventually(lambda: plane.stats().memory_used == 0, "what was staged goes with who staged it")
    assert len(plane.table("t").look()) == 0


@pytest.mark.usefixtures("empty")
def test_rows_written_by_a_killed_process_remain(node: StandingNode, plane: Any) -> None:
    table = plane.table("t")
    with Worker(dies, node.address, "written") as worker:
        assert worker.hear() == "written"
        worker.kill()
        eventually(lambda: plane.stats().clients == 1)
    assert (plane.get(table.read(["a", "b"]))["x"].numpy() == pattern(3, MIB, 2)).all()
    table.drop()
