"""A node in a cluster: its control channel, the members, and the requests of other nodes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from dataplane.batch.locations import link_of, shard_of
from dataplane.batch.rows import RowIndices
from dataplane.closing import close_each
from dataplane.cluster.cluster import ClusterConnection
from dataplane.cluster.membership import Member, Membership
from dataplane.config import ClusterConfig, environment
from dataplane.errors import PeerUnavailable, ProtocolMismatch
from dataplane.node.clustered.durable import DurableColumns, PartitionStorage
from dataplane.node.clustered.open_streams import opening
from dataplane.node.clustered.retained_shards import RetainedShards
from dataplane.node.clustered.streams import ClusteredStreams
from dataplane.node.clustered.tables import ClusteredTables, machine
from dataplane.node.partitions.era import Era
from dataplane.node.partitions.partitions import Partitions
from dataplane.node.partitions.replicas import in_memory
from dataplane.node.shards.fetch import Fetcher
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.node.shards.offers import Offers
from dataplane.node.shards.pending_changes import Part
from dataplane.node.shards.shard_replicas import links_of
from dataplane.node.telemetry import Telemetry
from dataplane.store.store import Store
from dataplane.transport.channels import Transport
from dataplane.transport.choice import TransportChoice, started
from dataplane.wire import auth
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import (
    ClockRead,
    Done,
    Figures,
    ListRings,
    Message,
    ReadClock,
    ReadRing,
    ReadStats,
    Reply,
    RingEvents,
    RingList,
)
from dataplane.wire.partition_messages import PartitionFrame
from dataplane.wire.peer import Peers
from dataplane.wire.row_messages import ListStreams
from dataplane.wire.shard_messages import MAX_RETAINED

log = logging.getLogger(__name__)

_TRIPS = 9  # round trips to compare clocks
_OBSERVED_S = 5.0  # timeout for the rings of another node
_FIGURES_S = 2.0  # timeout for the statistics of another node
_STREAMS = 50  # the most streams with statistics in one message


class Hosts:
    """One node's connection to the other hosts. The node calls `start`, `run` and `aclose`."""

    # Set by `start`, before the first request of another node or client.
    membership: Membership
    partitions: Partitions
    streams: ClusteredStreams
    tables: ClusteredTables
    fetcher: Fetcher
    _cluster: ClusterConnection

    def __init__(
        self,
        config: ClusterConfig,
        node: bytes,
        store: Store,
        needed: NeededShards,
        freed: Callable[[int], object],
        observing: Telemetry,
        *,
        keeps: bool = False,
    ) -> None:
        """`freed` is called with the size of a released large message of another node. `observing` answers other nodes
        about this node's rings of events. `keeps`: whether the node has a data directory. Raises OSError or ValueError
        for an unusable key."""
        self._needed = needed
        self._observing = observing
        self._config = config
        self._keeps = keeps
        self._node = node
        self._store = store
        self._key = None if config.key is None else auth.load(Path(config.key))
        key = self._key or auth.own(Path(environment().state_dir))
        self._peers = Peers(node.hex(), config.listen, key, self._answer, freed=freed)
        self._transports: list[Transport] = []
        member, copy = (lambda node: node in self.membership.members), (lambda *key: self.fetcher.copy(*key))
        self._offers = Offers(node, store, self._transports, member, copy)
        self._inline_bytes = 0
        self.graphs: Callable[[], dict[str, Any]] = dict
        """Returns the reports of this node's clients about their performance."""
        self._retained = RetainedShards(needed)
        self._keeping = None if store.persistence is None else PartitionStorage(store.persistence)
        self._era: Era | None = None
        self._columns = None
        if self._keeping is not None:
            self._columns = DurableColumns(self._keeping, needed, self._retained)
        self._choice = TransportChoice(())
        self.measured: Callable[[], dict[str, Any]] = dict
        """Returns the statistics of the whole node. The node sets this."""

    @property
    def address(self) -> str:
        """The address at which other nodes reach this one."""
        listens = self._peers.address
        return f"tcp://{self._config.told}:{listens.rpartition(':')[2]}" if self._config.told and listens else listens

    async def start(self) -> None:
        """Listen for other nodes, start the partitions, and recover the columns in the data directory. Raises OSError,
        Corrupt; ValueError if the package for the address `join` is not installed."""
        self._transports += await started(self._config.transports, self._config.host, self._config.told)
        self._choice = TransportChoice(self._transports)
        self._peers.start()
        me = Member(
            secrets.randbits(48),
            self.address,
            _machine(),
            {t.name: t.address for t in self._transports},
            keeps=self._keeps,
            first=self._store.first,
        )
        self._cluster = ClusterConnection(self._config, self._peers, self._node.hex(), me, self._key)
        self.membership = membership = self._cluster.membership
        self.fetcher = Fetcher(self._node, self._store, self._peers, membership, self._choice)
        self._needed.replica = self.fetcher.replicas.here
        self.fetcher.replicas.freeing = self._needed.free_replica
        self._needed.free_lost = self.fetcher.free_lost
        self._known = dict(membership.members)
        membership.watch(self._changed)
        membership.watch_ended(self._ended)
        reading = self.fetcher.reading
        self.partitions = Partitions(
            membership,
            self._cluster.coordinator,
            self._peers,
            machine,
            opening,
            settled=self._retained.settled if self._columns is None else self._columns.settled,
            logs=in_memory if self._keeping is None else self._keeping.log,
            needing=lambda node: reading.needing(bytes.fromhex(node)),
        )
        keep = None if self._columns is None else self._columns.keep
        self.streams = ClusteredStreams(self._node, self.partitions, self._retained, self._peers, me.life, keep=keep)
        holders = self.streams.holders
        self.tables = ClusteredTables(self.partitions, self._cluster.coordinator, self._peers, holders, me.life)
        self.partitions.start()
        self.tables.start()
        if self._keeping is not None and self._columns is not None:
            era = self._era = Era(self._cluster.coordinator, self._keeping.notes("era"), self._keeping.path)
            self._columns.partitions = self.partitions
            self._columns.restored = self.fetcher.replicas.restored
            self.fetcher.replicas.forgotten = self._columns.freed
            for partition in self._keeping.partitions():
                await self.partitions.replicas.host(partition)
            await self._columns.recover(era.known)

    async def run(self) -> None:
        """Take part in the cluster until cancelled. Raises Rejected if this node is not admitted."""
        running = [asyncio.ensure_future(self._cluster.run())]
        if self._era is not None:
            running.append(asyncio.ensure_future(self._era.run()))
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for task in running:
            if not task.cancelled():
                task.result()

    async def figures_of(self, request: ReadStats | ListStreams) -> Figures:
        """The statistics of another member. Raises PeerUnavailable if it is not a member or does not answer."""
        member = self.membership.members.get(request.node)
        if member is None:
            node = request.node[:16].hex()
            raise PeerUnavailable(f"node {node} is no member of this cluster", address=node)
        asked = msgspec.structs.replace(request, id=self._peers.next_id(), node=b"")
        return await self._peers.request(member, asked, Figures, _FIGURES_S)

    def _changed(self) -> None:
        before, self._known = self._known, dict(self.membership.members)
        gone = before.keys() - self._known.keys()
        there = {member.address for member in self._known.values()}
        for address in {before[node].address for node in gone} - there:  # a new member may listen there
            self._peers.forget(address)  # requests to it fail at once
        self._offers.gone(gone)

    def _ended(self, node: str, before_s: float) -> None:
        self.fetcher.replicas.gone(bytes.fromhex(node))

    # requests of other nodes

    def _answer(self, request: Any) -> Message | Awaitable[Message]:
        match request:
            case PartitionFrame():
                self.partitions.receive(request)
            case pm.DescribeShards():
                if len(request.shards) > pm.MAX_SHARDS:
                    raise ProtocolMismatch(f"a request for {len(request.shards)} shards")
                return self._describe(request)
            case pm.CopyShards():
                return self.fetcher.replicas.copy(request)
            case pm.TakeReplicas():
                return self.fetcher.replicas.take(request)
            case pm.FreeReplicas():
                self.fetcher.replicas.free(request.node, request.parts)
            case pm.FindReplicas():
                return self.fetcher.replicas.found(request)
            case pm.Offer():
                return self._offers.offer(request)
            case pm.Withdraw():
                self._offers.withdraw(request)
            case ReadClock() | ListRings() | ReadRing():
                return self._observing.answer(request)
            case ReadStats(about="graphs"):
                return Figures(request.id, {"nodes": [self.graphs()]})
            case pm.RetainParts():
                if len(request.shards) > MAX_RETAINED:
                    raise ProtocolMismatch(f"links to {len(request.shards)} shards")
                links = self._store.owners.retain(links_of(request.shards), holder="another node's client")
                return pm.Linked(request.id, links)
            case pm.RetainReplicas():
                self.fetcher.replicas.retain(request)
            case pm.FreeParts():
                return pm.PartsFreed(request.id, self._free(request.parts))
            case ReadStats():
                return Figures(request.id, self.measured())
            case ListStreams():
                return Figures(request.id, self.streams.figures(request.after, _STREAMS))
            case pm.LedTables():
                return self.tables.answer(request)
            case _:
                answer = self.streams.answer(request)
                if answer is not None:
                    return answer
        return Done(getattr(request, "id", 0))

    async def observed(self, request: ReadClock | ListRings | ReadRing) -> Reply:
        """Another node's rings, or its clock compared with the clock here by the shortest of several round trips.
        Raises PeerUnavailable, and the errors of that node."""
        member = self.membership.members.get(request.node)
        if member is None:
            raise PeerUnavailable(f"node {request.node.hex()} is not in the cluster", address="")
        trips: list[tuple[int, int, int]] = []
        for _ in range(_TRIPS if isinstance(request, ReadClock) else 1):
            asked = msgspec.structs.replace(request, id=self._peers.next_id(), node=b"")
            kind = {ReadClock: ClockRead, ListRings: RingList, ReadRing: RingEvents}[type(request)]
            sent = time.monotonic_ns()
            answer: Any = await self._peers.request(member, asked, kind, _OBSERVED_S)
            came = time.monotonic_ns()
            if isinstance(answer, ClockRead):
                trips.append((came - sent, answer.now - (sent + came) // 2, came))
        if not trips:
            return msgspec.structs.replace(answer, id=request.id)  # type: ignore[no-any-return]
        took, ahead, came = min(trips)
        return ClockRead(request.id, came, ahead, took // 2)

    def _free(self, parts: Sequence[Part]) -> list[int]:
        """Free these parts of local shards. Returns the shards that have other owners."""
        try:
            named = [(shard, columns, RowIndices.decode(rows)) for shard, columns, rows in parts if columns]
            self._needed.free_parts(named)
        except (ValueError, IndexError) as error:
            raise ProtocolMismatch(f"no part of a shard: {error}") from None
        self._store.free([shard for shard, columns, _ in parts if not columns])
        left = {}
        for number, *_ in parts:
            found = self._store.shards.get(shard_of(number))
            if found is not None and (link_of(number) or found.links is not None):
                left[found.number] = True
        return [*left]

    def _describe(self, request: pm.DescribeShards) -> pm.Described:
        left, described = pm.MAX_INLINE_ALL, []
        shards = self._store.shards.describe(request.shards)
        for shard, what in zip(request.shards, shards, strict=True):
            payload = self._store.payload(shard, min(left, pm.MAX_INLINE))
            left -= len(payload)
            self._inline_bytes += len(payload)
            described.append((*what, payload))
        return pm.Described(request.id, described)

    def statistics(self) -> dict[str, int]:
        """Bytes received from and sent to other nodes, the number of their shards known here, and of requests to and
        from them."""
        peers, fetcher = self._peers, self.fetcher
        return {
            "fetched_bytes": fetcher.fetched_bytes,
            "sent_bytes": self._inline_bytes + self._offers.sent_bytes,
            "copies": fetcher.copies,
            "asked": peers.asked,
            "answered": peers.answered,
        }

    def figures(self) -> dict[str, Any]:
        roles = self._roles()
        members = {
            node.hex(): {
                "address": m.address,
                "transports": dict(m.transports),
                "self": node == self._node,
                **{role: list(of.get(node.hex(), ())) for role, of in roles.items()},
            }
            for node, m in self.membership.members.items()
        }
        read = self._choice.statistics()
        coordination = asdict(self.membership.coordination)
        return {"epoch": self.membership.epoch, "members": members, "read_bytes": read, "coordination": coordination}

    def roles(self) -> dict[str, dict[str, int]]:
        """The partitions that this node `leads` and `follows`, each with the epoch of its configuration."""
        roles: dict[str, dict[str, int]] = {"leads": {}, "follows": {}}
        for hosted in self.partitions.replicas:
            leads = hosted.configuration.leader[0] == self._node.hex()
            roles["leads" if leads else "follows"][hosted.partition] = hosted.configuration.epoch
        return roles

    def _roles(self) -> dict[str, dict[str, dict[str, int]]]:
        """By role and node, the partitions that this node knows, each with the epoch of its configuration."""
        leads: dict[str, dict[str, int]] = {}
        follows: dict[str, dict[str, int]] = {}
        for partition, configuration in self.partitions.configurations().items():
            leader = configuration.leader[0]
            leads.setdefault(leader, {})[partition] = configuration.epoch
            for node in {follower[0] for follower in configuration.followers} - {leader}:
                follows.setdefault(node, {})[partition] = configuration.epoch
        return {"leads": leads, "follows": follows}

    async def aclose(self, within_s: float | None = None) -> None:
        """Leave the cluster. Idempotent. Raises the last error, and TimeoutError after `within_s` seconds; every part
        is closed in any case."""
        names = (
            "_columns tables streams partitions _offers _peers _offers fetcher _cluster"  # offers made meanwhile too
        )
        parts = [getattr(self, name, None) for name in names.split()]  # it may not have started
        await close_each(*[part.aclose for part in (*parts, *self._transports) if part is not None], within_s=within_s)


def _machine() -> str:
    """An identifier that all processes of this machine share until the machine restarts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
