"""A tiny vision-language model and its processor: Qwen2-VL's code, one layer each, made here and not downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

WORDS = 64
_SPECIAL = ["<unk>", "<pad>", "<eos>", "<vision>", "</vision>", "<image>", "<video>"]
_IMAGE = _SPECIAL.index("<image>")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of `WORDS` words, separated by white space."""
    words = {word: i for i, word in enumerate([*_SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


class Processor:
    """Qwen2-VL's processor without video: converts text and pictures to token ids and patches."""

    def __init__(self, side: int) -> None:
        """side: pictures are scaled to about `side * side` pixels."""
        self.tokenizer = make_tokenizer()
        self.image_processor = Qwen2VLImageProcessorPil(min_pixels=side * side, max_pixels=side * side)
        self.pad_token_id = self.tokenizer.pad_token_id
        self.eos_token_id = self.tokenizer.eos_token_id
        self.calls = 0

    def __call__(self, text: Any, images: Any = None, **_: Any) -> dict[str, Any]:
        self.calls += 1
        (prompt,) = text if isinstance(text, list) else [text]
        patches: dict[str, Any] = {}
        if images:
            patches = dict(self.image_processor(images=images, return_tensors="pt"))
            for grid in patches["image_grid_thw"].tolist():
                shown = grid[0] * grid[1] * grid[2] // self.image_processor.merge_size**2
                prompt = prompt.replace("<image>", " ".join(["<shown>"] * shown), 1)
        prompt = prompt.replace("<shown>", "<image>")
        return {"input_ids": self.tokenizer(prompt, return_tensors="pt")["input_ids"], **patches}

    def decode(self, tokens: Any, **options: Any) -> Any:
        return self.tokenizer.decode(tokens, **options)


def make_model(where: Path, seed: int = 0) -> None:
    """Write the model, with random weights, for `from_pretrained`."""
    torch.manual_seed(seed)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(_SPECIAL) + WORDS,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": _SPECIAL.index("<eos>"),
        },
        vision_config={
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
        },
        image_token_id=_IMAGE,
        video_token_id=_SPECIAL.index("<video>"),
        vision_start_token_id=_SPECIAL.index("<vision>"),
        vision_end_token_id=_SPECIAL.index("</vision>"),
        pad_token_id=_SPECIAL.index("<pad>"),
        eos_token_id=_SPECIAL.index("<eos>"),
    )
    Qwen2VLForConditionalGeneration(config).save_pretrained(where)
