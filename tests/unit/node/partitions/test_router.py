"""A request finds the leader of its partition, and ends in an answer, a refusal or a typed error in time."""

from __future__ import annotations

import asyncio
import time

import pytest

from dataplane.clock import Deadline
from dataplane.coordinator.base import Unavailable
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import Lost, PeerUnavailable
from tests.unit.node.partitions.bench import SETTINGS, benches, until

P = "streams/rollouts/1"


async def test_a_partition_that_there_is_not_is_lost() -> None:
    async with benches(1) as (a,):
        with pytest.raises(Lost, match="no partition"):
            await a.router.ask(P, b"", Deadline.after(5.0))


async def test_a_leader_is_found_though_the_coordinator_went_away() -> None:
    class Leaving(ProcessCoordinator):
        away = False

        async def read(self, key: str) -> bytes | None:
            if self.away:
                raise Unavailable("it is away")
            return await super().read(key)

    coordinator = Leaving()
    async with benches(3, coordinator) as (a, b, c):
        await a.replicas.create(P, "n0")
        await until(lambda: a.led(P))
        await c.append(P, "x")
        await b.append(P, "x", sequence=9)
        coordinator.away = True
        c.router._leaders.clear()
        assert await c.append(P, "y") == (2,)
        with pytest.raises(PeerUnavailable, match="in time"):
            await c.router.ask("streams/other/1", b"", Deadline.after(0.2))


@pytest.mark.long
async def test_a_node_that_is_suspended_takes_nobody_for_silent() -> None:
    async with benches(2) as (a, b):
        await a.replicas.create(P, "n0")
        await until(lambda: a.led(P))
        configuration = a.at(P).configuration  # type: ignore[union-attr]
        time.sleep(2 * SETTINGS.grace_s)  # noqa: ASYNC251 - both, as a host is suspended
        await asyncio.sleep(2 * SETTINGS.beat_s)
        assert await b.append(P, "x") == (0,)
        found = a.replicas.find(P) or b.replicas.find(P)
        assert found is not None
        assert found.configuration == configuration
