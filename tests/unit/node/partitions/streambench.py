"""Nodes with partitions of real streams in one loop, and what clients do with them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.coordinator.base import Coordinator
from dataplane.node.partitions.streams import StreamRequests, encode_settings, machine
from dataplane.node.partitions.table import Table
from dataplane.stream import requests as r
from dataplane.stream.machine import StreamMachine
from dataplane.stream.sampler import Fifo
from dataplane.stream.settings import Settings
from tests.unit.node.partitions.bench import WAIT_S, Bench

S = "rollouts"
TASKS = ("train",)
_INT = Field("dense", "int64", ())
_shards = itertools.count(1)


def hexed(name: str) -> str:
    """A node's name: hexadecimal, as nodes are called in references."""
    return name.encode().hex().ljust(16, "0")


class StreamBench(Bench):
    """One node, with one client, whose columns are no bytes: what was settled says which are needed no more."""

    def __init__(self, name: str, coordinator: Coordinator, **options: Any) -> None:
        super().__init__(hexed(name), coordinator, machines=machine, requests=StreamRequests(), **options)
        self.client = f"{self.name}/1/1"
        self._sequences: dict[str, int] = {}

    def machine(self, partition: str) -> StreamMachine:
        hosted = self.replicas.find(partition)
        assert hosted is not None
        assert isinstance(hosted.machine, StreamMachine)
        return hosted.machine

    async def opened(self, **settings: Any) -> Table:
        """The stream, with a partition of this node."""
        await self.directory.open(S, encode_settings(Settings(TASKS, **settings)))
        return (await self.directory.own(S))[0]

    def own_key(self, table: Table) -> str:
        return table.key(table.own(self.name) or 0)

    def ref(self, rows: int, name: str = "x") -> BatchRef:
        """A column of so many rows that this node stores."""
        return BatchRef.of(bytes.fromhex(self.name), rows, [(name, _INT, 8 * rows, next(_shards), 0)])

    def sequence(self, partition: str) -> int:
        self._sequences[partition] = self._sequences.get(partition, 0) + 1
        return self._sequences[partition]

    async def ask(self, partition: str, request: r.Request, *, timeout_s: float = WAIT_S, **options: Any) -> Any:
        result = await self.router.ask(partition, r.encode_request(request), Deadline.after(timeout_s), **options)
        answer = r.decode_result(result)
        if isinstance(answer, r.Refused):
            raise answer.error
        return answer

    async def put(self, partition: str, rows: int, *, queue: str = "", wait_s: float = 0.0, **said: Any) -> r.Appended:
        """Append rows."""
        request = r.Append(
            client=self.client,
            sequence=self.sequence(partition),
            ref=said.pop("ref", None) or self.ref(rows),
            versions=said.pop("versions", np.zeros(rows, np.int64)),
            **said,
        )
        answer: r.Appended = await self.ask(partition, request, queue=queue, wait_s=wait_s)
        return answer

    async def take(
        self, table: Table, rows: int, timeout_s: float = WAIT_S, **said: Any
    ) -> tuple[str, r.Delivered] | None:
        """Rows of whichever partition has some."""
        request = r.Consume(
            client=self.client, task=TASKS[0], columns=("x",), rows=rows, sampler=said.pop("sampler", Fifo()), **said
        )
        now = self.directory.find
        found = await self.consuming.consume(
            lambda: now(S) or table,
            f"{S} {TASKS[0]}",
            r.encode_request(request),
            Deadline.after(timeout_s),
            self._give_back,
        )
        if found is None:
            return None
        given = r.decode_result(found[1])
        assert isinstance(given, r.Delivered)
        return found[0], given

    async def done(self, partition: str, grant: int) -> None:
        """Ack what was taken."""
        await self.ask(partition, r.Ack(client=self.client, sequence=self.sequence(partition), grant=grant))

    async def _give_back(self, partition: str, result: bytes) -> None:
        self.back.append((partition, result))
        given = r.decode_result(result)
        assert isinstance(given, r.Delivered)
        nack = r.Nack(client=self.client, sequence=self.sequence(partition), grant=given.grant, seen=False)
        await self.ask(partition, nack)
