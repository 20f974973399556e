"""Durable partitions of a node outside a cluster. They use the same code as others, without followers.

The coordinator runs in the process of the node and keeps its values in the data directory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from dataplane.cluster.membership import Member, Membership
from dataplane.coordinator.base import DELETED
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.partitions.columns import Settled
from dataplane.node.partitions.partition_storage import PartitionStorage
from dataplane.node.partitions.record import Record
from dataplane.node.partitions.replicas import Machines
from dataplane.node.partitions.service import Partitions
from dataplane.wire.peer import Peers


class SingleNodePartitions(Partitions):
    """See the module."""

    def __init__(
        self,
        keeping: PartitionStorage,
        peers: Peers,
        machines: Machines,
        opening: Callable[[Record], bytes],
        settled: Settled,
    ) -> None:
        """`peers` connects to nobody. Raises Corrupt if the data directory was changed."""
        notes = keeping.notes("coordinator")
        values = notes.load()
        self._notes, self._deleted = notes, [key for key, value in values.items() if value == DELETED]
        for key in self._deleted:
            del values[key]

        async def keep(key: str, value: bytes | None) -> None:
            await notes.write({key: value})

        self.coordinator = ProcessCoordinator(values=values, keep=keep)
        self._keeping = keeping
        member = Member(secrets.randbits(48), "", keeping.me, keeps=True)
        super().__init__(
            Membership(self.coordinator, keeping.me, member),
            self.coordinator,
            peers,
            machines,
            opening,
            settled=settled,
            logs=keeping.log,
            alone=True,
        )

    async def recover(self) -> None:
        """Lead the partitions of the data directory. Raises Corrupt."""
        self.start()
        self._notes.write(dict.fromkeys(self._deleted), lazily=True)
        for partition in self._keeping.partitions():
            hosted = self.replicas.host(partition)
            if await self.coordinator.read(self.replicas.key(partition)) is None:
                self.replicas.end(hosted, forget=True)  # it was being made, and nobody knows of it

    async def aclose(self) -> None:
        await super().aclose()
        await self.coordinator.aclose()
