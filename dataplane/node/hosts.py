"""A node among others: its control channel, who is there, and what it does for them.

What always holds: what is offered to another node is pinned for it until it has been read, the offer has run out, or
that node is no member any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.batch.rows import Rows
from dataplane.clock import Deadline
from dataplane.cluster.membership import Member
from dataplane.cluster.static import StaticMembership
from dataplane.config import ClusterConfig
from dataplane.errors import LimitExceeded, ProtocolMismatch
from dataplane.node.fetch import Fetcher
from dataplane.store.store import Store
from dataplane.transport.base import Memory, Transport
from dataplane.transport.choice import started
from dataplane.wire import auth
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

MAX_OFFERS = 1024
"""Shards that are pinned for other nodes at a time."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """Another node, as a holder of pins."""

    node: bytes

    def __str__(self) -> str:
        return f"node {self.node.hex()}"


@dataclass(frozen=True, slots=True)
class _Offer:
    reader: _Reader
    shard: int
    transport: Transport
    until: asyncio.TimerHandle


class Hosts:
    """The other hosts, for one node. `start`, `run` and `aclose` are called by it."""

    def __init__(self, config: ClusterConfig, node: bytes, store: Store) -> None:
        """Raises OSError or ValueError for a key that can not be used."""
        self._config = config
        self._node = node
        self._store = store
        key = None if config.key is None else auth.load(Path(config.key))
        self._peers = Peers(config.listen, key, self._answer)
        self._transports: Sequence[Transport] = ()
        self._offers: dict[bytes, _Offer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.membership: StaticMembership | None = None
        self.fetcher: Fetcher | None = None

    @property
    def address(self) -> str:
        """Where other nodes find this one."""
        return self._peers.address

    async def start(self) -> None:
        """Listen. Raises OSError."""
        self._transports = await started(self._config.transports, self._config.host)
        self._peers.start()
        me = Member(self._node, self._peers.address, {t.name: t.address for t in self._transports})
        self.membership = membership = StaticMembership(self._peers, me, self._config.addresses)
        self.fetcher = Fetcher(self._node, self._store, self._peers, membership, self._transports)
        self._known = dict(membership.members)
        membership.watch(self._changed)

    async def run(self) -> None:
        """Keep watch over the others until cancelled."""
        assert self.membership is not None, "it has been started"
        await self.membership.run()

    def _changed(self) -> None:
        assert self.membership is not None
        before, self._known = self._known, dict(self.membership.members)
        gone = before.keys() - self._known.keys()
        for node in gone:  # who waits for its answer is told at once
            self._peers.forget(before[node].address)
        for ticket in [ticket for ticket, offer in self._offers.items() if offer.reader.node in gone]:
            self._withdraw_soon(ticket)

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
            case pm.Offer():
                return self._offer(request)
            case pm.Withdraw():
                offer = self._offers.get(request.ticket)
                if offer is not None and offer.reader.node == request.node:
                    self._withdraw_soon(request.ticket)
            case pm.FreeParts():
                for shard, columns, rows in request.parts:
                    try:
                        self._store.free_part(shard, columns, Rows.decode(rows))
                    except (ValueError, IndexError) as error:
                        raise ProtocolMismatch(f"no part of a shard: {error}") from None
        return Done(request.id)

    def _describe(self, request: pm.Describe) -> pm.Described:
        left, described = pm.MAX_INLINE_ALL, []
        for shard, what in zip(request.shards, self._store.describe(request.shards), strict=True):
            payload = self._store.peek(shard, min(left, pm.MAX_INLINE))
            left -= len(payload)
            described.append((*what, payload))
        return pm.Described(request.id, described)

    async def _offer(self, request: pm.Offer) -> pm.Offered:
        transport = next((t for t in self._transports if t.name == request.transport), None)
        if transport is None:
            raise ProtocolMismatch(f"this node has no transport {request.transport!r}")
        if len(self._offers) >= MAX_OFFERS:
            what = "shards offered to other nodes at a time"
            raise LimitExceeded(f"{MAX_OFFERS} {what}", what=what, asked=MAX_OFFERS + 1, limit=MAX_OFFERS)
        timeout_s = min(max(request.timeout_s, 0.0), 3600.0)
        reader = _Reader(request.node)
        (held,) = await self._store.pin(reader, [request.shard], Deadline.after(timeout_s))
        extent = held.extent
        ticket = transport.offer(Memory(self._store.arena[extent.segment].readonly_fd, extent.offset, extent.size))
        loop = asyncio.get_running_loop()
        until = loop.call_later(timeout_s + 1.0, self._withdraw_soon, ticket)
        self._offers[ticket] = _Offer(reader, request.shard, transport, until)
        return pm.Offered(request.id, ticket)

    def _withdraw_soon(self, ticket: bytes) -> None:
        task = asyncio.get_running_loop().create_task(self._withdraw(ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _withdraw(self, ticket: bytes) -> None:
        offer = self._offers.pop(ticket, None)
        if offer is not None:
            offer.until.cancel()
            await offer.transport.withdraw(ticket)
            self._store.unpin(offer.reader, [offer.shard])

    def figures(self) -> dict[str, Any]:
        """Who is there, as plain values."""
        if self.membership is None:
            return {}
        members = {
            node.hex(): {"address": m.address, "transports": dict(m.transports), "self": node == self._node}
            for node, m in self.membership.members.items()
        }
        read = {} if self.fetcher is None else self.fetcher.choice.statistics()
        return {"epoch": self.membership.epoch, "members": members, "read_bytes": read}

    async def aclose(self) -> None:
        """Leave. Idempotent."""
        for ticket in list(self._offers):
            await self._withdraw(ticket)
        await self._peers.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for transport in self._transports:
            await transport.aclose()
