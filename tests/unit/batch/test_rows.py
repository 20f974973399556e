"""Selections of rows: ranges where they can be, and exact either way."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dataplane.batch.rows import Rows
from tests.cases import each_case

lists = st.lists(st.integers(0, 70_000), max_size=50)
ranges = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: list(range(min(pair), max(pair))))
numbers = lists | ranges


@given(numbers)
def test_it_is_what_it_lists(rows: list[int]) -> None:
    selected = Rows.index(rows)
    assert selected.array().tolist() == rows
    assert len(selected) == len(rows)
    assert (selected.slice is not None) == (rows == list(range(rows[0], rows[0] + len(rows))) if rows else True)


@given(numbers, st.data())
def test_take(rows: list[int], data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1)) if rows else st.just([]))
    taken = Rows.index(rows).take(Rows.index(positions))
    assert taken.array().tolist() == [rows[position] for position in positions]


@given(numbers)
def test_distinct_and_where_each_is_among_them(rows: list[int]) -> None:
    distinct, inverse = Rows.index(rows).distinct()
    assert distinct.array().tolist() == sorted(set(rows))
    again = distinct.array() if inverse is None else distinct.array()[inverse]
    assert again.tolist() == rows


@given(numbers)
def test_encoded_and_back(rows: list[int]) -> None:
    selected = Rows.index(rows)
    again = Rows.decode(selected.encode())
    assert again == selected
    assert hash(again) == hash(selected)


@each_case(("top", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4), (2**32 - 1, 4), (2**32, 8)])
def test_an_index_takes_the_smallest_integers(top: int, width: int) -> None:
    selected = Rows.index([top, 0, 1])
    start, stop, packed = selected.encode()
    assert (start, stop, len(packed)) == (0, top + 1, 1 + 3 * width)
    assert Rows.decode((start, stop, packed)) == selected


def test_a_range_is_equal_to_the_index_that_lists_it() -> None:
    assert Rows.range(3, 6) == Rows.index([3, 4, 5])
    assert hash(Rows.range(3, 6)) == hash(Rows.index([3, 4, 5]))
    assert Rows.range(3, 6) != Rows.index([5, 4, 3])
    assert Rows.range(3, 6) != [3, 4, 5]


def test_an_index_cannot_be_changed() -> None:
    given_array = np.array([4, 2])
    selected = Rows.index(given_array)
    given_array[0] = 9
    assert selected.array().tolist() == [4, 2]
    with pytest.raises(ValueError, match="read-only"):
        selected.array()[0] = 1


@each_case("wrong", [(-1, 2), (3, 2)])
def test_a_range_that_is_none(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not a range"):
        Rows.range(*wrong)


def test_a_negative_row() -> None:
    with pytest.raises(ValueError, match="negative"):
        Rows.index([1, -1])


@each_case("start", [0, 5])
def test_taking_beyond_the_end(start: int) -> None:
    with pytest.raises(IndexError, match="of 3 rows"):
        Rows.range(start, start + 3).take(Rows.range(1, 4))


@each_case(
    "encoded",
    [
        (2, 1, b""),
        (-1, 1, b""),
        (0, 3),
        (0, 3, "B"),
        ("0", 3, b""),
        (0, 3, b"X123"),
        (0, 3, b"H123"),
        (0, 2**64, b"Q" + b"\xff" * 8),
    ],
)
def test_what_was_not_encoded_is_refused(encoded: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Rows.decode(encoded)
