"""Checkpoints under faults: a stream outlives its node, once; a file is whole or not there, and so is what it holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import dataplane as dp
from dataplane.client import checkpoint
from dataplane.client.checkpointfile import BLOCK, COLUMNS, END, HEAD, TABLE, CheckpointReader, CheckpointWriter
from dataplane.stream import requests as r
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from tests.cases import each_case
from tests.chaos.checkpoints import rewritten, worker
from tests.processes import MIB, StandingNode, Worker, before_requests, eventually, pattern
from tests.streams import take, values


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path / "node", spill=0) as node:
        yield node


@pytest.fixture(autouse=True)
def _directories(tmp_path: Path) -> None:
    for name in ("node", "next", "files"):
        (tmp_path / name).mkdir()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a checkpoint is written; nothing else is in the directory."""
    return tmp_path / "files" / "stream.dp"


def held(plane: Any) -> tuple[int, int, int, int]:
    stats = plane.stats()
    return stats.shards, stats.memory_used, stats.pinned_bytes, stats.clients


def fill(plane: Any, rows: int = 16) -> Any:
    """A stream `s` of rows of a MiB in all."""
    stream = plane.stream("s", ["a", "b"])
    stream.append({"x": np.arange(rows), "big": pattern(1, MIB, rows)})
    return stream


def written(node: StandingNode, file: Path) -> bytes:
    """The file of a stream that is there no more; what is in it."""
    with dp.connect(node.address) as plane:
        stream = fill(plane)
        stream.checkpoint(file)
        stream.drop()
        assert plane.stats().shards == 0
    return file.read_bytes()


def test_each_row_is_acked_once_when_a_checkpoint_replaces_a_dead_node(
    tmp_path: Path, node: StandingNode, file: Path
) -> None:
    acked: dict[str, list[int]] = {"a": [], "b": []}
    with dp.connect(node.address) as plane:
        stream = plane.stream("s", ["a", "b"], max_deliveries=1)
        for start in range(0, 60, 12):
            stream.append(
                {"x": np.arange(start, start + 12), "big": pattern(start, 96 << 10, 12)},
                keys=[f"{row}" for row in range(start, start + 12)],
                group=np.repeat(range(start, start + 3), 4),
            )
        acked["a"] += take(stream, "a", rows=20)
        acked["b"] += take(stream, "b", rows=7)
        scored = stream.consume("a", rows=10, columns=["x"])
        stream.extend(scored.ref, {"score": -scored.get()["x"].numpy()})
        stream.consume("b", rows=13, columns=["x"])
        stream.checkpoint(file)
        stream.append({"x": [60], "big": pattern(9, 8 << 10)}, keys=["60"])
        node.kill()
        with pytest.raises(dp.PeerUnavailable):
            stream.checkpoint(file)
        del scored
    with StandingNode(tmp_path / "next") as later, dp.connect(later.address) as plane:
        stream = plane.restore(file)
        stream.append({"x": [48 + i for i in range(12)], "big": pattern(48, 96 << 10, 12)}, **last_append())
        stream.append({"x": [60], "big": pattern(9, 8 << 10)}, keys=["60"])  # which was lost
        stream.close()
        for task in acked:
            for delivery in stream.deliveries(task, rows=9, columns=["x", "big"]):
                acked[task] += values(delivery)
                for x, big in zip(values(delivery), delivery.get()["big"].numpy(), strict=True):
                    expected = pattern(x - x % 12, 96 << 10, 12)[x % 12] if x < 60 else pattern(9, 8 << 10)[0]
                    assert np.array_equal(big, expected)
                del big
        assert sorted(acked["b"]) == list(range(61))
        assert acked["a"] == list(range(61))
        stats = stream.stats()["task"]
        assert (stats["a"]["acked"], stats["b"]["acked"]) == (61, 61)
        assert (stream.stats()["rows"], plane.stats().shards) == (0, 0)


