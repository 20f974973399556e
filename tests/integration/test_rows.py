"""`dataplane.integrations.rows`: handles that stand where dicts of tensors would."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import dataplane as dp
from dataplane.batch.concat import concat
from dataplane.errors import Misuse, SchemaMismatch
from dataplane.integrations import process
from dataplane.integrations.rows import LazyRow, lazy_rows, put_rows

pytestmark = pytest.mark.leaks(reason="a node of this process ends a moment after its last client")


@pytest.fixture
def plane() -> Iterator[dp.Plane]:
    process.close()
    yield process.start(dp.NodeConfig(memory="64MiB", spill=0, prewarm=0))
    process.close()


def image(patches: int = 16) -> dict[str, Any]:
    return {"pixel_values": torch.randn(patches, 1176), "image_grid_thw": torch.tensor([[1, 4, patches // 4]])}


def assert_same(got: Mapping[Any, Any], expected: Mapping[Any, Any]) -> None:
    assert set(got) == set(expected)
    for key, value in expected.items():
        assert type(got[key]) is type(value), key
        if isinstance(value, torch.Tensor):
            assert got[key].dtype == value.dtype
            assert torch.equal(got[key], value)
        elif isinstance(value, np.ndarray):
            assert got[key].dtype == value.dtype
            np.testing.assert_array_equal(got[key], value)
        else:
            assert got[key] == value


def test_a_lazy_row_reads_the_values_and_types_that_were_put(plane: dp.Plane) -> None:
    rows: list[dict[Any, Any] | None] = [
        {**image(), "bf16": torch.randn(2, 3).bfloat16(), "scalar": torch.tensor(3.0), "grads": torch.ones(2)},
        {"array": np.arange(3, dtype=np.int32), "fps": [1.0, 2.0], "absent": None, "name": "a", 7: "seven", "": 1},
        None,
        {},
        image(32),
    ]
    handles = put_rows(rows)
    assert handles[2] is None
    for handle, row in zip(handles, rows, strict=True):
        if row is not None:
            assert handle is not None
            assert_same(handle, row)
            assert_same(dict(handle.items()), row)
            assert len(handle) == len(row)
            assert len(list(handle.values())) == len(row)
            assert handle.get("nothing", 5) == 5
            with pytest.raises(KeyError):
                handle["nothing"]


def test_lazy_rows_keep_arrays_that_differ_from_row_to_row_or_from_torch(plane: dp.Plane) -> None:
    rows: list[dict[Any, Any]] = [
        {"grid": np.arange(3, dtype=np.int32), "sound": np.arange(3, dtype=">f4"), "size": np.ones(2)},
        {"grid": np.arange(3, dtype=np.int64), "sound": np.arange(2, dtype=">f4"), "size": torch.ones(2)},
        {"grid": np.ones((2, 2), np.int32)},
    ]
    for handle, row in zip(put_rows(rows), rows, strict=True):
        assert handle is not None
        assert_same(handle, row)
        assert_same(handle.read(), row)


def test_a_lazy_row_is_read_without_its_neighbours() -> None:
    process.close()
    plane = process.start(dp.NodeConfig(memory="8MiB", spill="64MiB", prewarm=0))
    ref = concat([plane.put({"image": [{"pixels": torch.full((1 << 18,), float(i))}]}) for i in range(16)])
    assert [float(row["pixels"][0]) for row in lazy_rows(ref, "image")] == [float(i) for i in range(16)]
    process.close()


def test_invalid_lazy_rows_are_refused(plane: dp.Plane) -> None:
    ref = plane.put({"a": [1, 2]})
    with pytest.raises(Misuse, match="lazy_rows"):
        LazyRow(ref, "a")
    with pytest.raises(SchemaMismatch):
        LazyRow(ref[0], "b")
    with pytest.raises(SchemaMismatch):
        put_rows([{"image": object()}])
    assert put_rows([]) == []
