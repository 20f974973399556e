"""Streams that are restored as a partition of one node, which others open once all of it is there."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.coordinator.base import DELETED
from dataplane.errors import Corrupt, Misuse
from dataplane.node.clustered.restores import _fitting
from dataplane.stream.block import Block
from dataplane.stream.page import PAGE
from dataplane.stream.sampler import CompleteGroups
from dataplane.wire import messages as m
from tests.unit.node.clustered.readers import Client, ReaderBench, ids, readers
from tests.unit.node.clustered.writers import Writer
from tests.unit.node.partitions.bench import until


class Restorer:
    """A client that restores a stream of a snapshot, as `client.checkpoint` does."""

    def __init__(self, node: ReaderBench) -> None:
        self.node = node
        self.client: Writer = node.connect()
        self.token = b""

    async def begin(self, taken: m.SnapshotTaken, name: str = "again") -> None:
        opened: m.Opened = await self.client.ask(m.Restore(1, name, taken.head))
        self.token = opened.stream

    async def fill(self, found: list[m.SnapshotRows]) -> None:
        for part in found:
            await self.client.ask(m.PutBack(1, self.token, part.block))
            for rows, task, _ in part.columns:
                scope = f"{m.STAGED}{rows.hex()[:16]}"
                self.client.streams.staged(scope)
                ref = self.client.put(len(rows) // 8, scope=scope)
                await self.client.ask(m.PutColumns(1, self.token, scope, ref.encode(), rows, task, {}))

    async def finish(self) -> None:
        await self.client.ask(m.Restored(1, self.token))

    @property
    def partitions(self) -> list[str]:
        """Those of the name that are hosted on any node."""
        return [each.partition for each in self.node.replicas if each.partition.startswith("again/")]


async def read(client: Client) -> tuple[m.SnapshotTaken, list[m.SnapshotRows]]:
    taken: m.SnapshotTaken = await client.ask(m.TakeSnapshot(1, b""))
    return taken, [await client.read(taken.snapshot, page * PAGE, PAGE) for page in taken.head.pages]


async def opened(node: ReaderBench) -> Client:
    node.stream = await node.service.streams.open("again", None)
    return node.reader()


async def test_a_stream_of_several_partitions_is_restored_as_one_and_goes_on_everywhere() -> None:
    async with readers(3) as nodes:
        for number, node in enumerate(nodes):
            await node.put([number, number + 10], groups=["g", f"h{number}"], versions=[number, number])
        await nodes[0].put([20], keys=["named"])
        taken, found = await read(nodes[1].reader())
        restorer = Restorer(nodes[2])
        await restorer.begin(taken)
        with pytest.raises(Misuse, match="there is no stream"):
            await opened(nodes[0])
        await restorer.fill(found)
        assert restorer.node.service.figures().keys() == {"rollouts"}
        await restorer.finish()
        client = await opened(nodes[0])
        delivery = await client.take(7, min_rows=7)
        assert sorted(ids(delivery)) == [0, 1, 2, 10, 11, 12, 20]
        assert sorted(delivery.versions) == [0, 0, 0, 1, 1, 2, 2]
        writer = nodes[0].connect()
        writer.stream = nodes[0].stream
        assert len({key.rpartition(".")[0] for key in delivery.keys}) == 2  # they are called by their new partition
        await writer.extend(delivery.keys, "late")
        await client.settle(delivery, done=False)
        await nodes[0].directory.own("again")  # another partition, where the group may belong by now
        await until(lambda: len(nodes[0].stream.partitions) == 2)
        await writer.append(1, groups=["g"])
        whole = await client.take(8, min_rows=4, sampler=CompleteGroups(4))
        assert whole.groups == ["g"] * 4
        await client.settle(whole)


async def test_nothing_is_left_of_a_stream_whose_restorer_goes() -> None:
    async with readers(2) as nodes:
        await nodes[0].put(range(8))
        taken, found = await read(nodes[0].reader())
        restorer = Restorer(nodes[1])
        await restorer.begin(taken)
        await restorer.fill(found)
        assert restorer.partitions
        assert nodes[1].kept == 1
        restorer.client.streams.leave()
        await until(lambda: not restorer.partitions and nodes[1].kept == 0)
        value = await nodes[1].replicas.coordinator.read("placements/again")
        assert value in (None, DELETED)


async def test_what_no_stream_had_is_refused_and_the_node_goes_on() -> None:
    async with readers(1) as nodes:
        await nodes[0].put(range(4), groups=["g"] * 4)
        taken, found = await read(nodes[0].reader())
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
            restorer = Restorer(nodes[0])
            await restorer.begin(taken)
            with pytest.raises(Corrupt):
                await restorer.client.ask(m.PutBack(1, restorer.token, msgspec.structs.replace(block, **change)))
            restorer.client.streams.answer(m.End(1, restorer.token, drop=True), None)  # type: ignore[arg-type]
            restorer.client.streams.leave()
        await until(lambda: not restorer.partitions)
        assert len(ids(await nodes[0].reader().take(4, min_rows=4))) == 4


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
