"""Appends of one node's clients that are made as one request."""

from __future__ import annotations

import asyncio

from tests.unit.node.clustered.streambench import ids, streaming
from tests.unit.node.partitions.bench import until


async def test_appends_of_many_clients_are_merged_into_few_commands() -> None:
    async with streaming(2) as (leader, (far, *_)):
        before = leader.hosted().replica.committed
        made = [await far.opened() for _ in range(24)]
        appended = await asyncio.gather(*(client.append([number, number + 100]) for number, client in enumerate(made)))
        assert leader.hosted().replica.committed - before <= 6
        assert sorted(each.first for each in appended) == list(range(0, 48, 2))
        reader = made[0]
        delivery = await reader.take(48, min_rows=48)
        row_of = {row: number for number, each in enumerate(appended) for row in (each.first, each.first + 1)}
        assert [identifier % 100 for identifier in ids(delivery)] == [row_of[row] for row in delivery.rows.tolist()]
        assert far.kept == 24
        await reader.settle(delivery)
        await until(lambda: far.kept == 0)


async def test_an_append_that_cannot_be_merged_is_answered_separately() -> None:
    async with streaming(2) as (_, (far, *_)):
        first, second, third, fourth = [await far.opened() for _ in range(4)]
        await first.append([0])
        both = first.put(2)
        results = await asyncio.gather(
            first.append([1], ref=both[:1]),
            second.append([2], ref=both[1:]),
            third.append([3], keys=["a"]),
            fourth.append([4], ref=fourth.put(1, "y")),
            second.append([5]),
        )
        assert sorted(each.first for each in results) == [1, 2, 3, 4, 5]
        delivery = await first.take(5, min_rows=5)
        assert sorted(ids(delivery)) == [0, 1, 2, 3, 5]
        await first.settle(delivery)
        await until(lambda: far.kept == 1)
