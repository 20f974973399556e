"""Log lines about errors and about text of other processes: printable, each in one line, and bounded in length."""

from __future__ import annotations

import traceback

_TEXT = 4096  # the most characters of the text of an error
_LINE = 1024  # the most characters of a log line
_FRAMES = 3  # the most frames of the stack in a log line about an unexpected error


def error_line(error: BaseException) -> str:
    """An error in one line: the exception, and the frames that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = ", ".join(
        f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in reversed(frames)
    )
    return log_line(f"{type(error).__name__}: {error}; in {where}")


def log_line(text: object) -> str:
    """Untrusted text as one log line: printable, and bounded in length."""
    return "".join(each if each.isprintable() else "?" for each in clipped(str(text), _LINE))


def clipped(text: str, most: int = _TEXT) -> str:
    """Text that can be encoded, and is bounded in length."""
    text = text if len(text) <= most else text[:most] + "..."
    return text.encode("utf-8", "replace").decode()
