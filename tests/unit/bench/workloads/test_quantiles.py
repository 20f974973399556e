"""Inverse distribution functions, and shares that are spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads.quantiles import Quantiles, spread


def test_between_percentiles_is_linear() -> None:
    known = Quantiles.of([0, 50, 100], [0, 10, 30])
    assert known.at(np.array([0.0, 0.25, 0.5, 0.75])).tolist() == [0, 5, 10, 20]


def test_nothing_lies_in_a_gap() -> None:
    known = Quantiles.of([0, 30, 35, 100], [1, 2, 100, 101], gaps=[(2, 100)])
    values = known.at(np.linspace(0, 1, 10001))
    assert not ((values > 2) & (values < 100)).any()
    assert (values <= 2).mean() == pytest.approx(0.325, abs=0.001)  # the middle between the percentiles


def test_a_tail_is_a_power_law_and_ends_at_the_largest() -> None:
    known = Quantiles.of([0, 99, 99.9, 100], [1, 10, 100, 1000])
    assert known.at(np.array([0.99, 0.999, 1.0])).tolist() == pytest.approx([10, 100, 1000])
    # From 1 in 100 above 10 to 1 in 1000 above 100: the power is -1.
    assert known.at(np.array([1 - 0.01 / 2]))[0] == pytest.approx(20, rel=0.02)
    assert known.at(np.array([0.9995]))[0] == pytest.approx(100 * 10**0.5, rel=0.01)


@given(st.lists(st.floats(-10, 10), max_size=200), st.integers(0, 5))
def test_shares_are_in_the_order_of_their_scores_and_one_in_each_part(scores: list[float], seed: int) -> None:
    shares = spread(np.array(scores), np.random.default_rng(seed))
    assert sorted((shares * len(scores)).astype(int).tolist()) == list(range(len(scores)))
    order = np.argsort(np.array(scores), kind="stable")
    assert (np.diff(shares[order]) > 0).all()
