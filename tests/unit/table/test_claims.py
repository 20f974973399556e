"""What a claim costs who comes later."""

from __future__ import annotations

import time

import numpy as np

from dataplane.table.table import Table


def seconds(claims: int) -> float:
    """Of processor time, to clear one row of a table in which so many rows were taken one by one."""
    numbers = iter(range(1, 1 << 30))
    table, rows = Table("t", lambda: next(numbers)), 4096 + 16
    table.write([f"k{at}" for at in range(rows)])
    for task in ("a", "b", "c", "d"):
        for at in range(claims):
            table.take(task, np.array([at]), claim=f"claim {at}")
    spent = []
    for at in range(rows - 9, rows):
        began = time.process_time()
        table.clear(np.array([at]))
        spent.append(time.process_time() - began)
    return sorted(spent)[len(spent) // 2]


def test_a_row_is_cleared_as_fast_though_others_were_claimed_one_by_one() -> None:
    assert seconds(4096) < 20 * max(seconds(16), 1e-4)
