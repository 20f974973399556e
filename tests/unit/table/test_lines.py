"""Arrays that grow and shrink together."""

from __future__ import annotations

import numpy as np

from dataplane.table.lines import Lines


def test_lines_come_with_what_their_array_was_made_with() -> None:
    lines = Lines()
    lines.make("a", np.int64, -1)
    lines.add(3)
    lines["a"][1] = 7
    lines.add(1000)
    lines.make("late", np.bool_, True)
    assert lines["a"][:4].tolist() == [-1, 7, -1, -1]
    assert lines["late"].all()
    assert (len(lines["a"]), len(lines["late"]), lines.count) == (1003, 1003, 1003)


def test_lines_that_stay_keep_their_order_and_new_ones_are_new() -> None:
    lines = Lines()
    lines.make("a", np.int64, -1)
    lines.add(5000)
    lines["a"][:] = np.arange(5000)
    lines.keep(lines["a"] % 1000 == 3)
    assert lines["a"].tolist() == [3, 1003, 2003, 3003, 4003]
    lines.add(200)
    assert lines["a"].tolist()[4:8] == [4003, -1, -1, -1]
    lines.keep(np.zeros(205, np.bool_))
    lines.add(1)
    assert lines["a"].tolist() == [-1]
    lines.drop("a")
    assert "a" not in lines
