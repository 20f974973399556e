"""Nodes with stores and partitions of real streams in one loop, and clients that append to them by messages."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline, monotonic
from dataplane.config import NodeConfig
from dataplane.coordinator.base import Coordinator
from dataplane.node.clustered.retained import Retained
from dataplane.node.clustered.service import ClusteredStreams
from dataplane.node.clustered.streams import Stream
from dataplane.node.streams.homes import Homes
from dataplane.node.streams.streaming import Streaming
from dataplane.store.store import Store
from dataplane.stream import requests as r
from dataplane.stream.sampler import Fifo
from dataplane.stream.settings import Settings
from dataplane.wire import messages as m
from dataplane.wire.partition_messages import Frame
from tests.unit.node.partitions.bench import WAIT_S, benches
from tests.unit.node.partitions.streambench import StreamBench

S, TASK = "rollouts", "train"
_INT = Field("dense", "int64", ())


class WriterBench(StreamBench):
    """One node, with a store whose bytes partitions keep."""

    def __init__(self, name: str, coordinator: Coordinator, *, directory: Path, **options: Any) -> None:
        super().__init__(name, coordinator, **options)
        me = bytes.fromhex(self.name)
        self.store = Store(NodeConfig(memory="4MiB", spill=0, spill_dir=directory / name, prewarm=0))
        self.homes = Homes(me, self.store, monotonic)
        self.retained = Retained(self.homes)
        self.service = ClusteredStreams(me, self, self.retained, self.peers, life=1)
        self.deaf = False
        """Whether what other nodes send is lost on the way."""

    def receive(self, frame: Frame) -> None:
        if not self.deaf:
            super().receive(frame)

    def _answer(self, request: Any) -> Any:
        service = getattr(self, "service", None)
        answer = None if service is None else service.answer(request)
        return super()._answer(request) if answer is None else answer

    def _settled(self, partition: str, last: int, entries: tuple[bytes, ...]) -> None:
        self.retained.settled(partition, last, entries)
        super()._settled(partition, last, entries)

    @property
    def kept(self) -> int:
        """The shards in the store."""
        return len(self.store._shards)

    def connect(self) -> Writer:
        return Writer(self)

    async def aclose(self) -> None:
        await self.service.aclose()
        await super().aclose()
        await self.store.aclose()


class Writer:
    """A client of a node."""

    def __init__(self, node: WriterBench) -> None:
        self.node = node
        self.here = Streaming(self, node.homes)
        self.streams = node.service.client(self.here)
        self.stream: Stream
        self._scopes = itertools.count(1)

    async def ask(self, request: Any, timeout_s: float = WAIT_S) -> Any:
        """What the node answers."""
        answer = self.streams.answer(request, Deadline.after(timeout_s))
        return answer if answer is None or isinstance(answer, m.Message) else await answer()

    async def open(self, tasks: Sequence[str] = (TASK,), **settings: Any) -> m.Opened:
        opened: m.Opened = await self.ask(m.Open(1, S, Settings(tuple(tasks), **settings)))
        self.stream = self.node.service.streams.find(opened.stream)[0]
        return opened

    def put(self, rows: int, *columns: str, scope: str = "") -> BatchRef:
        """Columns of integers in the node's store."""
        names = columns or ("x",)
        laid = tuple((name, ColumnLayout(_INT, rows, rows, ((4096 * at, 8 * rows),))) for at, name in enumerate(names))
        layout = ShardLayout(laid).encode()
        shard = self.node.store.put_now("client", bytes(4096 * len(names)), layout, scope=scope, holder="")
        assert shard is not None
        me = bytes.fromhex(self.node.name)
        return BatchRef.of(me, rows, [(name, _INT, 8 * rows, shard, at) for at, name in enumerate(names)])

    async def append(self, rows: int, *, timeout_s: float = WAIT_S, **said: Any) -> m.Appended:
        """Admit, put and append, as a client does."""
        groups, keys, whole = said.get("groups", []), said.get("keys", []), said.get("whole", False)
        version, ref = said.get("version", 0), said.get("ref")
        digest = b"digest" if keys else b""
        admit = m.Admit(
            1, self.stream.token, rows, 8 * rows, version, (keys or [""])[0], digest, 0.0, groups, [], whole, keys
        )
        admitted: m.Admitted = await self.ask(admit, timeout_s)
        if not admitted.ticket:
            return m.Appended(1, 0, False)
        scope = f"{m.STAGED}{next(self._scopes)}"
        try:
            if ref is None:
                self.streams.staged(scope)
                ref = self.put(rows, scope=scope)
            reply: m.Appended = await self.ask(
                m.Append(
                    1,
                    self.stream.token,
                    admitted.ticket,
                    scope,
                    ref.encode(),
                    keys,
                    digest,
                    groups,
                    np.full(rows, version, np.int64).tobytes(),
                    {},
                    {},
                    said.get("spares", []),
                    whole=whole,
                ),
                timeout_s,
            )
        except BaseException:
            self.streams.answer(m.GiveBack(self.stream.token, admitted.ticket), Deadline.after(0.0))
            self.streams.free_scope(scope)
            raise
        return reply

    async def take(self, rows: int, timeout_s: float = WAIT_S, columns: Sequence[str] = ("x",)) -> Taken:
        """Rows of one partition."""
        session = self.streams._session
        request = r.Consume(task=TASK, columns=tuple(columns), rows=rows, sampler=Fifo())
        found = await session.consume(self.stream, f"{S} {TASK}", request, Deadline.after(timeout_s))
        assert found is not None, "no rows became ready"
        partition, given = found
        return Taken(self, partition.token, given)

    async def extend(self, taken: Taken | Sequence[str], *columns: str) -> None:
        """More columns for rows that were taken, or for keys."""
        by_key = not isinstance(taken, Taken)
        count = len(taken) if by_key else len(taken.given.rows)  # type: ignore[arg-type]
        scope = f"{m.STAGED}{next(self._scopes)}"
        self.streams.staged(scope)
        ref = self.put(count, *columns, scope=scope)
        rows, holds, origins, keys = b"", b"", [], []
        if isinstance(taken, Taken):
            rows = taken.given.rows.tobytes()
            holds = np.full(count, taken.given.holds, np.int64).tobytes()
            origins = [(taken.token, np.arange(count).tobytes())]
        else:
            keys = list(taken)
        try:
            await self.ask(m.Extend(1, self.stream.token, scope, ref.encode(), rows, holds, keys, {}, False, origins))
        except BaseException:
            self.streams.free_scope(scope)
            raise

    async def figures(self) -> dict[str, Any]:
        values: dict[str, Any] = (await self.ask(m.Measure(1, self.stream.token))).values
        return values


class Taken:
    """Rows of a partition that a client holds."""

    def __init__(self, client: Writer, token: bytes, given: r.Delivered) -> None:
        self.client = client
        self.token = token
        self.given = given

    async def ack(self, *, done: bool = True, seen: bool = True) -> None:
        await self.client.ask(m.Ack(1, self.token, self.given.grant, None, done, seen))


@asynccontextmanager
async def writers(count: int, directory: Path, **options: Any) -> AsyncIterator[list[WriterBench]]:
    """So many nodes that know each other."""

    async with benches(count, make=WriterBench, directory=directory, **options) as nodes:
        yield nodes
