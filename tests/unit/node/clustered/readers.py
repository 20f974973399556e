"""Nodes with partitions of real streams in one loop, and clients that read them. Columns are references to no bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.stream import requests as r
from dataplane.stream.sampler import Fifo
from dataplane.stream.settings import Settings
from dataplane.wire import messages as m
from tests.unit.node.clustered.writers import WriterBench
from tests.unit.node.partitions.bench import WAIT_S, benches, until

S, TASK = "rollouts", "train"


class ReaderBench(WriterBench):
    """One node, whose clients read. What they read are references to no bytes, unless they were put."""

    stream: Stream

    async def open(self, tasks: Sequence[str] = (TASK,), **settings: Any) -> Stream:
        """The stream, with a partition of this node, which is led here."""
        self.stream = await self.service.streams.open(S, Settings(tuple(tasks), **settings))
        await self.directory.own(S)
        await until(lambda: self.at(self.own.key))
        return self.stream

    @property
    def own(self) -> Partition:
        """The partition of this node."""
        return next(each for each in self.stream.partitions if each.node == self.name)

    async def put(self, ids: Sequence[int], *, on: Partition | None = None, **said: Any) -> None:
        """Append rows, whose ids are their versions unless these are said, to this node's partition."""
        versions = np.array(said.pop("versions", [0] * len(ids)), np.int64)
        tags = {"id": list(ids), **said.pop("tags", {})}
        session = self.service.session()
        request = r.Append(ref=said.pop("ref", self.ref(len(ids))), versions=versions, tags=tags, **said)
        await session.ask(on or self.own, request, r.Appended)

    async def close_all(self) -> None:
        """Close the stream, at all its partitions."""
        session = self.service.session()
        for partition in self.stream.partitions:
            await session.ask(partition, r.Close(), r.Done)

    def reader(self) -> Client:
        return Client(self)


class Client:
    """What a client of a node is answered."""

    def __init__(self, node: ReaderBench) -> None:
        self.node = node
        self._client = node.connect()
        self._client.stream = node.stream
        self.session = self._client.streams._session
        self.gather = self._client.streams._reads._gather
        self.replicas = self._client.streams._reads._replicas

    async def ask(self, request: Any, timeout_s: float = WAIT_S) -> Any:
        """What the node answers to a request about the stream as a whole."""
        return await self._client.ask(msgspec.structs.replace(request, stream=self.node.stream.token), timeout_s)

    async def take(self, rows: int, timeout_s: float = WAIT_S, **how: Any) -> m.Delivered:
        """A delivery."""
        delivery: m.Delivered = await self.ask(consume(rows, timeout_s, **how), timeout_s)
        return delivery

    async def settle(self, delivery: m.Delivered, *, done: bool = True, seen: bool = True) -> None:
        """Ack a delivery, or give it back."""
        await self._client.ask(m.Ack(1, delivery.stream, delivery.grant, delivery.replica, done, seen))

    async def read(self, snapshot: int, first: int, count: int) -> m.SnapshotRows:
        """Rows of a snapshot."""
        found: m.SnapshotRows = await self._client.ask(m.ReadSnapshot(1, snapshot, first, count))
        return found

    async def release(self, snapshot: int) -> None:
        await self._client.ask(m.ReleaseSnapshot(snapshot))


def consume(rows: int, timeout_s: float = WAIT_S, **how: Any) -> m.Consume:
    """A client's request."""
    return m.Consume(
        id=1,
        stream=b"",
        task=how.get("task", TASK),
        rows=rows,
        min_rows=how.get("min_rows", 1),
        columns=how.get("columns", ["x"]),
        sampler=how.get("sampler", Fifo()),
        chosen=how.get("chosen", b""),
        expired=how.get("expired", b""),
        member=how.get("member", ""),
        replica=how.get("replica"),
        replicas=how.get("replicas", 0),
        lease_s=how.get("lease_s", 60.0),
        timeout_s=timeout_s,
    )


def look(most: int = 1000, seen: int = -1, **how: Any) -> m.Look:
    """A client's request for candidates."""
    return m.Look(
        id=1,
        stream=b"",
        task=how.get("task", TASK),
        member=how.get("member", ""),
        replica=how.get("replica"),
        replicas=how.get("replicas", 0),
        columns=how.get("columns", ["x"]),
        lengths=how.get("lengths", []),
        tags=how.get("tags", ["id"]),
        most=most,
        seen=seen,
        timeout_s=0.0,
    )


def ids(delivery: m.Delivered) -> list[int]:
    """The ids of the rows of a delivery."""
    return [int(value) for value in delivery.tags["id"]]  # type: ignore[arg-type]


def rows_of(delivery: m.Delivered) -> int:
    """How many rows its columns are of."""
    return len(BatchRef.decode(delivery.ref))


@asynccontextmanager
async def readers(count: int, tasks: Sequence[str] = (TASK,), **settings: Any) -> AsyncIterator[list[ReaderBench]]:
    """So many nodes with a stream, each with a partition that it leads."""
    with TemporaryDirectory() as directory:
        async with benches(count, make=ReaderBench, directory=Path(directory)) as nodes:
            for node in nodes:
                await node.open(tasks, **settings)
            await until(lambda: all(len(node.stream.partitions) == count for node in nodes))
            if count > 1:  # what is done is done at a follower too
                await until(lambda: all(node.led(node.own.key) for node in nodes))
            yield nodes
