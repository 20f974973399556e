"""What the backend tells TransferQueue of fields is what TransferQueue says of them itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue.metadata import BatchMeta, extract_field_schema

from dataplane.integrations.verl import hooks
from dataplane.integrations.verl.entries import _says_the_same, schema_of


def _fields() -> dict[str, Any]:
    jagged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    strided = torch.nested.as_nested_tensor([torch.ones(2, 1), torch.ones(3, 2)], layout=torch.strided)
    return {
        "scalars": torch.arange(2),
        "dense": torch.zeros(2, 3, 4, dtype=torch.bfloat16),
        "empty": torch.zeros(2, 0),
        "jagged": jagged,
        "strided": strided,
        "text": NonTensorStack("a", "b"),
        "one for all": NonTensorData("a", batch_size=[2]),
    }


def test_a_field_schema_equals_that_of_transfer_queue() -> None:
    for names in (*([name] for name in _fields()), list(_fields())):
        data = TensorDict({name: _fields()[name] for name in names}, batch_size=[2])
        assert schema_of(data) == extract_field_schema(data), names


def test_schema_shortcuts_agree_with_the_installed_transfer_queue() -> None:
    """Else all that is said is said by it, and what is above compares it with itself."""
    assert _says_the_same()
    assert hooks._adds_the_same()


def test_fields_are_added_to_metadata_as_transfer_queue_adds_them() -> None:
    data = TensorDict({"b": torch.arange(2), "a": NonTensorStack("x", "y")}, batch_size=[2])
    schema = {"c": {"dtype": torch.int64, "shape": torch.Size([3]), "is_nested": False, "is_non_tensor": False}}
    ours = BatchMeta(global_indexes=[0, 1], partition_ids=["p", "p"], field_schema=schema)
    theirs = copy.deepcopy(ours)
    hooks._added(ours, schema_of(data))
    theirs.add_fields(data)
    for name in BatchMeta.__slots__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert mine.tolist() == other.tolist() if hasattr(mine, "tolist") else mine == other, name
