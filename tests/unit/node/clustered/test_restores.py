"""Streams that are restored as a partition that nobody sees, and opened once all of it is there."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.coordinator.base import DELETED
from dataplane.errors import Corrupt, Misuse
from dataplane.node.streams.restores import _fitting
from dataplane.stream.block import Block
from dataplane.stream.page import PAGE
from dataplane.stream.sampler import CompleteGroups
from dataplane.wire import messages as m
from tests.unit.node.clustered.streambench import Client, StreamBench, clients, ids, stream_nodes, streaming
from tests.unit.node.partitions.bench import until


class Restorer:
    """A client that restores a stream of a snapshot, as `client.checkpoint` does."""

    def __init__(self, node: StreamBench) -> None:
        self.client = node.connect()
        self.token = b""

    async def begin(self, taken: m.SnapshotTaken, name: str = "again") -> None:
        opened: m.Opened = await self.client.ask(m.Restore(1, name, taken.head))
        self.token = opened.stream

    async def fill(self, found: list[m.SnapshotRows]) -> None:
        for part in found:
            await self.client.ask(m.PutBack(1, self.token, part.block))
            for rows, task, _ in part.columns:
                scope, ref = self.client.stage(len(rows) // 8)
                await self.client.ask(m.PutColumns(1, self.token, scope, ref.encode(), rows, task, {}))

    async def finish(self) -> None:
        await self.client.ask(m.Restored(1, self.token))


async def read(client: Client) -> tuple[m.SnapshotTaken, list[m.SnapshotRows]]:
    taken: m.SnapshotTaken = await client.ask(m.TakeSnapshot(1, client.stream.token))
    pages = [m.ReadSnapshot(1, taken.snapshot, page * PAGE, PAGE) for page in taken.head.pages]
    return taken, [await client.ask(page) for page in pages]


async def opened(node: StreamBench) -> Client:
    client = node.connect()
    client.stream = await node.service.streams.open("again", None)
    return client


def replicas(nodes: list[StreamBench]) -> list[str]:
    """The replicas of the restored streams."""
    return [each.partition for node in nodes for each in node.replicas if each.partition.startswith("again/")]


async def test_a_stream_is_restored_on_another_node_and_goes_on_everywhere() -> None:
    async with streaming(3) as (leader, (node, other)):
        (client,) = clients([node])
        await client.append([0, 1], groups=["g"] * 2, version=3)
        await client.append([2], keys=["named"])
        taken, found = await read(client)
        restorer = Restorer(other)
        await restorer.begin(taken)
        with pytest.raises(Misuse, match="there is no stream"):
            await opened(leader)
        await restorer.fill(found)
        assert not any("again" in each.service.figures() for each in (leader, node, other))
        await restorer.finish()
        again = await opened(leader)
        delivery = await again.take(3, min_rows=3)
        assert (ids(delivery), delivery.versions) == ([0, 1, 2], [3, 3, 0])
        await again.extend(["named"], "late")
        await again.settle(delivery, done=False)
        assert (await again.append([4], groups=["g"])).new
        whole = await again.take(8, sampler=CompleteGroups(3))
        assert whole.groups == ["g"] * 3


async def test_nothing_is_left_of_a_stream_whose_restorer_goes() -> None:
    async with streaming(2) as (leader, (node,)):
        (client,) = clients([leader])
        await client.append(range(8))
        taken, found = await read(client)
        restorer = Restorer(node)
        await restorer.begin(taken)
        await restorer.fill(found)
        assert replicas([leader, node])
        assert node.kept == 1
        restorer.client.streams.leave()
        await until(lambda: not replicas([leader, node]) and node.kept == 0)
        value = await node.replicas.coordinator.read("streams/again")
        assert value in (None, DELETED)


async def test_what_no_stream_had_is_refused_and_the_node_goes_on() -> None:
    async with stream_nodes(1) as [node]:
        client = await node.opened()
        await client.append(range(4), groups=["g"] * 4)
        taken, found = await read(client)
        block = found[0].block
        wrong: list[dict[str, Any]] = [
            {"rows": block.rows[:8]},
            {"rows": np.array([3, 2, 1, 0]).tobytes()},
            {"states": b"\xff" * 4},
            {"ages_s": np.full(4, np.nan).tobytes()},
            {"versions": b"odd"},
            {"groups": []},
            {"tags": {"id": [1]}},
            {"dropped": [("g", [1, 2, 3])]},
        ]
        for change in wrong:
            restorer = Restorer(node)
            await restorer.begin(taken)
            with pytest.raises(Corrupt):
                await restorer.client.ask(m.PutBack(1, restorer.token, msgspec.structs.replace(block, **change)))
            await restorer.client.ask(m.End(1, restorer.token, drop=True))
            restorer.client.streams.leave()
        await until(lambda: not replicas([node]))
        assert len(ids(await client.take(4, min_rows=4))) == 4


def test_a_block_that_is_too_large_for_a_command_is_split_and_loses_nothing() -> None:
    count = 4096
    block = Block(
        rows=np.arange(count).tobytes(),
        groups=[f"g{row // 2}" for row in range(count)],
        versions=np.arange(count).tobytes(),
        ages_s=np.arange(count, dtype=np.float64).tobytes(),
        tags={"why": ["y" * 2000] * count},
        keys=[f"k{row}" for row in range(count)],
        calls=[("k0", 0, 3000, b"a"), ("k3000", 3000, 1096, b"b")],
        states=np.arange(2 * count).astype(np.uint8).tobytes(),
        tries=np.arange(2 * count).astype(np.uint8)[::-1].tobytes(),
        dropped=[("g0", [1, 2]), ("g2000", [3, 4])],
    )
    parts = _fitting(block)
    assert len(parts) > 2
    assert all(len(msgspec.msgpack.encode(part)) <= 2 << 20 for part in parts)
    assert b"".join(part.rows for part in parts) == block.rows
    assert b"".join(part.ages_s for part in parts) == block.ages_s
    assert [key for part in parts for key in part.keys] == block.keys
    assert [call for part in parts for call in part.calls] == block.calls
    assert [each for part in parts for each in part.dropped] == block.dropped
    for name in ("states", "tries"):
        arrays = [np.frombuffer(getattr(part, name), np.uint8).reshape(2, -1) for part in parts]
        assert np.concatenate(arrays, axis=1).tobytes() == getattr(block, name)
