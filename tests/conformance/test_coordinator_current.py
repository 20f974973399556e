"""The coordinator that another may take the place of: the suite of all coordinators, and what a change is for users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dataplane.coordinator.base import Coordinator, Unavailable
from dataplane.coordinator.current import CurrentCoordinator, Replaced
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.testing import CoordinatorSuite


class TestCurrent(CoordinatorSuite):
    @pytest.fixture
    async def coordinator(self) -> AsyncIterator[Coordinator]:
        current = CurrentCoordinator()
        await current.use(ProcessCoordinator())
        yield current
        await current.aclose()


async def test_who_watches_is_told_that_another_takes_its_place() -> None:
    current = CurrentCoordinator()
    await current.use(ProcessCoordinator())
    await current.swap("k", None, b"1")
    registration = await current.register("me", b"x", 60.0)
    watch = current.watch("k")
    assert await anext(watch) == b"1"
    waits = asyncio.ensure_future(anext(watch))
    await current.use(ProcessCoordinator())
    with pytest.raises(Replaced):
        await waits
    assert await current.read("k") is None
    assert not await registration.renew()
    await registration.leave()  # which nobody hears
    await current.aclose()


async def test_while_there_is_none_a_call_waits_for_one_and_says_why_it_does_not_come() -> None:
    current = CurrentCoordinator(wait_s=0.01)
    current.why = "nobody answers"
    with pytest.raises(Unavailable, match="nobody answers"):
        await current.read("k")
    assert current.address == "none: nobody answers"
    patient = CurrentCoordinator()
    reading = asyncio.ensure_future(patient.swap("k", None, b"1"))
    await asyncio.sleep(0)
    await patient.use(ProcessCoordinator())
    assert await reading == b"1"
    for each in (current, patient):
        await each.aclose()
        with pytest.raises(Unavailable):
            await each.members()
