"""Experiences as OpenRLHF makes them, and whether two are the same in everything."""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

PATCHES = 64


def inputs(seed: int = 0, patches: int = PATCHES) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.rand(patches, 1176, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, patches // 8]])}


def experience(samples: int = 4, tokens: int = 9, seed: int = 0, **fields: Any) -> Experience:
    """A micro batch after all phases; the samples are answers to one prompt."""
    draw = torch.Generator().manual_seed(seed)
    of_steps = (samples, tokens - 1)
    made: dict[str, Any] = {
        "sequences": torch.randint(0, 99, (samples, tokens), generator=draw),
        "attention_mask": torch.ones(samples, tokens, dtype=torch.long),
        "action_mask": torch.rand(of_steps, generator=draw) > 0.5,
        "action_log_probs": torch.randn(of_steps, generator=draw),
        "base_action_log_probs": torch.randn(of_steps, generator=draw).bfloat16(),
        "values": torch.randn(of_steps, generator=draw).double(),
        "returns": torch.full(of_steps, float("nan")),
        "rewards": torch.rand(samples, generator=draw),
        "truncated": torch.zeros(samples, dtype=torch.bool),
        "total_length": torch.full((samples,), float(tokens)),
        "index": list(range(samples)),
        "prompts": [f"how many, été {i}?" for i in range(samples)],
        "labels": ["7", "", None, "x"][:samples] + ["y"] * (samples - 4),
        "images": [["a.png"], None, [], ["b.png", "c.png"]][:samples] + [None] * (samples - 4),
        "mm_train_inputs": [{name: each.clone() for name, each in inputs(seed).items()} for _ in range(samples)],
        "info": {"kl": torch.rand(samples, generator=draw), "reward": torch.rand(samples, generator=draw)},
    }
    return Experience(**(made | fields))


def same(a: Any, b: Any) -> bool:
    """Whether they are equal in type, shape, dtype, bits and order, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Experience):
        return same(a.__dict__, b.__dict__)
    return bool(a == b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
