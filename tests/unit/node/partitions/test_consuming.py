"""Consumers over the partitions of a stream: who is asked, who is woken, and what that costs."""

from __future__ import annotations

import asyncio

from dataplane.node.partitions.table import Table
from tests.unit.node.partitions.bench import Bench, benches, until
from tests.unit.node.partitions.machine import Machine

S, TASK = "rollouts", "train"


def machine(node: Bench, table: Table) -> Machine:
    """The machine of a node's own partition."""
    hosted = node.at(table.key(table.own(node.name) or 0))
    assert hosted is not None
    assert isinstance(hosted.machine, Machine)
    return hosted.machine


async def opened(nodes: list[Bench]) -> Table:
    table = await nodes[0].directory.open(S, b"s")
    for node in nodes:
        await node.directory.open(S, b"s")
        await until(lambda: node.led(table.key(table.own(node.name) or 0)))  # noqa: B023
    return table


async def test_ones_own_rows_come_first_and_no_message_is_sent_for_them() -> None:
    async with benches(3) as nodes:
        table = await opened(nodes)
        for node in nodes:
            await node.append(table.key(table.own(node.name) or 0), f"of {node.name}")
        for node in nodes:
            _, leased = await node.lease(table, TASK, 5)
            assert [row[2] for row in leased.rows] == [f"of {node.name}"]
        assert await nodes[0].lease(table, TASK, 5, timeout_s=0.2) == ("", type(leased)(()))


async def test_a_waiting_consumer_is_given_a_row_wherever_it_is_appended() -> None:
    async with benches(4) as nodes:
        table = await opened(nodes)
        for turn in range(3):
            for producer in nodes:
                waiting = asyncio.create_task(nodes[turn].lease(table, TASK, 1))
                await asyncio.sleep(0)
                await producer.append(table.key(table.own(producer.name) or 0), f"{turn} {producer.name}")
                partition, leased = await waiting
                assert [row[2] for row in leased.rows] == [f"{turn} {producer.name}"]
                await nodes[turn].ack(partition, TASK, leased)


async def test_an_append_is_decided_for_as_many_consumers_as_it_serves() -> None:
    async with benches(2) as nodes:
        table = await opened(nodes)
        home = machine(nodes[0], table)
        key = table.key(table.own("n0") or 0)
        waiting = [asyncio.create_task(node.lease(table, TASK, 1)) for node in nodes for _ in range(20)]
        hosted = nodes[0].at(key)
        assert hosted is not None
        await until(lambda: len(hosted.waiters) == 40)
        before = home.decided
        for number in range(5):
            await nodes[0].append(key, f"r{number}")
        await until(lambda: sum(task.done() for task in waiting) == 5)
        assert home.decided - before == 10  # five appends, and five requests of the 40
        for number in range(5, 40):
            await nodes[0].append(key, f"r{number}")
        given = [row[2] for _, leased in await asyncio.gather(*waiting) for row in leased.rows]
        assert sorted(given) == sorted(f"r{number}" for number in range(40))  # each once, and none is given back
        assert not nodes[0].back + nodes[1].back


async def test_who_waits_at_a_leader_that_ends_is_served_by_its_follower() -> None:
    async with benches(3) as nodes:
        table = await opened(nodes)
        key = table.key(table.own("n2") or 0)
        waiting = asyncio.create_task(nodes[0].lease(table, TASK, 1))
        await until(lambda: nodes[2].at(key).waiters)  # type: ignore[union-attr]
        await nodes[2].aclose()
        await nodes[1].append(key, "row")
        _, leased = await waiting
        assert [row[2] for row in leased.rows] == ["row"]


async def test_rows_come_back_when_their_lease_is_over_though_nothing_happens() -> None:
    async with benches(1) as nodes:
        table = await opened_alone(nodes[0])
        await nodes[0].append(table.key(0), "row")
        _, first = await nodes[0].lease(table, TASK, 1, lease_s=0.2)
        _, second = await nodes[0].lease(table, TASK, 1)
        assert first.rows[0][0] == second.rows[0][0]


async def opened_alone(node: Bench) -> Table:
    table = await node.directory.open(S, b"s")
    await until(lambda: node.at(table.key(0)))
    return table
