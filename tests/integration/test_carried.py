"""Small shards are brought by the answer itself, and nothing is held for them; the others are held in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dataplane as dp
from tests.processes import StandingNode, eventually


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, memory="8MiB") as node:
        yield node


def test_what_came_stays_when_it_is_freed_and_the_plane_is_closed(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        refs = [plane.put({"x": [[row, 1]], "t": [f"text {row}"]}) for row in range(20)]
        batches = [plane.get(ref) for ref in (refs[3], dp.concat(refs), dp.concat(refs[:4]))]
        plane.free(dp.concat(refs))
        eventually(lambda: plane.stats().memory_used == 0, "nothing is held")
        for _ in range(100):
            plane.put({"x": [[9, 9]], "t": ["other"]})
    for batch, rows in zip(batches, ([3], range(20), range(4)), strict=True):
        assert batch["x"].to_list() == [[row, 1] for row in rows]
        assert batch["t"].to_list() == [f"text {row}" for row in rows]
