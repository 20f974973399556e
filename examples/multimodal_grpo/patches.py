"""Images in the input format of Qwen2-VL: `pixel_values`, [n, 1176] patches of an image, and `image_grid_thw`, its
grid.

A patch is 14 x 14 pixels of 3 channels in 2 frames (of a still image, twice the same): 3 * 2 * 14 * 14 = 1176 numbers.
The four patches of a 2 x 2 square, which the model merges into one token, are adjacent. Images of different sizes have
different numbers of patches, so a batch of them is ragged.

The layout is that of `Qwen2VLImageProcessor._preprocess` in Hugging Face transformers
(`models/qwen2_vl/image_processing_qwen2_vl.py`), as are the mean and the deviation (CLIP's).
"""

from __future__ import annotations

import numpy as np

PATCH, FRAMES, CHANNELS, MERGE = 14, 2, 3, 2
PATCH_VALUES = CHANNELS * FRAMES * PATCH * PATCH

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)[:, None, None]
DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)[:, None, None]


def grid_of(height: int, width: int) -> tuple[int, int, int]:
    """`image_grid_thw` of an image: frames, lines and columns of patches. Raises ValueError for other sizes."""
    unit = PATCH * MERGE
    if height % unit or width % unit or not height or not width:
        raise ValueError(f"an image's sides are multiples of {unit}, not {height} x {width}")
    return 1, height // PATCH, width // PATCH


def write_patches(image: np.ndarray, out: np.ndarray) -> None:
    """Write the patches of an RGB image, `[3, height, width]` in 0..1, to `out`, `[n, 1176]` float32.

    The rollout worker passes shared memory as `out`, so the pixels are written once.
    """
    _, lines, columns = grid_of(*image.shape[1:])
    normalised = (image - MEAN) / DEVIATION
    split = normalised.reshape(CHANNELS, lines // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    patches = split.transpose(1, 4, 2, 5, 0, 3, 6)  # square's line, column; patch in it; channel; pixel's line, column
    room = out.reshape(lines // MERGE, columns // MERGE, MERGE, MERGE, CHANNELS, FRAMES, PATCH, PATCH)
    room[:] = patches[..., None, :, :]  # the same pixels for both frames


def positions(lines: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Line and column of each patch, in the order in which the patches come."""
    line, column = np.indices((lines, columns))

    def in_order(of: np.ndarray) -> np.ndarray:
        return of.reshape(lines // MERGE, MERGE, columns // MERGE, MERGE).transpose(0, 2, 1, 3).ravel()

    return in_order(line), in_order(column)
