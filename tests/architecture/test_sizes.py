"""Modules, classes and functions are small enough to be read at once."""

from __future__ import annotations

import ast

from tests.architecture.test_imports import MODULES

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_LINES, MOST_METHODS, MOST_OF_A_FUNCTION = 500, 30, 60


def test_modules_classes_and_functions_are_within_size_limits() -> None:
    large = []
    for path in MODULES:
        source = path.read_text()
        if source.count("\n") > MOST_LINES:
            large.append(path.name)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and sum(isinstance(each, FUNCTIONS) for each in node.body) > MOST_METHODS:
                large.append(f"{path.name}: {node.name}")
            if isinstance(node, FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= MOST_OF_A_FUNCTION:
                large.append(f"{path.name}: {node.name}")
    assert not large
