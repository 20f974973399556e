"""Nodes with stores and partitions of real streams in one loop, and clients that ask them by messages."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.coordinator.base import Coordinator
from dataplane.node.clustered.open_streams import ClusteredStream, opening
from dataplane.node.clustered.retained_shards import RetainedShards
from dataplane.node.clustered.session import PartitionSession
from dataplane.node.clustered.streams import ClusteredStreams
from dataplane.node.clustered.tables import machine
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.node.requests.stream_client import StreamClient
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.store.store import Store
from dataplane.stream import requests as r
from dataplane.stream.machine import StreamMachine
from dataplane.stream.settings import StreamSettings
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire.partition_messages import PartitionFrame
from tests.unit.node.partitions.bench import WAIT_S, Bench, benches, until

S, TASK = "rollouts", "train"
_INT = Field("dense", "int64", ())
_scopes = itertools.count(1)


async def no_wait() -> bool:
    """There is always room."""
    return False


class StoringBench(Bench):
    """One node, with a store whose bytes partitions keep."""

    def __init__(self, name: str, coordinator: Coordinator, *, directory: Path, **options: Any) -> None:
        self.id = name.encode().ljust(8, b".")
        super().__init__(self.id.hex(), coordinator, **options)
        self.store = Store(NodeConfig(memory="4MiB", spill=0, spill_dir=directory / name, prewarm=0))
        self.needed = NeededShards(self.id, self.store)
        self.retained = RetainedShards(self.needed)

    def _settled(self, partition: str, last: int, entries: tuple[bytes, ...]) -> None:
        self.retained.settled(partition, last, entries)

    async def aclose(self) -> None:
        await super().aclose()
        await self.store.aclose()


class Putting:
    """A client of a node that puts columns of integers there."""

    def __init__(self, node: StoringBench) -> None:
        self._at = node
        self.staged = StagedColumns(node.needed)

    def put(self, rows: int, *columns: str, scope: str = "") -> BatchRef:
        """So many rows of these columns, or of `x`, stored at the node."""
        names = columns or ("x",)
        laid = tuple((name, ColumnLayout(_INT, rows, rows, ((4096 * at, 8 * rows),))) for at, name in enumerate(names))
        layout = ShardLayout(laid).encode()
        shard = self._at.store.put_now("client", bytes(4096 * len(names)), layout, scope=scope, holder="")
        assert shard is not None
        return ref_to(self._at.id, rows, [(name, _INT, 8 * rows, shard, at) for at, name in enumerate(names)])

    def stage(self, rows: int, *columns: str) -> tuple[str, BatchRef]:
        """As `put`, for what is to be told the scope."""
        scope = f"{rm.STAGED}{next(_scopes)}"
        self.staged.begin(scope)
        return scope, self.put(rows, *columns, scope=scope)


class StreamBench(StoringBench):
    """One node, and its clients' streams."""

    def __init__(self, name: str, coordinator: Coordinator, **options: Any) -> None:
        super().__init__(name, coordinator, machines=machine, opening=opening, **options)
        self.service = ClusteredStreams(self.id, self, self.retained, self.peers, life=1)
        self.deaf = False
        """Whether what other nodes send is lost on the way."""

    def receive(self, frame: PartitionFrame) -> None:
        if not self.deaf:
            super().receive(frame)

    def _answer(self, request: Any) -> Any:
        service = getattr(self, "service", None)
        answer = None if service is None else service.answer(request)
        return super()._answer(request) if answer is None else answer

    @property
    def kept(self) -> int:
        return len(self.store.shards)

    def hosted(self) -> HostedReplica:
        """The replica of the stream here."""
        record = self.directory.records.find(S)
        hosted = None if record is None else self.replicas.find(record.key or "")
        assert hosted is not None
        return hosted

    def machine(self) -> StreamMachine:
        found = self.hosted().machine
        assert isinstance(found, StreamMachine)
        return found

    def connect(self) -> Client:
        return Client(self)

    async def opened(self, tasks: Sequence[str] = (TASK,), **settings: Any) -> Client:
        """A client that has opened the stream, which is made if it is not there."""
        client = self.connect()
        await client.open(tasks, **settings)
        return client

    async def aclose(self) -> None:
        await self.service.aclose()
        await super().aclose()


