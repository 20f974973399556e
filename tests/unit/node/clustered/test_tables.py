"""Tables over several nodes: the same calls wherever they are led, whoever dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.coordinator.base import Coordinator, Unavailable
from dataplane.errors import Corrupt, OwnerDied
from dataplane.node.clustered.column_holders import ColumnHolders
from dataplane.node.clustered.tables import ClusteredTables, machine
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.node.partitions.record import Record
from dataplane.store.live_cells import LiveCells
from dataplane.table import requests as r
from dataplane.table import requests as t
from dataplane.table.machine import TableMachine
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire import row_messages as rm
from tests.coordinator import ProcessCoordinator
from tests.unit.node.clustered.streambench import Putting, StoringBench
from tests.unit.node.partitions.bench import WAIT_S, absent, back, benches, until

T = "t"


class TableBench(StoringBench):
    """One node, and its clients' tables."""

    def __init__(self, name: str, coordinator: Coordinator, *, idle_s: float = 60.0, **options: Any) -> None:
        super().__init__(name, coordinator, machines=machine, **options)
        self.holders = ColumnHolders(
            self.id, self.retained, self.members, self.peers, self.router, life=self.members.current[self.name].life
        )
        self.tables = ClusteredTables(
            self, coordinator, self.peers, self.holders, life=1, idle_s=idle_s, care_s=0.05, sweep_s=0.05
        )

    def start(self) -> None:
        super().start()
        self.tables.start()

    def _answer(self, request: Any) -> Any:
        match request:
            case pm.LedTables():
                return self.tables.answer(request)
            case pm.RetainColumns():
                assert self.holders.retain(request) is None, "it is not durable"
                return m.Done(request.id)
            case pm.ReleaseColumns():
                self.holders.release(request)
                return m.Done(request.id)
        return super()._answer(request)

    def client(self) -> User:
        return User(self)

    @property
    def live(self) -> int:
        found = 0
        for _, rows, columns, _, live in self.store.shards.describe([*self.store.shards]):
            cells = LiveCells.of(live, columns, rows)
            found += sum(int(cells.flags(column, 0, rows).sum()) for column in range(columns))
        return found

    async def aclose(self) -> None:
        await self.tables.aclose()
        await super().aclose()


class User(Putting):
    """A client of a node: its messages, and what they are answered."""

    def __init__(self, node: TableBench) -> None:
        super().__init__(node)
        self.node = node
        self.home = b""
        self.tables = node.tables.client(self.staged)

    async def ask(self, asked: t.FromClient, timeout_s: float = 0.0, *, staged: str = "", table: str = T) -> Any:
        request = rm.AskTable(7, table, self.home, asked, timeout_s, staged)
        reply = await self.tables.answer(request, Deadline.after(timeout_s))()
        assert isinstance(reply, rm.TableAnswer)
        assert reply.id == 7
        self.home = reply.home
        return reply.result

    async def write(self, keys: Sequence[str], *columns: str, ref: BatchRef | None = None, **more: Any) -> list[int]:
        staged = ""
        if columns:
            staged, ref = self.stage(len(keys), *columns)
        encoded = b"" if ref is None else ref.encode()
        reply = await self.ask(t.Upsert(keys=list(keys), ref=encoded, **more), staged=staged)
        found: list[int] = reply.rows.tolist()
        return found

    async def look(self, *columns: str, **more: Any) -> Any:
        return await self.ask(t.LookRows(all=True, columns=list(columns), **more))

    async def read(self, keys: Sequence[str], *columns: str) -> BatchRef:
        return BatchRef.decode((await self.ask(t.Read(keys=list(keys), columns=list(columns) or None))).ref)

    async def clear(self, *keys: str) -> None:
        await self.ask(t.ClearRows(keys=list(keys)))

    async def ready(self, *columns: str, timeout_s: float = 0.0, **more: Any) -> list[int]:
        found: list[int] = (await self.ask(t.FindReady(columns=list(columns), **more), timeout_s)).rows.tolist()
        return found

    async def take(self, task: str, *rows: int, claim: str = "") -> list[int] | None:
        numbers = np.array(rows, np.int64)
        reply = await self.ask(t.Claim(task=task, rows=numbers, give=numbers, claim_id=claim))
        return reply.rows.tolist() if reply.granted else None


def leader(nodes: Sequence[TableBench], name: str = T, followers: int | None = 1) -> TableBench | None:
    for node in nodes:
        hosted = hosted_at(node, name)
        there = hosted is not None and node.at(hosted.partition) is hosted
        if hosted is not None and there and followers in (None, len(hosted.configuration.followers)):
            return node
    return None


def hosted_at(node: TableBench, name: str = T) -> HostedReplica | None:
    """The node's replica of the table."""
    record = node.tables.directory.records.find(name)
    hosted = None if record is None or record.key is None else node.replicas.find(record.key)
    assert hosted is None or isinstance(hosted.machine, TableMachine)
    return hosted


@asynccontextmanager
async def table_nodes(count: int, directory: Path, **options: Any) -> AsyncIterator[list[TableBench]]:
    async with benches(count, ProcessCoordinator(), TableBench, directory=directory, **options) as nodes:
        yield nodes


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
