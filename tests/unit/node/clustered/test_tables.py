"""Tables over several nodes: the same calls wherever they are led, whoever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dataplane.coordinator.base import Unavailable
from dataplane.errors import Corrupt, OwnerDied
from dataplane.node.partitions.record import Record
from dataplane.table import requests as r
from dataplane.table import requests as t
from dataplane.table.machine import TableMachine
from tests.unit.node.clustered.tablebench import T, TableBench, hosted_at, leader, table_nodes
from tests.unit.node.partitions.bench import WAIT_S, until
from tests.unit.node.partitions.test_returning import absent, back


def nothing_kept(node: TableBench) -> bool:
    return node.live == 0 and not node.retained.holders


async def test_an_altered_table_record_is_corrupt_and_not_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with table_nodes(2, tmp_path) as (a, b):
        coordinator = a.members._coordinator
        await a.client().write(["a"], "x")
        key, wrong = f"tables/{T}", b"\xc1 wrong"
        before = await coordinator.read(key)
        await coordinator.swap(key, before, wrong)
        with pytest.raises(Corrupt, match="left as it is"):
            await b.tables.directory.records.read(T)
        await until(lambda: "left as it is. Delete the key" in caplog.text)
        await a.client().write(["c"], "x")
        assert (await a.client().look("x")).keys == ["a", "c"]
        assert await coordinator.read(key) == wrong
        await coordinator.swap(key, wrong, before)
        await b.client().write(["b"], "x")
        assert (await a.client().look("x")).keys == ["a", "c", "b"]


async def test_a_lost_table_raises_owner_died_and_a_new_one_replaces_it(tmp_path: Path) -> None:
    async with table_nodes(4, tmp_path) as nodes:
        users = {node: node.client() for node in nodes}
        for node in nodes:
            await users[node].write([node.name], "x")
        led = await until(lambda: leader(nodes))
        follower = next(node for node in nodes if node is not led and hosted_at(node) is not None)
        left = [node for node in nodes if node not in (led, follower)]
        await asyncio.gather(led.aclose(), follower.aclose())
        for node in left:
            with pytest.raises(OwnerDied, match="was lost with every node that had it"):
                await users[node].look()
        await until(lambda: all(map(nothing_kept, left)))
        fresh = left[0].client()
        assert (await fresh.look()).keys == []
        assert await fresh.write(["a"], "x") == [0]
        for node in left:  # also once there is another of its name
            with pytest.raises(OwnerDied, match="was lost"):
                await users[node].write(["b"])
        assert (await left[1].client().look()).keys == ["a"]


async def test_retained_columns_of_a_deleted_partition_are_released_on_other_nodes(tmp_path: Path) -> None:
    async with table_nodes(2, tmp_path) as (node, other):
        key = f"rollouts/s0/0-{other.name}"  # as of a stream that is being restored: it has no record
        await other.replicas.create(key, other.name)
        node.retained.retain(key, node.client().put(1))
        await node.tables.sweep()
        assert node.retained.holders == [key], "its partition is there"
        await other.replicas.delete(key)
        await until(lambda: not node.retained.holders)


async def test_a_table_partition_with_waiting_requests_is_not_retired(tmp_path: Path) -> None:
    async with table_nodes(2, tmp_path, idle_s=0.0) as nodes:
        waiting = asyncio.ensure_future(nodes[0].client().ready("x", timeout_s=WAIT_S))
        other = nodes[1].client()
        for _ in range(20):  # while its partition comes and goes
            await other.write(["a"])
            await other.ask(t.DropTable())
        await other.write(["b"], "x")
        assert len(await waiting) == 1


async def test_a_table_request_retries_while_the_coordinator_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was wiped is told its records again by their nodes, and says `Unavailable` until then."""
    async with table_nodes(2, tmp_path) as (a, b):
        await a.client().write(["a"], "x")
        records, refused = b.tables.directory.records, []
        read = records.read

        async def forgotten(name: str) -> Record | None:
            if len(refused) < 2:
                refused.append(name)
                raise Unavailable("it has forgotten the table")
            return await read(name)

        monkeypatch.setattr(records, "find", lambda name: None)
        monkeypatch.setattr(records, "read", forgotten)
        assert len(await b.client().read(["a"], "x")) == 1
        assert refused == [T, T]


# Tables of nodes that were away, and of leaders that end between two steps.


async def test_a_table_write_replaces_a_partition_retired_by_an_ended_leader(tmp_path: Path) -> None:
    """As when the leader ends after that, and before the record says so."""
    async with table_nodes(2, tmp_path, idle_s=60.0) as nodes:
        user = nodes[0].client()
        await user.write(["a"])
        found = await until(lambda: leader(nodes))
        hosted = hosted_at(found)
        assert hosted is not None
        machine = hosted.machine
        assert isinstance(machine, TableMachine)
        await user.ask(r.DropTable())
        await until(lambda: machine.idle)
        await found.replicas.request(hosted.partition, r.encode_request(r.Retire()), 5.0)
        async with asyncio.timeout(8.0):
            assert await user.write(["b"])


async def test_a_node_that_was_away_for_long_writes_again(tmp_path: Path) -> None:
    async with table_nodes(3, tmp_path, lost_s=0.5) as nodes:
        await nodes[0].client().write(["a"])
        leading = await until(lambda: leader(nodes))
        hosted = hosted_at(leading)
        assert hosted is not None
        machine = hosted.machine
        assert isinstance(machine, TableMachine)
        away = next(node for node in nodes if node is not leading)
        others = [node for node in nodes if node is not away]
        await away.client().write(["b"], "x")
        await absent(away, others)
        await until(lambda: machine.lost_nodes)
        await back(away, others)
        await until(lambda: leader(nodes, followers=None))
        assert await away.client().write(["c"], "x")
