from __future__ import annotations

import pytest

from dataplane.batch.rows import Rows
from dataplane.store.shard import Shard
from tests.cases import each_case


def a_shard(rows: int, columns: int) -> Shard:
    return Shard(1, 4096, rows, columns, b"", "somebody", "", 0)


@each_case(
    ("columns", "rows"),
    [([2], Rows.range(0, 1)), ([-1], Rows.range(0, 1)), ([0], Rows.range(0, 4)), ([1], Rows.index([0, 3]))],
)
def test_columns_and_rows_that_are_not_there_are_refused_and_change_nothing(columns: list[int], rows: Rows) -> None:
    shard = a_shard(3, 2)
    with pytest.raises(IndexError, match="2 columns of 3 rows"):
        shard.free_part(columns, rows)
    assert shard.live_bits() == b""
