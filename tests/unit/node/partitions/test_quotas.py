"""Limits of a stream over several nodes: quotas are borrowed, given back, and never passed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from dataplane.errors import DataplaneError
from dataplane.node.partitions.table import Table
from dataplane.stream import requests as r
from tests.unit.node.partitions.bench import WAIT_S, benches, until
from tests.unit.node.partitions.streambench import S, StreamBench

LIMIT = 12


def rows(nodes: list[StreamBench], table: Table) -> int:
    """The rows of all partitions, which are never more than the limit."""
    leading = {hosted.partition: hosted for node in nodes for hosted in node.replicas if hosted.replica.leads}
    machines = [
        leading[table.key(each.number)].machine for each in table.partitions if table.key(each.number) in leading
    ]
    count = sum(machine.home.books.rows.count for machine in machines)  # type: ignore[attr-defined]
    assert count <= LIMIT
    return count


async def append(node: StreamBench, table: Table, count: int, **said: Any) -> r.Appended:
    """Append to a node's own partition, waiting there for as long as it takes."""
    partition = node.own_key(table)
    return await node.put(partition, count, queue="append", wait_s=WAIT_S, **said)


async def test_each_node_appends_up_to_the_limit_of_all_and_goes_on_when_there_is_room() -> None:
    async with benches(3, make=StreamBench) as nodes:
        for node in nodes:
            table = await node.opened(max_rows=LIMIT)
        appends = [asyncio.create_task(append(nodes[at % 3], table, 1)) for at in range(2 * LIMIT)]
        await until(lambda: rows(nodes, table) == LIMIT)
        taken = 0
        while taken < 2 * LIMIT:
            found = await nodes[taken % 3].take(table, 3)
            assert found is not None
            partition, given = found
            assert rows(nodes, table) <= LIMIT
            await nodes[taken % 3].done(partition, given.grant)
            taken += len(given.rows)
        await asyncio.gather(*appends)


async def test_what_was_lent_to_a_partition_that_is_no_more_is_lent_again() -> None:
    async with benches(3, make=StreamBench) as nodes:
        for node in nodes:
            table = await node.opened(max_rows=LIMIT)
        leader = next(node for node in nodes if table.own(node.name) == 0)
        gone, other = (node for node in nodes if node is not leader)
        await append(gone, table, LIMIT, ref=other.ref(LIMIT))
        found = await gone.take(table, LIMIT)
        assert found is not None
        await gone.done(found[0], found[1].grant)
        number = table.own(gone.name) or 0
        await until(lambda: gone.led(table.key(number)))
        await gone.leave(WAIT_S)
        await gone.aclose()

        async def dropped() -> bool:
            try:
                table = await other.directory.take_care(await other.directory.open(S, None))
            except DataplaneError:
                return False
            return table.find(number) is None

        while not await dropped():
            await asyncio.sleep(0.01)
        await append(other, table, LIMIT)


async def test_versions_wait_for_older_ones_of_other_nodes() -> None:
    async with benches(3, make=StreamBench) as nodes:
        for node in nodes:
            table = await node.opened(max_lag=2)
        await append(nodes[0], table, 1, versions=np.array([5]))
        await append(nodes[1], table, 1, versions=np.array([7]))
        waiting = asyncio.create_task(append(nodes[2], table, 1, versions=np.array([8])))
        await append(nodes[2], table, 1, versions=np.array([6]))
        key = nodes[2].own_key(table)
        await until(lambda: nodes[2].at(key) and nodes[2].at(key).waiters)  # type: ignore[union-attr]
        found = await nodes[0].take(table, 1)
        assert found is not None
        assert found[1].versions == [5]
        assert not waiting.done()
        await nodes[0].done(found[0], found[1].grant)
        assert (await waiting).new
        assert await nodes[0].take(table, 1) is not None
