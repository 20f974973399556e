"""A table's partition: commands that are done once, reads of what is committed, and what nodes are told."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, Misuse, ProtocolMismatch, Rejected
from dataplane.replication.sessions import WINDOW
from dataplane.table import requests as r
from dataplane.table.machine import NOTHING, TableMachine

INT = Field("dense", "int64", ())
ME, OTHER = b"node-one", b"node-two"


def stored(shard: int, rows: int, *columns: str, node: bytes = ME) -> BatchRef:
    return ref_to(node, rows, [(name, INT, 8 * rows, shard, i) for i, name in enumerate(columns)])


class Asked:
    """A machine, and what is asked of it: each command is decided and applied at once."""

    def __init__(self) -> None:
        self.machine = TableMachine("t")
        self.sequence = 0

    def run(self, request: r.StreamRequest) -> r.AnyResult | None:
        decision = self.machine.decide(r.encode_request(request), 1, 0.0)
        result = decision.result
        for command in decision.commands:
            result = self.machine.apply(command)
        if result == NOTHING:
            return None
        found = r.decode_result(result)
        if isinstance(found, r.CommandRefused):
            raise found.error
        return found

    def do(self, kind: type[r.StreamRequest], **fields: Any) -> Any:
        """As the next request of a client."""
        self.sequence += 1
        return self.run(kind(client="c", sequence=self.sequence, **fields))

    def write(self, keys: list[str], ref: BatchRef | None = None, **more: Any) -> Any:
        return self.do(r.Upsert, keys=keys, ref=b"" if ref is None else ref.encode(), **more)

    def look(self, **more: Any) -> Any:
        return self.run(r.LookRows(all=True, **more))


def test_the_session_record_of_a_large_write_is_small() -> None:
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
    asked.do(r.ClearRows, keys=keys[:1])
    with pytest.raises(Misuse, match="was cleared"):
        asked.run(write)


def test_writes_with_an_expired_or_missing_sequence_are_refused() -> None:
    asked = Asked()
    for number in range(WINDOW + 1):
        asked.write([str(number)])
    with pytest.raises(Rejected, match="answered long ago"):
        asked.run(r.Upsert(client="c", sequence=1, keys=["0"]))
    with pytest.raises(ProtocolMismatch, match="needs a sequence"):
        asked.run(r.Upsert(keys=["0"]))
    asked.run(r.ForgetClients(clients=["c"]))
    asked.run(r.Upsert(client="c", sequence=1, keys=["new"]))
    assert "new" in asked.look().keys


def test_an_invalid_table_snapshot_is_corrupt() -> None:
    asked = Asked()
    asked.write(["a", "b"], stored(1, 2, "x"), tags=[{"n": 1}, {}])
    state = asked.machine.snapshot()
    for wrong in (b"what", state[:-1], state[:20] + b"!" + state[21:], state[:8] + b"\x07" + state[9:]):
        with pytest.raises(Corrupt):
            TableMachine("t").restore(wrong)
    with pytest.raises(Corrupt, match="and this is 'u'"):
        TableMachine("u").restore(state)
