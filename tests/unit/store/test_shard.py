from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.rows import Rows
from dataplane.store.shard import Shard
from tests.cases import each_case


def a_shard(rows: int, columns: int) -> Shard:
    return Shard(1, 4096, rows, columns, b"", "somebody", "", 0)


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, int, list[tuple[list[int], Rows]]]:
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    some_columns = st.lists(st.integers(0, columns - 1), max_size=5)
    ends = st.tuples(st.integers(0, rows), st.integers(0, rows)).map(sorted)
    some_rows = st.one_of(
        ends.map(lambda pair: Rows.range(*pair)),
        st.lists(st.integers(0, rows - 1), max_size=8).map(Rows.index),
        st.just(Rows.range(0, rows)),
    )
    return rows, columns, draw(st.lists(st.tuples(some_columns, some_rows), max_size=12))


@given(parts())
def test_what_is_left_after_parts_were_freed(case: tuple[int, int, list[tuple[list[int], Rows]]]) -> None:
    rows, columns, freed = case
    shard, left = a_shard(rows, columns), np.ones((columns, rows), dtype=bool)
    for some_columns, some_rows in freed:
        for column in some_columns:
            left[column, some_rows.array()] = False
        gone = shard.free_part(some_columns, some_rows)
        assert gone == (not left.any())
        if gone:
            return
        bits = shard.live_bits()
        live = np.unpackbits(np.frombuffer(bits, np.uint8), count=left.size).reshape(left.shape) if bits else True
        assert np.array_equal(np.broadcast_to(live, left.shape).astype(bool), left)


@each_case(
    ("columns", "rows"),
    [([2], Rows.range(0, 1)), ([-1], Rows.range(0, 1)), ([0], Rows.range(0, 4)), ([1], Rows.index([0, 3]))],
)
def test_columns_and_rows_that_are_not_there_are_refused_and_change_nothing(columns: list[int], rows: Rows) -> None:
    shard = a_shard(3, 2)
    with pytest.raises(IndexError, match="2 columns of 3 rows"):
        shard.free_part(columns, rows)
    assert shard.live_bits() == b""
