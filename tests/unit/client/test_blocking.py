"""`dataplane.client.blocking`: blocking methods are compiled from asynchronous ones."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest

from dataplane.client import blocking
from dataplane.client.blocking import Blocking


class Delivery:
    """A result with a blocking class."""


class Consuming:
    def __await__(self) -> Any:
        return one().__await__()


async def one() -> Delivery:
    return Delivery()


class AsyncThing:
    """An asynchronous class."""

    closed = False

    async def add(self, first: int, *others: int, scale: int = 1, **how: int) -> int:
        """Add them. See `AsyncThing.each` of `things.AsyncThing`."""
        return scale * (first + sum(others)) + sum(how.values())

    def plain(self, value: int = 3) -> int:
        return value

    async def found(self) -> Delivery:
        return await one()

    async def nothing(self) -> Delivery | None:
        return None

    def consume(self, task: str, *, rows: int) -> Consuming:
        return Consuming()

    async def each(self, most: int) -> AsyncIterator[int]:
        try:
            for value in range(most):
                yield value
        finally:
            self.closed = True

    async def fails(self) -> None:
        raise ValueError("no")

    @property
    def size(self) -> int:
        """The size."""
        return 7


@blocking.blocking(AsyncThing, "add", "plain", "found", "nothing", "consume", "each", "fails", "size")
class ThingCalls(Blocking):
    """The calls of `Thing`."""


class Wrapped:
    def __init__(self, *given: Any) -> None:
        self.given = given


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThingCalls]:
    monkeypatch.setitem(blocking.CLASSES, Delivery, Wrapped)
    loop = asyncio.new_event_loop()

    def wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(coroutine)

    made = ThingCalls(AsyncThing(), wait, None)  # type: ignore[arg-type]
    yield made
    loop.close()


def test_the_parameters_are_passed_on(thing: Any) -> None:
    assert thing.add(1, 2, 3, scale=2, more=5) == 17
    assert thing.add(first=1) == 1
    assert thing.plain() == 3
    assert thing.plain(value=4) == 4
    assert thing.size == 7


def test_the_signature_and_the_docstring_are_those_of_the_asynchronous_method() -> None:
    blocking_add: Any = vars(ThingCalls)["add"]
    assert inspect.signature(blocking_add) == inspect.signature(AsyncThing.add)
    assert blocking_add.__doc__ == "Add them. See `Thing.each` of `Thing`."
    assert not inspect.iscoroutinefunction(blocking_add)
    assert inspect.signature(vars(ThingCalls)["consume"]).return_annotation == "Delivery"
    assert inspect.signature(vars(ThingCalls)["each"]).return_annotation == "Iterator[int]"


def test_a_result_with_a_blocking_class_is_wrapped(thing: Any) -> None:
    for found in (thing.found(), thing.consume("actor", rows=1)):
        assert isinstance(found, Wrapped)
        assert isinstance(found.given[0], Delivery)
        assert found.given[1:] == (thing._wait, thing._turns)
    assert thing.nothing() is None


def test_the_items_of_a_generator_come_one_by_one_and_it_is_closed(thing: Any) -> None:
    assert list(thing.each(3)) == [0, 1, 2]
    thing._inner.closed = False
    several = thing.each(3)
    assert next(several) == 0
    several.close()
    assert thing._inner.closed


def test_a_method_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match="missing"):
        blocking.blocking(AsyncThing, "missing")(type("OtherCalls", (Blocking,), {}))
