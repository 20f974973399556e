"""Qwen2-VL's processor, images alone: its part for video needs torchvision, which nothing here does."""

from __future__ import annotations

from typing import Any

from transformers import AutoProcessor, Qwen2VLConfig
from transformers.models.qwen2_vl import processing_qwen2_vl


class Qwen2VLProcessor(processing_qwen2_vl.Qwen2VLProcessor):  # verl looks at the name
    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


AutoProcessor.register(Qwen2VLConfig, Qwen2VLProcessor, exist_ok=True)
