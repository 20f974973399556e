"""A clock that jumps: no decision depends on wall time, since nothing reads it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import dataplane
from tests.cases import each_case

PACKAGE = Path(dataplane.__file__).parent
WALL = {("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime")}
WALL |= {("datetime", name) for name in ("now", "utcnow", "today")}
#: Dates are values there, that users put or that certificates name: no attribute has one of the names above.
VALUES = {"batch/builtin_codec.py", "cluster/certificates.py"}
#: Shown to people beside what happened, and used for nothing else.
SHOWN = {"web/feed.py", "web/cluster_view.py"}
#: Who reads one has imported it: others need not be parsed.
IMPORTED = re.compile(r"\b(?:import|from)\b.*\b(?:time|datetime)\b")


def readings(source: str, *, values: bool = False) -> list[str]:
    """Where the wall clock is read: the module imported, or a function of it called or imported. `values`: it may be
    imported."""
    found: list[str] = []
    if not values and not IMPORTED.search(source):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.lineno}: {alias.name}" for alias in node.names if (node.module, alias.name) in WALL]
        if isinstance(node, ast.Attribute) and values and node.attr in ("now", "utcnow", "today", "fromtimestamp"):
            found.append(f"{node.lineno}: {node.attr}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in WALL:
            found.append(f"{node.lineno}: {node.value.id}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["timedelta"]:
            continue  # an amount of time
        if isinstance(node, ast.Import | ast.ImportFrom) and not values:
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"{node.lineno}: {name}" for name in names if name == "datetime"]
    return found


def test_the_package_does_not_read_the_wall_clock() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name not in SHOWN:
            found[name] = readings(path.read_text(), values=name in VALUES)
    assert len(found) > 200
    assert {name: read for name, read in found.items() if read} == {}


@each_case(
    "source",
    ["import time\ntime.time()", "from time import time", "import datetime", "from datetime import datetime"],
)
def test_a_read_of_the_wall_clock_is_detected(source: str) -> None:
    assert readings(source)
