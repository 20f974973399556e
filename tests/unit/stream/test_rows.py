"""Where the columns of rows are, and when the batches that brought them are done."""

from __future__ import annotations

import numpy as np

from dataplane.batch import locations
from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.page import PAGE
from dataplane.stream.rows import StreamRows
from tests.unit.stream.example_streams import stored


def found(rows: StreamRows, numbers: list[int], column: str) -> list[tuple[int, int]]:
    pieces = locations.pieces(rows.ref(np.array(numbers), [column]), column)
    return [(piece.shard, at) for piece in pieces for at in piece.rows.array().tolist()]


def shards(batches: list[ColumnBatch]) -> list[int]:
    return [batch.ref.shards()[0][1] for batch in batches]


def test_a_restored_row_has_no_columns_from_before_its_removal() -> None:
    """Its page is there still, for others: a row has moved away, and comes back."""
    rows, again = StreamRows(), np.array([1])
    rows.append(stored(1, 2, "x"))
    rows.append(stored(2, 1, "x"))
    assert shards(rows.remove(again)) == []
    rows.restore(again)
    assert rows.holds(again, "x").tolist() == [-2]
    rows.extend(again, stored(3, 1, "x"), replace=False)
    assert found(rows, [0, 1, 2], "x") == [(1, 0), (3, 0), (2, 0)]
    assert shards(rows.remove(again)) == [3], "and the first batch is needed still"
    assert shards(rows.remove(np.array([0, 2]))) == [1, 2]


def test_empty_pages_are_removed_except_the_last_one() -> None:
    rows = StreamRows()
    rows.append(stored(1, 2 * PAGE + 1, "x"))
    rows.remove(np.arange(1, 2 * PAGE + 1))
    assert sorted(rows.pages) == [0, 2]
    assert rows.there(np.array([-1, 0, 1, PAGE, 2 * PAGE, 2 * PAGE + 1, 9 * PAGE])).tolist() == [False, True] + 5 * [
        False
    ]
    rows.append(stored(2, 1, "x"))
    assert found(rows, [2 * PAGE + 1], "x") == [(2, 0)]
