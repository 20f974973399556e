"""The streams and tables of a node with a data directory outside a cluster. The code is that of a cluster, without
followers.

The coordinator runs in the process of the node. It stores the values of durable streams and tables in the data
directory.

Invariants: before the first client is served, this node leads all durable partitions, their columns are retained, and
columns that no partition needs are freed. Streams and tables that are not durable end with the process.
"""

from __future__ import annotations

import secrets

from dataplane.clock import Deadline
from dataplane.closing import close_each
from dataplane.cluster.membership import Member, Membership
from dataplane.coordinator.base import DELETED
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.clustered.durable import DurableColumns, PartitionStorage
from dataplane.node.clustered.open_streams import opening
from dataplane.node.clustered.retained_shards import RetainedShards
from dataplane.node.clustered.streams import ClusteredStreams
from dataplane.node.clustered.tables import ClusteredTables, machine
from dataplane.node.partitions import era
from dataplane.node.partitions.partitions import Partitions
from dataplane.node.partitions.record import TABLES, decode, is_durable, kind_of, name_of
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.store.persistence import Persistence
from dataplane.stream.requests import EndClients, encode_request
from dataplane.wire.auth import Key
from dataplane.wire.messages import Message
from dataplane.wire.peer import Peers

_LEAD_S = 10.0  # timeout for this node to become the leader of a partition


class SingleNode:
    def __init__(self, persistence: Persistence, needed: NeededShards) -> None:
        """Raises Corrupt if the data directory was changed."""
        node, life = persistence.durable.directory.identity.node, persistence.durable.directory.identity.starts
        self._me = node.hex()
        self._keeping = keeping = PartitionStorage(persistence)
        self._notes = notes = keeping.notes("coordinator")
        values = notes.load()
        self._kept = set(values)
        self._deleted = [key for key, value in values.items() if value == DELETED]
        for key in self._deleted:
            del values[key]
        self._coordinator = ProcessCoordinator(values=values, keep=self._keep)
        retained = RetainedShards(needed)
        self._columns = DurableColumns(keeping, needed, retained)
        self._peers = peers = Peers("", "", Key(b"", b""), _unasked)  # never started: there are no other nodes
        self.partitions = Partitions(
            Membership(self._coordinator, self._me, Member(secrets.randbits(48), "", self._me, keeps=True)),
            self._coordinator,
            peers,
            machine,
            opening,
            settled=self._columns.settled,
            logs=keeping.log,
            alone=True,
        )
        self._columns.partitions = self.partitions
        self.streams = ClusteredStreams(node, self.partitions, retained, peers, life, keep=self._columns.keep)
        self.tables = ClusteredTables(self.partitions, self._coordinator, peers, self.streams.holders, life)

    async def _keep(self, key: str, value: bytes | None) -> None:
        """Write a value of a durable stream or table to disk."""
        if key in self._kept or self._is_durable(key, value):
            await self._notes.write({key: value})
            (self._kept.discard if value is None else self._kept.add)(key)

    def _is_durable(self, key: str, value: bytes | None) -> bool:
        """Whether this is the record of a durable stream or table, or the configuration of a durable partition."""
        if key.startswith(self.partitions.replicas.key("")):
            return is_durable(key)
        return value is not None and key != era.KEY and decode(value).durable

    async def recover(self) -> None:
        """Recover the data directory. Called once, before any client is served. Raises Corrupt."""
        self.partitions.start()
        self._notes.write(dict.fromkeys(self._deleted), lazily=True)
        replicas = self.partitions.replicas
        for partition in self._keeping.partitions():
            hosted = await replicas.host(partition)
            if await self._coordinator.read(replicas.key(partition)) is None:
                replicas.end(hosted, forget=True)  # its creation was not completed, and no record names it
        await self.tables.directory.read_all(self._coordinator.values())
        await self._columns.recover()
        ended = encode_request(EndClients(clients=f"{self._me}/"))
        for hosted in replicas:
            await self.partitions.router.ask(hosted.partition, ended, Deadline.after(_LEAD_S))
            if not await self._is_named(hosted.partition):
                await replicas.delete(hosted.partition)  # its creation or restoration was not completed
        await self._columns.recovered()
        self.tables.start()

    async def _is_named(self, partition: str) -> bool:
        """Whether a stream or table has this partition."""
        is_table, name = kind_of(partition) == TABLES, name_of(partition)
        record = await (self.tables.directory if is_table else self.partitions.directory).records.read(name)
        return record is not None and record.key == partition

    async def aclose(self) -> None:
        parts = (self._columns, self.tables, self.streams, self.partitions, self._peers, self._coordinator)
        await close_each(*[part.aclose for part in parts])


def _unasked(request: object) -> Message:
    raise AssertionError(f"a node without a cluster gets no request of another node: {request}")
