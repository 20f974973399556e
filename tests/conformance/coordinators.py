"""The conformance suite of coordinators. The test of a backend subclasses `CoordinatorSuite` and provides
`coordinator`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

import pytest

from dataplane.coordinator.base import Coordinator, Unavailable

T = TypeVar("T")

LEASE_S = 2.0
"""The shortest lease that every backend supports: etcd's minimum."""


async def until(watch: AsyncGenerator[T, None], holds: Callable[[T], bool]) -> list[T]:
    seen = []
    async for value in watch:
        seen.append(value)
        if holds(value):
            return seen
    raise AssertionError("the watch has ended")


class CoordinatorSuite:
    """Each test has an empty coordinator."""

    @pytest.fixture
    def coordinator(self) -> AsyncIterator[Coordinator]:
        raise NotImplementedError

    async def test_a_swap_changes_a_value_only_if_it_is_the_expected_one(self, coordinator: Coordinator) -> None:
        await coordinator.swap("k", None, b"1")
        assert await coordinator.swap("k", None, b"2") == b"1"
        assert await coordinator.swap("k", b"0", b"2") == b"1"
        assert await coordinator.swap("k", b"1", b"2") == b"2"
        assert await coordinator.read("k") == b"2"

    async def test_a_repeated_swap_reports_success(self, coordinator: Coordinator) -> None:
        """So a caller that lost an answer can repeat the swap."""
        await coordinator.swap("k", None, b"1")
        assert await coordinator.swap("k", b"1", b"2") == b"2"
        assert await coordinator.swap("k", b"1", b"2") == b"2"
        assert await coordinator.swap("k", b"2", b"2") == b"2"

    async def test_a_swap_removes_a_value_only_if_it_is_the_expected_one(self, coordinator: Coordinator) -> None:
        await coordinator.swap("k", None, b"1")
        assert await coordinator.swap("k", b"0", None) == b"1"
        assert await coordinator.swap("k", b"1", None) is None
        assert await coordinator.read("k") is None
        assert await coordinator.swap("other", None, None) is None

    async def test_an_empty_value_differs_from_an_absent_one(self, coordinator: Coordinator) -> None:
        await coordinator.swap("k", None, b"")
        assert await coordinator.read("k") == b""
        assert await coordinator.swap("k", None, b"1") == b""

    async def test_one_of_many_concurrent_swaps_succeeds(self, coordinator: Coordinator) -> None:
        values = [b"%d" % i for i in range(16)]
        told = await asyncio.gather(*(coordinator.swap("k", None, value) for value in values))
        assert len(set(told)) == 1
        assert await coordinator.read("k") == told[0]

    async def test_concurrent_updates_by_swap_lose_nothing(self, coordinator: Coordinator) -> None:
        await coordinator.swap("k", None, b"0")

        async def count(name: int) -> None:
            for step in range(4):
                while True:
                    before = await coordinator.read("k")
                    assert before is not None
                    after = before + b",%d.%d" % (name, step)
                    if await coordinator.swap("k", before, after) == after:
                        break

        await asyncio.gather(*(count(name) for name in range(4)))
        done = await coordinator.read("k")
        assert done is not None
        assert len(set(done.split(b","))) == 17

    async def test_a_watch_yields_the_present_value_and_then_its_changes(self, coordinator: Coordinator) -> None:
        async with aclosing(coordinator.watch("k")) as watch:
            assert await anext(watch) is None
            await coordinator.swap("k", None, b"1")
            await coordinator.swap("other", None, b"x")
            assert await anext(watch) == b"1"
            await coordinator.swap("k", b"1", None)
            assert await anext(watch) is None

    async def test_a_watch_may_skip_values_but_is_monotonic_and_reaches_the_last(
        self, coordinator: Coordinator
    ) -> None:
        await coordinator.swap("k", None, b"0")
        async with aclosing(coordinator.watch("k")) as watch:
            seeing = asyncio.ensure_future(until(watch, lambda value: value == b"50"))
            for i in range(50):
                await coordinator.swap("k", b"%d" % i, b"%d" % (i + 1))
            seen = [int(value or b"-1") for value in await seeing]
        assert seen == sorted(set(seen))
        async with aclosing(coordinator.watch("k")) as watch:
            assert await anext(watch) == b"50"

    async def test_a_watch_continues_when_another_watch_of_its_key_ends(self, coordinator: Coordinator) -> None:
        async with aclosing(coordinator.watch("k")) as watch:
            assert await anext(watch) is None
            async with aclosing(coordinator.watch("k")) as other:
                assert await anext(other) is None
            await coordinator.swap("k", None, b"1")
            assert await anext(watch) == b"1"

    async def test_members_register_renew_and_leave(self, coordinator: Coordinator) -> None:
        assert dict(await coordinator.members()) == {}
        a = await coordinator.register("a", b"1", LEASE_S)
        await coordinator.register("b", b"2", LEASE_S)
        assert dict(await coordinator.members()) == {"a": b"1", "b": b"2"}
        assert await a.renew()
        await a.leave()
        assert dict(await coordinator.members()) == {"b": b"2"}
        assert not await a.renew()

    async def test_a_new_registration_replaces_the_old_one(self, coordinator: Coordinator) -> None:
        old = await coordinator.register("a", b"1", LEASE_S)
        new = await coordinator.register("a", b"2", LEASE_S)
        assert not await old.renew()
        await old.leave()
        assert dict(await coordinator.members()) == {"a": b"2"}
        assert await new.renew()

    async def test_a_member_is_evicted_only_with_its_present_value(self, coordinator: Coordinator) -> None:
        a = await coordinator.register("a", b"2", LEASE_S)
        await coordinator.evict("a", b"1")
        await coordinator.evict("b", b"2")
        assert await a.renew()
        await coordinator.evict("a", b"2")
        assert dict(await coordinator.members()) == {}
        assert not await a.renew()
        again = await coordinator.register("a", b"2", LEASE_S)
        assert not await a.renew()
        assert await again.renew()

    async def test_a_lease_that_is_not_renewed_expires(self, coordinator: Coordinator) -> None:
        kept = await coordinator.register("kept", b"", LEASE_S)
        left = await coordinator.register("left", b"", LEASE_S)

        async def renew() -> None:
            while True:
                assert await kept.renew()
                await asyncio.sleep(LEASE_S / 4)  # as a member does, which keeps the lease

        async with aclosing(coordinator.watch_members()) as watch:
            renewing = asyncio.ensure_future(renew())
            try:
                seen = await until(watch, lambda members: "left" not in members)
            finally:
                renewing.cancel()
        assert set(seen[0]) == {"kept", "left"}
        assert set(seen[-1]) == {"kept"}
        assert not await left.renew()

    async def test_calls_to_a_closed_coordinator_raise_unavailable(self, coordinator: Coordinator) -> None:
        watch = coordinator.watch("k")
        assert await anext(watch) is None
        registration = await coordinator.register("a", b"", LEASE_S)
        await coordinator.aclose()
        await coordinator.aclose()
        for call in (
            lambda: coordinator.read("k"),
            lambda: coordinator.swap("k", None, b"1"),
            coordinator.members,
            lambda: coordinator.evict("a", b""),
            registration.renew,
            registration.leave,
            lambda: coordinator.register("a", b"", LEASE_S),
            lambda: anext(watch),
        ):
            with pytest.raises(Unavailable):
                await call()
