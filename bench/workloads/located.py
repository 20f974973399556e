"""JSON with the lines of errors: the standard library parses values, and lines are found only for an error.

A reader raises `Malformed` with the path of the wrong value, its keys and indices. `line_of` finds the line on which
the value begins, by a second pass over the text. So a correct file takes no extra time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

Path = tuple[str | int, ...]

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_PIECE = re.compile(r"([-+.eE\d]*|t|tr|tru|f|fa|fal|fals|n|nu|nul)\s*")  # empty, or the beginning of a word or number
_DEEP = 64  # too deeply nested text is reported at the line with this depth
_MOST = 1 << 48  # tokens: sums of them stay exact


class Malformed(Exception):
    """The value at `path` is wrong. `line`: 0 if it is not known yet."""

    def __init__(self, path: Path, message: str, *, line: int = 0, expected: str = "", found: str = "") -> None:
        super().__init__(message)
        self.path, self.line, self.expected, self.found = path, line, expected, found


class _Twice(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return made


def parse(text: str) -> Any:
    """Parse a JSON text. Raises `Malformed` with the line if it is invalid or incomplete."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        if _PIECE.fullmatch(text, error.pos) or error.msg.startswith("Unterminated"):
            at = text.rstrip().count("\n") + 1
            raise Malformed((), "the file is cut short here", line=at) from None
        raise Malformed((), f"this is not JSON: {error.msg}, column {error.colno}", line=error.lineno) from None
    except _Twice as error:
        name = json.dumps(str(error))
        last = max((match.start() for match in re.finditer(re.escape(name) + r"\s*:", text)), default=0)
        raise Malformed((), f"{name} is there twice", line=text.count("\n", 0, last) + 1) from None
    except RecursionError:
        raise Malformed((), "lists are nested too deeply", line=_deep_line(text)) from None
    except ValueError:  # an integer of more digits than Python converts
        digits = re.search(r"\d{4000}", text)
        at = text.count("\n", 0, digits.start() if digits else 0) + 1
        raise Malformed((), "a number has too many digits", line=at) from None


def _deep_line(text: str) -> int:
    depth = 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > _DEEP:
            return text.count("\n", 0, match.start()) + 1
    return 1


def line_of(text: str, path: Path) -> int:
    """The line on which the value at `path` begins, or the last existing value on this path."""
    at = _skip(text, 0)
    for key in path:
        found = _child(text, at, key)
        if found is None:
            break
        at = found
    return text.count("\n", 0, at) + 1


def _child(text: str, at: int, key: str | int) -> int | None:
    kind = text[at : at + 1]
    if kind not in ("{", "["):
        return None
    at, index = _skip(text, at + 1), 0
    while text[at] not in "]}":
        name: str | int = index
        if kind == "{":
            name, end = _DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, end) + 1)
        if name == key:
            return at
        _, end = _DECODER.raw_decode(text, at)
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
        index += 1
    return None


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def shown(value: Any) -> str:
    """A value as JSON of at most 40 characters, for errors."""
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def whole(value: Any, path: Path, least: int = 0) -> int:
    """The value, if it is an integer from `least` on. Raises `Malformed`."""
    if type(value) is not int or not least <= value <= _MOST:
        expected = f"an integer from {least}" if least else "an integer that is not negative"
        raise _unfit(path, expected, value)
    return value


def seconds(value: Any, path: Path) -> float:
    """The value, if it is a number that is not negative. Raises `Malformed`."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise _unfit(path, "seconds, a number that is not negative", value)
    return float(value)


def member(record: dict[str, Any], key: str, path: Path) -> Any:
    """The record's value of the key. Raises `Malformed` if it is missing."""
    if key not in record:
        raise Malformed(path, f"{shown(key)} is missing", expected=key, found=", ".join(record))
    return record[key]


def record(value: Any, path: Path) -> dict[str, Any]:
    """The value, if it is an object. Raises `Malformed`."""
    if not isinstance(value, dict):
        raise _unfit(path, "an object", value)
    return value


def items(value: Any, path: Path, of: int | None = None) -> list[Any]:
    """The value, if it is a list, and of the length `of` if given. Raises `Malformed`."""
    if not isinstance(value, list):
        raise _unfit(path, "a list", value)
    if of is not None and len(value) != of:
        raise Malformed(path, f"{shown_path(path)} has {len(value)} values, and {of} belong there")
    return value


def all_whole(value: Any, path: Path, of: int | None = None) -> list[int]:
    """The value, if it is a list of integers, and of the length `of` if given. Raises `Malformed`."""
    return [whole(item, (*path, i)) for i, item in enumerate(items(value, path, of))]


def all_seconds(value: Any, path: Path, of: int) -> list[float]:
    """The value, if it is a list of `of` seconds. Raises `Malformed`."""
    return [seconds(item, (*path, i)) for i, item in enumerate(items(value, path, of))]


def shown_path(path: Iterable[str | int]) -> str:
    """The text of a path: `["0"]["input"][3]`."""
    return "".join(f"[{shown(key)}]" for key in path) or "the whole"


def _unfit(path: Path, expected: str, value: Any) -> Malformed:
    found = shown(value)
    return Malformed(path, f"{shown_path(path)} is {found}, not {expected}", expected=expected, found=found)
