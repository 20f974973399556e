"""A table's bookkeeping: rows by key, cells that are replaced and freed, tags, and what tasks have taken."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dataplane.batch.concat import joined
from dataplane.batch.field import Field
from dataplane.batch.locations import linked, ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, LimitExceeded, Misuse, OwnerDied, ProtocolMismatch, Rejected, SchemaMismatch
from dataplane.replication.sessions import WINDOW
from dataplane.stream.requests import EndClient, Lose
from dataplane.table import answers
from dataplane.table import requests as r
from dataplane.table.answers import MAX_TAG_BYTES, write
from dataplane.table.claims import MAX_CLAIMS, MAX_TASKS
from dataplane.table.machine import NOTHING, TableMachine
from dataplane.table.table import TableRows
from dataplane.table.table_cells import MAX_COLUMNS
from dataplane.table.write_effects import WriteEffect

INT = Field("dense", "int64", ())
FLOAT = Field("dense", "float32", ())


def stored(shard: int, rows: int, *columns: str, field: Field = INT) -> BatchRef:
    return ref_to(b"the-node", rows, [(name, field, 8 * rows, shard, i) for i, name in enumerate(columns)])


def made(first: int = 0) -> TableRows:
    return TableRows("t", itertools.count(1).__next__, first)


def numbers(*rows: int) -> Any:
    return np.array(rows, np.int64)


def test_a_column_may_change_type_when_all_its_rows_are_replaced() -> None:
    table = made()
    table.upsert(["a", "b"], stored(1, 2, "x"))
    with pytest.raises(SchemaMismatch):
        table.upsert(["a"], stored(2, 1, "x", field=FLOAT))
    table.upsert(["a", "b"], stored(3, 2, "x", field=FLOAT))
    assert table.cells.schema == {"x": FLOAT}
    assert table.read(numbers(0, 1)).schema == {"x": FLOAT}


def test_a_claim_longer_than_a_page_of_numbers_is_found_in_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of it, a caller that asks for the rows after the last one is given the same page forever."""
    monkeypatch.setattr(answers, "_NUMBERS", 2)
    table = made()
    table.upsert(["a", "b", "c", "d"])
    table.claim("train", numbers(3), numbers(3, 0, 2), "step-0")
    of_claim = r.FindReady(columns=[], task="train", claim_id="step-0")
    assert answers.answer("t", table, of_claim).rows.tolist() == [3, 0, 2]
    assert not answers.answer("t", table, of_claim).more
    # A claim that was made while a caller reads pages of ready rows does not become one of the pages.
    second = r.FindReady(columns=[], task="train", claim_id="step-0", least=0, after=1)
    assert answers.answer("t", table, second).rows.tolist() == [2]


def test_tasks_and_claims_are_bounded() -> None:
    table = made()
    table.upsert(["a"])
    for number in range(MAX_TASKS):
        table.claim(f"t{number}", numbers(0))
    with pytest.raises(LimitExceeded, match="tasks"):
        table.claim("one more", numbers())
    for number in range(MAX_CLAIMS + 1):
        table.claim("t0", numbers(), numbers(0), f"c{number}")
    assert table.claims.find("t0", "c0") is None
    assert table.claims.find("t0", "c1") is not None
    with pytest.raises(LimitExceeded, match="columns"):
        table.upsert(["b"], stored(2, 1, *map(str, range(MAX_COLUMNS + 1))))
    table.release()
    assert table.claims.tasks == []
    for step in range(2 * MAX_TASKS):
        (row,), _ = table.upsert([f"r{step}"])
        table.claim(f"step {step}", numbers(row), claim_id="c" * (step % 2))
        table.clear([f"r{step}"])
    assert len(table.claims.tasks) <= MAX_TASKS, "tasks whose rows are gone make way"


def test_replaced_tags_do_not_count_against_the_tag_limit() -> None:
    table = made()
    half = "x" * (MAX_TAG_BYTES // 2)
    for name in ("state", "state", "state", "other"):
        write(table, r.Upsert(keys=["new", "a"], tags=[{}, {name: half[:-100]}]), None)
    assert len(table.tags(["a"])[0]) == 2
    with pytest.raises(LimitExceeded, match="tags of a row"):
        write(table, r.Upsert(keys=["a"], tags=[{"third": half}]), None)
    write(table, r.Upsert(rows=numbers(1), tags=[{"state": "", "other": ""}]), None)
    write(table, r.Upsert(keys=["a"], tags=[{"third": half}]), None)
    assert table.tags(["a", "never"]) == [{"state": "", "other": "", "third": half}, {}]


def test_rows_that_share_storage_are_not_freed_separately() -> None:
    pieces = [ref_to(b"the-node", 1, [("x", Field("ragged", "int64", (None,)), 8, shard, 0)]) for shard in (1, 2)]
    row = joined(pieces)
    assert WriteEffect.of(row).exact
    assert not WriteEffect.of(row.repeat(2)).exact
    assert WriteEffect.of(stored(1, 2, "x", "y")).exact
    assert not WriteEffect.of(stored(1, 2, "x").repeat(2)).exact


def test_a_column_is_removed_with_its_last_cell() -> None:
    table = made()
    table.upsert(["a", "b"], stored(1, 2, "x"))
    table.upsert(["b", "c"], stored(2, 2, "x", "y"))
    table.clear(["c"])
    assert list(table.cells.schema) == ["x", "y"]
    restored = made()
    restored.restore(table.state())
    for each in (table, restored):
        each.clear(["b"])
        assert list(each.cells.schema) == ["x"]
        each.upsert(["a"], stored(3, 1, "x", field=FLOAT))
        assert each.cells.schema == {"x": FLOAT}, "no other row has it"
        each.clear(["a"])
        assert each.cells.schema == {}


# A table's partition: commands that are done once, reads of what is committed, and what nodes are told.


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
    asked.run(EndClient(client="c", ended=True))
    asked.run(r.Upsert(client="c", sequence=1, keys=["new"]))
    assert "new" in asked.look().keys


def test_a_link_to_a_shard_that_a_restarted_node_has_lost_is_refused() -> None:
    asked = Asked()
    asked.run(Lose(node=b"the-node", before=2))
    with pytest.raises(OwnerDied):
        asked.write(["a"], stored(linked(1, 1), 1, "x"))
    asked.write(["a"], stored(linked(2, 1), 1, "x"))


def test_an_invalid_table_snapshot_is_corrupt() -> None:
    asked = Asked()
    asked.write(["a", "b"], stored(1, 2, "x"), tags=[{"n": 1}, {}])
    state = asked.machine.snapshot()
    for wrong in (b"what", state[:-1], state[:20] + b"!" + state[21:], state[:8] + b"\x07" + state[9:]):
        with pytest.raises(Corrupt):
            TableMachine("t").restore(wrong)
    with pytest.raises(Corrupt, match="and this is 'u'"):
        TableMachine("u").restore(state)
