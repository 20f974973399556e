"""Columns of durable partitions: written to disk before the command that names them, and retained again after a
restart.

The node stores on disk the names of the partitions that need columns of this node, but not which columns they need.
After a restart it asks the leaders of these partitions. Until the leader of a partition has answered, no recovered
column is freed, and the partition gets no new columns from this node. Afterwards the recovered columns that no
partition needs are freed.

Invariant: when a command is answered, the columns that it names are on disk. If the partition is led by this node, they
are written in the transaction of the command or an earlier one, otherwise before the leader is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dataplane.background_tasks import BackgroundTasks
from dataplane.batch.locations import shard_of
from dataplane.batch.ref import ShardKey
from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, Freed, Lost, PeerUnavailable
from dataplane.node.clustered.column_holders import held_columns
from dataplane.node.clustered.retained_shards import RetainedShards
from dataplane.node.partitions.partitions import Partitions
from dataplane.node.partitions.record import called, is_durable
from dataplane.node.partitions.replicas import in_memory
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.replication.configuration import ReplicaId
from dataplane.replication.log import StoredLog
from dataplane.store.durable.database import Notes
from dataplane.store.durable.log import JournaledLog, names
from dataplane.store.persistence import Persistence

log = logging.getLogger(__name__)

_PERSIST_S = 5.0  # timeout for writing columns to disk: less than the time that a client waits for an answer
_AGAIN_S = 0.5


def copy_name(key: ShardKey) -> str:
    """The name of the record on disk of a copy of another node's shard, or of a link to it."""
    return f"{key[0].hex()}/{shard_of(key[1])}"


def copy_key(name: str) -> ShardKey:
    """The shard of the record with this name."""
    node, number = name.split("/")
    return bytes.fromhex(node), int(number)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(int).decode


