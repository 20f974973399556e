"""Rows split over shards: exactly, evenly, soon."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given

from dataplane.errors import Misuse
from dataplane.stream.balance import balanced
from tests.cases import each_case

Index = npt.NDArray[np.int64]


def largest(lengths: Index, split: list[Index]) -> int:
    return max(int(lengths[rows].sum()) for rows in split)


def in_turn(rows: int, shards: int) -> list[Index]:
    return [np.arange(shard, rows, shards) for shard in range(shards)]


many = st.lists(st.integers(0, 40) | st.integers(0, 100_000), max_size=80)


@given(many, st.integers(1, 20), st.booleans())
@example([0, 0, 0, 0, 0], 3, True)
@example([10, 9, 8, 7, 6, 5, 4], 3, True)
def test_a_balanced_split_is_exact_and_no_worse_than_round_robin(numbers: list[int], shards: int, equal: bool) -> None:
    lengths = np.array(numbers, np.int64)
    split = balanced(lengths, shards, equal=equal)
    assert len(split) == shards
    assert sorted(np.concatenate(split).tolist()) == list(range(len(lengths)))
    assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in split)
    if equal:
        assert {len(rows) for rows in split} <= {len(lengths) // shards, -(-len(lengths) // shards)}
    assert largest(lengths, split) <= largest(lengths, in_turn(len(lengths), shards))
    again = balanced(lengths, shards, equal=equal)
    assert all((a == b).all() for a, b in zip(split, again, strict=True))


@given(st.lists(st.integers(0, 50), min_size=4, max_size=40), st.integers(2, 6), st.booleans())
def test_no_swap_of_two_rows_improves_a_balanced_split(numbers: list[int], shards: int, equal: bool) -> None:
    lengths = np.array(numbers, np.int64)
    split = balanced(lengths, shards, equal=equal)
    sums = [int(lengths[rows].sum()) for rows in split]
    heavy = int(np.argmax(sums))
    for light in range(shards):
        less = np.subtract.outer(lengths[split[heavy]], lengths[split[light]])
        if light != heavy and less.size:
            assert (np.maximum(sums[heavy] - less, sums[light] + less) >= sums[heavy]).all()


def test_unequal_row_counts_allow_a_better_balance() -> None:
    lengths = np.array([6, 2, 2, 2])
    assert largest(lengths, balanced(lengths, 2)) == 8
    assert largest(lengths, balanced(lengths, 2, equal=False)) == 6


@each_case(
    ("lengths", "shards", "message"),
    [
        (np.array([1, -2]), 2, "row 1 has the length -2"),
        (np.array([1.5]), 2, "integers"),
        (np.array([[1]]), 2, "shape"),
        (np.array([1 << 61, 1 << 61]), 2, "2\\*\\*62"),
        (np.array([1]), 0, "1 shard or more"),
    ],
)
def test_invalid_splits_are_refused(lengths: Index, shards: int, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        balanced(lengths, shards)
