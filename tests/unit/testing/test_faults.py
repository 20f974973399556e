"""Calls that fail where a test says so."""

from __future__ import annotations

import pytest

from dataplane import testing
from dataplane.errors import Backpressure, OutcomeUnknown
from tests.cases import each_case


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
    with (
        testing.failing(shop, "sell", OutcomeUnknown("no answer"), done=True),
        pytest.raises(OutcomeUnknown),
    ):
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
