"""The replicas of nodes in one loop, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from dataplane.replication.configuration import ReplicaId
from dataplane.replication.storage import MemoryStorage, Operation, Storage
from tests.unit.node.partitions.bench import SETTINGS, benches, until

P = "streams/rollouts/1"
PATIENT = msgspec.structs.replace(SETTINGS, lease_s=600.0, grace_s=700.0)
"""A test has no time to wait until a silent leader, or follower, is given up."""


async def test_a_new_partition_answers_at_once_and_has_a_follower_soon() -> None:
    async with benches(3, settings=PATIENT) as (a, b, c):
        configuration = await a.replicas.create(P, "n0")
        assert configuration == await b.replicas.create(P, "n1")  # the first wins
        assert await a.append(P, "x", "y") == (0, 1)
        await until(lambda: a.led(P))
        assert await a.append(P, "x", "y", sequence=1) == (0, 1)
        assert await c.append(P, "z") == (2,)
        replicas = [bench.replicas.find(P) for bench in (b, c)]
        hosted = a.replicas.find(P)
        assert hosted is not None
        (follower,) = [r for r in replicas if r is not None and hosted.configuration.holds(r.me)]
        await until(lambda: follower.machine.state.rows == ["x", "y", "z"])  # type: ignore[attr-defined]


async def test_a_follower_leads_at_once_when_the_leaders_process_has_ended() -> None:
    async with benches(3, settings=PATIENT) as (a, b, c):
        await a.replicas.create(P, "n0")
        await a.append(P, "x")
        await until(lambda: a.led(P))
        await a.aclose()
        assert await c.append(P, "y") == (1,)
        leader = b if b.at(P) else c
        await until(lambda: leader.led(P))  # the third is recruited
        assert await b.append(P, "z") == (2,)


async def test_a_follower_leads_at_once_when_the_leader_has_left() -> None:
    async with benches(2, settings=PATIENT) as (a, b):
        await a.replicas.create(P, "n0")
        await a.append(P, "x")
        await until(lambda: a.led(P))
        await a.leave()
        await a.aclose()
        assert await b.append(P, "y") == (1,)


class SlowStorage(MemoryStorage):
    """Counts what is saved at a time."""

    durable = True
    refusal = None

    def __init__(self, replica: ReplicaId) -> None:
        super().__init__(replica)
        self.syncs = 0

    def save(self, operations: Sequence[Operation]) -> asyncio.Future[None]:
        self.syncs += 1
        self.write(operations)
        saved = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.02, saved.set_result, None)
        return saved

    def remove(self) -> None:
        return


async def test_commands_that_come_during_a_sync_share_the_next() -> None:
    made: dict[ReplicaId, SlowStorage] = {}

    def logs(partition: str, replica: ReplicaId) -> Storage:
        made[replica] = SlowStorage(replica)
        return made[replica]

    settings = msgspec.structs.replace(SETTINGS, snapshot_every=999)
    async with benches(2, settings=settings, logs=logs, keeps=True) as (a, _):
        await a.replicas.create(P, "n0")
        await until(lambda: a.led(P))
        before = sum(storage.syncs for storage in made.values())
        for first in range(1, 64, 16):  # a producer has 16 on their way at most
            await asyncio.gather(*(a.append(P, f"r{n}", sequence=n) for n in range(first, first + 16)))
        syncs = sum(storage.syncs for storage in made.values()) - before
        assert syncs <= 32  # of 64 commands on two disks
        assert len(made) == 2
        for storage in made.values():
            assert sum(len(entry.command) > 0 for entry in storage.load()[1].entries) == 64
