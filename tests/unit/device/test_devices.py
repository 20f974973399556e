"""Batches whose tensors are elsewhere. Torch's `meta` stands for a device where there is none: it has shapes alone."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dataplane.batch.batch import Batch
from dataplane.device.memory import bytes_tensor, lent
from dataplane.errors import SchemaMismatch
from tests.unit.batch.exact import local_batch


@pytest.fixture
def batch() -> Batch:
    return local_batch(
        {
            "dense": np.arange(12, dtype=np.float32).reshape(4, 3),
            "ragged": [[1, 2], [], [3], [4]],
            "images": [np.ones((2, n, 1), np.uint8) for n in range(4)],
            "struct": [{"x": float(i), "name": str(i)} for i in range(4)],
            "text": list("abcd"),
        }
    )


def test_numeric_columns_move_to_the_device_and_text_does_not(batch: Batch) -> None:
    there = batch.to("meta")
    assert {name: column.device for name, column in there.items()} == dict.fromkeys(batch, "meta")
    assert there["dense"].torch().device.type == "meta"
    assert there["dense"].torch() is there["dense"].torch()
    assert there["dense"].torch().shape == (4, 3)
    values, offsets = there["ragged"].packed()
    assert (values.device.type, values.shape, offsets.shape) == ("meta", (4,), (5,))
    assert {row.device.type for row in there["images"].torch()} == {"meta"}
    records = there["struct"].torch()
    assert {record["x"].device.type for record in records} == {"meta"}
    assert [record["name"] for record in records] == list("0123")
    assert there["text"].to_list() == list("abcd")
    with pytest.raises(SchemaMismatch):
        there["text"].torch()


def test_host_values_are_unchanged_by_a_move_to_a_device(batch: Batch) -> None:
    there = batch.to("meta")
    assert there.schema == batch.schema
    assert there.to_dict() == batch.to_dict()
    assert torch.equal(there.to("cpu")["dense"].torch(), batch["dense"].torch())
    assert there["dense"][1:3].torch().device.type == "meta"
    assert there["dense"][::-2].torch().shape == (2, 3)


def test_the_device_argument_of_a_call_determines_its_tensor(batch: Batch) -> None:
    column = batch["dense"]
    assert column.torch(device="meta").device.type == "meta"
    assert column.torch(device="cpu") is column.torch()
    assert column.to("meta").torch(device="cpu").tolist() == column.to_list()


def test_read_only_memory_is_shared_with_torch_without_a_copy() -> None:
    array = np.arange(6, dtype=np.int16)
    array.setflags(write=False)
    tensor = torch.from_numpy(lent(array[1:]))
    assert np.shares_memory(tensor.numpy(), array)
    del array
    assert tensor.tolist() == [1, 2, 3, 4, 5]
    assert bytes_tensor(np.empty(0, np.uint8)).shape == (0,)
