"""TensorDicts in and out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane.batch import tensordicts
from tests.cases import each_case
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


@each_case(
    ("data", "rows"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([[1], [], [2, 3]], [[1], [], [2, 3]]),
        (["a", "b", "c"], ["a", "b", "c"]),
        (np.array(["2020-01-01", "2021-01-01", "2022-01-01"], "datetime64[D]"), None),
        (np.arange(6).reshape(3, 2).astype("timedelta64[s]"), None),
        (np.array(["a", "b", "c"]), ["a", "b", "c"]),
        (torch.arange(6).view(3, 2), [[0, 1], [2, 3], [4, 5]]),
        ("s", ["s", "s", "s"]),
        (None, [None, None, None]),
        ((1, 2, 3), [(1, 2, 3)] * 3),
        ({"a": 1}, [{"a": 1}] * 3),
    ],
    ids=repr,
)
def test_a_list_or_array_without_a_stack_has_a_value_for_each_row(data: object, rows: list[object] | None) -> None:
    batch = local_batch(TensorDict({"x": NonTensorData(data=data, batch_size=[3])}, batch_size=[3]))
    if isinstance(data, np.ndarray) and rows is None:
        assert batch["x"].numpy().dtype == data.dtype
        assert np.array_equal(batch["x"].numpy(), data)
    else:
        assert batch["x"].to_list() == rows


@each_case(
    ("rows", "layout"),
    [
        ([torch.ones(1), torch.ones(2)], torch.jagged),
        ([torch.ones(2, 1), torch.ones(2, 3)], torch.jagged),
        ([torch.ones(1, 2), torch.ones(3, 4)], torch.strided),
        ([torch.tensor(1), torch.tensor(2)], None),
    ],
    ids=["1-d", "one dimension varies", "two vary", "0-d"],
)
def test_rows_are_stacked_as_transferqueue_does(rows: list[torch.Tensor], layout: torch.layout | None) -> None:
    whole = tensordicts.stacked(rows)
    assert whole.is_nested == (layout is not None)
    assert layout is None or whole.layout == layout
    assert same(list(whole.unbind()), rows)


@each_case(
    "rows",
    [
        [torch.ones(2), torch.ones(2, dtype=torch.int64)],
        [torch.ones(2), torch.ones(2, 2)],
        [torch.ones(2), None],
        ["a", "b"],
        [[1], [2]],
    ],
    ids=["dtypes", "dimensions", "none", "text", "lists"],
)
def test_what_no_tensor_holds_exactly_is_a_stack_of_values(rows: list[object]) -> None:
    whole = tensordicts.stacked(rows)
    assert isinstance(whole, NonTensorStack)
    assert same(whole.tolist(), rows)


def test_a_stack_is_cut_joined_pickled_and_copied_as_any() -> None:
    made = TensorDict({"x": tensordicts.stack_of(list(range(6)))}, batch_size=[6])
    assert [part["x"].tolist() for part in made.chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert made[torch.tensor([3, 1])]["x"].tolist() == [3, 1]
    assert torch.cat([made, made[:1]])["x"].tolist() == [*range(6), 0]
    assert pickle.loads(pickle.dumps(made))["x"].tolist() == copy.deepcopy(made)["x"].tolist() == list(range(6))
    made.lock_()
    assert made.get("x").is_locked
    made.unlock_()
