"""The images: 1,797 handwritten digits that come with scikit-learn, 8 x 8 grey values each, drawn larger.

A digit is drawn in a random size each time, as photographs have, so the rows of a batch differ in length.
"""

from __future__ import annotations

import functools

import numpy as np

from examples.multimodal_grpo.patches import MERGE, PATCH


def load(seed: int) -> dict[str, np.ndarray | list[str]]:
    """All digits in a random order, as columns: `picture`, [8, 8] float32 in 0..1, and `answer`, text."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    return {
        "picture": digits.images[order].astype(np.float32) / 16,
        "answer": [str(target) for target in digits.target[order]],
    }


def draw(digit: np.ndarray, height: int, width: int) -> np.ndarray:
    """The digit as an RGB image `[3, height, width]` in 0..1, by bilinear interpolation."""
    grey = _weights(digit.shape[0], height) @ digit @ _weights(digit.shape[1], width).T
    return np.broadcast_to(grey.astype(np.float32), (3, height, width))


def sizes(count: int, smallest: int, largest: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Heights and widths of `count` images, drawn at random from the sizes that Qwen2-VL takes."""
    unit = PATCH * MERGE
    return [(int(h) * unit, int(w) * unit) for h, w in rng.integers(smallest // unit, largest // unit + 1, (count, 2))]


@functools.cache
def _weights(old: int, new: int) -> np.ndarray:
    """The weights of linear interpolation, `[new, old]`: the share of each old sample in each new one. Pixel centres
    are aligned."""
    centres = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(centres[:, None] - np.arange(old)))
