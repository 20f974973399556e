"""The names that users may rely on. To change this list is to change the public interface."""

from __future__ import annotations

import ast
import inspect
from collections import Counter

import pytest

import dataplane
from dataplane import errors
from dataplane.client import blocking_calls
from tests import stubs
from tests.architecture.test_imports import MODULES
from tests.cases import each_case

ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
NAMES = [
    "connect",
    "NodeConfig",
    "Plane",
    "Batch",
    "BatchRef",
    "Column",
    "Draft",
    "Stream",
    "Delivery",
    "Table",
    "Sampler",
    "Candidates",
    "Choice",
    "Fifo",
    "CompleteGroups",
    "TokenBalanced",
    "Freshest",
    "Weighted",
    "Field",
    "Stats",
    "concat",
    "loader",
    "Row",
    "Loader",
    "Appender",
    "Taken",
    "Weights",
    "History",
    "Recording",
    "packed_share",
    "dense",
    "ragged",
    "aio",
    "collective",
]


def test_public_names_are_exactly_those_listed() -> None:
    assert sorted(dataplane.__all__) == sorted(NAMES + ERRORS)


@each_case("name", NAMES + ERRORS)
def test_each_public_name_exists(name: str) -> None:
    assert getattr(dataplane, name) is not None
    assert name in dir(dataplane)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dataplane.no_such_name


# A class name stands for one thing.

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


# Modules, classes and functions are small enough to be read at once.

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


def test_every_class_of_compiled_methods_is_in_the_stub() -> None:
    defined = {name for name, kind in vars(blocking_calls).items() if inspect.isclass(kind) and name.endswith("Calls")}
    assert {kind.__name__ for kind in stubs.classes()} == defined
