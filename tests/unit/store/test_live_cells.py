"""Which cells exist after any frees, whatever the blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.rows import RowIndices
from dataplane.store import live_cells
from dataplane.store.live_cells import LiveCells

ROWS = 50


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_cells, "BLOCK", 8)


def some_rows() -> st.SearchStrategy[RowIndices]:
    ends = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted)
    picked = st.lists(st.integers(0, ROWS - 1), max_size=20)
    return st.one_of(ends.map(lambda pair: RowIndices.range(*pair)), picked.map(RowIndices.index))


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=3), some_rows()), max_size=12),
    some_rows(),
    st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted),
)
def test_live_cells_are_exactly_those_not_freed(
    freed: list[tuple[list[int], RowIndices]], asked: RowIndices, window: tuple[int, int]
) -> None:
    cells, left = LiveCells(2, ROWS), np.ones((2, ROWS), np.bool_)
    for columns, rows in freed:
        cells.free(columns, rows)
        for column in columns:
            left[column, rows.array()] = False
    again = LiveCells.of(cells.blocks, 2, ROWS)
    first, stop = window
    for each in (cells, again):
        assert bool(each) == left.any()
        assert each.blocks == cells.blocks
        for column in range(2):
            assert each.all(column, asked) == left[column, asked.array()].all()
            assert np.array_equal(each.flags(column, first, stop), left[column, first:stop])
            inside = np.unique(asked.array())
            assert np.array_equal(each.freed([column], asked), inside[~left[column, inside]])
