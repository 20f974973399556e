"""A model's directory, a tokenizer of bytes and, for images, Qwen2-VL's processor in it; and data sets. All made
here: nothing is fetched, and nothing is learnt."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LETTERS = "abcdefghijklmnopqrstuvwxyz "
CUT = "!"
_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = 14


def ids() -> dict[str, int]:
    """The vocabulary: a token a byte, as Qwen's has without its merges, and the special ones."""
    from tokenizers import pre_tokenizers

    return {token: number for number, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL])}


def id_of(letter: str) -> int:
    return ids()["Ġ" if letter == " " else letter]


def make_model(directory: Path, *, images: bool) -> None:
    """Write what verl loads from `actor_rollout_ref.model.path`: no weights."""
    from transformers import Qwen2Tokenizer

    numbers = ids()
    directory.mkdir(exist_ok=True)
    Qwen2Tokenizer(
        vocab=numbers,
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=_SPECIAL,
        chat_template=_TEMPLATE,
    ).save_pretrained(directory)
    kind = "qwen2_vl" if images else "qwen2"
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": ["Qwen2VLForConditionalGeneration" if images else "Qwen2ForCausalLM"],
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": len(numbers),
        "image_token_id": numbers["<|image_pad|>"],
        "video_token_id": numbers["<|video_pad|>"],
        "vision_start_token_id": numbers["<|vision_start|>"],
        "vision_end_token_id": numbers["<|vision_end|>"],
    }
    if images:
        config["vision_config"] = {"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 1, "patch_size": PATCH}
        (directory / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": "Qwen2VLImageProcessor"})
        )
    (directory / "config.json").write_text(json.dumps(config))


def make_data(
    path: Path, prompts: int, *, image_side: int = 0, cut_every: int = 0, first: int = 0, smooth: bool = False
) -> None:
    """Write a data set of verl's columns; with images, one a prompt; `cut_every` as `server`. Bytes of an image are PNG
    of noise, which are as many as its pixels; smooth: JPEG, and about a fourteenth of them."""
    rows = []
    for index in range(first, first + prompts):
        cut = CUT if cut_every and index % cut_every == cut_every - 1 else ""
        row = {
            "data_source": "made_up",
            "prompt": [{"role": "user", "content": f"{'<image>' if image_side else ''}{cut}question {index}"}],
            "reward_model": {"style": "rule", "ground_truth": LETTERS[index % 3 :: 3]},
            "extra_info": {"index": index, "split": "made"},
        }
        if image_side:
            row["images"] = [{"bytes": _file(index, image_side, smooth=smooth), "path": None}]
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), path)


def _file(number: int, side: int, *, smooth: bool) -> bytes:
    from PIL import Image

    drawn = side // 16 if smooth else side
    image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (drawn, drawn, 3), np.uint8))
    held = io.BytesIO()
    image.resize((side, side), Image.Resampling.BICUBIC).save(held, "jpeg" if smooth else "png", quality=90)
    return held.getvalue()
