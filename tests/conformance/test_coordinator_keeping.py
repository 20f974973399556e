"""The coordinator of one process whose values are kept: what was answered is kept, whatever failed before."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import Corrupt


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
