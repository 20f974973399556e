"""Warnings at the line of the user's program."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_INSIDE = ("dataplane", "asyncio", "threading")  # packages whose frames are between the warning and the user's line


def warn(message: str) -> None:
    """Issue a `UserWarning` at the innermost line outside this package; without such a line, at the caller's."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=2 if frame is None else level)
