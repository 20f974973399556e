"""Tables in files: what was written is read; of whatever becomes of the bytes, data or `Corrupt`, and nobody dies."""

from __future__ import annotations

import random
import resource
from collections import Counter
from typing import Any

import numpy as np

from dataplane.batch import arrow_file, arrow_in
from dataplane.batch.batch import Batch, Column, Piece
from dataplane.batch.columns import plan
from dataplane.batch.layout import check_contents
from dataplane.batch.layout_check import check_layout
from dataplane.batch.local import LocalMemory
from dataplane.batch.rows import Rows
from dataplane.errors import Corrupt, DataplaneError, SchemaMismatch
from tests.cases import each_case
from tests.mutation import mutated
from tests.processes import Worker
from tests.unit.batch.exact import filled

ROWS = 4
KINDS: dict[str, Any] = {
    "numbers": np.arange(12, dtype=np.float32).reshape(ROWS, 3),
    "flags": np.array([True, False, True, True]),
    "nothing": np.empty((ROWS, 0), np.int16),
    "times": np.array([0, 1, "NaT", 3], "datetime64[ns]"),
    "complex": np.array([1j, 2, 3, 4]),
    "lists": [np.arange(n) for n in (2, 0, 3, 1)],
    "items": [np.ones((n, 2), np.int16) for n in (2, 0, 3, 1)],
    "images": [np.ones((2, n, 3), np.float32) for n in (1, 2, 0, 3)],
    "text": ["a", "bc", "", "ü"],
    "bytes": [b"\xff", b"", b"abc", b"\0"],
    "objects": [None, 1, (2,), {"k": 3}],
    "structs": [{"a": 1}, {"b": "x"}, {}, {"a": 2, "b": "y"}],
    "nested": [{"s": {"t": ["x"]}, "r": np.arange(3)}, {"s": {"u": b"b"}}, {}, {"r": np.arange(1)}],
}


def stored(columns: Any) -> Batch:
    """The columns as a put of them would be read."""
    planned = plan(columns)
    memory = filled(planned)
    layout = planned.layout()
    check_layout(layout.encode(), len(memory))
    check_contents(layout, memory)
    held, rows = LocalMemory(memory), Rows.range(0, planned.rows)
    return Batch({name: Column(name, column.field, [Piece(column, held, rows)]) for name, column in layout.columns})


def written(name: str) -> bytes:
    return bytes(arrow_file.encoded(stored({name: KINDS[name]}).to_arrow()))


@each_case("name", KINDS)
def test_each_kind_is_read_as_it_was_written(name: str) -> None:
    before = stored({name: KINDS[name]})
    after = stored(dict(arrow_in.columns_of(arrow_file.decoded(written(name)), checked=True)))
    assert after.schema == before.schema
    assert repr(after[name].to_list()) == repr(before[name].to_list())


def outcome(data: bytes) -> str:
    """What comes of restoring these bytes and of looking at them in every way."""
    try:
        table = arrow_file.decoded(data)
        if table.num_rows != ROWS:
            return "other rows"
        batch = stored(dict(arrow_in.columns_of(table.combine_chunks(), checked=True)))
        for column in batch.values():
            column.to_list()
            column.numpy()
            column.arrow()
    except DataplaneError as error:
        return type(error).__name__
    return "data"


def tries(pipe: Any, seed: int, count: int) -> None:
    """Tells what came of all, if it may have as much memory as the few bytes of a file are worth, and lives."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    files, found = {name: written(name) for name in KINDS}, Counter[str]()
    for number in range(count):
        chance = random.Random(seed * 1_000_003 + number)
        found[outcome(mutated(chance, files[chance.choice(list(files))]))] += 1
    pipe.send(dict(found))


@each_case("seed", range(2))
def test_any_bytes_are_data_or_a_typed_error(seed: int) -> None:
    """In a process of its own, which would die of an offset that is followed and false."""
    with Worker(tries, seed, 1000) as worker:
        found = worker.hear()
        assert worker.join() == 0
    assert found.keys() <= {"data", "other rows", Corrupt.__name__, SchemaMismatch.__name__}
    assert found["data"] > 50
    assert found[Corrupt.__name__] > 500
