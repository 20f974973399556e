"""TensorDicts in and out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane.batch import tensordicts
from tests.unit.batch.exact import local_batch, same


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


def test_a_batch_round_trips_through_a_tensordict() -> None:
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


def test_a_stack_of_values_supports_tensordict_operations() -> None:
    made = TensorDict({"x": tensordicts.stack_of(list(range(6)))}, batch_size=[6])
    assert [part["x"].tolist() for part in made.chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert made[torch.tensor([3, 1])]["x"].tolist() == [3, 1]
    assert torch.cat([made, made[:1]])["x"].tolist() == [*range(6), 0]
    assert pickle.loads(pickle.dumps(made))["x"].tolist() == copy.deepcopy(made)["x"].tolist() == list(range(6))
    made.lock_()
    assert made.get("x").is_locked
    made.unlock_()
