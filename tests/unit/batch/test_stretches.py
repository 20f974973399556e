"""What of a shard has to be there for some rows of some columns."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from dataplane.batch import stretches
from dataplane.batch.batch import Column, Piece
from dataplane.batch.columns import plan
from dataplane.batch.layout import check_contents
from dataplane.batch.local import LocalMemory, aligned_bytes
from dataplane.batch.rows import Rows
from tests.cases import each_case
from tests.unit.batch.exact import filled, same

ROWS = 40


def columns() -> dict[str, Any]:
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (n % 5 + 1, 3, 700), dtype=np.uint8) for n in range(ROWS)]
    return {
        "dense": random.standard_normal((ROWS, 300)).astype(np.float32),
        "flags": random.integers(0, 2, ROWS).astype(bool),
        "empty": np.empty((ROWS, 0), np.float32),
        "ragged": [random.integers(0, 9, n * 37 % 500) for n in range(ROWS)],
        "images": images,
        "varying": [np.ones((n % 3, n % 4, 2), np.int16) * n for n in range(ROWS)],
        "text": ["x" * (n * 13 % 200) for n in range(ROWS)],
        "bytes": [bytes([n]) * n for n in range(ROWS)],
        "object": [[n, {"a": None}] for n in range(ROWS)],
        "struct": [{"a": np.arange(n), "b": "y" * n} if n % 3 else {"a": np.arange(2)} for n in range(ROWS)],
        "repeated": [images[n // 8] for n in range(ROWS)],
    }


PLANNED = plan(columns(), dedupe=["repeated"])
LAYOUT = PLANNED.layout()
WHOLE = filled(PLANNED)


def read(memory: Any, ordinal: int, rows: Rows) -> Any:
    """As arrays, which are compared sooner than lists of numbers."""
    name, layout = LAYOUT.columns[ordinal]
    return Column(name, layout.field, [Piece(layout, LocalMemory(memory), rows)]).numpy()


@given(
    st.sets(st.integers(0, len(LAYOUT.columns) - 1), min_size=1),
    st.one_of(
        st.sets(st.integers(0, ROWS - 1)).map(sorted),
        st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda ends: list(range(min(ends), max(ends)))),
    ),
)
def test_tables_and_values_are_all_that_rows_are_read_from(ordinals: set[int], rows: list[int]) -> None:
    chosen = Rows.index(rows)
    memory = aligned_bytes(PLANNED.nbytes)
    memory[:] = 0xA5
    for start, stop in stretches.tables(LAYOUT):
        memory[start:stop] = WHOLE[start:stop]
    check_contents(LAYOUT, memory)
    for start, stop in stretches.values(LAYOUT, sorted(ordinals), chosen, memory):
        memory[start:stop] = WHOLE[start:stop]
    for ordinal in ordinals:
        assert same(read(memory, ordinal, chosen), read(WHOLE, ordinal, chosen))


def test_no_more_is_named_than_the_rows_are() -> None:
    dense = next(i for i, (name, _) in enumerate(LAYOUT.columns) if name == "dense")
    found = stretches.values(LAYOUT, [dense], Rows.range(10, 20), WHOLE)
    assert stretches.total(found) == 10 * 300 * 4
    assert stretches.values(LAYOUT, range(len(LAYOUT.columns)), Rows.range(3, 3), WHOLE) == []


@each_case(
    ("given_", "gap", "expected"),
    [
        ([(5, 9), (0, 2)], 0, [(0, 2), (5, 9)]),
        ([(0, 5), (5, 9)], 0, [(0, 9)]),
        ([(0, 5), (3, 4), (2, 9)], 0, [(0, 9)]),
        ([(0, 5), (8, 9)], 3, [(0, 9)]),
        ([(4, 4), (9, 3)], 0, []),
    ],
)
def test_neighbours_are_one(given_: stretches.Stretches, gap: int, expected: stretches.Stretches) -> None:
    assert stretches.merged(given_, gap) == expected


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))),
)
def test_what_is_not_there_is_missing(wanted: stretches.Stretches, there: stretches.Stretches) -> None:
    wanted, there = stretches.merged(wanted, 0), stretches.merged(there, 0)

    def spelled(several: stretches.Stretches) -> set[int]:
        return {at for start, stop in several for at in range(start, stop)}

    missing = stretches.without(wanted, there)
    assert spelled(missing) == spelled(wanted) - spelled(there)
    assert missing == stretches.merged(missing, -1)
