"""The names that users may rely on. To change this list is to change the public interface."""

from __future__ import annotations

import ast
import inspect
from collections import Counter

import pytest

import dataplane
from dataplane import errors, testing
from tests.architecture.test_imports import MODULES
from tests.cases import each_case

ERRORS = [
    "DataplaneError",
    "Retryable",
    "Backpressure",
    "PeerUnavailable",
    "LeaseExpired",
    "NotReady",
    "OutcomeUnknown",
    "Lost",
    "OwnerDied",
    "Corrupt",
    "Freed",
    "Rejected",
    "Unauthenticated",
    "ProtocolMismatch",
    "LimitExceeded",
    "Misuse",
    "Closed",
    "Forked",
    "SchemaMismatch",
]
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


TESTING = [
    "Failing",
    "LocalNode",
    "ManualClock",
    "NodeProcess",
    "SamplerSuite",
    "candidates",
    "failing",
    "node",
    "plane",
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


def test_names_of_the_testing_module_are_exactly_those_listed() -> None:
    assert sorted(testing.__all__) == TESTING
    assert all(getattr(testing, name) is not None for name in TESTING)


def test_every_error_is_public() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == set(ERRORS)


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
