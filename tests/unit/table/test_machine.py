"""A table's partition: commands that are done once, reads of what is committed, and what nodes are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, DataplaneError, Misuse, OwnerDied, ProtocolMismatch, Rejected
from dataplane.replication.sessions import WINDOW
from dataplane.table import requests as r
from dataplane.table.cell_release import decode
from dataplane.table.machine import NOTHING, TableMachine
from tests.cases import each_case

INT = Field("dense", "int64", ())
ME, OTHER = b"node-one", b"node-two"


def stored(shard: int, rows: int, *columns: str, node: bytes = ME) -> BatchRef:
    return ref_to(node, rows, [(name, INT, 8 * rows, shard, i) for i, name in enumerate(columns)])


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
