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


def test_pairs_are_columns_in_place(plane: dp.Plane) -> None:
    ids = [np.random.default_rng(n).integers(0, 150_000, (n, 8)) for n in (900, 1, 0, 700)]
    logprobs = [np.random.default_rng(n).random((len(row), 8), np.float32) for n, row in enumerate(ids)]
    ref = plane.put({"teacher": {"ids": ids, "logprobs": logprobs}, "x": [1, 2, 3, 4]}, narrow=["teacher"])
    teacher = plane.get(ref.slice_rows("teacher", 0, 100, 300)[[3, 0]])["teacher"]
    same(teacher["ids"], [ids[3][100:300], ids[0][100:300]])
    assert teacher["ids"].narrow().dtype == "int32"
    views = teacher["logprobs"].numpy()
    assert all(not row.flags.owndata and not row.flags.writeable for row in views)
    np.testing.assert_array_equal(views[1], logprobs[0][100:300])
    packed, offsets = teacher["logprobs"].packed()
    assert (tuple(packed.shape), offsets.tolist()) == ((400, 8), [0, 200, 400])
    again = plane.put({"teacher": teacher})
    np.testing.assert_array_equal(plane.get(again)["teacher"]["logprobs"].numpy()[1], views[1])
    with pytest.raises(dp.SchemaMismatch):
        teacher["absent"]
    partly = plane.get(plane.put({"p": [{"a": 1}, {}]}))["p"]
    with pytest.raises(dp.SchemaMismatch, match="row 1"):
        partly["a"]
    with pytest.raises(dp.SchemaMismatch):
        plane.put({"p": {"a": [1], "b": [1, 2]}})


def test_ranks_of_a_group_read_each_its_share(plane: dp.Plane) -> None:
    """Rows that several ranks mean are read once for all, also where each means another part of them."""
    from dataplane.collective.overlaps import read_once

    ref = plane.put({"r": ROWS, "x": [1, 2, 3, 4]}, narrow=True)
    starts = np.array([0, 0, 1, 50])
    asked = [ref.share_rows("r", 0, 2), ref.slice_rows("r", 0, starts), ref.share_rows("r", 0, 2)[::-1]]
    first, second, third = read_once(plane.get, asked)
    halves = [row[: -(-len(row) // 2)] for row in ROWS]
    same(first["r"], halves)
    same(second["r"], [row[start:] for row, start in zip(ROWS, starts, strict=True)])
    same(third["r"], halves[::-1])
