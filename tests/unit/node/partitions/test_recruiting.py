"""Followers, and what is left of a replica that has ended."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from dataplane.errors import Backpressure
from tests.unit.node.partitions.bench import Bench, benches, until

KEY = "rollouts/s0/0-n0"


def full(*_: object) -> NoReturn:
    raise Backpressure("there is no space left on the disk")


async def test_another_follower_is_recruited_when_the_first_choice_has_a_full_disk() -> None:
    async with benches(3) as nodes:
        leader = nodes[0]
        (first,) = leader.replicas.recruiting.others(KEY, leader.name, 1)
        refusing = next(node for node in nodes if node.name == first)
        refusing.replicas._logs = full
        made = await leader.replicas.create(KEY, leader.name, followers=1)
        assert not made.followers, "it goes on with fewer"

        def follower() -> Bench | None:
            hosted = leader.at(KEY)
            names = [] if hosted is None else [name for name, _ in hosted.configuration.followers]
            return next((node for node in nodes if node.name in names), None)

        assert await until(follower) not in (leader, refusing)


async def test_the_watch_of_an_ended_replica_stops() -> None:
    async with benches(1) as [node]:
        await node.replicas.create(KEY, node.name)
        hosted = node.replicas.find(KEY)
        assert hosted is not None
        watching = hosted.watching
        assert watching is not None
        node.replicas.end(hosted)
        await asyncio.wait([watching], timeout=10)
        assert watching.done()
