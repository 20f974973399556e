"""The coordinator of one process: the suite of all coordinators, and leases by a clock that is turned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dataplane.coordinator.base import Coordinator
from dataplane.errors import Corrupt
from tests.conformance.coordinators import CoordinatorSuite
from tests.coordinator import ProcessCoordinator, Registry


class TestProcess(CoordinatorSuite):
    @pytest.fixture
    async def coordinator(self) -> AsyncIterator[Coordinator]:  # type: ignore[override]
        coordinator = ProcessCoordinator()
        yield coordinator
        await coordinator.aclose()


async def test_a_registration_lease_expires_exactly_on_time() -> None:
    now = 10.0
    coordinator = ProcessCoordinator(clock=lambda: now)
    registration = await coordinator.register("a", b"", 2.0)
    now = 11.9
    assert await registration.renew()
    now = 13.8
    assert dict(await coordinator.members()) == {"a": b""}
    now = 13.9
    assert dict(await coordinator.members()) == {}
    assert not await registration.renew()


def test_the_registry_notifies_only_of_real_changes() -> None:
    registry = Registry()
    changes: list[str] = []
    registry.members_changed = lambda: changes.append("members")
    registry.value_changed = changes.append
    registry.swap("k", None, b"1")
    registry.swap("k", None, b"2")  # nothing
    registry.swap("k", b"1", b"1")  # nothing
    number = registry.register("a", b"", 1.0, 0.0)
    registry.renew("a", number, 0.5)
    assert registry.next_expiry() == 1.5
    registry.expire(1.4)
    registry.expire(1.5)
    assert changes == ["k", "members", "members"]
    assert registry.next_expiry() is None


# The coordinator of one process whose values are kept: what was answered is kept, whatever failed before.


async def test_a_value_that_failed_to_persist_is_written_at_the_next_request() -> None:
    kept: dict[str, bytes | None] = {}
    broken = True

    async def keep(key: str, value: bytes | None) -> None:
        if broken:
            raise Corrupt("the disk")
        kept[key] = value

    coordinator = ProcessCoordinator(keep=keep)
    with pytest.raises(Corrupt):
        await coordinator.swap("placements/rollouts", None, b"table")
    broken = False
    found = await coordinator.read("placements/rollouts")
    if found is None:
        found = await coordinator.swap("placements/rollouts", None, b"table")
    assert kept.get("placements/rollouts") == found


async def test_a_repeated_swap_is_answered_after_the_value_was_persisted() -> None:
    keeping, kept = asyncio.Event(), asyncio.Event()

    async def keep(key: str, value: bytes | None) -> None:
        keeping.set()
        await kept.wait()

    coordinator = ProcessCoordinator(keep=keep)
    first = asyncio.ensure_future(coordinator.swap("key", None, b"value"))
    await keeping.wait()
    second = asyncio.ensure_future(coordinator.swap("key", None, b"value"))
    await asyncio.sleep(0.05)
    early = second.done()
    kept.set()
    await asyncio.gather(first, second)
    assert not early
