"""Which cells count after any frees, whatever the blocks; and that few bits say so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.rows import Rows
from dataplane.store import live
from dataplane.store.live import BLOCK, Live

ROWS = 50


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "large" not in request.node.name:
        monkeypatch.setattr(live, "BLOCK", 8)


def some_rows() -> st.SearchStrategy[Rows]:
    ends = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted)
    picked = st.lists(st.integers(0, ROWS - 1), max_size=20)
    return st.one_of(ends.map(lambda pair: Rows.range(*pair)), picked.map(Rows.index))


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=3), some_rows()), max_size=12),
    some_rows(),
    st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted),
)
def test_what_counts_is_what_was_not_freed(
    freed: list[tuple[list[int], Rows]], asked: Rows, window: tuple[int, int]
) -> None:
    cells, left = Live(2, ROWS), np.ones((2, ROWS), np.bool_)
    for columns, rows in freed:
        cells.free(columns, rows)
        for column in columns:
            left[column, rows.array()] = False
    again = Live.decode(cells.encode(), 2, ROWS)
    first, stop = window
    for each in (cells, again):
        assert bool(each) == left.any()
        assert each.encode() == np.packbits(left).tobytes()
        for column in range(2):
            assert each.all(column, asked) == left[column, asked.array()].all()
            assert np.array_equal(each.flags(column, first, stop), left[column, first:stop])
            bits = each.bits(column, first, stop)
            told = np.unpackbits(np.frombuffer(bits, np.uint8), count=stop - first) if bits else 1
            assert np.array_equal(np.broadcast_to(told, stop - first).astype(bool), left[column, first:stop])


def test_a_large_shard_costs_a_block_for_a_row_that_was_freed_and_a_bit_a_row_at_most() -> None:
    rows = 8_000_000
    cells = Live(1, rows)
    cells.free([0], Rows.range(7, 8))
    assert cells.nbytes == BLOCK // 8
    assert cells.large
    assert cells.bits(0, BLOCK, rows) == b""
    for start in range(0, rows, 1_000_000):
        cells.free([0], Rows.index(np.arange(start, start + 1_000_000, 2)))
    assert cells.nbytes <= rows // 8 + 8
    for start in range(0, rows, 1_000_000):
        cells.free([0], Rows.range(start, start + 1_000_000))
    assert not cells
    assert cells.nbytes == 0


def test_of_freed_rows_the_runs_that_are_long_enough_are_found() -> None:
    cells = Live(1, ROWS)
    for start, stop in ((0, 3), (10, 14), (20, 30), (40, 50)):
        cells.free([0], Rows.range(start, stop))
    asked = Rows.index([1, 12, 25, 45])
    assert cells.dead_runs(0, asked, 4).array().tolist() == [10, 20, 40]
    assert cells.dead_runs(0, asked, 11).array().tolist() == []
    assert cells.dead_runs(0, Rows.range(25, 26), 4).array().tolist() == [21], "as far as it was looked"
    assert cells.dead_runs(0, Rows.range(5, 6), 1).array().tolist() == []
