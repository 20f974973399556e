"""A table's partition: commands that are done once, reads of what is committed, and what nodes are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, DataplaneError, Misuse, OwnerDied, ProtocolMismatch, Rejected
from dataplane.replication.sessions import WINDOW
from dataplane.table import requests as r
from dataplane.table.cell_release import decode
from dataplane.table.machine import NOTHING, TableMachine
from tests.cases import each_case

INT = Field("dense", "int64", ())
ME, OTHER = b"node-one", b"node-two"

Cell = tuple[bytes, int, int, int]  # node, shard, ordinal, row


def stored(shard: int, rows: int, *columns: str, node: bytes = ME) -> BatchRef:
    return BatchRef.of(node, rows, [(name, INT, 8 * rows, shard, i) for i, name in enumerate(columns)])


def numbers(*rows: int) -> Any:
    return np.array(rows, np.int64)


class Asked:
    """A machine, and what is asked of it: each command is decided and applied at once."""

    def __init__(self) -> None:
        self.machine = TableMachine("t")
        self.sequence = 0

    def run(self, request: r.Request) -> r.AnyResult | None:
        decision = self.machine.decide(r.encode_request(request), 1, 0.0)
        result = decision.result
        for command in decision.commands:
            result = self.machine.apply(command)
        if result == NOTHING:
            return None
        found = r.decode_result(result)
        if isinstance(found, r.Refused):
            raise found.error
        return found

    def do(self, kind: type[r.Request], **fields: Any) -> Any:
        """As the next request of a client."""
        self.sequence += 1
        return self.run(kind(client="c", sequence=self.sequence, **fields))

    def write(self, keys: list[str], ref: BatchRef | None = None, **more: Any) -> Any:
        return self.do(r.Upsert, keys=keys, ref=b"" if ref is None else ref.encode(), **more)

    def look(self, **more: Any) -> Any:
        return self.run(r.Look(all=True, **more))

    def told(self, node: bytes) -> list[tuple[BatchRef, bool]]:
        entries, last = self.machine.outbox(node.hex(), 1 << 20)
        self.machine.apply(self.machine.telling(node.hex(), last))
        return [decode(entry) for entry in entries]


def cells(ref: BatchRef) -> set[Cell]:
    return {
        (node, shard, column, row)
        for (node, shard), selected in ref.footprint().items()
        for columns, rows in selected
        for column in columns
        for row in rows.array().tolist()
    }


def test_what_is_remembered_of_a_large_write_is_small() -> None:
    asked = Asked()
    keys = [f"key-{number}" for number in range(5000)]
    write = r.Upsert(client="c", sequence=1, keys=keys, tags=[{"n": 1}] * len(keys), look=True)
    first = asked.run(write)
    assert len(asked.machine.sessions.snapshot()) < 100
    again = asked.run(write)
    assert isinstance(first, r.Looked)
    assert isinstance(again, r.Looked)
    assert r.encode_result(again) == r.encode_result(first)
    asked.sequence = 1
    asked.do(r.Clear, keys=keys[:1])
    with pytest.raises(Misuse, match="was cleared"):
        asked.run(write)


def test_what_was_answered_long_ago_is_refused_and_what_has_no_sequence() -> None:
    asked = Asked()
    for number in range(WINDOW + 1):
        asked.write([str(number)])
    with pytest.raises(Rejected, match="answered long ago"):
        asked.run(r.Upsert(client="c", sequence=1, keys=["0"]))
    with pytest.raises(ProtocolMismatch, match="has a sequence"):
        asked.run(r.Upsert(keys=["0"]))
    asked.run(r.End(clients=["c"]))
    asked.run(r.Upsert(client="c", sequence=1, keys=["new"]))
    assert "new" in asked.look().keys


@each_case(
    ("request_", "error", "match"),
    [
        (r.Upsert(keys=["a", "a"]), Misuse, "given twice"),
        (r.Upsert(keys=["a", ""]), Misuse, "one character or more"),
        (r.Upsert(rows=numbers(7)), Misuse, "no row number 7"),
        (r.Upsert(keys=["a"], ref=b"what"), ProtocolMismatch, "reference"),
        (r.Upsert(keys=["a"], ref=stored(2, 2, "x").encode()), ProtocolMismatch, "2 rows of columns for 1"),
        (r.Upsert(keys=["a"], tags=[{}, {}]), ProtocolMismatch, "2 tags for 1"),
        (r.Upsert(keys=["a"], tags=[{"t": "x" * 70_000}]), DataplaneError, "bytes of the tags"),
        (r.Claim(task="t", rows=numbers(0, 0), give=numbers()), Misuse, "named twice"),
        (r.Release(task="t", rows=numbers(9)), Misuse, "no row number 9"),
    ],
)
def test_what_is_refused_has_changed_nothing(request_: Any, error: type[Exception], match: str) -> None:
    asked = Asked()
    asked.write(["a"], stored(1, 1, "x"))
    before = asked.machine.table.state()
    fields = {
        name: getattr(request_, name) for name in request_.__struct_fields__ if name not in ("client", "sequence")
    }
    with pytest.raises(error, match=match):
        asked.do(type(request_), **fields)
    after = asked.machine.table.state()
    assert r.encode_result(after) == r.encode_result(before)  # type: ignore[arg-type]


def test_a_node_that_is_lost_is_told_nothing_and_its_rows_stay() -> None:
    asked = Asked()
    asked.write(["a"], stored(1, 1, "x", node=OTHER), tags=[{"n": 1}])
    asked.write(["a"], stored(2, 1, "y"))
    asked.run(r.decode_request(asked.machine.losing(OTHER.hex())))
    assert set(asked.machine.holders()) == {ME.hex()}
    assert asked.look(columns=["x", "y"]).tags == [{"n": 1}]
    with pytest.raises(OwnerDied, match=OTHER.hex()):
        asked.write(["b"], stored(3, 1, "x", node=OTHER))
    asked.write(["a"], stored(4, 1, "x"))
    assert not [*asked.machine.waiting()]
    read = asked.run(r.Read(keys=["a"], columns=["x"]))
    assert isinstance(read, r.Referred)
    assert {node for node, _ in BatchRef.decode(read.ref).shards()} == {ME}


def test_a_snapshot_that_no_replica_made_is_corrupt() -> None:
    asked = Asked()
    asked.write(["a", "b"], stored(1, 2, "x"), tags=[{"n": 1}, {}])
    state = asked.machine.snapshot()
    for wrong in (b"what", state[:-1], state[:20] + b"!" + state[21:], state[:8] + b"\x07" + state[9:]):
        with pytest.raises(Corrupt):
            TableMachine("t").restore(wrong)
    with pytest.raises(Corrupt, match="and this is 'u'"):
        TableMachine("u").restore(state)


KEYS = [f"k{i}" for i in range(6)]
COLUMNS = ["x", "y"]


class Replicas(RuleBasedStateMachine):
    """A leader and a follower that is restored now and then: they always agree to the byte, every cell is told once to
    the node that stores it, and each write's shards are let go once."""

    def __init__(self) -> None:
        super().__init__()
        self.leader, self.follower = Asked(), TableMachine("t")
        self.shard = 0
        self.writes: dict[int, set[Cell]] = {}
        self.freed: set[Cell] = set()

    def do(self, kind: type[r.Request], **fields: Any) -> Any:
        self.leader.sequence += 1
        request = r.encode_request(kind(client="c", sequence=self.leader.sequence, **fields))
        for command in self.leader.machine.decide(request, 1, 0.0).commands:
            result = self.leader.machine.apply(command)
            assert self.follower.apply(bytes(bytearray(command))) == result
        return r.decode_result(result)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=5),
        columns=st.lists(st.sampled_from(COLUMNS), unique=True, min_size=1),
        node=st.sampled_from([ME, OTHER]),
    )
    def write(self, keys: list[str], columns: list[str], node: bytes) -> None:
        self.shard += 1
        ref = stored(self.shard, len(keys), *columns, node=node)
        self.do(r.Upsert, keys=keys, ref=ref.encode(), tags=[{"n": self.shard}] * len(keys))
        self.writes[self.shard] = cells(ref)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def clear(self, keys: list[str]) -> None:
        self.do(r.Clear, keys=keys)

    @rule(row=st.integers(0, 30), claim=st.sampled_from(["", "one", "two"]))
    def take(self, row: int, claim: str) -> None:
        self.do(r.Claim, task="t", rows=numbers(row), give=numbers(row), claim_id=claim)

    @rule()
    def drop(self) -> None:
        self.do(r.Drop)

    @rule(node=st.sampled_from([ME, OTHER]))
    def tell(self, node: bytes) -> None:
        entries, last = self.leader.machine.outbox(node.hex(), 2)
        for entry in entries:
            ref, done = decode(entry)
            if done:
                self.freed |= self.writes.pop(ref.shards()[0][1])
            else:
                assert self.freed.isdisjoint(cells(ref))
                self.freed |= cells(ref)
        command = self.leader.machine.telling(node.hex(), last)
        self.leader.machine.apply(command)
        self.follower.apply(command)

    @rule()
    def restart(self) -> None:
        restored = TableMachine("t")
        restored.restore(self.follower.snapshot())
        self.follower = restored

    @invariant()
    def agrees(self) -> None:
        assert self.follower.snapshot() == self.leader.machine.snapshot()
        assert set(self.follower.holders()) == set(self.leader.machine.holders())
        assert self.follower.table.nbytes == self.leader.machine.table.nbytes
        there = self.leader.machine.table
        if there.schema:
            for name in there.schema:
                ready = there.ready([name])
                assert not len(ready) or self.freed.isdisjoint(cells(there.read(ready, [name])))

    def teardown(self) -> None:
        self.do(r.Drop)
        for node in (ME, OTHER):
            while node.hex() in self.leader.machine.waiting():
                self.tell(node)
        assert not self.writes  # each was let go of, once


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(stateful_step_count=30)
