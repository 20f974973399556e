"""Narrow integers, slices and pairs through puts, streams, tables, devices and groups of one host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp

ROWS = [np.random.default_rng(n).integers(0, 200, (n, 5, 2)) for n in (7, 0, 3, 100)]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[dp.Plane]:
    with dp.connect(config=dp.NodeConfig(memory="32MiB", spill=0, prewarm=0, spill_dir=tmp_path)) as plane:
        yield plane


def same(column: Any, rows: list[Any]) -> None:
    for found, row in zip(column.numpy(), rows, strict=True):
        np.testing.assert_array_equal(found, row)
        assert found.dtype == np.int64


def test_a_stream_of_blocks_of_several_widths_and_a_sliced_reference(plane: dp.Plane) -> None:
    stream = plane.stream("s", tasks=["t"])
    large = [np.random.default_rng(n).integers(-5, 200, (2000, 5, 2)) for n in range(4)]
    stream.append({"r": ROWS, "x": [1, 2, 3, 4]}, narrow=True)
    stream.append({"r": [row * 300 for row in ROWS], "x": [1, 2, 3, 4]}, narrow=["r"])
    stream.append({"r": large, "x": [1, 2, 3, 4]}, narrow="r")
    stream.append(plane.put({"r": large, "x": [1, 2, 3, 4]}).slice_rows("r", 0, 1, 3))
    with stream.appender(narrow=True) as appender:
        for row in ROWS:
            appender.send({"r": [row], "x": [7]})
    with stream.consume("t", rows=20, columns=["r", "x"], min_rows=20) as delivery:
        assert repr(delivery.ref.schema["r"]) == "ragged int64 [*, 5, 2]"
        every = [*ROWS, *(row * 300 for row in ROWS), *large, *(row[1:3] for row in large), *ROWS]
        batch = delivery.get()
        same(batch["r"], every)
        stream.extend(delivery.ref, {"score": np.arange(20)}, narrow=True)
        last = delivery.ref.slice_rows("r", 0, -2)[::-1]
        same(plane.get(last)["r"], [row[-2:] for row in every[::-1]])


def test_into_tensors_of_the_callers(plane: dp.Plane) -> None:
    import torch

    ref = plane.put({"r": ROWS, "d": np.arange(40).reshape(4, 10)}, narrow=True)
    mine = ref.share_rows("r", 1, 2, zigzag=True).slice_rows("d", 0, 2, 5)
    batch = plane.get(mine)
    wide, narrow = np.empty_like(batch["r"].packed()[0].numpy()), torch.empty(len(batch["r"].packed()[0]), 5, 2).byte()
    dense = np.empty((4, 3), np.int64)
    plane.get(mine, out={"r": wide, "d": dense})
    plane.get(mine, out={"r": narrow})
    np.testing.assert_array_equal(wide, np.concatenate(batch["r"].numpy()))
    np.testing.assert_array_equal(narrow.numpy(), wide)
    np.testing.assert_array_equal(dense, np.arange(40).reshape(4, 10)[:, 2:5])
    with pytest.raises(dp.SchemaMismatch):
        plane.get(mine, out={"r": np.empty(wide.shape, np.int16)})
    moved = plane.get(mine, device="cpu")
    assert moved["r"].torch().values().tolist() == wide.tolist()
