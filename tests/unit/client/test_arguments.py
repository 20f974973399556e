"""What callers give and a message cannot hold is refused by its name; the rest arrives as meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.client import arguments
from dataplane.errors import Misuse
from tests.cases import each_case

SURROGATE = "\ud800"


class TestSeconds:
    @each_case("value", ["1", True, float("nan"), [1], None, 1j])
    def test_what_is_no_duration(self, value: Any) -> None:
        with pytest.raises(Misuse, match="a lease is a number of seconds"):
            arguments.seconds(value, what="a lease")


class TestWhole:
    @each_case("value", ["5", 2.5, 2.0, None, True, 2**63, -(2**63) - 1, 2**70, [1], np.float64(1)])
    def test_what_is_no_whole_number(self, value: Any) -> None:
        with pytest.raises(Misuse, match="rows is a whole number"):
            arguments.whole("rows", value)


class TestTexts:
    @each_case("value", [1, "", SURROGATE, "a" + SURROGATE, None, b"a", ["a"]])
    def test_what_is_no_text(self, value: Any) -> None:
        with pytest.raises(Misuse, match="a task is text of"):
            arguments.text("a task", value)

    @each_case("values", ["ids", 5, None, (1,), [""], ["a", SURROGATE], [b"a"], b"ab"])
    def test_what_are_no_names(self, values: Any) -> None:
        with pytest.raises(Misuse):
            arguments.names("columns", values)

    @each_case("values", [[1, 2], [b"a", b"b"], ["a", SURROGATE], ["a"], ["a", None], 5])
    def test_what_are_no_keys(self, values: Any) -> None:
        with pytest.raises(Misuse):
            arguments.keys_of(values, 2)


class TestOneARow:
    @each_case(
        ("values", "kinds"),
        [
            ([1.5, 2.5], (int,)), ([1, True], (int,)), ([1], (int,)), ([1, 2, 3], (int,)), ("new", (int,)),
            (object(), (int,)), ([1, 2**63], (int,)), (2**64, (int,)), (["a", SURROGATE], (str, int)),
            (SURROGATE, (str,)), ([("a",), ("b",)], (str, int)),
        ],
    )  # fmt: skip
    def test_what_is_no_value_a_row(self, values: Any, kinds: tuple[type, ...]) -> None:
        with pytest.raises(Misuse):
            arguments.plain("version", values, 2, kinds)


class TestTags:
    @each_case(
        "tags",
        [
            ["t"], "t", 5, {1: "a"}, {"": "a"}, {SURROGATE: "a"}, {"t": SURROGATE}, {"t": [2**63, 1]},
            {"t": [object(), 1]}, {"t": [1]}, {"t": {1, 2, 3}},
        ],
    )  # fmt: skip
    def test_what_are_no_tags(self, tags: Any) -> None:
        with pytest.raises(Misuse):
            arguments.tagged(tags, 2)


class TestSettings:
    @each_case(
        "how",
        [
            {"tasks": [1]}, {"tasks": "x"}, {"tasks": [SURROGATE]}, {"tasks": []}, {"tasks": 5},
            {"tasks": ["a", "a"]}, {"tasks": [f"t{i}" for i in range(65)]}, {"max_deliveries": 2.5},
            {"max_deliveries": "5"}, {"max_deliveries": 0}, {"max_deliveries": 256}, {"max_rows": 2.7},
            {"max_rows": 0}, {"max_rows": -1}, {"max_rows": 2**70}, {"max_rows": "5"}, {"max_lag": -1},
            {"max_lag": 0.5}, {"max_bytes": 0}, {"max_bytes": -1}, {"max_bytes": 2**62}, {"max_bytes": "much"},
            {"max_bytes": 1.5}, {"max_bytes": [1]},
        ],
        ids=str,
    )  # fmt: skip
    def test_what_no_stream_is_made_with(self, how: dict[str, Any]) -> None:
        given = {"tasks": ["a"], "max_bytes": None, "max_rows": None, "max_lag": None, "max_deliveries": None} | how
        with pytest.raises(Misuse):
            arguments.settings(**given)
