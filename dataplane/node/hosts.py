"""A node among others: its control channel, who is there, and what it answers them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dataplane.batch.links import shard_of
from dataplane.batch.rows import Rows
from dataplane.cluster.joining import Cluster, join
from dataplane.cluster.membership import Member, Membership
from dataplane.cluster.static import StaticMembership
from dataplane.config import ClusterConfig
from dataplane.errors import ProtocolMismatch
from dataplane.node.shards.fetch import Fetcher
from dataplane.node.shards.offers import Offers
from dataplane.node.shards.replicas import Part
from dataplane.node.shards.retaining import links_of
from dataplane.node.spread.spread import Spread
from dataplane.node.streams.homes import Homes
from dataplane.node.tables.tables import Tables
from dataplane.store.store import Store
from dataplane.transport.base import Transport
from dataplane.transport.choice import Choice, started
from dataplane.wire import auth
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import MAX_LIVE, MAX_RETAINED, Done, Message
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostsStatistics:
    """Bytes that have come from other nodes, and that have gone to them; how many of their shards are known here;
    requests to them, and theirs."""

    fetched: int = 0
    sent: int = 0
    copies: int = 0
    asked: int = 0
    answered: int = 0


class Hosts:
    """The other hosts, for one node. `start`, `run` and `aclose` are called by it."""

    def __init__(
        self,
        config: ClusterConfig,
        node: bytes,
        store: Store,
        homes: Homes,
        tables: Tables,
        freed: Callable[[int], object],
    ) -> None:
        """`freed` is called with the bytes of a large message of another node. Raises OSError or ValueError for a key
        that can not be used."""
        self._homes = homes
        self._tables = tables
        self._config = config
        self._node = node
        self._store = store
        self._key = None if config.key is None else auth.load(Path(config.key))
        self._peers = Peers(config.listen, self._key, self._answer, freed=freed)
        self._transports: list[Transport] = []
        self._offers = Offers(node, store, self._transports, self)
        self._inline_bytes = 0
        self._cluster: Cluster | None = None
        self.membership: Membership | None = None
        self.roles: Callable[[bytes], Mapping[str, Sequence[str]]] = lambda node: {}
        """Of a member: the partitions that it `leads` and `follows`, for people. Set by whoever drives partitions."""
        self._choice = Choice(())
        self.fetcher: Fetcher | None = None
        self.spread: Spread | None = None

    @property
    def address(self) -> str:
        """Where other nodes find this one."""
        listens = self._peers.address
        return f"tcp://{self._config.told}:{listens.rpartition(':')[2]}" if self._config.told and listens else listens

    def member(self, node: bytes) -> bool:
        """Whether this is a member; see `node.shards.offers`."""
        return self.membership is not None and node in self.membership.members

    def copy(self, owner: bytes, shard: int) -> int | None:
        """The number here of another's shard that others may read here; see `node.shards.offers`."""
        return None if self.fetcher is None else self.fetcher.copy(owner, shard)

    async def start(self) -> None:
        """Listen. Raises OSError; ValueError where what it is to be joined by is not installed."""
        self._transports += await started(self._config.transports, self._config.host, self._config.told)
        self._choice = Choice(self._transports)
        self._peers.start()
        me = Member(self._node, self.address, {t.name: t.address for t in self._transports})
        self._cluster = join(self._config, self._peers, me, self._key)
        self.membership = membership = self._cluster.membership
        self.fetcher = Fetcher(self._node, self._store, self._peers, membership, self._choice)
        self._homes.replica = self.fetcher.replicas.here
        self.fetcher.replicas.freeing = self._homes.free_replica
        self.spread = Spread(self._node, self._homes, self._tables, self._peers, membership)
        self._known = dict(membership.members)
        membership.begin_anew_by(self._begin_anew)
        membership.watch(self._changed)

    async def run(self) -> None:
        """Keep watch over the others until cancelled. Raises Rejected where this node may not be one of them."""
        assert self._cluster is not None, "it has been started"
        await self._cluster.run()

    def seek(self, addresses: Iterable[str]) -> None:
        """Others listen at these tcp://HOST:PORT, as the process says that started this node."""
        if isinstance(self.membership, StaticMembership):
            self.membership.seek(addresses)

    def _begin_anew(self) -> int:
        """Others took this node for dead. What was put here stays and can be read, but of streams nothing is left, nor
        of what was kept here for others."""
        since = self._store.following()
        if self.spread is not None:
            self.spread.begin_anew(since)
        if self.fetcher is not None:
            self.fetcher.replicas.begin_anew()
        return since

    def _changed(self) -> None:
        assert self.membership is not None
        before, self._known = self._known, dict(self.membership.members)
        gone = before.keys() - self._known.keys()
        for node in gone:  # who waits for its answer is told at once
            self._peers.forget(before[node].address)
        self._offers.gone(gone)
        if self.fetcher is not None:
            for node in gone:
                self.fetcher.replicas.gone(node)
        if self.spread is not None:
            self.spread.changed(gone)

    # what others ask

    def _answer(self, request: Any) -> Message | Awaitable[Message]:
        match request:
            case pm.Greet():
                assert self.membership is not None
                return self.membership.greeted(request)
            case pm.Describe():
                if len(request.shards) > pm.MAX_SHARDS:
                    raise ProtocolMismatch(f"a request for {len(request.shards)} shards")
                return self._describe(request)
            case pm.LiveRows():
                if request.count > MAX_LIVE:
                    raise ProtocolMismatch(f"a request for {request.count} rows of a shard")
                bits = self._store.live(request.shard, request.column, request.first, request.count)
                return pm.LiveBits(request.id, bits)
            case pm.TakeReplicas() if self.fetcher is not None:
                return self.fetcher.replicas.take(request)
            case pm.FreeReplicas() if self.fetcher is not None:
                self.fetcher.replicas.free(request.node, request.parts)
            case pm.FindReplicas() if self.fetcher is not None:
                return self.fetcher.replicas.found(request)
            case pm.Offer():
                return self._offers.offer(request)
            case pm.Withdraw():
                self._offers.withdraw(request)
            case pm.RetainParts():
                if len(request.shards) > MAX_RETAINED:
                    raise ProtocolMismatch(f"links to {len(request.shards)} shards")
                links = self._store.retain(links_of(request.shards), holder="another node's client")
                return pm.Linked(request.id, links)
            case pm.RetainReplicas() if self.fetcher is not None:
                self.fetcher.replicas.retain(request)
            case pm.FreeParts():
                return pm.PartsFreed(request.id, self._free(request.parts))
            case _:
                answer = None if self.spread is None else self.spread.answer(request)
                if answer is not None:
                    return answer
        return Done(request.id)

    def _free(self, parts: Sequence[Part]) -> list[int]:
        """Free these parts of shards here; the shards of which others own some of it still."""
        for shard, columns, rows in parts:
            try:
                if columns:
                    self._store.free_part(shard, columns, Rows.decode(rows), hollow=True)
                else:
                    self._store.free([shard])
            except (ValueError, IndexError) as error:
                raise ProtocolMismatch(f"no part of a shard: {error}") from None
        return [shard for shard in dict.fromkeys(shard_of(shard) for shard, *_ in parts) if self._store.owned(shard)]

    def _describe(self, request: pm.Describe) -> pm.Described:
        left, described = pm.MAX_INLINE_ALL, []
        shards = self._store.describe(request.shards, apart=request.apart)
        for shard, what in zip(request.shards, shards, strict=True):
            payload = self._store.peek(shard, min(left, pm.MAX_INLINE))
            left -= len(payload)
            self._inline_bytes += len(payload)
            described.append((*what, payload))
        apart = [shard for shard in request.shards if request.apart and self._store.apart(shard)]
        return pm.Described(request.id, described, apart)

    def statistics(self) -> HostsStatistics:
        """What has crossed, and what is known."""
        if self.fetcher is None:
            return HostsStatistics()
        sent = self._inline_bytes + self._offers.sent_bytes
        peers = self._peers.statistics()
        return HostsStatistics(self.fetcher.fetched_bytes, sent, self.fetcher.copies, peers.asked, peers.answered)

    def figures(self) -> dict[str, Any]:
        """Who is there, as plain values."""
        if self.membership is None:
            return {}
        members = {
            node.hex(): {
                "address": m.address,
                "transports": dict(m.transports),
                "self": node == self._node,
                **{role: list(partitions) for role, partitions in self.roles(node).items()},
            }
            for node, m in self.membership.members.items()
        }
        read = self._choice.statistics()
        figures = {"epoch": self.membership.epoch, "members": members, "read_bytes": read}
        coordination = self.membership.coordination
        return figures if coordination is None else figures | {"coordination": asdict(coordination)}

    async def aclose(self) -> None:
        """Leave. Idempotent."""
        if self.spread is not None:
            await self.spread.aclose()
        await self._offers.aclose()
        await self._peers.aclose()
        await self._offers.aclose()  # what was asked for meanwhile
        if self.fetcher is not None:
            await self.fetcher.aclose()
        if self._cluster is not None:
            await self._cluster.aclose()
        for transport in self._transports:
            await transport.aclose()
