"""A Qwen2-VL of 84,000 random parameters, with prompts and random images in the layout of the real model's."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

VOCABULARY, BOS, EOS, PAD, IMAGE, VISION_START, VISION_END = 128, 1, 2, 0, 120, 122, 123
PATCH_VALUES = 3 * 2 * 14 * 14  # a patch of 14 x 14 in three colours and two frames


def make_model() -> Any:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=121,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return Qwen2VLForConditionalGeneration(config).eval()


def process(seed: int, side: int) -> dict[str, torch.Tensor]:
    """The patches `[n, 1176]` of a random image of `side` x `side` pixels, and their grid `[1, 3]`."""
    rows = side // 14
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(rows * rows, PATCH_VALUES, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, rows]])}


def prompt(seed: int, side: int) -> list[int]:
    """The tokens of image and question, with a placeholder for each four patches."""
    question = [5 + seed % 50, 60, 61]
    return [BOS, VISION_START, *[IMAGE] * (side // 28) ** 2, VISION_END, *question]


def forward(model: Any, tokens: torch.Tensor, mask: torch.Tensor, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits, `[rows, tokens, VOCABULARY]`. pixels: of all rows, concatenated."""
    logits: torch.Tensor = model(
        input_ids=tokens, attention_mask=mask, mm_token_type_ids=(tokens == IMAGE).int(), **pixels
    ).logits
    return logits