def last_append() -> dict[str, Any]:
    return {"keys": [f"{row}" for row in range(48, 60)], "group": np.repeat(range(48, 51), 4)}


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("step", "nth"),
    [
        pytest.param(r.ReadSnapshot, 1, marks=pytest.mark.long),
        pytest.param(sm.PinShards, 3, marks=pytest.mark.long),
        ("commit", 1),
    ],
)
def test_a_client_killed_during_a_checkpoint_leaves_no_file(
    node: StandingNode, file: Path, step: Any, nth: int, there: bool
) -> None:
    with dp.connect(node.address) as plane:
        stream = fill(plane)
        before = held(plane)
        if there:
            file.write_bytes(b"before")
        with Worker(worker, node.address, file, "checkpoint", step, nth) as writer:
            assert writer.hear() == "there"
            assert os.listdir(file.parent) == ["stream.dp"] * there
            for task in ("a", "b"):
                assert take(stream, task) == list(range(16))
            assert stream.stats()["rows"] == 0
            assert plane.stats().shards == before[0]  # the snapshot's
            writer.kill()
        eventually(lambda: held(plane) == (0, 0, 0, 1), "nothing is kept for it")
        assert [path.read_bytes() for path in file.parent.iterdir()] == [b"before"] * there
        stream.append({"x": range(3)})
        stream.checkpoint(file)
        stream.drop()
        assert take(plane.restore(file)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("step", "nth"),
    [
        pytest.param(rm.RestoreRows, 1, marks=pytest.mark.long),
        pytest.param(sm.PutShard, 3, marks=pytest.mark.long),
        pytest.param(rm.RestoreColumns, 4, marks=pytest.mark.long),
        (rm.PublishRestored, 1),
    ],
)
def test_a_client_killed_during_a_restore_leaves_no_stream(node: StandingNode, file: Path, step: Any, nth: int) -> None:
    with dp.connect(node.address) as plane:
        fill(plane).checkpoint(file)
        plane.stream("s").drop()
        with Worker(rewritten, node.address, file) as pieces:
            pieces.join()
        with Worker(worker, node.address, file, "restore", step, nth) as reader:
            assert reader.hear() == "there"
            assert plane.streams() == {}
            reader.kill()
        eventually(lambda: held(plane) == (0, 0, 0, 1), "nothing of it is kept")
        assert plane.streams() == {}
        assert take(plane.restore(file)) == list(range(16))


@pytest.mark.parametrize(
    ("what", "step"),
    [
        pytest.param("checkpoint", r.ReadSnapshot, marks=pytest.mark.long),
        pytest.param("checkpoint", sm.PinShards, marks=pytest.mark.long),
        pytest.param("restore", rm.RestoreRows, marks=pytest.mark.long),
        pytest.param("restore", sm.SealShards, marks=pytest.mark.long),
        ("restore", rm.RestoreColumns),
        pytest.param("restore", rm.PublishRestored, marks=pytest.mark.long),
    ],
)
async def test_a_cancelled_checkpoint_or_restore_leaves_nothing(
    node: StandingNode, file: Path, what: str, step: type
) -> None:
    await asyncio.to_thread(written, node, file)
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", ["a"])
        await stream.append({"x": np.arange(16), "big": pattern(1, MIB, 16)})
        before = await plane.stats()
        before_requests(plane.connection, lambda request: task.cancel() if isinstance(request, step) else None)
        other = file.with_name("other")
        work = stream.checkpoint(other) if what == "checkpoint" else plane.restore(file, name="t")
        task = asyncio.create_task(work)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert os.listdir(file.parent) == ["stream.dp"]
        after = await plane.stats()
        assert (after.shards, after.memory_used, list(after.streams)) == (before.shards, before.memory_used, ["s"])
        again = await plane.restore(file, name="t")
        for each in (stream, again):
            async with each.consume("a", rows=16, columns=["x"], timeout=0) as delivery:
                assert len(delivery) == 16


def frames(path: Path) -> list[tuple[int, bytes]]:
    found = []
    with CheckpointReader(path) as file:
        while not file.ended:
            found.append(file.frame())
    return found


def crafted(path: Path, whole: list[tuple[int, bytes]]) -> None:
    """A file of these frames whose checksums are right."""
    with CheckpointWriter(path) as file:
        for kind, payload in whole:
            file.frame(kind, payload)
        file.frame(END, msgspec.msgpack.encode(len(whole)))
        file.commit()


