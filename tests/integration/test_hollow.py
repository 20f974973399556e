"""A shard of which some rows are freed gives their memory back, and reads as before where it is not freed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from tests.processes import eventually

KIB = 1024


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[dp.Plane]:
    with dp.connect(config=dp.NodeConfig(memory="16MiB", spill="64MiB", spill_dir=tmp_path, prewarm=0)) as made:
        yield made


def test_of_256_rows_one_is_left(plane: dp.Plane) -> None:
    row = 16 * KIB
    ref = plane.put({"x": np.arange(256 * row, dtype=np.uint8).reshape(256, row)})
    assert plane.stats().memory_used == 256 * row
    plane.free(dp.concat([ref[:100], ref[101:]]))
    stats = plane.stats()
    assert stats.memory_used == row
    assert stats.memory_resident == row
    with pytest.raises(dp.Freed):
        plane.get(ref[99:101])
    assert np.array_equal(plane.get(ref[100])["x"].numpy()[0], np.arange(row, dtype=np.uint8))
    eventually(lambda: not plane.stats().pinned_bytes, "the view has gone")
    plane.free(ref)
    assert (plane.stats().memory_used, plane.stats().shards) == (0, 0)
