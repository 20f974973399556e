"""Replicas that their owner frees while they are being stored."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dataplane.clock import Deadline
from dataplane.cluster.membership import Membership
from dataplane.node.shards.reading import ShardReads
from dataplane.node.shards.shard_replicas import ShardReplicas
from dataplane.store.store import Store
from dataplane.transport.choice import TransportChoice
from dataplane.wire import peer_messages as pm
from dataplane.wire.peer import Peers
from tests.cases import each_case
from tests.processes import WAIT_S, until
from tests.unit.node.shards.members import ME
from tests.unit.node.shards.owners import OWNER, owning
from tests.unit.store.stores import moving

MIB = 1 << 20


def replicas_of(store: Store, peers: Peers, members: Membership) -> ShardReplicas:
    reading = ShardReads(ME, peers, members, TransportChoice(()))
    return ShardReplicas(ME, store, peers, members, reading)


@each_case("times", [1, 2])
async def test_a_replica_that_is_freed_while_it_waits_for_memory_does_not_stay(tmp_path: Path, times: int) -> None:
    async with (
        owning() as (_, peers, members),
        moving({"memory": MIB, "spill": 0, "spill_dir": tmp_path}) as store,
    ):
        replicas = replicas_of(store, peers, members)
        (held,) = await store.reservations.reserve("client", [MIB], Deadline.after(WAIT_S))
        taking = [
            asyncio.create_task(replicas.take(pm.TakeReplicas(number, OWNER, [1, 2], WAIT_S)))
            for number in range(times)
        ]
        await until(lambda: len(store.budget._puts) == times)
        replicas.free(OWNER, [(1, [], (0, 0, b""))])
        store.reservations.abort("client", [held.shard])
        await asyncio.gather(*taking)
        assert replicas.here((OWNER, 1)) is None
        assert list(store.shards) == [replicas.here((OWNER, 2))]
        assert not replicas._taking