class DurableColumns:
    """The durable columns of one node. Its creator sets `partitions`."""

    partitions: Partitions

    def __init__(self, keeping: PartitionStorage, needed: NeededShards, retained: RetainedShards) -> None:
        """Raises Corrupt if the data directory was changed."""
        self._me = bytes.fromhex(keeping.me)
        self._persistence = keeping.persistence
        self._needed = needed
        self._retained = retained
        self._notes = keeping.notes("columns")
        self._named = set(self._notes.load())  # partitions that have columns here
        self._copies = keeping.notes("copies")
        self.restored: Callable[[ShardKey, int], None] = lambda key, number: None
        """Called with each recovered copy of another node's shard, and its local number."""
        self._pending: dict[str, asyncio.Event] = {}  # partitions that have not reported their needs since the start
        self._early: dict[str, list[tuple[int, Sequence[bytes]]]] = {}  # outbox entries of pending partitions
        self._background = BackgroundTasks()

    # New columns

    async def keep(self, partition: str, shards: Sequence[ShardKey], until: Deadline) -> None:
        """Write the columns in these shards, or copies of them, to disk before the next command of the partition is
        answered. Raises Backpressure if the disk is full, Freed, Corrupt, Misuse, DirectoryUnusable; PeerUnavailable if
        the partition has not reported its needs since the restart by the deadline `until`."""
        pending = self._pending.get(partition)
        if pending is not None:
            await self._said(partition, pending, until)
        if not shards:
            return
        if partition not in self._named:
            await self._notes.write({partition: b""})
            self._named.add(partition)
        hosted = self.partitions.replicas.find(partition)
        with_next = hosted is not None and hosted.replica.leads
        copies = {copy_name(key): _encode(shard_of(self._number(key))) for key in shards if key[0] != self._me}
        numbers = [self._number(key) for key in shards]
        persisted = self._persistence.persist(numbers, Deadline.after(_PERSIST_S), with_next=with_next)
        await (asyncio.gather(persisted, self._copies.write(copies)) if copies else persisted)

    def _number(self, key: ShardKey) -> int:
        number = self._needed.number(key)
        if number is None:
            raise Freed(f"the copy of shard {key[1]} of node {key[0].hex()} was freed", shard=key[1])
        return number

    def freed(self, key: ShardKey) -> None:
        """Remove the record of a copy that was freed here."""
        self._copies.write({copy_name(key): None}, lazily=True)

    async def _said(self, partition: str, pending: asyncio.Event, until: Deadline) -> None:
        try:
            async with asyncio.timeout(until.remaining_s):
                await pending.wait()
        except TimeoutError:
            raise PeerUnavailable(
                f"{called(partition)} has not reported its columns on this node since the node was started"
            ) from None

    def settled(self, partition: str, last: int, entries: Sequence[bytes]) -> None:
        """Execute entries of the partition's outbox (`RetainedShards.settled`), now or once the partition has reported
        its needs."""
        if partition in self._pending:
            self._early.setdefault(partition, []).append((last, entries))
        else:
            self._retained.settled(partition, last, entries)

    # Recovered columns

    async def recover(self, ready: asyncio.Event | None = None) -> None:
        """Load the columns from disk. Once `ready` is set, ask the partitions in the background which columns they
        need. Called once, when partitions can be asked. Raises Corrupt."""
        shards = {number: (self._me, number) for number in await self._persistence.recover()}
        for name, value in self._copies.load().items():
            key, number = copy_key(name), _decode(value)
            if number in shards:
                shards[number] = key
                self.restored(key, number)
            else:
                self._copies.write({name: None}, lazily=True)
        known = self._named | {each.partition for each in self.partitions.replicas}
        self._pending = {partition: asyncio.Event() for partition in known if is_durable(partition)}
        self._asking = self._background.spawn(self._ask_all(shards, ready))

    async def recovered(self) -> None:
        """Wait until all partitions have reported their needs."""
        await self._asking

    async def _ask_all(self, shards: Mapping[int, ShardKey], ready: asyncio.Event | None) -> None:
        if ready is not None:
            await ready.wait()
        await asyncio.gather(*(self._ask(partition) for partition in self._pending))
        self._needed.recovered(shards)

    async def _ask(self, partition: str) -> None:
        """Ask a partition for its needs until it answers or is lost, and retain the columns that it needs."""
        while True:
            try:
                refs, last = await held_columns(self.partitions.router, self._me, partition)
            except DataplaneError as error:
                if not isinstance(error, Lost):
                    log.debug("%s has not reported yet which columns it needs here: %s", partition, error)
                    await asyncio.sleep(_AGAIN_S)
                    continue
                log.info("%s does not exist any more, so its columns here are freed: %s", partition, error)
                self._named.discard(partition)
                hosted = self.partitions.replicas.find(partition)
                if hosted is not None and not hosted.configuration.epoch:  # deleted while this node was away
                    self.partitions.replicas.end(hosted, forget=True)
                await self._notes.write({partition: None}, lazily=True)
                break
            else:
                self._retained.restored(partition, refs, last)
                break
        pending = self._pending.pop(partition)
        for last, entries in self._early.pop(partition, ()):
            self._retained.settled(partition, last, entries)
        pending.set()

    async def aclose(self) -> None:
        await self._background.aclose()


class PartitionStorage:
    """The logs of a node's partitions, and small values about them (`Notes`), in the data directory of the node. `me`:
    the node."""

    def __init__(self, persistence: Persistence) -> None:
        self.persistence = persistence
        durable = persistence.durable
        self._database = durable.directory.database
        self._journal = durable.journal
        self.me = durable.directory.identity.node.hex()
        self.path = str(durable.directory.path)

    async def log(self, partition: str, new: ReplicaId) -> tuple[JournaledLog | None, ReplicaId, StoredLog]:
        if not is_durable(partition):
            return await in_memory(partition, new)
        return await self._journal.run(self._opened, partition, new)

    def _opened(self, partition: str, new: ReplicaId) -> tuple[JournaledLog, ReplicaId, StoredLog]:
        log = JournaledLog(self._database, self._journal, partition, new)
        return log, *log.load()

    def notes(self, kind: str) -> Notes:
        return Notes(self._database, self._journal, kind)

    def partitions(self) -> list[str]:
        return [name for name, _ in names(self._database)]
