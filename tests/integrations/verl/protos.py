"""DataProtos for the tests, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from dataplane.integrations.verl.proto import same

MIXED = [1, None, "a", [1, 2], {"a": [1.0], 3: "b"}, (1, (2,)), 2.5, True]


def objects(values: Sequence[Any]) -> Any:
    """An array of them, one by one."""
    array = np.empty(len(values), object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def image(seed: int = 0, patches: int = 16) -> dict[str, Any]:
    pixels = torch.randn(patches, 1176, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, patches // 4]])}


def proto(rows: int = 8) -> DataProto:
    """Every kind of column that a DataProto has, text-only rows and rows without inputs among them."""
    inputs = [{**image(row), "fps": [2.0]} if row % 3 == 1 else None if row % 2 else {} for row in range(rows)]
    generator = torch.Generator().manual_seed(7)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.arange(rows * 4).view(rows, 4),
            "log_probs": torch.randn(rows, 4, generator=generator).bfloat16(),
            "mask": torch.ones(rows, 4, dtype=torch.bool),
            "position_ids": torch.arange(rows * 12).view(rows, 3, 4).transpose(1, 2),
        },
        non_tensors={
            "uid": objects([f"prompt-{row // 2}" for row in range(rows)]),
            "number": objects(list(range(rows))),
            "mixed": objects([MIXED[row % len(MIXED)] for row in range(rows)]),
            "raw_prompt": objects([[{"role": "user", "content": "ä" * row}] for row in range(rows)]),
            "extra_info": objects([{"index": row, "answer": None} for row in range(rows)]),
            "table": np.array([[row, "a"] for row in range(rows)], dtype=object),
            "score": np.arange(rows, dtype=np.float32),
            "name": np.array([f"n{row}" for row in range(rows)]),
            "multi_modal_inputs": objects(inputs),
        },
        meta_info={"temperature": 1.0, "metrics": {"loss": 1.0}, "anything": {1, 2}},
    )


def assert_same(got: DataProto, expected: DataProto) -> None:
    assert type(got) is DataProto
    assert (got.batch is None) == (expected.batch is None)
    assert len(got) == len(expected)
    if got.batch is not None:
        assert got.batch.batch_size == expected.batch.batch_size
        assert sorted(got.batch.keys()) == sorted(expected.batch.keys())
        for name in got.batch.keys():  # noqa: SIM118  a TensorDict iterates over its rows
            assert same(got.batch[name], expected.batch[name]), name
    assert sorted(got.non_tensor_batch) == sorted(expected.non_tensor_batch)
    for name, array in got.non_tensor_batch.items():
        assert same(array, expected.non_tensor_batch[name]), name
    assert got.meta_info == expected.meta_info