class Client(Putting):
    def __init__(self, node: StreamBench) -> None:
        super().__init__(node)
        self.node = node
        self.streams = StreamClient(node.service, self.staged, no_wait, owner="")
        self.stream: ClusteredStream
        self.session: PartitionSession = self.streams._session  # type: ignore[assignment]

    async def ask(self, request: Any, timeout_s: float = WAIT_S) -> Any:
        answer = self.streams.answer(request, Deadline.after(timeout_s))
        return answer if answer is None or isinstance(answer, m.Message) else await answer()

    async def open(self, tasks: Sequence[str] = (TASK,), **settings: Any) -> rm.Opened:
        opened: rm.Opened = await self.ask(rm.OpenStream(1, S, StreamSettings(tuple(tasks), **settings)))
        self.stream = self.node.service.streams.find(opened.stream)
        return opened

    @property
    def partition(self) -> Any:
        found = self.stream.partition
        assert found is not None
        return found

    async def append(self, ids: Sequence[int], *, timeout_s: float = WAIT_S, **said: Any) -> rm.RowsAppended:
        """Admit, put and append, as a client does: rows whose tags say their ids."""
        rows, groups, keys, version = len(ids), said.get("groups", []), said.get("keys", []), said.get("version", 0)
        digest = b"digest" if keys else b""
        admit = rm.AdmitRows(1, self.stream.token, rows, 8 * rows, version, (keys or [""])[0], digest, 0.0)
        admitted: rm.RowsAdmitted = await self.ask(admit, timeout_s)
        if not admitted.ticket:
            return rm.RowsAppended(1, 0, False)
        scope, ref = "", said.get("ref")
        try:
            if ref is None:
                scope, ref = self.stage(rows)
            versions = np.full(rows, version, np.int64).tobytes()
            said = keys, digest, groups, versions, {"id": list(ids)}, None, {}
            columns = {"ticket": admitted.ticket, "staged": scope, "ref": ref.encode()}
            request = rm.AppendRows(1, self.stream.token, *said, **columns)
            reply: rm.RowsAppended = await self.ask(request, timeout_s)
        except BaseException:
            self.streams.answer(rm.ReturnPermit(self.stream.token, admitted.ticket), Deadline.after(0.0))
            self.staged.free(scope)
            raise
        return reply

    async def forward(self, asked: r.FromClient, timeout_s: float = WAIT_S) -> Any:
        return (await self.ask(rm.AskStream(1, self.stream.token, asked), timeout_s)).result

    async def take(self, rows: int, timeout_s: float = WAIT_S, **how: Any) -> r.Delivered:
        asked: dict[str, Any] = {"task": TASK, "rows": rows, **how, "columns": tuple(how.get("columns", ("x",)))}
        delivery: r.Delivered = await self.forward(r.Consume(**asked), timeout_s)
        return delivery

    async def settle(self, delivery: r.Delivered, *, done: bool = True, seen: bool = True) -> None:
        grant, replica = delivery.grant, delivery.replica
        await self.forward(
            r.Ack(grant=grant, replica=replica) if done else r.Nack(grant=grant, replica=replica, seen=seen)
        )

    async def look(self, most: int = 1000, seen: int = -1, timeout_s: float = 0.0, **how: Any) -> r.CandidateRows:
        asked = r.Look(task=TASK, columns=("x",), most=most, tags=("id",), seen=seen, **how)
        shown: r.CandidateRows = await self.forward(asked, timeout_s)
        return shown

    async def extend(self, rows: r.Delivered | Sequence[str], *columns: str) -> None:
        """More columns for rows that were delivered, or for keys."""
        token, numbers, holds, keys = self.stream.token, b"", b"", list[str]()
        if isinstance(rows, r.Delivered):
            ref = rows.ref.with_origin(token, rows.rows, rows.holds)
            numbers, holds, count = rows.rows.tobytes(), ref.holds().tobytes(), len(ref)
        else:
            keys, count = list(rows), len(rows)
        scope, brought = self.stage(count, *columns)
        try:
            await self.ask(rm.ExtendRows(1, token, numbers, holds, keys, {}, False, staged=scope, ref=brought.encode()))
        except BaseException:
            self.staged.free(scope)
            raise

    async def lost(self) -> rm.LostRowsTaken:
        found: rm.LostRowsTaken = await self.ask(rm.TakeLostRows(1, self.stream.token))
        return found


def ids(delivery: r.Delivered | r.CandidateRows) -> list[int]:
    """The ids of the rows of a delivery."""
    return [int(value) for value in delivery.tags["id"]]  # type: ignore[arg-type]


@asynccontextmanager
async def stream_nodes(count: int, **options: Any) -> AsyncIterator[list[StreamBench]]:
    """So many nodes that know each other."""
    with TemporaryDirectory() as directory:
        async with benches(count, make=StreamBench, directory=Path(directory), **options) as nodes:
            yield nodes


@asynccontextmanager
async def streaming(
    count: int, tasks: Sequence[str] = (TASK,), options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[StreamBench, list[StreamBench]]]:
    """So many nodes with a stream: the one that leads it, and the others, its follower first."""
    async with stream_nodes(count, **(options or {})) as nodes:
        for node in nodes:
            await node.opened(tasks, **settings)
        key = nodes[0].directory.records.find(S).key  # type: ignore[union-attr]
        leader = await until(lambda: next((each for each in nodes if each.led(key or "", min(1, count - 1))), None))
        followers = [node for node, _ in leader.hosted().configuration.followers]
        others = sorted((each for each in nodes if each is not leader), key=lambda each: each.name not in followers)
        yield leader, others


def clients(nodes: Sequence[StreamBench]) -> list[Client]:
    """A client of each of these nodes, where the stream is open."""
    made = [node.connect() for node in nodes]
    for client in made:
        client.stream = next(iter(client.node.service.streams))
    return made
