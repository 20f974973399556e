"""Rows of many small puts that lie in two ways, by turns: as when every eighth response brings an image too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import StandingNode

PUTS = 40


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, memory="32MiB") as node:
        yield node


def columns(number: int) -> dict[str, Any]:
    rows = 2
    own: dict[str, Any] = {
        "n": [number * 10 + row for row in range(rows)],
        "text": [f"text {number}" * (row + 1) for row in range(rows)],
        "ids": [np.arange(number + row) for row in range(rows)],
        "known": [{"number": number, "row": row} for row in range(rows)],
        "values": [{"a": np.full(number, row), "b": "x"} if row else {"b": "y"} for row in range(rows)],
        "pixels": np.full((rows, 300_000), number, np.uint8),
    }
    return {"image": [b"x" * 9] * rows, **own} if number % 3 == 0 else own


def test_rows_of_puts_that_lie_in_two_ways_by_turns_are_read_in_their_order(node: StandingNode) -> None:
    names = list(columns(1))
    with dp.connect(node.address) as plane:
        refs = [plane.put(columns(number)).select(*names) for number in range(PUTS)]
        whole = dp.concat(refs)
        expected = {name: [row for number in range(PUTS) for row in _plain(columns(number)[name])] for name in names}
        for picked in (range(len(whole)), [0, 0, 79, 3, 17, *range(20, 70), 2], range(len(whole) - 1, -1, -1)):
            batch = plane.get(whole if picked == range(len(whole)) else whole[list(picked)])
            for name in names:
                assert batch[name].to_list() == [expected[name][row] for row in picked], name
        assert len(plane.get(whole)["n"].reading.parts) == 2  # in one pass each, of 40 puts


def _plain(rows: Any) -> list[Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return value.tolist() if isinstance(value, np.ndarray) else value

    return [plain(row) for row in rows]
