"""Rows split over shards: exactly, evenly, soon."""

from __future__ import annotations

from statistics import NormalDist

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given

from dataplane.errors import Misuse
from dataplane.stream.balance import balanced
from tests.cases import each_case

Index = npt.NDArray[np.int64]

PERCENTILES = [0, 1, 2, *range(5, 100, 5), 96, 97, 98, 99, 99.5, 99.9, 100]

#: Quantiles of the response lengths, in tokens, of two recorded RL tasks, and how the spread of their logarithm is
#: split between prompts and a prompt's responses. Source: the step logs of PolyTrace (arXiv 2509.25279).
CODE_14B = (
    "444 1043.72 1140.58 2489.6 3068.9 3674.65 4112 4881.5 5563.7 6484.2 7628.2 8629.2 9758 10891.55 11806 12489.65 "
    "13165.2 13716.5 14357.6 15265.2 16000 16000 16000 16000 16000 16000 16000 16000 16000",
    0.6629,
    0.2123,
)
MATH_32B = (
    "2 7 11 89 163 217 261 292 325 357 393 425 458 499 538.2 582 632 692 779 882.95 1034.3 1400 1530.44 1675.74 1896 "
    "2707.71 3261.47 5673.579 10112",
    0.4035,
    0.8846,
)


def drawn(task: tuple[str, float, float], seed: int, *, groups: int = 64, size: int = 8) -> Index:
    """Response lengths of one step: responses to a prompt resemble each other as they do in the task."""
    quantiles, between, within = task
    random = np.random.default_rng(seed)
    score = between * random.standard_normal((groups, 1)) + within * random.standard_normal((groups, size))
    share = np.vectorize(NormalDist(0, float(np.hypot(between, within))).cdf)(score)
    return (
        np.interp(100 * share, PERCENTILES, [float(quantile) for quantile in quantiles.split()])
        .round()
        .astype(np.int64)
        .ravel()
    )


def largest(lengths: Index, split: list[Index]) -> int:
    return max(int(lengths[rows].sum()) for rows in split)


def in_turn(rows: int, shards: int) -> list[Index]:
    return [np.arange(shard, rows, shards) for shard in range(shards)]


many = st.lists(st.integers(0, 40) | st.integers(0, 100_000), max_size=80)


@given(many, st.integers(1, 20), st.booleans())
@example([0, 0, 0, 0, 0], 3, True)
@example([10, 9, 8, 7, 6, 5, 4], 3, True)
def test_the_split_is_exact_and_no_worse_than_in_turn(numbers: list[int], shards: int, equal: bool) -> None:
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
def test_no_exchange_of_two_rows_would_make_the_largest_smaller(numbers: list[int], shards: int, equal: bool) -> None:
    lengths = np.array(numbers, np.int64)
    split = balanced(lengths, shards, equal=equal)
    sums = [int(lengths[rows].sum()) for rows in split]
    heavy = int(np.argmax(sums))
    for light in range(shards):
        less = np.subtract.outer(lengths[split[heavy]], lengths[split[light]])
        if light != heavy and less.size:
            assert (np.maximum(sums[heavy] - less, sums[light] + less) >= sums[heavy]).all()


@each_case("seed", range(8))
@each_case("equal", [True, False])
def test_a_step_of_long_responses_is_even(seed: int, equal: bool) -> None:
    lengths = drawn(CODE_14B, seed)
    mean = lengths.sum() / 64
    assert lengths.max() <= mean
    assert largest(lengths, balanced(lengths, 64, equal=equal)) <= 1.005 * mean


@each_case("seed", range(8))
def test_a_step_with_a_long_tail_is_near_what_its_longest_row_allows(seed: int) -> None:
    lengths = drawn(MATH_32B, seed)
    ascending = np.sort(lengths)
    bound = max(lengths.sum() / 64, ascending[-1] + ascending[:7].sum())
    assert largest(lengths, balanced(lengths, 64)) <= 1.05 * bound


def test_one_giant_row_has_the_shortest_beside_it() -> None:
    lengths = np.array([3, 1000, 1, 5, 4, 2, 6, 7, 8])
    split = balanced(lengths, 3)
    (with_giant,) = [rows for rows in split if 1 in rows]
    assert sorted(lengths[with_giant].tolist()) == [1, 2, 1000]


def test_free_counts_reach_what_equal_ones_cannot() -> None:
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
def test_what_cannot_be_split(lengths: Index, shards: int, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        balanced(lengths, shards)
