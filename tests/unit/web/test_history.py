"""Rings of buckets: means, gaps, and a size that does not grow."""

from __future__ import annotations

import math

from dataplane.web.history import History, rounded


def test_a_bucket_is_the_mean_of_what_came_in_its_time() -> None:
    history = History(5.0, 4)
    history.add(100.0, {("a",): 1.0})
    history.add(104.0, {("a",): 3.0})
    history.add(105.0, {("a",): 7.0})
    assert rounded(history.series(("a",))) == [None, None, 2, 7]


def test_time_in_which_nothing_came_is_a_gap() -> None:
    history = History(1.0, 5)
    history.add(10.0, {("a",): 1.0})
    history.add(13.0, {("a",): 4.0, ("b",): None, ("c",): math.nan})
    assert rounded(history.series(("a",))) == [None, 1, None, None, 4]
    assert len(history) == 1


def test_what_was_measured_since_the_last_look_holds_for_all_of_that_time() -> None:
    history = History(1.0, 5)
    history.add(10.0, {("a",): 1.0})
    history.add(13.0, {("a",): 4.0}, 10.0)
    assert rounded(history.series(("a",))) == [None, 1, 4, 4, 4]
    history.add(1000.0, {("a",): 9.0}, 13.0)
    assert rounded(history.series(("a",))) == [9] * 5


def test_what_is_older_than_the_ring_is_gone() -> None:
    history = History(1.0, 3)
    history.add(1.0, {("a",): 1.0})
    history.add(50.0, {("b",): 2.0})
    assert rounded(history.series(("b",))) == [None, None, 2]
    assert rounded(history.series(("a",))) == [None] * 3
    assert len(history) == 1, "a series of which nothing came makes room"


def test_series_are_bounded_in_number() -> None:
    history = History(1.0, 3, max_series=100)
    for second in range(20):
        history.add(float(second), {("s", second, number): 1.0 for number in range(80)})
        assert len(history) <= 100
    assert history._values.nbytes <= 128 * 3 * 4
