"""Reading ahead: what a reference means is in memory by the time that it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import dataplane as dp
from tests.processes import MIB, eventually, pattern


def test_prefetched_shards_are_restored_before_they_are_read(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="8MiB", spill="64MiB", spill_dir=tmp_path, prewarm=0)
    with dp.connect(config=config) as plane:
        refs = [plane.put({"x": pattern(i, 2 * MIB, 2)}) for i in range(8)]
        eventually(lambda: plane.stats().spilled_shards, "some are on disk")
        restored = plane.stats().restored_bytes
        for ref in refs:  # some of them are there, and some not
            plane.prefetch(ref)
        eventually(lambda: plane.stats().restored_bytes > restored, "they come by themselves")
        for i, ref in enumerate(refs):
            assert (np.stack(plane.get(ref)["x"].numpy()) == pattern(i, 2 * MIB, 2)).all()
