"""A stream to a file and back, end to end, by both faces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dataplane as dp
from dataplane.client import checkpoint
from dataplane.stream import requests as r
from dataplane.wire import row_messages as rm
from tests.integration.test_hosts import Host
from tests.processes import MIB, StandingNode, eventually, pattern
from tests.streams import take, values
from tests.unit.batch.exact import bits


@pytest.fixture(params=["alone", "clustered"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A node of its own for each test: one that keeps streams by itself, and one whose streams have partitions."""
    make = StandingNode if request.param == "alone" else Host
    with make(tmp_path / "node", memory="32MiB") as node:
        yield node


@pytest.fixture
def clustered(request: pytest.FixtureRequest) -> bool:
    """Whether the node is one of a cluster."""
    return bool(request.getfixturevalue("node").__class__ is Host)


@pytest.fixture
def empty(plane: Any) -> Iterator[None]:
    """The test leaves no bytes in the node."""
    yield
    eventually(lambda: held(plane) == (0, 0, 0), "nothing is left in the node")


def held(plane: Any) -> tuple[int, int, int]:
    stats = plane.stats()
    return stats.shards, stats.memory_used, stats.pinned_bytes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stream.dp"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 1000)


def during(stream: Any, request: type, do: Callable[[], Any]) -> None:
    """Before the stream's client makes its next request of this kind, `do` is called, in another thread."""
    connection = stream._inner._connection
    original = connection.request

    async def asked(what: Any, *args: Any) -> Any:
        if isinstance(getattr(what, "asked", what), request):
            connection.request = original
            with ThreadPoolExecutor(1) as pool:
                await asyncio.get_running_loop().run_in_executor(pool, do)
        return await original(what, *args)

    connection.request = asked


def nan_bits(rows: int) -> np.ndarray[Any, Any]:
    """Every NaN another one."""
    return (np.uint32(0x7FC00000) + np.arange(rows * 3, dtype=np.uint32)).view(np.float32).reshape(rows, 3)


KINDS: dict[str, Callable[[int], Any]] = {
    "float32": lambda rows: torch.arange(rows * 6, dtype=torch.float32).reshape(rows, 2, 3),
    "nan": nan_bits,
    "bfloat16": lambda rows: torch.arange(rows * 3, dtype=torch.bfloat16).reshape(rows, 3),
    "float8": lambda rows: torch.arange(rows, dtype=torch.float32).to(torch.float8_e4m3fn),
    "bool": lambda rows: np.arange(rows) % 3 == 0,
    "uint64": lambda rows: np.arange(rows, dtype=np.uint64) + np.uint64((1 << 64) - 1 - rows),
    "of no width": lambda rows: np.zeros((rows, 0, 2), np.int16),
    "ids": lambda rows: [np.arange(row % 5, dtype=np.int32) for row in range(rows)],
    "ids as long": lambda rows: [np.arange(4) + row for row in range(rows)],
    "no ids": lambda rows: [np.zeros(0, np.int64) for _ in range(rows)],
    "ragged bfloat16": lambda rows: [torch.full((row % 4,), row, dtype=torch.bfloat16) for row in range(rows)],
    "patches": lambda rows: [np.full((1 + row % 3, 4, 2), row, np.float32) for row in range(rows)],
    "frames": lambda rows: [np.full((1 + row % 3, 2 + row % 2, 4), row, np.uint8) for row in range(rows)],
    "text": lambda rows: ["" if row % 4 == 1 else f"réponse {row}" for row in range(rows)],
    "bytes": lambda rows: [bytes([row]) * (row % 5) for row in range(rows)],
    "struct": lambda rows: [{"uid": row, "score": row / 3, "name": f"{row}", "ids": [1] * row} for row in range(rows)],
    "struct of tensors": lambda rows: [
        {"pixels": torch.full((1 + row, 4), row), "grid": np.array([[1, row]])} for row in range(rows)
    ],
    "object": lambda rows: [[None, {"a": row}, "b", 1.5, b"c"][: row % 6] for row in range(rows)],
    "object or none": lambda rows: [None if row % 2 else {"a": [row]} for row in range(rows)],
}


