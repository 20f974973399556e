"""The suite of samplers: this package's pass it, and it finds what is wrong with others."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane import testing
from dataplane.errors import Backpressure, OutcomeUnknown
from dataplane.stream.sampler import Candidates
from tests.cases import each_case


class TestFifo(testing.SamplerSuite):
    def made(self) -> dp.Sampler:
        return dp.Fifo()


class TestCompleteGroups(testing.SamplerSuite):
    raises_misuse = True  # of a `want` below a group

    def made(self) -> dp.Sampler:
        return dp.CompleteGroups(4)


class TestFreshest(testing.SamplerSuite):
    def made(self) -> dp.Sampler:
        return dp.Freshest(2, max_age=50.0)


class TestWeighted(testing.SamplerSuite):
    def made(self) -> dp.Sampler:
        return dp.Weighted("domain", {"maths": 3.0, "code": 1.0})

    def prepared(self, shown: Candidates) -> Candidates:
        domains = np.asarray(["maths" if number % 2 else "code" for number in shown.group], object)
        return dataclasses.replace(shown, tags={"domain": domains})


class TestTokenBalanced(testing.SamplerSuite):
    def made(self) -> dp.Sampler:
        return dp.TokenBalanced("ids", 4, within=dp.Fifo())


class Newest:
    """A sampler as a user writes one."""

    def choose(self, candidates: Candidates, want: int) -> Any:
        return np.argsort(-candidates.version, kind="stable")[:want]


class TestAUsersOwn(testing.SamplerSuite):
    def made(self) -> dp.Sampler:
        return Newest()


class TooMany(Newest):
    def choose(self, candidates: Candidates, want: int) -> Any:
        return np.arange(len(candidates))


class Sorting(Newest):
    def choose(self, candidates: Candidates, want: int) -> Any:
        candidates.version.sort()
        return np.arange(min(want, len(candidates)))


class Counting(Newest):
    def __init__(self) -> None:
        self.calls = 0

    def choose(self, candidates: Candidates, want: int) -> Any:
        self.calls += 1
        return np.roll(np.arange(len(candidates)), self.calls)[:want]


class Idle(Newest):
    def choose(self, candidates: Candidates, want: int) -> Any:
        return []


class NamesOne(Newest):
    needs = "ids"


@each_case(
    ("kind", "found_by"),
    [
        (TooMany, "test_a_choice_is_valid"),
        (Sorting, "test_candidates_stay_as_they_are"),
        (Counting, "test_the_same_candidates_give_the_same_choice"),
        (Idle, "test_something_is_chosen_or_expires"),
        (NamesOne, "test_what_it_reads_is_named"),
    ],
)
def test_the_sampler_suite_rejects_faulty_samplers(kind: type[Newest], found_by: str) -> None:
    class Suite(testing.SamplerSuite):
        def made(self) -> dp.Sampler:
            return kind()

    with pytest.raises((AssertionError, ValueError, dp.Misuse)):
        getattr(Suite(), found_by)()


def test_candidates_count_the_rows_of_their_groups() -> None:
    shown = testing.candidates([7, 7, 9], version=[1, 1, 4], group_rows={9: 3})
    assert shown.group_rows.tolist() == [2, 2, 3]
    assert (shown.latest, len(shown)) == (4, 3)
    with pytest.raises(ValueError, match="read-only"):
        shown.version[0] = 5


# Calls that fail where a test says so.


class Shop:
    """Something with calls of both kinds."""

    def __init__(self) -> None:
        self.sold: list[str] = []

    def sell(self, what: str) -> int:
        self.sold.append(what)
        return len(self.sold)

    async def order(self, what: str) -> int:
        return self.sell(what)

    @staticmethod
    def closed() -> bool:
        return False


def outcomes(shop: Shop, calls: int) -> str:
    """A letter a call: `.` for one that was carried out, `x` for one that failed."""
    told = ""
    for i in range(calls):
        try:
            shop.sell(str(i))
            told += "."
        except Backpressure:
            told += "x"
    return told


@each_case("of_class", [False, True])
def test_only_the_selected_calls_fail(of_class: bool) -> None:
    shop = Shop()
    with testing.failing(Shop if of_class else shop, "sell", Backpressure("full"), times=2, after=1) as sales:
        assert outcomes(shop, 5) == ".xx.."
    assert (sales.calls, sales.failures) == (5, 2)
    assert shop.sold == ["0", "3", "4"]
    assert outcomes(shop, 1) == "."
    assert sales.calls == 5
    assert "sell" not in vars(shop)


def test_a_failing_call_may_take_effect() -> None:
    shop = Shop()
    with testing.failing(shop, "sell", OutcomeUnknown("no answer"), done=True), pytest.raises(OutcomeUnknown):
        shop.sell("one")
    assert shop.sold == ["one"]


async def test_coroutine_functions_fail_when_they_are_awaited() -> None:
    shop = Shop()
    with testing.failing(Shop, "order", Backpressure("full")) as orders:
        coroutine = shop.order("one")
        with pytest.raises(Backpressure):
            await coroutine
        assert await shop.order("two") == 1
    assert (orders.calls, orders.failures) == (2, 1)
