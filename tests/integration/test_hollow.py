"""A shard of which some rows are freed gives their memory back, and reads as before where it is not freed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import eventually

KIB = 1024


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[dp.Plane]:
    with dp.connect(config=dp.NodeConfig(memory="16MiB", spill="64MiB", spill_dir=tmp_path, prewarm=0)) as made:
        yield made


def columns(rows: int, source: np.random.Generator) -> dict[str, list[Any]]:
    """Of every kind, rows from nothing to some pages."""
    lengths = source.integers(0, 20 * KIB, rows).tolist()
    return {
        "dense": list(source.integers(0, 255, (rows, 5000), np.uint8)),
        "ragged": [source.integers(0, 255, n, np.uint8) for n in lengths],
        "shapes": [source.integers(0, 255, (n % 7, n // 7), np.uint8) for n in lengths],
        "text": ["x" * n for n in lengths],
        "bytes": [bytes([n % 251]) * n for n in lengths],
        "struct": [{"a": source.integers(0, 255, n, np.uint8)} if n % 3 else {"b": b"y" * n} for n in lengths],
        "object": [{"n": n, "z": "z" * n} if n % 2 else None for n in lengths],
    }


def stored(values: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: np.stack(column) if name == "dense" else column for name, column in values.items()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


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


@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_is_what_was_put(plane: dp.Plane, seed: int) -> None:
    """Of columns of every kind, rows and columns freed in any order; nothing of them stays in the end."""
    source, chance = np.random.default_rng(seed), random.Random(seed)
    values = columns(24, source)
    ref = plane.put(stored(values))
    left = {name: set(range(24)) for name in values}
    before = plane.stats().memory_used
    for _ in range(20):
        names = chance.sample(sorted(values), chance.randint(1, len(values)))
        rows = chance.sample(range(24), chance.randint(1, 5))
        plane.free(ref.select(*names)[rows])
        for name in names:
            left[name] -= set(rows)
        used = plane.stats().memory_used
        assert used <= before
        before = used
        for name, kept in left.items():
            if kept:
                got = plane.get(ref.select(name)[sorted(kept)])[name]
                assert all(same(a, values[name][row]) for a, row in zip(list(got), sorted(kept), strict=True)), name
                del got
        eventually(lambda: not plane.stats().pinned_bytes, "no view is left")
    plane.free(ref)
    assert (plane.stats().memory_used, plane.stats().shards) == (0, 0)


def test_a_view_keeps_the_memory_of_rows_that_are_freed(plane: dp.Plane) -> None:
    """Until it goes: then they go too."""
    ref = plane.put({"x": np.ones((64, 16 * KIB), np.uint8)})
    view = plane.get(ref)["x"].numpy()
    plane.free(ref[1:])
    assert plane.stats().memory_used == 64 * 16 * KIB
    assert view.all()
    del view
    eventually(lambda: plane.stats().memory_used == 16 * KIB, "all but one row is free")
    assert plane.get(ref[:1])["x"].numpy().all()


def test_what_is_left_goes_to_disk_and_comes_back(plane: dp.Plane) -> None:
    """As its pages would, those that it gave back as zeros; memory is counted once, there and back."""
    half = 2 << 20
    refs = [plane.put({"x": np.full((512, 8 * KIB), number, np.uint8)}) for number in range(3)]
    for ref in refs:
        plane.free(ref[256:])
    assert plane.stats().memory_used == 3 * half
    more = [plane.put({"x": np.zeros((512, 8 * KIB), np.uint8)}) for _ in range(3)]
    more += [plane.put({"x": np.zeros((512, 8 * KIB), np.uint8)}) for _ in range(3)]
    assert plane.stats().memory_used <= 16 << 20
    for number, ref in enumerate(refs):
        assert (plane.get(ref[:256])["x"].numpy() == number).all()
        with pytest.raises(dp.Freed):
            plane.get(ref[255:257])
    assert plane.stats().spilled_bytes
    for ref in refs + more:
        plane.free(ref)
    eventually(lambda: (plane.stats().memory_used, plane.stats().disk_used) == (0, 0), "all of it has gone")