def packed(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def edited(payload: bytes, **fields: Any) -> bytes:
    """A message whose fields, by position, are others."""
    values = msgspec.msgpack.decode(payload)
    for at, value in fields.items():
        values[int(at[1:])] = value
    return msgspec.msgpack.encode(values)


CRAFTED: dict[str, Any] = {
    "no head": lambda h, b, c, t: [b, c, t],
    "columns first": lambda h, b, c, t: [h, c, t, b],
    "no table": lambda h, b, c, t: [h, b, c],
    "a block twice": lambda h, b, c, t: [h, b, b, c, t],
    "columns twice": lambda h, b, c, t: [h, b, c, t, c, t],
    "no head's fields": lambda h, b, c, t: [(HEAD, b"\x90"), b, c, t],
    "half a table": lambda h, b, c, t: [h, b, c, (TABLE, t[1][: len(t[1]) // 2])],
    "rows of no table": lambda h, b, c, t: [h, b, (COLUMNS, edited(c[1], _2=[packed(*[99] * 16)])), t],
    "no rows' numbers": lambda h, b, c, t: [h, b, (COLUMNS, edited(c[1], _2=[b"abc"])), t],
    "rows that are not there": lambda h, b, c, t: [h, b, (COLUMNS, edited(c[1], _0=packed(*range(1, 17)))), t],
    "a task that is none": lambda h, b, c, t: [h, b, (COLUMNS, edited(c[1], _1=7)), t],
    "rows out of order": lambda h, b, c, t: [h, (BLOCK, edited(b[1], _0=[16, 15, -1])), c, t],
    "states that are none": lambda h, b, c, t: [h, (BLOCK, edited(b[1], _8=[32, 9])), c, t],
    "a name that is none": lambda h, b, c, t: [(HEAD, edited(h[1], _0="")), b, c, t],
    "tasks that are none": lambda h, b, c, t: [(HEAD, head(h[1], _0=[["a", "a"], 0, 0, -1, 5])), b, c, t],
}


def head(payload: bytes, **fields: Any) -> bytes:
    name, told = msgspec.msgpack.decode(payload)
    return msgspec.msgpack.encode([name, msgspec.msgpack.decode(edited(msgspec.msgpack.encode(told), **fields))])


@each_case("what", list(CRAFTED))
def test_a_forged_checkpoint_file_is_corrupt(node: StandingNode, file: Path, what: str) -> None:
    with dp.connect(node.address) as plane:
        stream = plane.stream("s", ["a", "b"])
        stream.append({"x": np.arange(16)}, keys=[f"{i}" for i in range(16)])
        stream.checkpoint(file)
        crafted(file, CRAFTED[what](*frames(file)[:-1]))
        before = plane.stats().shards
        with pytest.raises(dp.Corrupt):
            plane.restore(file, name=None if what == "a name that is none" else "t")
        assert list(plane.streams()) == ["s"]
        eventually(lambda: plane.stats().shards == before, "nothing of it is kept")
        assert take(stream) == list(range(16))
        stream.drop()


@pytest.mark.parametrize(
    "piece",
    [pytest.param(32 * MIB, marks=pytest.mark.long), 5 * MIB // 4, pytest.param(1000, marks=pytest.mark.long)],
    ids=["large pieces", "two rows", "a row"],
)
@pytest.mark.parametrize(
    "rows", [pytest.param(1, marks=pytest.mark.long), 10], ids=["an append a row", "large appends"]
)
def test_a_stream_larger_than_memory_is_checkpointed_and_restored(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, rows: int, piece: int
) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", piece)
    how = {"memory": "8MiB", "spill": "64MiB"}
    with StandingNode(tmp_path / "node", **how) as node, dp.connect(node.address) as plane:
        stream = plane.stream("s", ["a"])
        for start in range(0, 30, rows):
            columns = {"x": np.arange(start, start + rows), "big": pattern(start, rows * MIB // 2, rows)}
            stream.append(columns, timeout=60)
        assert plane.stats().spilled_bytes > 0
        stream.checkpoint(file, timeout=60)
        assert plane.stats().pinned_bytes == 0
        node.kill()
    with StandingNode(tmp_path / "next", **how) as node, dp.connect(node.address) as plane:
        stream = plane.restore(file, timeout=60)
        assert plane.stats().spilled_bytes > 0
        seen = []
        for _ in range(30):
            with stream.consume("a", rows=1, columns=["x", "big"], timeout=0) as delivery:
                batch = delivery.get()
                (x,) = batch["x"].to_list()
                start = x - x % rows
                assert np.array_equal(batch["big"].numpy()[0], pattern(start, rows * MIB // 2, rows)[x - start])
                seen.append(x)
                del batch
        assert seen == list(range(30))
        eventually(lambda: (plane.stats().shards, plane.stats().disk_used) == (0, 0), "all freed, and deleted")
