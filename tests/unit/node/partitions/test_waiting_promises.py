"""What a leader holds for those who wait, and for those who wait no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataplane.clock import Deadline
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import LimitExceeded
from dataplane.replication.configuration import encode
from dataplane.stream import requests as r
from dataplane.stream.sampler import Fifo
from dataplane.wire import partition_messages as m
from tests.unit.node.partitions.bench import benches, until
from tests.unit.node.partitions.streambench import TASKS, S, StreamBench


def consume(rows: int) -> bytes:
    return r.encode_request(r.Consume(client="6e/1/1", task=TASKS[0], columns=("x",), rows=rows, sampler=Fifo()))


async def test_who_is_cancelled_waits_no_more_and_is_given_nothing() -> None:
    async with benches(1, make=StreamBench) as [node]:
        key = node.own_key(await node.opened())
        hosted = await until(lambda: node.at(key))
        waiting = asyncio.ensure_future(node.replicas.request(key, consume(1), 60.0, "queue", 50.0))
        await until(lambda: len(hosted.waiters))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await node.put(key, 1)
        await asyncio.sleep(0.1)
        assert (len(hosted.waiters), len(node.machine(key).home.leases)) == (0, 0)


async def test_who_waits_at_a_leader_that_was_deposed_is_told_who_leads() -> None:
    coordinator = ProcessCoordinator()
    async with benches(3, coordinator, make=StreamBench) as nodes:
        first = nodes[0]
        key = first.own_key(await first.opened())
        await until(lambda: first.led(key))
        hosted = first.replicas.find(key)
        assert hosted is not None
        (heir,) = hosted.configuration.followers
        second, third = sorted(nodes[1:], key=lambda node: node.name != heir[0])
        for node in nodes:
            node.replicas.recruiting.wanted = lambda partition: 0  # or the one that was deposed may follow, and hear
        watch = r.Watch(client=third.client, task=TASKS[0], columns=("x",), rows=1, sampler=Fifo(), least=1)
        asked = third.router.ask(key, r.encode_request(watch), Deadline.after(12.0), queue="queue", wait_s=10.0)
        waiting = asyncio.ensure_future(asked)
        await until(lambda: len(hosted.waiters))
        before = hosted.configuration
        await coordinator.swap(first.replicas.key(key), encode(before), encode(before.deposed_by(heir)))
        await until(lambda: second.at(key))
        await second.put(key, 1)
        async with asyncio.timeout(4.0):
            assert await waiting


@pytest.mark.long
async def test_rows_that_a_leader_gives_too_late_are_given_back() -> None:
    async with benches(2, make=StreamBench) as [node, slow]:
        await node.opened()
        await slow.directory.own(S)
        table = await node.directory.read(S)
        assert table is not None
        key = slow.own_key(table)
        await until(lambda: slow.led(key))
        hear, loop = slow.channel.heard, asyncio.get_running_loop()

        def later(sender: str, item: m.Item) -> None:
            if isinstance(item, m.Ask | m.Withdrawn):
                loop.call_later(1.3, hear, sender, item)
            else:
                hear(sender, item)

        await slow.put(key, 4)
        slow.channel.heard = later
        taken = await node.take(table, 4, timeout_s=2.0)
        slow.channel.heard = hear
        await asyncio.sleep(2.0)  # until all that is under way has come
        leased = sum(len(grant.rows) for grant in slow.machine(key).home.leases)
        assert leased == (0 if taken is None else len(taken[1].rows))


async def test_rows_whose_delivery_fits_no_frame_are_still_to_be_had() -> None:
    async with benches(2, make=StreamBench) as [node, other]:
        await node.opened()
        await other.directory.own(S)
        table = await node.directory.read(S)
        assert table is not None
        key = other.own_key(table)
        await until(lambda: other.led(key))
        for first in range(0, 20_000, 1000):
            keys = [f"{number:0250d}" for number in range(first, first + 1000)]
            await other.put(key, 1000, keys=keys, digest=first.to_bytes(8, "big"))
        with pytest.raises(LimitExceeded, match="fewer rows"):
            await node.take(table, 20_000, timeout_s=2.0)
        fewer: Any = await node.take(table, 1000, timeout_s=2.0)
        assert fewer is not None, "they are leased to who was told nothing"
        assert len(fewer[1].rows) == 1000
