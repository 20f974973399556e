"""What partitions cost: frames between nodes, and processor time, for rows that are appended, given and acked.

Four nodes in one process and one loop, over real sockets on loopback, each partition with a follower; the state machine
only counts, so the time is that of replication and its drivers. `python -m bench.partitions`
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from dataplane.clock import Deadline
from dataplane.cluster.membership import Member, Membership
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.partitions.service import Partitions
from dataplane.node.partitions.table import Table
from dataplane.replication.machine import Decision, StateMachine
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers

NODES, BLOCK, GROUP, BLOCKS = 4, 512, 8, 60
_S = "flow"


class Counting(StateMachine):
    """Rows as numbers: so many appended, so many given, so many acked."""

    def __init__(self) -> None:
        self.rows = self.acked = self.given = 0

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        if request[:1] != b"l":
            return Decision((request,))
        most = min(int(request[1:]), self.rows - self.given)
        self.given += most
        return Decision((), b"%d" % most if most else b"")

    def serves(self, request: bytes, now: float) -> bool:
        return request[:1] != b"l" or self.given < self.rows

    def apply(self, command: bytes) -> bytes:
        if command[:1] == b"a":
            self.rows += int(command[1:].split()[0])
        else:
            self.acked += int(command[1:])
        return b"done"

    def snapshot(self) -> bytes:
        return b"%d %d" % (self.rows, self.acked)

    def restore(self, state: bytes) -> None:
        self.rows, self.acked = map(int, state.split()) if state else (0, 0)
        self.given = self.acked

    def forget(self) -> None:
        self.given = self.acked


class Nothing:
    """No partition is retired here."""

    def opening(self, table: Table, number: int) -> bytes:
        return b""

    def disowning(self, groups: Sequence[str | int]) -> bytes:
        raise NotImplementedError

    outliving = retiring = disowning


class Host:
    """A node, its producer and its consumer."""

    def __init__(self, number: int, coordinator: ProcessCoordinator) -> None:
        self.peers = Peers("tcp://127.0.0.1:0", None, self._answer)
        self.peers.start()
        self.name = f"{number:016x}"
        self.membership = Membership(coordinator, self.name, Member(number, self.peers.address, self.name))
        self.partitions = Partitions(self.membership, coordinator, self.peers, lambda _: Counting(), Nothing())
        self._joined: asyncio.Task[None] | None = None
        self.rows = 0

    def start(self) -> None:
        self._joined = asyncio.ensure_future(self.membership.run())
        self.partitions.start()

    async def aclose(self) -> None:
        assert self._joined is not None
        self._joined.cancel()
        await asyncio.gather(self._joined, return_exceptions=True)
        await self.partitions.aclose()
        await self.peers.aclose()

    def _answer(self, request: Any) -> Message:
        self.partitions.receive(request)
        return Done(0)

    async def _back(self, partition: str, result: bytes) -> None:
        self.rows += int(result)  # it counts as acked: there is nothing else that it could be given to

    async def produce(self, table: Table, whole: bool, blocks: int = BLOCKS) -> None:
        router, own = self.partitions.router, table.own(self.name)
        for block in range(blocks):
            groups = [f"{self.name} {block} {i}" for i in range(BLOCK // GROUP)]
            numbers = np.full(len(groups), own) if whole else table.place(groups)
            found, counts = np.unique(numbers, return_counts=True)
            command = [
                b"a%d " % (count * GROUP) + bytes(24 * GROUP * count) for count in counts
            ]  # about what a row takes
            await asyncio.gather(
                *(
                    router.ask(table.key(int(number)), each, Deadline.after(30))
                    for number, each in zip(found, command, strict=True)
                )
            )

    async def consume(self, table: Table, hosts: list[Host], blocks: int = BLOCKS) -> None:
        while sum(host.rows for host in hosts) < len(hosts) * blocks * BLOCK:
            found = await self.partitions.consuming.consume(
                lambda: table, "q", b"l%d" % BLOCK, Deadline.after(0.5), self._back
            )
            if found is not None:
                await self.partitions.router.ask(found[0], b"k" + found[1], Deadline.after(30))
                self.rows += int(found[1])


async def measure(whole: bool, nodes: int = NODES, blocks: int = BLOCKS, idle_s: float = 5.0) -> dict[str, float]:
    """What so many nodes cost that each append and take so many blocks, and what they cost after that."""
    coordinator = ProcessCoordinator()
    async with AsyncExitStack() as undo:
        hosts = [Host(number, coordinator) for number in range(nodes)]
        for host in hosts:
            host.start()
            undo.push_async_callback(host.aclose)
        while any(len(host.partitions.members.current) < nodes for host in hosts):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        table = await hosts[0].partitions.directory.open(_S, b"")
        for host in hosts:  # one that was slow to answer has none yet
            table, _ = await host.partitions.directory.own(_S)
        while not all(_followed(host, table) for host in hosts):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        posted, spent, began = _posted(hosts), time.process_time(), time.monotonic()
        await asyncio.gather(
            *(host.produce(table, whole, blocks) for host in hosts),
            *(host.consume(table, hosts, blocks) for host in hosts),
        )
        frames, cpu, took = _posted(hosts) - posted, time.process_time() - spent, time.monotonic() - began
        posted, spent = _posted(hosts), time.process_time()
        await asyncio.sleep(idle_s)
        idle_frames, idle_cpu = _posted(hosts) - posted, time.process_time() - spent
    count = nodes * blocks
    return {
        "requests_per_512_rows": frames / 2 / count,  # a frame is half of what a request and its reply are
        "us_per_row": cpu / (count * BLOCK) * 1e6,
        "seconds": took,
        "idle_frames_per_node_s": idle_frames / nodes / idle_s,
        "idle_core_share_per_node": idle_cpu / nodes / idle_s,
    }


def _followed(host: Host, table: Table) -> bool:
    """Whether the host's own partition is led there, with a follower."""
    led = host.partitions.replicas.find(table.key(table.own(host.name) or 0))
    return led is not None and led.replica.leads and bool(led.configuration.followers)


def _posted(hosts: list[Host]) -> int:
    return sum(host.peers.statistics().posted for host in hosts)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for whole in (True, False):
        found = [asyncio.run(measure(whole)) for _ in range(runs)]
        print("whole groups" if whole else "groups of several producers")
        for name in found[0]:
            values = sorted(each[name] for each in found)
            print(f"  {name}: {values[len(values) // 2]:.4g} ({values[0]:.4g} to {values[-1]:.4g})")


if __name__ == "__main__":
    main()
