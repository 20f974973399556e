"""Trace files in either format of PolyTrace (arXiv 2509.25279), which `stepfiles` and `steplogs` describe.

An incomplete or malformed file is refused as a whole: `SchemaMismatch`, with a message that begins with file and line.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.workloads import stepfiles
from bench.workloads.located import Malformed, line_of, parse
from bench.workloads.stepfiles import Unpaired
from bench.workloads.steplogs import Log
from bench.workloads.trace import Step, Trace
from dataplane.errors import SchemaMismatch

#: The names of step logs in a directory of PolyTrace's.
LOGS = ("packed_lengths_step_*.jsonl", "multiturn_workload_step_*.jsonl")


def read(path: str | Path, *, group_size: int | None = None, unpaired: Unpaired = "refuse") -> Trace:
    """Read the trace in a file of either format, or in a directory of step logs.

    group_size: the number of adjacent responses that share a prompt, for a file of lengths without groups. unpaired:
    "refuse" steps in which inputs and outputs do not match, or "cycle" through the inputs. Raises `SchemaMismatch` for
    an invalid file, OSError for one that cannot be read, ValueError for invalid arguments."""
    path = Path(path)
    if group_size is not None and group_size < 1:
        raise ValueError(f"group_size is at least 1, not {group_size}")
    if unpaired not in ("refuse", "cycle"):
        raise ValueError(f"unpaired is 'refuse' or 'cycle', not {unpaired!r}")
    if path.is_dir():
        steps = _logs(sorted(file for name in LOGS for file in path.glob(name)), path)
    elif _is_log(text := _text(path)):
        steps = _logs([path], path)
    else:
        try:
            steps = stepfiles.steps(parse(text), group_size, unpaired)
        except Malformed as error:
            raise _refused(path, error.line or line_of(text, error.path), error) from None
    if not steps:
        raise SchemaMismatch(f"{path}:1: there are no steps in it", expected="steps", found="none")
    pictures, many = any(step.images.any() for step in steps), any((step.turns > 1).any() for step in steps)
    modality = ("image or video" if pictures else "text") + (", multi-turn" if many else "")
    return Trace(path.name, modality, str(path), tuple(steps))


def write(trace: Trace, path: str | Path) -> None:
    """Save a trace as a file of lengths. `read` returns the same steps. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(stepfiles.lines(trace))


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refused(path, line, Malformed((), "this is not text in UTF-8")) from None


def _is_log(text: str) -> bool:
    """Whether the text is a step log: its first key is not the number of a step."""
    first = re.match(r'\s*\{\s*"([^"\\]*)"', text)
    return first is not None and not first[1].isdigit()


def _logs(files: list[Path], path: Path) -> list[Step]:
    log = Log()
    for file in files:
        try:
            log.add(_text(file).split("\n"))
        except Malformed as error:
            raise _refused(file, error.line, error) from None
    if not files:
        raise SchemaMismatch(f"{path}: there is no {' or '.join(LOGS)} in it", expected=LOGS[0], found="none")
    return log.steps()


def _refused(path: Path, line: int, error: Malformed) -> SchemaMismatch:
    keys = [key for key in error.path if isinstance(key, str)]
    rows = [key for key in error.path if isinstance(key, int)]
    return SchemaMismatch(
        f"{path}:{line}: {error}",
        column=keys[-1] if keys else "", row=rows[-1] if rows else -1, expected=error.expected, found=error.found,
    )  # fmt: skip
