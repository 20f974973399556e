"""Shards of many rows, of which some were freed: the rest is readable, on their own host and on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.integration.test_hosts import Host, together
from tests.processes import StandingNode

ROWS = 20_000_000


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[dp.Plane]:
    with StandingNode(tmp_path, memory="64MiB", spill=0) as node, dp.connect(node.address) as plane:
        yield plane


def values() -> Any:
    return (np.arange(ROWS, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)


def one_row() -> Any:
    return np.array([ROWS // 3])


def every_second() -> Any:
    return np.arange(0, ROWS, 2)


def random_rows() -> Any:
    return np.unique(np.random.default_rng(0).integers(0, ROWS, 300_000))


@pytest.mark.long
@pytest.mark.parametrize("freed", [one_row, every_second, random_rows])
def test_of_a_shard_of_20_million_rows_all_is_readable_but_what_was_freed(
    plane: dp.Plane, freed: Callable[[], Any]
) -> None:
    written, gone = values(), freed()
    ref = plane.put({"x": written})
    plane.free(ref[gone])
    left = np.ones(ROWS, np.bool_)
    left[gone] = False
    there = np.flatnonzero(left)
    if len(gone) == 1:
        first, second = ref[: gone[0]], ref[gone[0] + 1 :]
        for part, expected in ((first, written[: gone[0]]), (second, written[gone[0] + 1 :])):
            assert np.array_equal(plane.get(part)["x"].numpy(), expected)
    else:
        assert np.array_equal(plane.get(ref[there])["x"].numpy(), written[there])
    for row in (gone[0], gone[len(gone) // 2], gone[-1]):
        with pytest.raises(dp.Freed, match=f"row {row} of shard"):
            plane.get(ref[int(row) : int(row) + 1])
    with pytest.raises(dp.Freed, match=f"row {gone[0]} of shard"):
        plane.get(ref)
    with pytest.raises(dp.Freed, match=f"row {gone[-1]} of shard"):
        plane.get(ref[np.array([there[0], gone[-1]])])
    assert plane.stats().pinned_bytes == 0
    plane.free(ref)
    assert plane.stats().shards == 0


def test_a_shard_of_20_million_rows_is_readable_on_another_host_but_for_what_was_freed(tmp_path: Path) -> None:
    large = {"memory": "64MiB"}
    with (
        Host(tmp_path / "0", **large) as one,
        Host(tmp_path / "1", one, **large) as two,
        dp.connect(one.address) as a,
        dp.connect(two.address) as b,
    ):
        together(a, b)
        ref, gone = a.put({"x": values()}), random_rows()
        a.free(ref[gone])
        start = int(gone[7]) + 1
        part = slice(start, int(gone[8]))
        assert np.array_equal(b.get(ref[part])["x"].numpy(), values()[part])
        with pytest.raises(dp.Freed, match=f"row {gone[7]} of shard"):
            b.get(ref[start - 1 : start])
