"""Tokens, patches and bytes of images and videos, as of Qwen2-VL's processor.

An image is cut into patches of 14 x 14 pixels. A patch, with three colours and two frames, is a float32 row of 1176
values. Four adjacent patches are one token of the model. Sides are rounded to whole tokens of 28 pixels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PATCH_BYTES = 1176 * 4
PATCHES_PER_TOKEN = 4

# PolyTrace's generate.py (arXiv 2509.25279) has five sizes of video, chosen by the tokens of the prompt: grids of
# 1x32x60, 2x32x60, 7x36x46, 9x36x46 and 10x36x46 patches. About 100 tokens of text are left.
_VIDEO_BELOW = np.array([960, 1500, 3500, 4000])
_VIDEO_TOKENS = np.array([480, 960, 2898, 3726, 4140])


def video_tokens(input_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The tokens of the video in each prompt; all tokens of a prompt that is shorter than any video."""
    size: npt.NDArray[np.int64] = _VIDEO_TOKENS[np.searchsorted(_VIDEO_BELOW, input_tokens, side="right")]
    return np.minimum(size, input_tokens)
