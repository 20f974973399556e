"""What each sampler chooses and lets expire, and what is refused of those that users write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings

from dataplane.errors import Misuse
from dataplane.stream.balance import balanced
from dataplane.stream.sampler import (
    Candidates,
    CompleteGroups,
    Fifo,
    Freshest,
    Sampler,
    TokenBalanced,
    Weighted,
    checked,
)
from tests.cases import each_case


def ready(
    group: Sequence[int],
    *,
    version: Sequence[int] | None = None,
    age_s: Sequence[float] | None = None,
    rows: Mapping[int, int] | None = None,
    dropped: Mapping[int, int] | None = None,
    tags: Mapping[str, Any] | None = None,
    latest: int = 0,
    closed: bool = False,
    whole: bool = True,
) -> Candidates:
    """Candidates of these groups. `rows` and `dropped` are by group; else as many as are ready, and none."""
    own = {number: group.count(number) for number in group} | dict(rows or {})
    return Candidates(
        group=np.array(group, np.int64),
        version=np.array(version if version is not None else [0] * len(group), np.int64),
        age_s=np.array(age_s if age_s is not None else [0.0] * len(group)),
        group_rows=np.array([own[number] for number in group], np.int64),
        group_dropped=np.array([(dropped or {}).get(number, 0) for number in group], np.int64),
        lengths={},
        tags={name: np.asarray(values) for name, values in (tags or {}).items()},
        latest=latest,
        closed=closed,
        whole=whole,
    )


def chosen(sampler: Sampler, candidates: Candidates, want: int) -> tuple[list[int], list[int]]:
    choice = checked(sampler.choose(candidates, want), candidates, want)
    return choice.rows.tolist(), choice.expired.tolist()


class TestCompleteGroups:
    def test_groups_that_cannot_complete_expire_when_the_stream_is_closed(self) -> None:
        candidates = ready([1, 2, 2, 2, 1, 3], rows={3: 3}, closed=True)
        assert chosen(CompleteGroups(3), candidates, 3) == ([1, 2, 3], [0, 4])

    def test_an_incomplete_group_expires_after_the_timeout(self) -> None:
        candidates = ready([1, 2, 1, 3, 3], rows={1: 3}, age_s=[9.0, 5.0, 1.0, 9.0, 9.0])
        assert chosen(CompleteGroups(2, timeout=5.0), candidates, 2) == ([3, 4], [0, 2])
        assert chosen(CompleteGroups(2), candidates, 2) == ([3, 4], [])

    def test_a_group_whose_other_rows_may_be_ready_does_not_expire(self) -> None:
        candidates = ready([1, 1, 2], rows={1: 3}, age_s=[9.0] * 3, whole=False)
        assert chosen(CompleteGroups(3, timeout=5.0), candidates, 3) == ([], [2])

    @given(st.lists(st.integers(0, 9), max_size=60), st.integers(10, 40))
    @settings(max_examples=100)
    def test_complete_groups_agrees_with_a_plain_loop(self, group: list[int], want: int) -> None:
        size = 3
        expected: list[int] = []
        for number in dict.fromkeys(group):
            rows = [row for row, other in enumerate(group) if other == number]
            if len(rows) < size:
                continue
            if len(expected) + len(rows) > want:
                break
            expected += rows
        try:
            assert chosen(CompleteGroups(size), ready(group), want) == (expected, [])
        except Misuse:
            assert not expected


class TestFreshest:
    def test_the_freshest_rows_are_chosen_first_and_stale_rows_expire(self) -> None:
        candidates = ready([0, 1, 2, 3, 4, 5], version=[1, 4, 2, 5, 4, 3], latest=5)
        assert chosen(Freshest(2), candidates, 3) == ([3, 1, 4], [0, 2])
        assert chosen(Freshest(0), candidates, 3) == ([3], [0, 1, 2, 4, 5])

    def test_rows_beyond_the_maximum_age_are_chosen_first_and_stale_rows_expire(self) -> None:
        ages = [9.0, 1.0, 7.0, 2.0, 8.0, 0.5]
        candidates = ready([0, 1, 2, 3, 4, 5], version=[3, 4, 2, 5, 4, 3], age_s=ages, latest=5)
        assert chosen(Freshest(2, max_age=7.5), candidates, 6) == ([0, 4, 3, 1, 5], [2])
        assert chosen(Freshest(2, max_age=7.5), candidates, 1) == ([0], [2])
        assert Freshest(2, max_age=7.5).judges_age
        with pytest.raises(Misuse):
            Freshest(2, max_age=-1.0)


class TestWeighted:
    def tagged(self, *domains: Any) -> Candidates:
        return ready(list(range(len(domains))), tags={"domain": np.array(domains)})

    def test_weighted_values_are_chosen_in_proportion_and_in_order(self) -> None:
        candidates = self.tagged(*["a"] * 20, *["b"] * 20)
        rows, _ = chosen(Weighted("domain", {"a": 3, "b": 1}), candidates, 8)
        assert sorted(rows) == [0, 1, 2, 3, 4, 5, 20, 21]
        assert [row for row in rows if row < 20] == [0, 1, 2, 3, 4, 5]

    def test_weighted_shares_are_right_on_average_in_small_deliveries(self) -> None:
        found = Counter[str]()
        for seed in range(4000):
            candidates = self.tagged("often", "rare", "never")
            (row,), _ = chosen(Weighted("domain", {"often": 0.95, "rare": 0.05}, seed=seed), candidates, 1)
            found[candidates.tags["domain"][row]] += 1
        assert found["rare"] == pytest.approx(200, abs=60)
        assert found.total() == 4000

    @each_case(
        ("tags", "value"),
        [
            (np.array([3, 4]), 4),
            (np.array([0.5, 1.5]), 1.5),
            (np.array(["x", "4"]), "4"),
            (np.array([None, "4"], object), "4"),
            (np.array(["4", 4], object), 4),
            (np.array([False, True]), True),
        ],
    )
    def test_weights_apply_to_tags_of_any_type(self, tags: npt.NDArray[Any], value: int | float | str) -> None:
        candidates = ready([0, 1], tags={"t": tags})
        assert chosen(Weighted("t", {value: 1}), candidates, 2) == ([1], [])

    def test_rows_without_the_tag_are_refused(self) -> None:
        with pytest.raises(Misuse, match="no tag 'domain', only kind"):
            Weighted("domain", {"a": 1}).choose(ready([0], tags={"kind": ["a"]}), 1)

    @given(
        st.lists(st.integers(0, 5), max_size=60),
        st.dictionaries(st.integers(0, 5), st.floats(0, 10), min_size=1).filter(lambda w: any(w.values())),
        st.integers(0, 40),
    )
    def test_weighted_sampling_takes_available_rows_when_some_values_run_out(
        self, values: list[int], weights: dict[int, float], want: int
    ) -> None:
        rows, _ = chosen(Weighted("domain", dict(weights)), self.tagged(*values), want)
        assert len(rows) == min(want, sum(weights.get(value, 0) > 0 for value in values))
        for value in weights:
            own = [row for row in rows if values[row] == value]
            assert own == [row for row, other in enumerate(values) if other == value][: len(own)]


class TestTokenBalanced:
    def test_token_balanced_has_the_properties_of_its_inner_sampler(self) -> None:
        plain, timed, freshest = Fifo(), CompleteGroups(3, timeout=1.0), Freshest(2)
        for within in (plain, timed, freshest, CompleteGroups(3)):
            sampler = TokenBalanced("x", 2, within=within)
            assert sampler.judges_age == within.judges_age == (within is timed)
            assert sampler.sees_all == within.sees_all == (within is freshest)
            assert sampler.group_size == within.group_size
        alone = TokenBalanced("x", 2)
        assert (alone.judges_age, alone.sees_all, alone.group_size) == (False, False, None)


@each_case(
    ("build", "message"),
    [
        (lambda: CompleteGroups(0), "size is a whole number, 1 or more, not 0"),
        (lambda: CompleteGroups(2.0), "size"),
        (lambda: CompleteGroups(True), "size"),
        (lambda: CompleteGroups(2, timeout=-1), "timeout"),
        (lambda: CompleteGroups(2, timeout=float("nan")), "timeout"),
        (lambda: Freshest(-1), "max_lag"),
        (lambda: Weighted("", {"a": 1}), "tag"),
        (lambda: Weighted("t", ["a"]), "mapping"),
        (lambda: Weighted("t", {}), "no weight is above 0"),
        (lambda: Weighted("t", {"a": 0}), "no weight is above 0"),
        (lambda: Weighted("t", {"a": -1}), "the weight of 'a'"),
        (lambda: Weighted("t", {"a": float("inf")}), "the weight of 'a'"),
        (lambda: Weighted("t", {None: 1}), "not for None"),
        (lambda: Weighted("t", {"a": 1}, seed=-1), "seed"),
        (lambda: TokenBalanced("", 2), "column"),
        (lambda: TokenBalanced("x", 0), "shards"),
        (lambda: TokenBalanced("x", 2, within=TokenBalanced("x", 2)), "within"),
        (lambda: TokenBalanced(7, 2), "column"),
    ],
)
def test_invalid_sampler_arguments_are_refused(build: Any, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        build()


# Rows split over shards: exactly, evenly, soon.

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
