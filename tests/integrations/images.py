"""Trajectories whose responses share their prompt's image."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

PATCHES = 112  # of 1176 float32: half a mebibyte
IMAGE = PATCHES * 1176 * 4
PAGES = 64 << 10  # bytes, more than all else of a row takes


def pixels(prompt: int) -> dict[str, Any]:
    """What the processor makes of a prompt's image: new memory each time."""
    made = torch.randn(PATCHES, 1176, generator=torch.Generator().manual_seed(prompt))
    return {"pixel_values": made, "image_grid_thw": torch.tensor([[1, 8, 14]])}


def trajectories(prompts: list[int]) -> TensorDict:
    """A response of each of these prompts."""
    inputs = [NonTensorData(pixels(prompt)) for prompt in prompts]
    ids = torch.nested.as_nested_tensor([torch.arange(5 + prompt) for prompt in prompts], layout=torch.jagged)
    return TensorDict({"multi_modal_inputs": NonTensorStack(*inputs), "input_ids": ids}, batch_size=[len(prompts)])


def check(queue: Any, partition: str, keys: list[str], prompts: list[int]) -> None:
    """Fails where these keys do not read as responses of these prompts."""
    got = queue.kv_batch_get(keys=keys, partition_id=partition)
    for entry, ids, prompt in zip(got["multi_modal_inputs"], got["input_ids"].unbind(), prompts, strict=True):
        found = entry if isinstance(entry, dict) else entry.data
        assert torch.equal(found["pixel_values"], pixels(prompt)["pixel_values"])
        assert torch.equal(found["image_grid_thw"], pixels(prompt)["image_grid_thw"])
        assert torch.equal(ids, torch.arange(5 + prompt))
