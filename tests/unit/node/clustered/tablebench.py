"""Nodes with stores of bytes and partitions of tables, in one loop, and the clients of one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.coordinator.base import Coordinator
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.clustered.column_holders import ColumnHolders
from dataplane.node.clustered.machines import machine
from dataplane.node.clustered.tables import ClusteredTables
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.store.live_cells import LiveCells
from dataplane.table import requests as t
from dataplane.table.machine import TableMachine
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire import row_messages as rm
from tests.unit.node.clustered.streambench import Putting, StoringBench
from tests.unit.node.partitions.bench import benches

T = "t"


class TableBench(StoringBench):
    """One node, and its clients' tables."""

    def __init__(self, name: str, coordinator: Coordinator, *, idle_s: float = 60.0, **options: Any) -> None:
        super().__init__(name, coordinator, machines=machine, **options)
        self.holders = ColumnHolders(self.id, self.retained, self.members, self.peers)
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
        """How many cells are stored here."""
        found = 0
        for _, rows, columns, _, live in self.store.descriptions.describe([*self.store.shards]):
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
        """What such a request about the table is answered."""
        request = rm.AskTable(7, table, self.home, asked, timeout_s, staged)
        reply = await self.tables.answer(request, Deadline.after(timeout_s))()
        assert isinstance(reply, rm.TableAnswer)
        assert reply.id == 7
        self.home = reply.home
        return reply.result

    async def write(self, keys: Sequence[str], *columns: str, ref: BatchRef | None = None, **more: Any) -> list[int]:
        """Write rows with these columns, which are stored here."""
        staged = ""
        if columns:
            staged, ref = self.stage(len(keys), *columns)
        encoded = b"" if ref is None else ref.encode()
        reply = await self.ask(t.Upsert(keys=list(keys), ref=encoded, **more), staged=staged)
        found: list[int] = reply.rows.tolist()
        return found

    async def look(self, *columns: str, **more: Any) -> Any:
        """All rows."""
        return await self.ask(t.LookRows(all=True, columns=list(columns), **more))

    async def read(self, keys: Sequence[str], *columns: str) -> BatchRef:
        """What the rows have of these columns."""
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
    """The node that leads the table's partition, once it has so many followers."""
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
    """So many nodes."""
    async with benches(count, ProcessCoordinator(), TableBench, directory=directory, **options) as nodes:
        yield nodes
