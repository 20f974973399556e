"""Durable streams and tables of a node outside a cluster, beside those that end with the process.

Invariants: before the first client is served, the partitions of the data directory are led and their columns
retained; columns that nobody needs are freed.
"""

from __future__ import annotations

from dataplane.clock import Deadline
from dataplane.errors import Misuse
from dataplane.node.clustered.durable import DurableColumns
from dataplane.node.clustered.either_tables import EitherTables, TableNames
from dataplane.node.clustered.machines import machine
from dataplane.node.clustered.retained_shards import RetainedShards
from dataplane.node.clustered.service import ClusteredStreams
from dataplane.node.clustered.streams import opening
from dataplane.node.clustered.tables import ClusteredTables
from dataplane.node.partitions.client_departures import HasClients
from dataplane.node.partitions.partition_storage import PartitionStorage
from dataplane.node.partitions.record import TABLES, kind_of, name_of
from dataplane.node.partitions.single_node import SingleNodePartitions
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.node.streams.client import StreamClient, StreamRequest
from dataplane.node.streams.deliveries import Room
from dataplane.node.streams.local import LocalStreams
from dataplane.node.streams.sessions import Waiting
from dataplane.node.streams.staged_columns import StagedColumns
from dataplane.node.tables.tables import Tables, Tabling
from dataplane.store.store import Store
from dataplane.wire import messages as m
from dataplane.wire.auth import Key
from dataplane.wire.messages import Message
from dataplane.wire.peer import Peers

_LEAD_S = 10.0  # that a partition may take to be led here
_STREAMS = 50  # whose figures one message has


class DurablePartitions:
    """See the module. `life`: how often the directory was opened."""

    def __init__(self, node: bytes, store: Store, needed: NeededShards, life: int) -> None:
        """Raises Corrupt if the data directory was changed."""
        self._me = node.hex()
        keeping, retained = PartitionStorage(store), RetainedShards(needed)
        self._columns = DurableColumns(keeping, store, needed, retained)
        peers = Peers("", Key(b"", b""), _unasked)  # never started: nobody is reached
        self.partitions = SingleNodePartitions(keeping, peers, machine, opening, self._columns.settled)
        self._columns.partitions = self.partitions
        self.service = ClusteredStreams(node, self.partitions, retained, peers, life, keep=self._columns.keep)
        coordinator, holders = self.partitions.coordinator, self.service.holders
        self.tables = ClusteredTables(self.partitions, coordinator, peers, holders, life)
        self._table_names = TableNames(self.tables)

    async def recover(self) -> None:
        """Recover the data directory. Called once, before any client is served. Raises Corrupt."""
        await self.partitions.recover()
        await self.tables.directory.read_all(self.partitions.coordinator.values())
        await self._columns.recover()
        for hosted in self.partitions.replicas:
            if isinstance(hosted.machine, HasClients):
                ended = hosted.machine.leaving(self._me)
                await self.partitions.router.ask(hosted.partition, ended, Deadline.after(_LEAD_S))
            if not await self._named(hosted.partition):
                await self.partitions.replicas.delete(hosted.partition)  # it was being made, or restored
        await self._columns.recovered()
        self.tables.start()

    async def _named(self, partition: str) -> bool:
        """Whether a stream or table has this partition."""
        is_table, name = kind_of(partition) == TABLES, name_of(partition)
        record = await (self.tables.directory if is_table else self.partitions.directory).read(name)
        return record is not None and record.key == partition

    def client(self, here: StreamClient, local: LocalStreams, staged: StagedColumns, room: Room) -> EitherStreams:
        """The streams of a client, given those that are not durable."""
        return EitherStreams(self, StreamClient(self.service, staged, room), here, local)

    def table_client(self, staged: StagedColumns, local: Tables, here: Tabling) -> EitherTables:
        """The tables of a client, given those that are not durable."""
        return EitherTables(self._table_names, self.tables.client(staged), local, here)

    def find(self, name: str) -> bool:
        """Whether there is a durable stream with this name."""
        return self.partitions.directory.find(name) is not None

    async def aclose(self) -> None:
        """Stop. Idempotent."""
        await self._columns.aclose()
        await self.tables.aclose()
        await self.service.aclose()
        await self.partitions.aclose()


def _unasked(request: object) -> Message:
    raise AssertionError(f"nobody asks this node: {request}")


class EitherStreams:
    """The streams of one client: durable ones, and those `here`, which end with the process."""

    def __init__(
        self, durable: DurablePartitions, clustered: StreamClient, here: StreamClient, local: LocalStreams
    ) -> None:
        self._durable = durable
        self.clustered = clustered
        self.here = here
        self._local = local

    def of(self, token: bytes) -> StreamClient:
        """The kind that the stream with this token is of."""
        return self.here if self._local.has(token) or self.here.restoring(token) else self.clustered

    @property
    def expected(self) -> bool:
        """Whether the client has unused permits."""
        return self.clustered.expected or self.here.expected

    def revoke(self) -> None:
        """As `StreamClient.revoke`."""
        self.clustered.revoke()
        self.here.revoke()

    def leave(self) -> None:
        """The client has gone."""
        self.clustered.leave()
        self.here.leave()

    def untold(self, request: m.AskStream | m.Admit, reply: m.Reply) -> None:
        """As `StreamClient.untold`."""
        self.of(request.stream).untold(request, reply)

    def answer(self, request: StreamRequest, deadline: Deadline) -> m.Reply | Waiting | None:
        """As `StreamClient.answer`."""
        match request:
            case m.Open():
                return self._open(request, deadline)
            case m.Restore():
                name = request.name
                if self._local.has_named(name) or self._durable.find(name):
                    raise Misuse(f"there is a stream {name!r} already")
                return (self.clustered if request.head.settings.durable else self.here).answer(request, deadline)
            case m.Streams():
                return self._figures(request)
        return self.of(request.stream).answer(request, deadline)

    def _open(self, request: m.Open, deadline: Deadline) -> m.Reply | Waiting | None:
        wanted = request.settings is not None and request.settings.durable
        if self._local.has_named(request.name):
            if wanted:
                raise Misuse(f"the stream {request.name!r} was made not to be durable; open it so")
            return self.here.answer(request, deadline)
        if wanted or self._durable.find(request.name):
            return self.clustered.answer(request, deadline)
        return self.here.answer(request, deadline)

    def _figures(self, request: m.Streams) -> m.Figures:
        """Statistics of streams of both kinds, the first by name."""
        found = self._local.figures(request.after, _STREAMS) | self._durable.service.figures(request.after, _STREAMS)
        return m.Figures(request.id, {name: found[name] for name in sorted(found)[:_STREAMS]})
