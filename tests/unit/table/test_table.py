"""A table's bookkeeping: rows by key, cells that are replaced and freed, tags, and what tasks have taken."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dataplane.batch.concat import joined
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import LimitExceeded, SchemaMismatch
from dataplane.table import requests as r
from dataplane.table.answers import MAX_TAG_BYTES, write
from dataplane.table.claims import MAX_CLAIMS, MAX_TASKS
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
