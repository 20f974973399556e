"""Images for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F")
WIDE = ("I;16", "I;16L", "I;16B")


def noise(mode: str, size: tuple[int, int] = (32, 24), seed: int = 0) -> Any:
    empty = Image.new(mode, size)
    data = np.random.default_rng(seed).integers(0, 256, len(empty.tobytes()), dtype=np.uint8)
    image = Image.frombytes(mode, size, data.tobytes())
    if mode in ("P", "PA"):
        image.putpalette(np.random.default_rng(seed + 1).integers(0, 256, 768, dtype=np.uint8).tobytes())
    return image


def file(image: Any, format: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **how)
    return out.getvalue()


def opened(data: bytes) -> Any:
    return Image.open(io.BytesIO(data))


def is_lazy(image: Any) -> bool:
    """Whether no pixel was decoded yet."""
    own = vars(image)
    return own.get("_im", own.get("im")) is None