@pytest.mark.usefixtures("empty", "small_pieces")
def test_every_kind_of_column_round_trips_through_a_checkpoint(plane: Any, file: Path) -> None:
    columns = {name: make(12) for name, make in KINDS.items()}
    stream = plane.stream("s", ["a"])
    stream.append(columns)
    with stream.consume("a", rows=12, columns=list(columns)) as delivery:
        before = {name: bits(column.to_list()) for name, column in delivery.get().items()}
        stored, schema = delivery.ref.nbytes, delivery.ref.schema
        stream.checkpoint(file)
    stream.drop()
    again = plane.restore(file)
    with again.consume("a", rows=12, columns=list(columns), timeout=0) as delivery:
        assert delivery.ref.schema == schema
        assert delivery.ref.nbytes == stored
        batch = delivery.get()
        for name, column in batch.items():
            assert bits(column.to_list()) == before[name], name
        assert batch["bfloat16"].torch().dtype == torch.bfloat16
        assert batch["nan"].numpy().tobytes() == nan_bits(12).tobytes()
        del batch, column
    again.append(columns)
    again.drop()


def outlined(stream: Any) -> dict[str, Any]:
    """Its figures, but for deliveries, which a restored stream counts from 0."""
    stats = dict(stream.stats())
    del stats["oldest_s"], stats["bytes"]
    uncounted = {"delivered", "redelivered"}
    tasks = {task: {what: of[what] for what in of.keys() - uncounted} for task, of in stats["task"].items()}
    return stats | {"task": tasks}


@pytest.mark.usefixtures("empty")
def test_all_row_metadata_round_trips_through_a_checkpoint(plane: Any, file: Path, clustered: bool) -> None:
    limits = {"max_bytes": "2MiB", "max_rows": 50, "max_lag": 3, "max_deliveries": 1}
    stream = plane.stream("rollouts", ["reward", "actor"], **limits)
    keys = [f"k{i}" for i in range(8)]
    stream.append(
        {"x": np.arange(8), "ids": [np.arange(n) for n in (9, 1, 1, 1, 1, 1, 1, 9)]},
        keys=keys,
        group=["g", "g", 7, 7, 7, "h", "h", "h"],
        version=[1, 1, 2, 2, 2, 3, 3, 3],
        tags={"domain": ["math", "code"] * 4, "hard": [True, None, 0.5, 2] * 2},
    )
    own = stream.append({"x": [8, 9]}, version=4)
    stream.consume("reward", rows=1, columns=["x"]).nack("too long")  # dead from now on
    assert take(stream, "reward", rows=3) == [1, 2, 3]
    stream.drop_rows(["k7"])
    before = outlined(stream)
    stream.checkpoint(file)
    stream.drop()
    again = plane.restore(file)
    assert again.name == "rollouts"
    assert again.settings == plane.stream("rollouts", ["reward", "actor"], **limits).settings == stream.settings
    assert outlined(again) == before
    dead = again.dead_letters("reward")
    assert (dead.keys, dead.reasons) == (["k0"], ["too long"])
    with pytest.raises(dp.Backpressure, match="max_lag"):
        again.append({"x": [0]}, version=5, timeout=0)
    with pytest.raises(dp.LimitExceeded):
        again.append({"x": range(51)})
    whole = {"columns": ["x"], "timeout": 0, "sampler": dp.CompleteGroups(3)}
    with again.consume("actor", rows=9, **whole) as delivery:
        assert delivery.keys == keys[2:7]
        assert (delivery.groups, delivery.versions) == ([7] * 3 + ["h"] * 2, [2] * 3 + [3] * 2)
        assert delivery.tags["domain"] == ["math", "code", "math", "code", "math"]
        assert delivery.tags["hard"] == [0.5, 2, True, None, 0.5]
    assert take(again, "reward", sampler=dp.TokenBalanced("ids", 2), rows=2) == [4, 5]
    with again.consume("actor", rows=9, columns=["x"], timeout=0) as delivery:
        assert delivery.keys[:2] == ["k0", "k1"]
        assert clustered or delivery.keys[2:] == own  # in a cluster they are called by their new partition
    again.drop_rows(["k0"])
    assert take(again, "reward") == [6, 8, 9]
    assert again.stats()["rows"] == 0


