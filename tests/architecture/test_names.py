"""A class name stands for one thing."""

from __future__ import annotations

import ast
from collections import Counter

from tests.architecture.test_imports import MODULES

BLOCKING = "sync.py"  # it has the names of the classes that it blocks for
TWICE = {"DataplaneCheckpointEngine"}  # verl and NeMo RL each find theirs by this name


def test_no_class_name_is_used_twice() -> None:
    found = Counter(
        node.name
        for path in MODULES
        if path.name != BLOCKING
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in found.items() if count > 1} == TWICE
