"""From pixels to tokens, patches and bytes, as Qwen2-VL's processor cuts them.

An image is cut into patches of 14 x 14 pixels, each of which, with the three colours and two frames, is a float32 row
of 1176 values; four neighbours make one token of the model. Sides are rounded to whole tokens of 28 pixels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PATCH_BYTES = 1176 * 4
PATCHES_PER_TOKEN = 4
TOKEN_PIXELS = 28

# PolyTrace's generate.py (arXiv 2509.25279) has five sizes of video: prompts below so many tokens have so many of
# video. They are grids of 1x32x60, 2x32x60, 7x36x46, 9x36x46 and 10x36x46 patches. What is left is about 100 of text.
_VIDEO_BELOW = np.array([960, 1500, 3500, 4000])
_VIDEO_TOKENS = np.array([480, 960, 2898, 3726, 4140])


def image_patches(height: int, width: int) -> int:
    """Of an image of so many pixels: 448 x 448 has 1024, 1024 x 1024 has 5476."""
    return PATCHES_PER_TOKEN * max(1, round(height / TOKEN_PIXELS)) * max(1, round(width / TOKEN_PIXELS))


def video_tokens(input_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many tokens of each prompt with a video are the video's; all, of one that is shorter than any video."""
    size: npt.NDArray[np.int64] = _VIDEO_TOKENS[np.searchsorted(_VIDEO_BELOW, input_tokens, side="right")]
    return np.minimum(size, input_tokens)
