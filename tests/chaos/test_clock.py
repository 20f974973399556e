"""A clock that jumps: no decision depends on wall time, since nothing reads it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dataplane

PACKAGE = Path(dataplane.__file__).parent
WALL = {("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime")}
WALL |= {("datetime", name) for name in ("now", "utcnow", "today")}


def readings(source: str) -> list[str]:
    """Where the wall clock is read: the module imported, or a function of it called or imported."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.lineno}: {alias.name}" for alias in node.names if (node.module, alias.name) in WALL]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in WALL:
            found.append(f"{node.lineno}: {node.value.id}.{node.attr}")
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"{node.lineno}: {name}" for name in names if name == "datetime"]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_reads_the_wall_clock(path: Path) -> None:
    assert readings(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    ["import time\ntime.time()", "from time import time", "import datetime", "from datetime import datetime"],
)
def test_a_reading_is_found(source: str) -> None:
    assert readings(source)


def test_the_monotonic_clock_is_none() -> None:
    assert readings("import time\ntime.monotonic()\ntime.perf_counter()") == []
