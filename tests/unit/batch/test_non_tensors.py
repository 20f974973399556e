"""Stacks of what is no tensor: as tensordict's constructors make them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from dataplane.batch import non_tensors
from tests.cases import each_case

_VALUES: list[Any] = [None, 1, "a", {"a": [1]}, [1, 2], (1,), torch.ones(2), b"x"]


def theirs(values: list[Any]) -> Any:
    return NonTensorStack(*map(NonTensorData, values))


def attributes(value: Any) -> Any:
    """Everything that an object has, and what is in it, but for values."""
    if isinstance(value, list):
        return [attributes(each) for each in value]
    if not hasattr(value, "__dict__") or isinstance(value, torch.Tensor | type):
        return type(value)
    return type(value), {
        name: sorted(own.items(), key=repr) if name == "_non_tensordict" else attributes(own)
        for name, own in vars(value).items()
    }


@each_case("count", [0, 1, 2, 8])
def test_a_stack_has_what_tensordicts_own_has(count: int) -> None:
    values = _VALUES[:count]
    made, expected = non_tensors.stack(values), theirs(values)
    assert type(made) is type(expected)
    assert made.batch_size == expected.batch_size == torch.Size([count])
    assert attributes(made) == attributes(expected)
    assert all(a is b for a, b in zip(made.tolist(), values, strict=True) if not isinstance(b, list))


def test_a_stack_is_cut_joined_pickled_and_copied_as_any() -> None:
    made = TensorDict({"x": non_tensors.stack(list(range(6)))}, batch_size=[6])
    assert [part["x"].tolist() for part in made.chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert made[torch.tensor([3, 1])]["x"].tolist() == [3, 1]
    assert torch.cat([made, made[:1]])["x"].tolist() == [*range(6), 0]
    assert pickle.loads(pickle.dumps(made))["x"].tolist() == copy.deepcopy(made)["x"].tolist() == list(range(6))
    made.lock_()
    assert made.get("x").is_locked
    made.unlock_()
