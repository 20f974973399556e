from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane.batch.columns import plan, values_of
from dataplane.batch.local import local_batch
from dataplane.errors import SchemaMismatch
from tests.unit.batch.exact import same


def _entries() -> dict[str, Any]:
    return {
        "tokens": torch.nested.nested_tensor([torch.arange(2), torch.arange(4)], layout=torch.jagged),
        "dense": torch.rand(2, 3).to(torch.bfloat16),
        "answer": NonTensorStack("a", "b"),
        "same": NonTensorData("s", batch_size=[2]),
        "images": NonTensorStack(NonTensorData(torch.ones(2, 3)), NonTensorData(torch.ones(1, 4))),
        "inputs": NonTensorStack(NonTensorData({"p": torch.ones(2, 3)}), NonTensorData({"q": 1})),
        "nested": TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2, 2)}}, batch_size=[2]),
    }


def test_a_tensordict_becomes_columns() -> None:
    batch = local_batch(TensorDict(_entries(), batch_size=[2]))
    assert {name: field.kind for name, field in batch.schema.items()} == {
        "tokens": "ragged",
        "dense": "dense",
        "answer": "text",
        "same": "text",
        "images": "ragged",
        "inputs": "struct",
        "nested": "struct",
    }
    assert batch["same"].to_list() == ["s", "s"]
    assert batch["nested"].to_list() == [{"a": 0, "b": {"c": [1, 1]}}, {"a": 1, "b": {"c": [1, 1]}}]
    assert same(batch["images"].torch(), [torch.ones(2, 3), torch.ones(1, 4)])


def test_a_batch_becomes_a_tensordict_and_comes_back() -> None:
    batch = local_batch(TensorDict(_entries(), batch_size=[2]))
    out = batch.to_tensordict()
    assert isinstance(out, TensorDict)
    assert out.batch_size == torch.Size([2])
    assert same(out["dense"], batch["dense"].torch())
    assert out.get("answer").tolist() == ["a", "b"]
    assert same(out.get("inputs").tolist()[0]["p"], torch.ones(2, 3))
    again = local_batch(out)
    assert {**again.schema, "nested": None} == {**batch.schema, "nested": None}  # a struct comes out as dicts
    assert same(again.to_dict(), batch.to_dict())


def test_a_tensordict_as_a_column_is_a_struct() -> None:
    batch = local_batch({"inputs": TensorDict({"a": torch.arange(3)}, batch_size=[3]), "i": [1, 2, 3]})
    assert batch["inputs"].to_list() == [{"a": 0}, {"a": 1}, {"a": 2}]


def test_no_rows() -> None:
    batch = local_batch(TensorDict({"a": torch.zeros(0, 3)}, batch_size=[0]))
    assert len(batch) == 0
    assert batch.to_tensordict().batch_size == torch.Size([0])
    assert local_batch({"a": np.zeros(0), "t": []}).to_tensordict().batch_size == torch.Size([0])


def test_a_tensordict_without_a_batch_dimension_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="batch dimension"):
        plan(TensorDict({"a": torch.zeros(2)}, batch_size=[]))
    with pytest.raises(SchemaMismatch, match="batch dimension") as caught:
        values_of("x", TensorDict({"a": torch.zeros(2)}, batch_size=[]))
    assert caught.value.column == "x"
