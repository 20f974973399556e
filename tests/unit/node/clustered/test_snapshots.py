"""Snapshots of all partitions of a stream, told as one."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.batch.ref import BatchRef
from dataplane.errors import LeaseExpired, LimitExceeded, Misuse
from dataplane.node.streams.snapshots import MAX_SNAPSHOTS
from dataplane.stream import requests as r
from dataplane.stream.block import Block
from dataplane.stream.page import PAGE
from dataplane.wire import messages as m
from tests.unit.node.clustered.readers import Client, ids, readers
from tests.unit.node.partitions.bench import until


async def taken(client: Client) -> m.SnapshotTaken:
    found: m.SnapshotTaken = await client.ask(m.TakeSnapshot(1, b""))
    return found


async def read(client: Client, snapshot: m.SnapshotTaken) -> tuple[list[Block], list[tuple[bytes, int, bytes]]]:
    """All of it."""
    found = [await client.read(snapshot.snapshot, page * PAGE, PAGE) for page in snapshot.head.pages]
    return [each.block for each in found], [columns for each in found for columns in each.columns]


async def test_the_rows_of_all_partitions_are_told_each_once_with_what_is_known_of_them() -> None:
    async with readers(3) as nodes:
        for number, node in enumerate(nodes):
            await node.put(range(4 * number, 4 * number + 4), groups=["a", "a", "b", "b"], versions=[number] * 4)
        await nodes[0].put([12], keys=["named"], groups=["c"])
        client = nodes[1].reader()
        await client.settle(await client.take(2))
        snapshot = await taken(client)
        assert (snapshot.head.appended, snapshot.head.latest, snapshot.head.closed) == (13, 2, False)
        assert [counts[1] for counts in snapshot.head.counts] == [2]  # acked
        blocks, columns = await read(client, snapshot)
        rows = np.concatenate([np.frombuffer(block.rows, np.int64) for block in blocks])
        assert len(set(rows.tolist())) == 11
        assert rows.max() < snapshot.head.following
        assert sorted(value for block in blocks for value in block.tags["id"]) == [0, 1, 2, 3, *range(6, 13)]  # type: ignore[type-var]
        assert sorted({group for block in blocks for group in block.groups}) == ["a", "b", "c"]  # type: ignore[type-var]
        assert [key for block in blocks for key in block.keys if key] == ["named"]
        [(key, first, count, _)] = [call for block in blocks for call in block.calls]
        assert (key, count) == ("named", 1)
        assert first in rows
        of = np.concatenate([np.frombuffer(each, np.int64) for each, _, _ in columns])
        assert sorted(of.tolist()) == sorted(rows.tolist())
        assert sum(len(BatchRef.decode(ref)) for _, _, ref in columns) == 11


async def test_a_snapshot_stays_as_it_was_until_it_is_released() -> None:
    async with readers(2) as nodes:
        for node in nodes:
            await node.put(range(4))
        client = nodes[0].reader()
        snapshot = await taken(client)
        await client.settle(await client.take(8, min_rows=8))
        await nodes[1].put(range(4, 8))
        blocks, _ = await read(client, snapshot)
        assert sum(len(block.keys) for block in blocks) == 8
        assert not any(node.settled for node in nodes)  # columns that are read stay where they are
        await client.release(snapshot.snapshot)
        await until(lambda: all(node.settled for node in nodes))
        with pytest.raises(Misuse):
            await read(client, snapshot)


async def test_a_client_reads_few_snapshots_at_a_time() -> None:
    async with readers(1) as nodes:
        client = nodes[0].reader()
        snapshots = [await taken(client) for _ in range(MAX_SNAPSHOTS)]
        with pytest.raises(LimitExceeded):
            await taken(client)
        await client.release(snapshots[0].snapshot)
        await taken(client)


async def test_a_snapshot_of_a_leader_that_has_ended_is_no_more() -> None:
    async with readers(3) as nodes:
        await nodes[2].put(range(4), ref=nodes[0].ref(4))
        client = nodes[0].reader()
        snapshot = await taken(client)
        await nodes[2].aclose()
        with pytest.raises(LeaseExpired):
            await read(client, snapshot)
        assert ids(await client.take(4)) == list(range(4))
        await client.session.ask(nodes[0].own, r.Measure(), r.Figures)
