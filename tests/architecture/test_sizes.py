"""Modules, classes and functions are small enough to be read at once."""

from __future__ import annotations

import ast
import inspect

from dataplane.client import blocking_calls
from tests import stubs
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


# The stub of the compiled methods says what the methods are.


def test_the_stub_agrees_with_the_compiled_methods() -> None:
    assert stubs.parsed(stubs.PATH.read_text()) == stubs.parsed(stubs.stub()), "run: python -m tests.stubs"


def test_a_changed_signature_is_seen() -> None:
    changed = stubs.stub().replace("create: bool = False", "create: bool = True")
    assert stubs.parsed(changed) != stubs.parsed(stubs.stub())


def test_every_class_of_compiled_methods_is_in_the_stub() -> None:
    defined = {name for name, kind in vars(blocking_calls).items() if inspect.isclass(kind) and name.endswith("Calls")}
    assert {kind.__name__ for kind in stubs.classes()} == defined
