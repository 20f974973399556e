"""Shards whose bytes say false things of other bytes: refused, or `Corrupt`, or wrong values; nobody dies of them.

One client puts them and is no client of ours. It may also change them after the node has looked, for as long as it
can write to its memory; who reads them meanwhile is told, or has wrong values.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.batch.layout import ColumnLayout
from dataplane.batch.put_plan import Plan, plan
from dataplane.wire import messages as m
from tests.cases import each_case
from tests.chaos.raw import Raw
from tests.mutation import mutated
from tests.processes import StandingNode, Worker

ROWS = 4
KINDS: dict[str, Any] = {
    "numbers": np.arange(12, dtype=np.float32).reshape(ROWS, 3),
    "ragged": [np.arange(n) for n in (2, 0, 3, 1)],
    "shapes": [np.ones((2, n, 3), np.float32) for n in (1, 2, 0, 3)],
    "text": ["a", "bc", "", "ü"],
    "bytes": [b"\xff", b"", b"abc", b"\0"],
    "objects": [None, {"k": np.arange(3)}, (2, "x"), [b"\1"]],
    "structs": [{"a": 1}, {"b": "x"}, {}, {"a": 2, "b": "y"}],
    "nested": [{"s": {"t": ["x"]}, "r": np.arange(3)}, {"s": {"u": b"b"}}, {}, {"r": np.arange(1)}],
    "repeated": ["r", "r", "s", "r"],
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, spill=0) as node:
        yield node


def planned(kind: str) -> Plan:
    return plan({kind: KINDS[kind]}, dedupe=[kind] if kind == "repeated" else [])


def payload(made: Plan) -> bytes:
    return b"".join(bytes(run) for column in made.columns for run in column.payload())


def tables(column: ColumnLayout) -> Iterator[tuple[int, int]]:
    """Where the bytes are that say how to read others: all but the values."""
    values = {"dense": 0, "struct": None}.get(column.field.kind, 1)
    yield from (buffer for at, buffer in enumerate(column.buffers) if at != values)
    for child in column.children:
        yield from tables(child)


def false(chance: random.Random, made: Plan) -> bytes:
    """The bytes with some that are false: of a table, or of anything."""
    data = bytearray(payload(made))
    places = list(tables(made.layout().columns[0][1]))
    if not places or chance.random() < 0.3:
        return mutated(chance, bytes(data))
    for _ in range(chance.randint(1, 2)):
        start, size = chance.choice(places)
        data[start : start + size] = mutated(chance, bytes(data[start : start + size])) if size else b""
    return bytes(data)


def look(batch: Any) -> None:
    """See each column in every way."""
    for column in batch.values():
        column.to_list()
        column.numpy()
        column.arrow()


def reader(pipe: Any, address: str) -> None:
    """Looks at each reference that it is sent, and tells what it found; ends when it is sent none."""
    with dp.connect(address) as plane:
        while (encoded := pipe.recv()) is not None:
            try:
                look(plane.get(dp.BatchRef.decode(encoded), timeout=60))
            except dp.DataplaneError as error:
                pipe.send(type(error).__name__)
            else:
                pipe.send("data")


def reference(node: bytes, made: Plan, shards: Sequence[int]) -> bytes:
    """The rows of shards that lie alike, one after another."""
    (column,) = made.columns
    refs = [
        dp.BatchRef.of(node, ROWS, [(column.name, column.field, column.logical_nbytes, shard, 0)]) for shard in shards
    ]
    return dp.concat(refs).encode()


@each_case("kind", KINDS)
def test_a_shard_with_false_bytes_is_refused_or_harmless(node: StandingNode, kind: str) -> None:
    """Alone, and among others that lie like it, which are read in one pass."""
    made, found = planned(kind), Counter[str]()
    with Raw(node.address) as raw, dp.connect(node.address) as plane, Worker(reader, node.address) as neighbour:
        own = plane._inner._connection.welcome.node
        right = [raw.ask(m.Put(raw.next(), payload(made), made.layout().encode(), "", 1.0)).shard for _ in range(12)]
        for seed in range(60):
            chance = random.Random(seed)
            reply = raw.ask(m.Put(raw.next(), false(chance, made), made.layout().encode(), "", 1.0))
            if isinstance(reply, m.Failure):
                assert reply.name == "Corrupt"
                found["refused"] += 1
                continue
            for shards in ([reply.shard], [*right, reply.shard]):
                found[neighbour.ask(reference(own, made, shards))] += 1
        assert found.keys() <= {"refused", "data", "Corrupt"}
        assert neighbour.ask(reference(own, made, right)) == "data"
        neighbour.say(None)
        assert neighbour.join() == 0
        assert found["data"] or found["Corrupt"]
        assert found["refused"] or kind == "numbers"
        assert plane.get(plane.put({"x": [1]}))["x"].to_list() == [1]