@pytest.mark.usefixtures("empty")
def test_row_metadata_larger_than_a_message_is_checkpointed_in_parts(plane: Any, file: Path) -> None:
    stream = plane.stream("s", ["a"])
    for start in range(0, 4000, 1000):
        stream.append({"x": np.arange(1000) + start}, tags={"why": [f"{start}" + "y" * 2000] * 1000})
    stream.checkpoint(file)
    stream.drop()
    again = plane.restore(file)
    for start in range(0, 4000, 1000):
        with again.consume("a", rows=1000, columns=["x"], timeout=0) as delivery:
            assert values(delivery) == list(range(start, start + 1000))
            assert set(delivery.tags["why"]) == {f"{start}" + "y" * 2000}


@pytest.mark.usefixtures("empty", "small_pieces")
def test_a_checkpoint_has_the_state_at_the_time_of_the_call(node: Any, plane: Any, file: Path) -> None:
    """All of it goes, and other rows come, while it is being read; its columns stay until they have been."""
    stream = plane.stream("s", ["a", "b"])
    keys = stream.append({"x": np.arange(16), "big": pattern(1, MIB, 16)}, group=[0, 1] * 8)
    stream.consume("b", rows=3, columns=["x"])
    freed: list[int] = []

    def go_on() -> None:
        with dp.connect(node.address) as other:
            theirs = other.stream("s")
            theirs.extend(keys, {"y": range(16)})
            theirs.append({"x": [16]}, keys=["late"])
            assert take(theirs, "a") == list(range(17))
            theirs.drop_rows(groups=[0, 1])
            theirs.close()
            freed.append(other.stats().shards)

    during(stream, r.ReadSnapshot, go_on)
    stream.checkpoint(file)
    assert freed[0] > 2
    stream.drop()
    eventually(lambda: plane.stats().shards == 0, "what was read is freed")
    again = plane.restore(file)
    assert again.stats()["appended"] == again.stats()["rows"] == 16
    assert not again.stats()["closed"]
    for task in ("a", "b"):
        with pytest.raises(dp.NotReady):
            again.consume(task, rows=1, columns=["y"], timeout=0)
        with again.consume(task, rows=20, columns=["x", "big"], timeout=0) as delivery:
            assert values(delivery) == list(range(16))
            assert np.array_equal(delivery.get()["big"].numpy(), pattern(1, MIB, 16))


@pytest.mark.usefixtures("empty")
def test_a_restore_under_an_existing_name_is_misuse(node: Any, plane: Any, file: Path) -> None:
    stream, other = plane.stream("s", ["a"]), plane.stream("t", ["a"])
    stream.append({"x": np.arange(8), "big": pattern(1, MIB, 8)})
    stream.checkpoint(file)
    before = held(plane)
    for name in (None, "s", "t"):
        with pytest.raises(dp.Misuse, match="already"):
            plane.restore(file, name=name)
    assert held(plane) == before
    stream.drop()

    def take_it() -> None:
        with dp.connect(node.address) as theirs:
            theirs.stream("s", ["b"]).append({"x": [7]})

    during(stream, rm.PublishRestored, take_it)
    with pytest.raises(dp.Misuse, match="already"):
        plane.restore(file)
    eventually(lambda: plane.stats().shards == 1, "nothing of it is kept")
    assert take(plane.stream("s"), "b") == [7]
    plane.stream("s").drop()
    other.drop()
    assert take(plane.restore(file)) == list(range(8))
