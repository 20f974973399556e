"""The few tokens of Qwen2's vocabulary that a digit's picture and its name need."""

from __future__ import annotations

from collections.abc import Sequence

from examples.multimodal_grpo.patches import MERGE

VISION_START, VISION_END, IMAGE_PAD = 151652, 151653, 151655
IM_END = 151645
DIGIT_0 = 15  # and the other digits after it


def prompt(grid_thw: Sequence[int]) -> list[int]:
    """An image in a prompt: a placeholder for each square of patches that the model merges into one token."""
    frames, lines, columns = grid_thw
    return [VISION_START, *[IMAGE_PAD] * (frames * lines * columns // MERGE**2), VISION_END]


def response(digit: int) -> list[int]:
    """The answer as the model says it."""
    return [DIGIT_0 + digit, IM_END]


def text(response_ids: Sequence[int]) -> str:
    """What a response says, as text."""
    return "".join(str(token - DIGIT_0) for token in response_ids if token != IM_END)
