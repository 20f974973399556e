"""What other nodes may read of this one: shards that are pinned for them, a ticket each.

What always holds: what is offered to another node is pinned for it until it has been read, the offer has run out, or
that node is no member any more; no more than `MAX_OFFERS` are at a time, and who waits comes in turn, by nodes; who has
waited for long is told to ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, ProtocolMismatch
from dataplane.node.gate import Gate
from dataplane.store.store import Store
from dataplane.transport.base import Memory, Transport
from dataplane.wire import peer_messages as pm

MAX_OFFERS = 48
"""Shards that are read by other nodes at a time: of four streams each, fewer than the connections that tcp takes."""

_WAIT = 0.8  # of the time that the asker gives, until it is told to ask again
_LONGEST_S = 3600.0


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


class Offers:
    """The offers of one node."""

    def __init__(self, store: Store, transports: Sequence[Transport]) -> None:
        self._store = store
        self._transports = transports
        self._gate = Gate(MAX_OFFERS, MAX_OFFERS)
        self._offers: dict[bytes, _Offer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._offers)

    async def offer(self, request: pm.Offer) -> pm.Offered:
        """Leave for another node to read a shard. Raises Freed, Corrupt, ProtocolMismatch, Backpressure."""
        if not request.timeout_s >= 0:  # NaN too
            raise ProtocolMismatch(f"a timeout is seconds, not {request.timeout_s}")
        transport = next((t for t in self._transports if t.name == request.transport), None)
        if transport is None:
            raise ProtocolMismatch(f"this node has no transport {request.transport!r}")
        timeout_s = min(request.timeout_s, _LONGEST_S)
        deadline = Deadline.after(_WAIT * timeout_s)
        reader = _Reader(request.node)
        try:
            async with asyncio.timeout(deadline.remaining_s):
                await self._gate.enter(request.node)
        except TimeoutError:
            raise Backpressure(f"{len(self._gate)} shards are being read here", waited_s=deadline.waited_s) from None
        try:
            (held,) = await self._store.pin(reader, [request.shard], deadline)
        except BaseException:
            self._gate.leave(request.node)
            raise
        extent = held.extent
        ticket = transport.offer(Memory(self._store.arena[extent.segment].readonly_fd, extent.offset, extent.size))
        until = asyncio.get_running_loop().call_later(timeout_s + 1.0, self._withdraw_soon, ticket)
        self._offers[ticket] = _Offer(reader, request.shard, transport, until)
        return pm.Offered(request.id, ticket)

    def withdraw(self, request: pm.Withdraw) -> None:
        """The reader says that it has read. What is not offered to it is passed over."""
        offer = self._offers.get(request.ticket)
        if offer is not None and offer.reader.node == request.node:
            self._withdraw_soon(request.ticket)

    def gone(self, nodes: Collection[bytes]) -> None:
        """These are no members any more."""
        for ticket in [ticket for ticket, offer in self._offers.items() if offer.reader.node in nodes]:
            self._withdraw_soon(ticket)

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
            self._gate.leave(offer.reader.node)

    async def aclose(self) -> None:
        """Take all back."""
        for ticket in list(self._offers):
            await self._withdraw(ticket)
        await asyncio.gather(*self._tasks, return_exceptions=True)
