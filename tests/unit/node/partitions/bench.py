"""Nodes with partitions in one loop, over real sockets: each with its own end of the control channel, and a small
stream as its state machine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dataplane.clock import Deadline
from dataplane.cluster.detector import Detector
from dataplane.cluster.membership import Member, Membership
from dataplane.coordinator.base import Coordinator
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.node.partitions.partitions import Partitions
from dataplane.node.partitions.record import Record
from dataplane.node.partitions.replicas import Logs, Machines, in_memory
from dataplane.node.partitions.waiters import NOTHING
from dataplane.replication.machine import Decision
from dataplane.replication.settings import ReplicationSettings
from dataplane.wire.auth import Key
from dataplane.wire.messages import Done, Message
from dataplane.wire.partition_messages import PartitionFrame
from dataplane.wire.peer import Peers
from tests.coordinator import ProcessCoordinator
from tests.keys import KEY
from tests.processes import WAIT_S, until
from tests.simulation.machine import (
    Append,
    Appended,
    Lease,
    Leased,
    StreamMachine,
    decode_request,
    decode_result,
    encode,
)

_ADMIN = b"\xc1"  # begins no MessagePack


class Deaf:
    def applied(self, count: int, command: bytes, result: bytes) -> None:
        return


def opening(record: Record) -> bytes:
    """The first request to a partition of this machine."""
    return _ADMIN + record.settings


class Machine(StreamMachine):
    def __init__(self) -> None:
        super().__init__(Deaf())

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        if request[:1] == _ADMIN:
            return Decision((request,))
        asked = decode_request(request)
        decision = super().decide(request, term, now)
        if isinstance(asked, Lease):
            result = decode_result(decision.result)
            assert isinstance(result, Leased)
            return decision if result.rows else Decision()
        return decision

    def serves(self, request: bytes, in_vain: int) -> bool:
        asked = decode_request(request)
        if not isinstance(asked, Lease):
            return True
        now = time.monotonic()
        done = self.state.done.get(asked.task, ())
        for offset in range(self._low.get(asked.task, 0), len(self.state.rows)):
            row = self._held.get((asked.task, offset))
            if offset not in done and (row is None or not (row.settling or row.until_s > now)):
                return True
        return False

    def apply(self, command: bytes) -> bytes:
        return b"done" if command[:1] == _ADMIN else super().apply(command)


#: Short, so that a test that waits for a lease is short too; long enough for a machine with much else to do.
SETTINGS = ReplicationSettings(lease_s=1.0, grace_s=1.3, drift=0.01, beat_s=0.15, retry_s=0.4, snapshot_every=64)

_numbers = itertools.count(1)
AnyBench = TypeVar("AnyBench", bound="Bench")


class Bench(Partitions):
    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        *,
        settings: ReplicationSettings = SETTINGS,
        logs: Logs = in_memory,
        host: str = "",
        keeps: bool = False,
        first: int = 0,
        key: Key = KEY,
        listen: str = "tcp://127.0.0.1:0",
        lease_s: float = 1.0,
        lost_s: float = 60.0,
        machines: Machines = lambda _: Machine(),
        opening: Callable[[Record], bytes] = opening,
    ) -> None:
        self.name = name
        self.peers = Peers(name, listen, key, self._answer)
        self.peers.start()
        member = Member(next(_numbers), self.peers.address, host or name, keeps=keeps, first=first)
        membership = Membership(coordinator, name, member, lease_s=lease_s, lost_s=lost_s)
        self._detector = Detector(self.peers, membership)
        self._running: list[asyncio.Task[None]] = []
        super().__init__(
            membership, coordinator, self.peers, machines, opening, settled=self._settled, settings=settings, logs=logs
        )
        self._sequence = 0

    def _answer(self, request: Any) -> Message:
        assert isinstance(request, PartitionFrame)
        self.receive(request)
        return Done(0)

    def _settled(self, partition: str, last: int, entries: tuple[bytes, ...]) -> None:
        raise AssertionError("nobody has columns")

    async def join(self) -> None:
        """Be a member, and take care of partitions."""
        self._running = [asyncio.ensure_future(work) for work in (self.members.run(), self._detector.run())]
        self.start()
        async with asyncio.timeout(WAIT_S):
            await self.members.joined()

    async def _end(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def aclose(self) -> None:
        """End as a process does that is killed: sockets close, and nobody is told."""
        await self._end()
        await super().aclose()
        await self.peers.aclose()

    # What clients do

    def at(self, partition: str) -> HostedReplica | None:
        """The replica here, if it answers."""
        hosted = self.replicas.find(partition)
        return hosted if hosted is not None and hosted.replica.serves(time.monotonic()) else None

    def led(self, partition: str, followers: int = 1) -> bool:
        """Whether it answers here, with so many followers."""
        hosted = self.at(partition)
        return hosted is not None and len(hosted.configuration.followers) == followers

    async def append(
        self, partition: str, *labels: str, key: str = "", sequence: int = 0, timeout_s: float = WAIT_S
    ) -> tuple[int, ...]:
        if not sequence:
            self._sequence = sequence = self._sequence + 1
        request = encode(Append(self.name, sequence, tuple((key, label) for label in labels)))
        result = decode_result(await self.router.ask(partition, request, Deadline.after(timeout_s)))
        assert isinstance(result, Appended)
        return result.offsets

    async def lease(
        self, partition: str, task: str, most: int, timeout_s: float = WAIT_S, lease_s: float = 60.0
    ) -> Leased:
        """Rows of a task, once there are some; none where none come in time."""
        request = encode(Lease(self.name, task, most, lease_s))
        until = Deadline.after(timeout_s + 1.0)
        result = await self.router.ask(partition, request, until, queue=task, wait_s=timeout_s)
        if result == NOTHING:
            return Leased(())
        leased = decode_result(result)
        assert isinstance(leased, Leased)
        return leased


@asynccontextmanager
async def benches(
    count: int, coordinator: Coordinator | None = None, make: type[AnyBench] = Bench, **options: Any
) -> AsyncIterator[list[AnyBench]]:
    """So many nodes that know each other: n0, n1, …"""
    coordinator = ProcessCoordinator() if coordinator is None else coordinator
    made: list[AnyBench] = []
    try:
        for number in range(count):
            made.append(make(f"n{number}", coordinator, **options))
            await made[-1].join()
        await until(lambda: all(len(bench.members.current) == count for bench in made))
        yield made
    finally:
        for bench in made:
            await bench.aclose()
        await coordinator.aclose()


async def absent(node: Bench, others: list[Bench]) -> None:
    """The node is registered no more, though it lives."""
    node._running[0].cancel()
    await asyncio.gather(node._running[0], return_exceptions=True)
    registration = node.members._registration
    assert registration is not None
    await registration.leave()
    await until(lambda: all(other.members.away(node.name) for other in others))


async def back(node: Bench, others: list[Bench]) -> None:
    """The same process registers again."""
    node._running[0] = asyncio.ensure_future(node.members.run())
    await until(lambda: not any(other.members.away(node.name) for other in others))
