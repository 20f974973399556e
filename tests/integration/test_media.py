"""Images through a node: put, stored once, and got."""

from __future__ import annotations

from typing import Any

import pytest

import dataplane as dp
from tests.unit.batch.pictures import file, is_lazy, noise, opened

NODE = {"memory": "32MiB", "spill": 0}
PROMPTS, RESPONSES = 4, 8


def files() -> list[bytes]:
    """An image file a prompt."""
    return [file(noise("RGB", (200, 150), seed)) for seed in range(PROMPTS)]


def rollouts() -> dict[str, Any]:
    """The responses of some prompts, each with the messages so far and the images of its prompt."""
    rows = [(opened(data), i) for data in files() for i in range(RESPONSES)]
    return {
        "prompt": [
            [
                {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]},
                {"role": "assistant", "content": f"Answer {i}."},
            ]
            for image, i in rows
        ],
        "multi_modal_data": [{"images": [image], "videos": None} for image, _ in rows],
        "score": [i / RESPONSES for _, i in rows],
    }


def same(batch: dp.Batch, columns: dict[str, Any], rows: list[int] | None = None) -> bool:
    picked = range(PROMPTS * RESPONSES) if rows is None else rows
    return all(batch[name].to_list() == [values[row] for row in picked] for name, values in columns.items())


def logical() -> int:
    """The bytes of the images of all rows, as often as they are put."""
    return 2 * RESPONSES * sum(map(len, files()))


@pytest.mark.usefixtures("empty")
def test_images_are_stored_once_and_round_trip(plane: Any) -> None:
    columns = rollouts()
    ref = plane.put(columns)
    assert plane.stats().memory_used < logical() / RESPONSES * 1.05 + 32 * 1024
    batch = plane.get(ref)
    assert is_lazy(batch["multi_modal_data"].to_list()[0]["images"][0])
    assert same(batch, columns)
    picked = [9, 3, 3, 31]
    assert same(plane.get(ref[picked]), columns, picked)
    given = plane.get(ref[8:9])["multi_modal_data"].to_list(decode=False)
    assert given == [{"images": [{"bytes": files()[1], "path": None}], "videos": None}]
    again = plane.put(batch)
    assert same(plane.get(again), columns)
    plane.free(ref)
    plane.free(again)
