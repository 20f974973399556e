"""Nodes that come back: as the same process after a while, or as a new one under the same name."""

from __future__ import annotations

import asyncio

from tests.simulation.machine import TASKS
from tests.unit.node.partitions.bench import Bench, benches, until

P = "rollouts/s1/0-n1"


async def absent(node: Bench, others: list[Bench]) -> None:
    """The node is registered no more, though it lives."""
    node._running[0].cancel()
    await asyncio.gather(node._running[0], return_exceptions=True)
    registration = node.members._registration
    assert registration is not None
    await registration.leave()
    await until(lambda: all(other.members.away(node.name) for other in others))


async def back(node: Bench, others: list[Bench]) -> None:
    """The same process registers again."""
    node._running[0] = asyncio.ensure_future(node.members.run())
    await until(lambda: not any(other.members.away(node.name) for other in others))


async def test_a_leader_that_returns_after_an_absence_is_asked_again() -> None:
    async with benches(3) as [node, leader, third]:
        await node.replicas.create(P, leader.name, 1)
        await until(lambda: leader.led(P))
        await absent(leader, [node, third])
        await back(leader, [node, third])
        await until(lambda: leader.at(P))
        for other in (node, third):
            await other.append(P, "row")
            assert (await other.lease(P, TASKS[0], 1)).rows
