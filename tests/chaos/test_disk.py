"""The spill disk full, and full no longer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from tests.processes import MIB, StandingNode, pattern


def test_a_full_disk_is_reported_in_backpressure_and_recovers(tmp_path: Path, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(4 * MIB - 64 * 1024))
    with (
        StandingNode(tmp_path, memory="8MiB", spill="64MiB", spill_dir=small_disk) as node,
        dp.connect(node.address) as plane,
    ):
        refs = [plane.put({"x": pattern(seed, MIB)}) for seed in range(8)]
        with pytest.raises(dp.Backpressure) as caught:
            plane.put({"x": pattern(8, MIB)}, timeout=0.3)
        assert "No space left" in caught.value.spill_error
        assert caught.value.spill_error in str(caught.value)
        assert "No space left" in plane.stats().spill_error
        assert plane.stats().disk_used == 0
        assert not list(small_disk.rglob("*.spill"))
        for seed, ref in enumerate(refs):  # it stayed in memory
            assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(seed, MIB))
        ballast.unlink()
        refs.append(plane.put({"x": pattern(8, MIB)}, timeout=60))
        assert plane.stats().spill_error == ""
        for seed, ref in enumerate(refs):
            assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(seed, MIB))
