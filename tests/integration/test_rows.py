"""`dataplane.integrations.rows`: handles that stand where dicts of tensors would."""

import copy
import gc
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import dataplane as dp
from dataplane.errors import Freed, Misuse, SchemaMismatch
from dataplane.integrations import process
from dataplane.integrations.rows import LazyRow, lazy_rows, put_rows, read_rows

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


def test_a_handle_reads_what_was_put_with_its_types(plane: dp.Plane) -> None:
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


def test_several_columns_make_a_row_by_their_names(plane: dp.Plane) -> None:
    ref = plane.put(
        {
            "pixel_values": [torch.ones(2, 3), torch.zeros(4, 3)],
            "varying": [torch.ones(2, 3), torch.zeros(4, 5)],
            "scalar": torch.arange(2),
            "text": ["a", "b"],
        }
    )
    row = lazy_rows(ref)[1]
    assert list(row) == ["pixel_values", "varying", "scalar", "text"]
    assert_same(
        row, {"pixel_values": torch.zeros(4, 3), "varying": torch.zeros(4, 5), "scalar": torch.tensor(1), "text": "b"}
    )


def test_a_pickled_handle_is_small_and_means_the_same(plane: dp.Plane) -> None:
    (handle,) = put_rows([image(1024)])
    sent = pickle.dumps(handle)
    assert len(sent) < 400
    assert pickle.loads(sent) == handle == copy.deepcopy(handle)
    assert hash(pickle.loads(sent)) == hash(handle)
    assert_same(pickle.loads(sent), dict(handle or {}))


def test_it_is_no_dict_and_one_element_to_numpy(plane: dp.Plane) -> None:
    handles = put_rows([image(), None, {}])
    assert isinstance(handles[0], Mapping)
    assert not isinstance(handles[0], dict)
    for given in (handles, handles[:1], [handles[0], handles[0]]):
        array = np.array(given, dtype=object)
        assert array.shape == (len(given),)
        assert array[0] is handles[0]
        assert np.concatenate([array, array])[len(given)] is handles[0]


def test_equal_rows_are_stored_once_and_are_one_memory(plane: dp.Plane) -> None:
    row = image(1024)
    handles = put_rows([dict(row) for _ in range(8)], repeated=True)
    assert plane.stats().memory_used < 2 * row["pixel_values"].nbytes
    batch = plane.get(dp.concat([handle.ref for handle in handles if handle]))
    assert len({row["pixel_values"].data_ptr() for row in read_rows(batch["inputs"]) if row}) == 1


def test_a_handle_keeps_nothing_in_place_but_its_tensors_do(plane: dp.Plane) -> None:
    (handle,) = put_rows([image(1024)])
    assert handle is not None
    pixels = handle["pixel_values"]
    assert plane.stats().pinned_bytes > 0
    pixels[0, 0] = 5.0  # private to this process, and as long as it lives
    assert pickle.loads(pickle.dumps(handle))["pixel_values"][0, 0] != 5.0
    del pixels
    gc.collect()
    assert plane.stats().pinned_bytes == 0
    assert handle["pixel_values"][0, 0] != 5.0


def test_neighbours_that_are_looked_into_in_turn_are_read_together(
    plane: dp.Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = put_rows([image() if row % 5 else {} for row in range(64)])
    reads = []
    monkeypatch.setattr(process.plane(), "get", lambda *a, of=plane.get, **k: reads.append(a) or of(*a, **k))
    found = [dict(handle.items()) for handle in handles if handle is not None]
    assert [bool(row) for row in found] == [bool(row % 5) for row in range(64)]
    assert len(reads) == 5  # of sixteen rows each, and once more where the first has nothing to hold it by
    del found
    gc.collect()
    assert plane.stats().pinned_bytes == 0


def test_a_row_beside_one_that_was_freed_is_read(plane: dp.Plane) -> None:
    row = image()
    handles = put_rows([row, image(), image()])
    assert handles[0] is not None
    assert handles[1] is not None
    plane.free(handles[1].ref)
    assert_same(dict(handles[0].items()), row)
    with pytest.raises(Freed):
        handles[1].read()


def test_what_the_schema_rules_out_is_answered_without_a_look(plane: dp.Plane) -> None:
    (handle,) = put_rows([image()])
    assert handle is not None
    plane.free(handle.ref)
    assert "image_bound" not in handle
    with pytest.raises(Freed):
        dict(handle)


def test_what_is_no_row_is_refused(plane: dp.Plane) -> None:
    ref = plane.put({"a": [1, 2]})
    with pytest.raises(Misuse, match="lazy_rows"):
        LazyRow(ref)
    with pytest.raises(SchemaMismatch):
        LazyRow(ref[0], "b")
    with pytest.raises(SchemaMismatch):
        put_rows([{"image": object()}])
    assert put_rows([]) == []
