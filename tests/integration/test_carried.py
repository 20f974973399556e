"""Small shards are brought by the answer itself, and nothing is held for them; the others are held in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.wire import messages as m
from tests.processes import StandingNode, eventually


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, memory="8MiB") as node:
        yield node


def sent(plane: dp.Plane) -> list[str]:
    """The kinds of messages that the plane sends from now on."""
    found: list[str] = []
    channel = plane._plane._connection._channel
    send = channel.send

    def noting(message: Any, *more: Any) -> None:
        found.append(type(message).__name__)
        send(message, *more)

    channel.send = noting
    return found


@pytest.mark.parametrize("more", [0, 1])
def test_what_is_larger_than_an_answer_carries_is_held(node: StandingNode, more: int) -> None:
    values = np.arange(m.MAX_CARRIED // 2 + 32 * more, dtype=np.uint16).reshape(2, -1)
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": values})
        kinds = sent(plane)
        batch = plane.get(ref)
        found = batch["x"].numpy()
        assert (found == values).all()
        assert not found.flags.writeable
        assert (plane.stats().pinned_bytes > 0) == bool(more)
        del batch, found
        assert kinds == (["Pin", "Stats", "Unpin"] if more else ["Pin", "Stats"])


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


def test_tensors_of_what_came_are_writable_and_arrays_of_it_stay(node: StandingNode) -> None:
    pytest.importorskip("torch")
    with dp.connect(node.address) as plane:
        batch = plane.get(plane.put({"x": np.arange(8, dtype=np.int64)}))
        tensor = batch["x"].torch()
        tensor[:] = 7
        assert batch["x"].torch().tolist() == [7] * 8
        assert batch["x"].numpy().tolist() == list(range(8))
