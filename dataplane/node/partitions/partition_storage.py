"""The logs of a node's partitions, and small values about them (`Notes`), in the data directory of the node."""

from __future__ import annotations

from dataplane.node.partitions.record import is_durable
from dataplane.node.partitions.replicas import in_memory
from dataplane.replication.configuration import ReplicaId
from dataplane.replication.storage import Storage, StoredLog
from dataplane.store.durable.log import JournaledLog, names
from dataplane.store.durable.notes import Notes
from dataplane.store.persistence import Persistence


class PartitionStorage:
    """The data directory of one node. `me`: the node."""

    def __init__(self, persistence: Persistence) -> None:
        self.persistence = persistence
        durable = persistence.durable
        self._database = durable.directory.database
        self._journal = durable.journal
        self.me = durable.directory.identity.node.hex()
        self.path = str(durable.directory.path)

    async def log(self, partition: str, new: ReplicaId) -> tuple[Storage, ReplicaId, StoredLog]:
        """See `replicas.Logs`. Raises Corrupt, Backpressure, DirectoryUnusable."""
        if not is_durable(partition):
            return await in_memory(partition, new)
        return await self._journal.run(self._opened, partition, new)

    def _opened(self, partition: str, new: ReplicaId) -> tuple[Storage, ReplicaId, StoredLog]:
        log = JournaledLog(self._database, self._journal, partition, new)
        return log, *log.load()

    def notes(self, kind: str) -> Notes:
        """The notes of this kind."""
        return Notes(self._database, self._journal, kind)

    def partitions(self) -> list[str]:
        """The partitions that have a log there."""
        return [name for name, _ in names(self._database)]
