"""A request finds the leader of its partition, and ends in an answer, a refusal or a typed error in time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from dataplane.clock import Deadline
from dataplane.coordinator.base import Unavailable
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import LimitExceeded, Lost, OutcomeUnknown, PeerUnavailable
from dataplane.wire.partition_messages import FRAME_BYTES
from tests.simulation.machine import Lease, encode
from tests.unit.node.partitions.bench import SETTINGS, benches, until

P = "streams/rollouts/1"


async def test_a_partition_that_there_is_not_is_lost() -> None:
    async with benches(1) as (a,):
        with pytest.raises(Lost, match="no partition"):
            await a.router.ask(P, b"", Deadline.after(5.0))


async def test_what_may_have_been_done_is_unknown_and_the_same_again_settles_it() -> None:
    async with benches(2) as (a, b):
        await a.replicas.create(P, "n0")
        await until(lambda: a.led(P))
        a.channel.answer = lambda node, number, outcome: None  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown):
            await b.append(P, "x", sequence=1, timeout_s=0.5)
        del a.channel.answer  # type: ignore[method-assign]
        assert await b.append(P, "x", sequence=1) == (0,)
        assert await b.append(P, "y", sequence=2) == (1,)


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


async def test_a_leader_that_was_slow_once_is_asked_again() -> None:
    async with benches(3) as (a, b, c):
        await a.replicas.create(P, "n0")
        await until(lambda: a.led(P))
        hosted = b.replicas.find(P) or c.replicas.find(P)
        assert hosted is not None
        asker = c if hosted is b.replicas.find(P) else b
        answer, late = a.channel.answer, asyncio.Event()

        def slow(node: str, number: int, outcome: Any) -> None:
            late.set()  # the first is lost, and no other
            a.channel.answer = answer  # type: ignore[method-assign]

        a.channel.answer = slow  # type: ignore[method-assign]
        assert await asker.append(P, "x", timeout_s=60) == (0,)
        assert late.is_set()


async def test_an_answer_that_fits_into_no_frame_is_refused() -> None:
    async with benches(2) as (a, b):
        await a.replicas.create(P, "n0")
        half = "x" * (FRAME_BYTES // 2)
        await a.append(P, half)
        await a.append(P, half)
        with pytest.raises(LimitExceeded, match="fewer rows"):
            await b.router.ask(P, encode(Lease("c", "train", 2, 9.0)), Deadline.after(5.0))
        with pytest.raises(LimitExceeded, match="fewer rows"):
            await a.append(P, half, half)


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
