"""The patch rule, by the examples that the tables' source gives."""

from __future__ import annotations

import numpy as np

from bench.workloads import vision
from bench.workloads.generator import generate


def test_examples_of_the_rule() -> None:
    assert vision.image_patches(448, 448) == 1024
    assert vision.image_patches(1024, 1024) == 5476
    assert vision.video_patches(32, 448, 448) == 16384


def test_the_video_of_a_prompt_leaves_some_text() -> None:
    [step] = generate("video_understanding_7b", steps=1, prompts=500).steps
    assert set((step.input_tokens - step.vision_tokens).tolist()) <= set(range(95, 110))
    assert (step.patches == 4 * step.vision_tokens).all()
    assert set(step.vision_tokens.tolist()) == {480, 960, 3726, 4140}
    assert vision.video_tokens(np.array([100])).tolist() == [100]


def test_pixels_are_counted_once_a_prompt_and_once_a_response() -> None:
    [step] = generate("image_understanding", steps=1, prompts=200, samples=5).steps
    assert step.repeated_patch_bytes == 5 * step.patch_bytes == 5 * 4704 * int(step.patches.sum())
    assert ((step.images == 0) == (step.patches == 0)).all()
    assert (step.input_tokens > 0).all()
