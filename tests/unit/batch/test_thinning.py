"""What is left of a shard when rows of it were freed: the same values, in fewer bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.batch.batch import Column, Piece
from dataplane.batch.columns import plan
from dataplane.batch.layout import ShardLayout, check, check_contents
from dataplane.batch.local import LocalMemory, aligned_bytes
from dataplane.batch.rows import Rows
from dataplane.batch.thinning import thinned
from tests.unit.batch.exact import same

ROWS = 12
COLUMNS: dict[str, Any] = {
    "scalar": np.arange(ROWS),
    "dense": np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3),
    "bits": torch.arange(ROWS * 2, dtype=torch.bfloat16).reshape(ROWS, 2),
    "ragged": [np.arange(row % 4, dtype=np.int32) for row in range(ROWS)],
    "patches": [np.full((row % 3, 5), row, np.float32) for row in range(ROWS)],
    "images": [np.full((3, 1 + row % 2, row % 3 + 1), row, np.uint8) for row in range(ROWS)],
    "text": [f"réponse {row}" * (row % 3) for row in range(ROWS)],
    "bytes": [bytes([row]) * row for row in range(ROWS)],
    "object": [[row, None, {"a": row}] if row % 2 else row for row in range(ROWS)],
    "struct": [
        {"x": np.float32(row), "inner": {"y": [row] * row}} | ({"odd": f"{row}"} if row % 2 else {})
        for row in range(ROWS)
    ],
    "empty": np.zeros((ROWS, 0), np.int64),
}
_FLAGS = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)


def stored(columns: dict[str, Any], *, dedupe: bool = False) -> tuple[ShardLayout, Any]:
    planned = plan(columns, dedupe=list(columns) if dedupe else [])
    memory = aligned_bytes(planned.nbytes)
    for job in planned.jobs(memory, piece=1 << 20):
        job()
    return planned.layout(), memory


def values(layout: ShardLayout, memory: Any, number: int, live: Any) -> list[Any]:
    name, column = layout.columns[number]
    return Column(
        name, column.field, [Piece(column, LocalMemory(memory), Rows.index(np.flatnonzero(live)))], None
    ).to_list()


@settings(max_examples=150, deadline=None)
@given(live=st.lists(_FLAGS, min_size=len(COLUMNS), max_size=len(COLUMNS)), again=_FLAGS, dedupe=st.booleans())
def test_what_was_not_freed_is_what_it_was(live: list[list[bool]], again: list[bool], dedupe: bool) -> None:
    layout, memory = stored(COLUMNS, dedupe=dedupe)
    flags = np.array(live)
    left, less = layout, memory
    for flags_now in (flags, flags & np.array(again)):  # and once more what was thinned
        made = thinned(left, flags_now, less)
        left, less = made.layout, aligned_bytes(made.nbytes)
        made.write(less)
        check(left, made.nbytes)
        check_contents(left, less)
        for number, live_now in enumerate(flags_now):
            before, after = values(layout, memory, number, live_now), values(left, less, number, live_now)
            assert same(before, after), layout.columns[number][0]


def test_it_may_be_written_over_where_it_came_from() -> None:
    layout, memory = stored(COLUMNS)
    live = np.zeros((len(COLUMNS), ROWS), np.bool_)
    live[:, 5:7] = True
    before = [values(layout, memory, number, live[number]) for number in range(len(COLUMNS))]
    over = memory.copy()
    made = thinned(layout, live, over)
    made.write(over)
    assert same([values(made.layout, over, number, live[number]) for number in range(len(COLUMNS))], before)


@pytest.mark.parametrize("rows", [256, 4096])
def test_one_row_of_many_takes_about_its_share(rows: int) -> None:
    layout, memory = stored({"x": np.zeros((rows, 256), np.float32), "ids": [np.arange(100)] * rows})
    live = np.zeros((2, rows), np.bool_)
    live[:, 17] = True
    made = thinned(layout, live, memory)
    assert made.nbytes < 2 * 8 * rows + 3 * 1024 + 1024  # an index of each column, and a row


def test_no_rows_at_all() -> None:
    layout, memory = stored({"x": np.zeros((0, 3)), "t": []})
    made = thinned(layout, np.zeros((2, 0), np.bool_), memory)
    check(made.layout, made.nbytes)
