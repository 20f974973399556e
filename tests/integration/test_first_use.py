"""What a new user runs into: rows that end are told of, and errors say what is waited for."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane import testing
from dataplane.testing import LocalNode
from tests.cases import each_case


@pytest.fixture
def node() -> Iterator[LocalNode]:
    with testing.node() as node:
        yield node


@pytest.fixture
def plane(node: LocalNode) -> Iterator[dp.Plane]:
    with dp.connect(node.address) as plane:
        yield plane


def stream_of(plane: dp.Plane, rows: int, **settings: Any) -> dp.Stream:
    stream = plane.stream("rollouts", tasks=["actor"], **settings)
    stream.append({"x": list(range(rows))})
    return stream


def task(stream: dp.Stream) -> dict[str, Any]:
    found: dict[str, Any] = stream.stats()["task"]["actor"]
    return found


def test_each_dead_letter_is_logged_with_its_cause(plane: dp.Plane, caplog: pytest.LogCaptureFixture) -> None:
    stream = stream_of(plane, 4, max_deliveries=1)
    with pytest.raises(ValueError, match="no reward"), stream.consume("actor", rows=1, columns=["x"]):
        raise ValueError("no reward")
    stream.consume("actor", rows=1, columns=["x"]).nack("out of memory")
    with pytest.raises(ZeroDivisionError):
        for _ in stream.deliveries("actor", rows=1, columns=["x"]):
            raise ZeroDivisionError
    loader = dp.loader(stream, "actor", rows=1, columns=["x"], collate=lambda batch: batch["y"])
    with pytest.raises(dp.SchemaMismatch):
        list(loader)
    assert task(stream)["dead"] == 4
    said = [each.getMessage() for each in caplog.records if "dead letters of task 'actor'" in each.getMessage()]
    assert [line.rpartition("reason: ")[2].split(":")[0] for line in said] == [
        "ValueError",
        "out of memory",
        "the loop over deliveries was left with them in hand",
        "SchemaMismatch",
    ]


def test_a_node_with_a_data_directory_logs_no_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with testing.node(data_dir=tmp_path / "data") as node, dp.connect(node.address) as plane:
        for durable in (True, False):
            stream = plane.stream(f"durable {durable}", tasks=["actor"], durable=durable)
            stream.append({"x": [1]})
            stream.drop()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_consume_after_the_end_reports_rows_that_were_not_done(plane: dp.Plane) -> None:
    stream = stream_of(plane, 3, max_deliveries=1)
    stream.consume("actor", rows=2, columns=["x"]).nack()
    with stream.consume("actor", rows=1, columns=["x"]):
        pass
    stream.close()
    with pytest.raises(dp.Closed, match=r"not done 2 of its rows: 2 are dead letters \(stream.dead_letters") as told:
        stream.consume("actor", rows=1, columns=["x"])
    assert (told.value.drained, told.value.dead, told.value.expired) == (True, 2, 0)
    assert len(stream.dead_letters("actor")) == 2
    assert repr(stream.dead_letters("actor")).startswith("<2 dead letters: ")


@pytest.mark.parametrize("by", ["deliveries", "loader"])
def test_a_loop_over_a_stream_reports_rows_that_were_not_done_at_its_end(plane: dp.Plane, by: str) -> None:
    stream = stream_of(plane, 3, max_deliveries=1)
    stream.consume("actor", rows=2, columns=["x"]).nack()
    stream.close()

    def loop(**how: Any) -> int:
        if by == "loader":
            return sum(len(batch["x"]) for batch in dp.loader(stream, "actor", rows=1, columns=["x"], **how))
        return sum(len(each) for each in stream.deliveries("actor", rows=1, columns=["x"], **how))

    with pytest.warns(UserWarning, match="2 are dead letters"):
        assert loop() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loop(at_end="ignore") == 0
    with pytest.raises(dp.Closed, match="2 are dead letters"):
        loop(at_end="raise")
    with pytest.raises(dp.Misuse, match="at_end is one of 'warn', 'raise', 'ignore'"):
        loop(at_end="loud")


def test_rows_of_an_incomplete_group_are_reported_at_the_end(plane: dp.Plane) -> None:
    stream = plane.stream("rollouts", tasks=["actor"])
    stream.append({"x": list(range(7))}, group=["p"] * 4 + ["q"] * 3)
    stream.close()
    how: dict[str, Any] = {"rows": 4, "columns": ["x"], "sampler": dp.CompleteGroups(4)}
    with pytest.warns(UserWarning, match="has not done 3 of its rows: 3 were dropped or expired"):
        assert sum(len(each) for each in stream.deliveries("actor", **how)) == 4


@pytest.mark.parametrize("how", ["reference", "scope", "stream", "rows"])
def test_a_freed_error_names_who_freed_the_shard_and_when(node: LocalNode, plane: dp.Plane, how: str) -> None:
    ref = plane.put({"x": [1, 2], "y": ["a", "b"]}, scope="step-1")
    if how == "reference":
        plane.free(ref)
    elif how == "rows":
        plane.free(ref[:1])
    elif how == "scope":
        plane.free(scope="step-1")
    else:
        stream = plane.stream("rollouts", tasks=["actor"])
        stream.append(ref)
        with stream.consume("actor", rows=2, columns=["x"]):
            pass
    node.advance(7)
    with dp.connect(node.address) as other, pytest.raises(dp.Freed) as told:
        other.get(ref.select("y"))
    error = told.value
    assert error.columns == ("y",)
    assert f"column 'y': {'row 0 of ' if how == 'rows' else ''}shard {error.shard}" in str(error)
    if how == "rows":
        return
    mine = f"(pid {os.getpid()})"
    assert 7 <= error.age_s < 60
    assert f"was freed {error.age_s:.1f} s ago" in str(error)
    if how == "stream":
        assert error.freed_by == "rollouts"
        assert "since no task of stream 'rollouts' needs its rows any more" in str(error)
    else:
        assert error.freed_by.endswith(mine)
        assert error.scope == "step-1"
        assert f"shard {error.shard}, put under scope 'step-1', was freed" in str(error)
        assert ("with its scope by" if how == "scope" else "ago by plane.free of") in str(error)


def test_typed_columns_are_stored_and_mixed_ones_refused_without_objects(plane: dp.Plane) -> None:
    columns = {"ids": [[1, 2], []], "text": ["a", "b"], "reward": [0.5, 1], "turn": [{"n": 1}, {}]}
    ref = plane.put(columns, objects="refuse", narrow=["ids"])
    assert plane.get(ref).to_dict() == {**columns, "reward": [0.5, 1.0]}
    assert [field.kind for field in ref.schema.values()] == ["ragged", "text", "dense", "struct"]
    stream = plane.stream("rollouts", tasks=["actor"])
    stream.append(ref, objects="refuse")
    mixed = plane.put({"answer": [1, None]})
    assert mixed.schema["answer"].kind == "object"
    with pytest.raises(dp.SchemaMismatch, match="column 'answer': it would be stored as objects"):
        stream.append(mixed, objects="refuse")


@each_case("turns", [[["a"], ["b", "c"]], [[1.5], [2.5]], [[bytes(9000)], [None]], [np.ones((2, 3)), np.ones((1, 3))]])
def test_rows_with_empty_lists_are_in_one_column_with_rows_of_any_items(plane: dp.Plane, turns: list[Any]) -> None:
    rows, name = [[], turns[0], [], [], turns[1]], type(turns[0][0]).__name__
    stream, table = plane.stream(name, tasks=["actor"]), plane.table(name)
    for number, row in enumerate(rows):
        stream.append({"turns": [row], "in": [{"turns": row}]})
        table.upsert([str(number)], {"turns": [row]})
    with stream.appender() as appender:
        for row in rows:
            appender.append({"turns": [row], "in": [{"turns": row}]})
    plain = [row if isinstance(row, list) else row.tolist() for row in rows]
    found = plane.get(stream.consume("actor", rows=10, min_rows=10, columns=["turns", "in"]).ref).to_dict()
    assert found == {"turns": 2 * plain, "in": [{"turns": row} for row in 2 * plain]}
    ref = table.read(["4", "2", "0", "1", "3"])
    assert plane.get(ref)["turns"].to_list() == [plain[at] for at in (4, 2, 0, 1, 3)]
    assert plane.get(plane.put(plane.get(ref)))["turns"].to_list() == plane.get(ref)["turns"].to_list()
    assert plane.get(table.read(["2", "0"]))["turns"].to_list() == [[], []]
    if plane.get(ref)["turns"].kind == "ragged":
        cut = plane.get(ref.slice_rows("turns", len(ref.schema["turns"].shape) - 1, 0, 1))["turns"].to_list()
        assert cut == [np.array(plain[at])[..., :1].tolist() for at in (4, 2, 0, 1, 3)]


def test_ragged_rows_become_one_padded_tensor(plane: dp.Plane) -> None:
    torch = pytest.importorskip("torch")
    frames = [np.ones((2, 3), np.float32), np.full((0, 3), 2, np.float32), np.full((1, 3), 3, np.float32)]
    batch = plane.get(plane.put({"ids": [[1, 2], [], [3]], "frames": frames, "reward": [0.5, 1, 2]}))
    assert batch["ids"].padded(-1).tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert batch["ids"][1:2].padded().shape == (1, 0)
    assert batch["ids"][:0].padded().shape == (0, 0)
    made = batch.padded(value={"frames": 0.5})
    assert list(made) == ["ids", "frames", "reward"]
    assert made["ids"].tolist() == [[1, 2], [0, 0], [3, 0]]
    assert made["frames"][:, :, 0].tolist() == [[1, 1], [0.5, 0.5], [3, 0.5]]
    assert made["frames"].shape == (3, 2, 3)
    assert made["reward"].tolist() == [0.5, 1, 2]
    assert made["ids"].dtype is torch.int64
    assert list(batch.padded("ids", value=7)) == ["ids"]
    half = plane.get(plane.put({"x": [torch.ones(2).half(), torch.ones(1).half()]}))["x"]
    with pytest.raises(dp.Misuse, match="can not be padded with 1000000000"):
        half.padded(1e9)
    made["ids"][0, 0] = 9
    assert batch["ids"].to_list()[0] == [1, 2]


def test_an_append_beyond_the_declared_group_size_is_refused(plane: dp.Plane) -> None:
    stream = plane.stream("rollouts", tasks=["actor"], group_size=4)
    how: dict[str, Any] = {"rows": 4, "columns": ["x"], "sampler": dp.CompleteGroups(4)}
    with pytest.raises(
        dp.Misuse, match=r"group 'p' has 0 rows, and 5 more would .* larger than the stream's group_size of 4"
    ):
        stream.append({"x": list(range(5))}, group="p")
    assert stream.stats()["rows"] == 0, "nothing of it is there"
    keys = stream.append({"x": list(range(4))}, group="p", keys=list("abcd"))
    assert stream.append({"x": list(range(4))}, group="p", keys=list("abcd")) == keys, "the same again"
    stream.append({"x": [7, 8]}, group=["q", "r"])
    with stream.consume("actor", **how) as delivery:
        for late in ({"x": [9]}, {"x": [[9]]}, {"x": ["late"]}):
            with pytest.raises(dp.Misuse, match="group 'p' has 4 rows, and 1 more"):
                stream.append(late, group="p")
        with pytest.raises(dp.Misuse, match="group 'p' has 4 rows"):
            stream.begin("late", group="p")
        assert delivery.groups == ["p"] * 4
    stream.drop_rows(stream.append({"x": [7, 8]}, group="q")[:1])
    with pytest.raises(dp.Misuse, match="group 'q' has 3 rows, 1 dropped, and 2 more"):
        stream.append({"x": [9, 9]}, group="q")
    stream.append({"x": [9]}, group="q")
    stream.append({"x": list(range(4))}, group="p")
    assert [stream.consume("actor", **how).groups[0] for _ in range(2)] == ["q", "p"]


def test_a_dead_letter_that_is_retried_is_delivered_again_and_not_reported_at_the_end(plane: dp.Plane) -> None:
    stream = plane.stream("rollouts", tasks=["actor", "other"], max_deliveries=2)
    stream.append({"x": [0, 1, 2]}, keys=["a", "b", "c"])
    for _ in range(2):
        stream.consume("actor", rows=2, columns=["x"]).nack("out of memory")
    stream.close()
    assert stream.retry("actor", ["b", "c"]) == 1, "c is no dead letter"
    assert stream.retry("actor", []) == stream.retry("other") == 0
    with pytest.raises(dp.Misuse, match="no task 'trainer'"):
        stream.retry("trainer", [])
    with pytest.raises(dp.Misuse, match="there is no row 'd'"):
        stream.retry("actor", ["d"])
    left = stream.dead_letters("actor")
    assert (left.keys, left.reasons) == (["a"], ["out of memory"])
    assert stream.retry("actor", left.keys) == 1
    stream.consume("actor", rows=1, columns=["x"]).nack("once more: it has two tries again")
    done = stream.deliveries("actor", rows=1, columns=["x"], at_end="raise")
    assert [delivery.get()["x"].to_list() for delivery in done] == [[0], [1], [2]]


class Oldest:
    """A sampler that runs in the client."""

    def choose(self, candidates: dp.Candidates, want: int) -> list[int]:
        return list(range(min(want, len(candidates.version))))


def scored(plane: dp.Plane) -> dp.Stream:
    """Two groups of two, of which one row is a dead letter of "reward" and never has its column."""
    stream = plane.stream("rollouts", tasks=["reward", "trainer"], max_deliveries=1)
    stream.append({"x": [0, 1, 2, 3]}, keys=list("abcd"), group=["p", "p", "q", "q"])
    for _ in range(4):
        delivery = stream.consume("reward", rows=1, columns=["x"])
        if delivery.keys == ["b"]:
            delivery.nack("out of memory")
        else:
            stream.extend(delivery.ref, {"reward": [1.0]})
            delivery.ack()
    return stream


@pytest.mark.parametrize(
    ("sampler", "done"),
    [(None, [0, 2, 3]), (Oldest(), [0, 2, 3]), (dp.CompleteGroups(2), [2, 3])],
    ids=["fifo", "own", "groups"],
)
def test_a_task_ends_without_rows_that_are_dead_letters_of_another_task(
    plane: dp.Plane, sampler: dp.Sampler | None, done: list[int]
) -> None:
    stream = scored(plane)
    stream.close()
    found = []
    with pytest.raises(dp.Closed) as told:
        for delivery in stream.deliveries(
            "trainer", rows=2, min_rows=1, columns=["x", "reward"], sampler=sampler, at_end="raise", timeout=30
        ):
            found += delivery.get()["x"].to_list()
    assert found == done
    assert told.value.expired == 4 - len(done), "the row, or its whole group"
    assert stream.dead_letters("reward").keys == ["b"], "it can still be looked at"


def test_a_timed_out_group_expires_including_rows_that_are_not_ready(plane: dp.Plane) -> None:
    stream = scored(plane)
    how: dict[str, Any] = {"rows": 2, "columns": ["x", "reward"]}
    with stream.consume("trainer", **how, sampler=dp.CompleteGroups(2)) as delivery:
        assert delivery.groups == ["q", "q"]
    with pytest.raises(dp.NotReady, match=r"task 'reward' has 1 dead letter,.*dead_letters\('reward'\)"):
        stream.consume("trainer", **how, sampler=dp.CompleteGroups(2), timeout=0.1)
    with pytest.raises(dp.NotReady):
        stream.consume("trainer", **how, sampler=dp.CompleteGroups(2, timeout=0.0), timeout=0.1)
    its = stream.stats()["task"]["trainer"]
    assert (its["expired"], its["left"]) == (2, 0)


def test_a_wait_names_the_holder_of_leased_rows_and_counts_rows_in_progress_apart(plane: dp.Plane) -> None:
    stream = stream_of(plane, 2)
    held = stream.consume("actor", rows=2, columns=["x"], lease=50)
    said = rf"0 rows are pending; 2 leased \(2 by .*pid {os.getpid()}\) for \d+ s more"
    with pytest.raises(dp.NotReady, match=said):
        stream.consume("actor", rows=1, columns=["x"], timeout=0.1)
    held.ack()
    row = stream.begin(columns={"x": [2]})
    with pytest.raises(dp.NotReady, match=r"0 rows are pending; 0 leased; waits for 1 row in progress, until finish"):
        stream.consume("actor", rows=1, columns=["x"], timeout=0.1)
    its = plane.stats().streams["rollouts"]
    assert (its["unfinished"], its["task"]["actor"]["pending"], its["task"]["actor"]["holders"]) == (1, 0, [])
    row.abandon()


def test_a_wait_names_the_replicas_that_have_not_acked(plane: dp.Plane) -> None:
    stream, how = stream_of(plane, 2), {"rows": 2, "columns": ["x"], "member": "dp", "replicas": 2}
    stream.consume("actor", replica=0, **how).ack()
    with pytest.raises(dp.NotReady, match=r"2 leased \(2 that replica 1 of member 'dp' has not taken\)"):
        stream.consume("actor", rows=1, columns=["x"], timeout=0.1)
    with dp.connect(plane.address) as other:
        other.stream(stream.name).consume("actor", replica=1, **how)
    with pytest.raises(dp.NotReady, match=r"\(2 by a process that has ended, replica 1 of member 'dp', for \d+ s more"):
        stream.consume("actor", rows=1, columns=["x"], timeout=0.1)


def test_streams_and_tables_that_a_process_unpickles_share_a_connection(plane: dp.Plane) -> None:
    stream, table = stream_of(plane, 1), plane.table("rows")
    before = plane.stats().clients
    kept = [pickle.loads(pickle.dumps(each)) for each in (stream, table, stream)]
    assert plane.stats().clients == before + 1
    assert kept[1].name == table.name
    kept[0]._plane.close()
    again = pickle.loads(pickle.dumps(stream))
    assert again.stats()["rows"] == stream.stats()["rows"]
    again._plane.close()
    with pickle.loads(pickle.dumps(plane)) as other:
        assert other.address == plane.address
