"""A table's bookkeeping: rows by key, cells that are replaced and freed, tags, and what tasks have taken."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import LimitExceeded, SchemaMismatch
from dataplane.table.claims import MAX_CLAIMS, MAX_TASKS
from dataplane.table.table import MAX_COLUMNS, Over, Table

INT = Field("dense", "int64", ())
FLOAT = Field("dense", "float32", ())

Cell = tuple[int, int, int]  # shard, ordinal, row


def stored(shard: int, rows: int, *columns: str, field: Field = INT) -> BatchRef:
    return BatchRef.of(b"the-node", rows, [(name, field, 8 * rows, shard, i) for i, name in enumerate(columns)])


def made(first: int = 0) -> Table:
    return Table("t", itertools.count(1).__next__, first)


def cells(ref: BatchRef, column: str) -> list[Cell]:
    return [(p.shard, p.ordinal, at) for p in ref.pieces(column) for at in p.rows.array().tolist()]


def freed(overs: list[Over]) -> Counter[Cell]:
    return Counter(cell for over in overs for name in over.columns for cell in cells(over.ref, name))


def numbers(*rows: int) -> Any:
    return np.array(rows, np.int64)


def test_a_column_that_no_other_row_has_may_become_another() -> None:
    table = made()
    table.upsert(["a", "b"], stored(1, 2, "x"))
    with pytest.raises(SchemaMismatch):
        table.upsert(["a"], stored(2, 1, "x", field=FLOAT))
    table.upsert(["a", "b"], stored(3, 2, "x", field=FLOAT))
    assert table.schema == {"x": FLOAT}
    assert table.read(numbers(0, 1)).schema == {"x": FLOAT}


def test_a_claim_is_what_was_given_first() -> None:
    table = made()
    table.upsert(list("abcd"), stored(1, 4, "x"))
    for chosen in (numbers(0, 1), numbers(2, 3)):
        given = table.claim("t", chosen, claim_id="step-1")
        assert given is not None
        assert given.tolist() == [0, 1]
    assert table.claimed("t").tolist() == [True, True, False, False]
    given = table.claim("t", numbers(2), numbers(2, 2), claim_id="step-2")
    assert given is not None
    assert given.tolist() == [2, 2]
    table.clear(numbers(0))
    assert table.find_claim("t", "step-1") is not None
    table.clear(numbers(1))
    assert table.find_claim("t", "step-1") is None
    table.release("t", numbers(2))
    assert table.find_claim("t", "step-2") is None
    assert table.find_claim("other", "step-2") is None


def test_tasks_and_claims_are_bounded() -> None:
    table = made()
    table.upsert(["a"])
    for number in range(MAX_TASKS):
        table.claim(f"t{number}", numbers())
    with pytest.raises(LimitExceeded, match="tasks"):
        table.claim("one more", numbers())
    for number in range(MAX_CLAIMS + 1):
        table.claim("t0", numbers(), numbers(0), f"c{number}")
    assert table.find_claim("t0", "c0") is None
    assert table.find_claim("t0", "c1") is not None
    with pytest.raises(LimitExceeded, match="columns"):
        table.upsert(["b"], stored(2, 1, *map(str, range(MAX_COLUMNS + 1))))
    table.release()
    assert table.tasks == []


COLUMNS = ["x", "y", "z"]
KEYS = [f"k{i}" for i in range(6)]


class Model(RuleBasedStateMachine):
    """Against plain dicts: what each row has, and that every cell is freed once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = made()
        self.rows: dict[str, tuple[int, dict[str, Cell], dict[str, int]]] = {}
        self.taken: dict[str, set[int]] = {"s": set(), "t": set()}
        self.all: Counter[Cell] = Counter()
        self.freed: Counter[Cell] = Counter()
        self.next = 0
        self.shard = 0

    @rule(
        keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=5),
        columns=st.lists(st.sampled_from(COLUMNS), unique=True, min_size=1),
        tag=st.integers(0, 3),
    )
    def write(self, keys: list[str], columns: list[str], tag: int) -> None:
        self.shard += 1
        ref = stored(self.shard, len(keys), *columns)
        given, over = self.table.upsert(keys, ref, [{str(tag): self.shard}] * len(keys))
        self.freed += freed(over)
        for row, (key, number) in enumerate(zip(keys, given.tolist(), strict=True)):
            if key not in self.rows:
                assert number == self.next
                self.next += 1
                self.rows[key] = number, {}, {}
            assert self.rows[key][0] == number
            self.rows[key][1].update({name: (self.shard, at, row) for at, name in enumerate(columns)})
            self.rows[key][2][str(tag)] = self.shard
            self.all.update((self.shard, at, row) for at in range(len(columns)))

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def clear(self, keys: list[str]) -> None:
        self.freed += freed(self.table.cleared(keys))
        for key in keys:
            number, _, _ = self.rows.pop(key, (-1, {}, {}))
            for rows in self.taken.values():
                rows.discard(number)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, max_size=4), task=st.sampled_from(["s", "t"]))
    def take(self, keys: list[str], task: str) -> None:
        chosen = [self.rows[key][0] for key in keys if key in self.rows]
        given = self.table.claim(task, numbers(*chosen))
        if self.taken[task].isdisjoint(chosen):
            assert given is not None
            self.taken[task].update(chosen)
        else:
            assert given is None

    @rule(task=st.sampled_from(["s", "t"]), key=st.sampled_from(KEYS))
    def untake(self, task: str, key: str) -> None:
        if key in self.rows:
            self.table.release(task, numbers(self.rows[key][0]))
            self.taken[task].discard(self.rows[key][0])

    @invariant()
    def agrees(self) -> None:
        rows = sorted(self.rows.items(), key=lambda row: row[1][0])
        there = numbers(*(number for _, (number, _, _) in rows))
        seen = self.table.look(self.table.all(), COLUMNS)
        assert seen.numbers.tolist() == there.tolist()
        assert seen.keys == [key for key, _ in rows]
        assert seen.tags == [tags for _, (_, _, tags) in rows]
        assert seen.have.tolist() == [[name in has for name in COLUMNS] for _, (_, has, _) in rows]
        for name in COLUMNS:
            ready = self.table.ready([name])
            assert ready.tolist() == [number for _, (number, has, _) in rows if name in has]
            if len(ready):
                assert cells(self.table.read(ready, [name]), name) == [
                    has[name] for _, (_, has, _) in rows if name in has
                ]
        for task, taken in self.taken.items():
            assert self.table.claimed(task).tolist() == [number in taken for _, (number, _, _) in rows]
        held = Counter(cell for _, (_, has, _) in rows for cell in has.values())
        assert self.freed + held == self.all
        assert sum(written.left for written in self.table._written.values()) == sum(held.values())


TestModel = Model.TestCase
TestModel.settings = settings(stateful_step_count=30)
