"""The tokens of Qwen2's vocabulary that prompts and answers use."""

from __future__ import annotations

from collections.abc import Sequence

from examples.multimodal_grpo.patches import MERGE

VISION_START, VISION_END, IMAGE_PAD = 151652, 151653, 151655
IM_END = 151645
DIGIT_0 = 15  # the other digits follow


def prompt(grid_thw: Sequence[int]) -> list[int]:
    """The token ids of a prompt with one image: a placeholder for each 2 x 2 square of patches."""
    frames, lines, columns = grid_thw
    return [VISION_START, *[IMAGE_PAD] * (frames * lines * columns // MERGE**2), VISION_END]


def response(digit: int) -> list[int]:
    """The token ids of an answer."""
    return [DIGIT_0 + digit, IM_END]


def text(response_ids: Sequence[int]) -> str:
    """The text of a response."""
    return "".join(str(token - DIGIT_0) for token in response_ids if token != IM_END)
