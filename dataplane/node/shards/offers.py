"""Offers of shards to other nodes. An offer keeps a shard for one reader, which reads the shard by a ticket.

Invariants: a shard that is offered here stays as it is until it was read, the offer expired, or the reader is no longer
a member. It is pinned in memory or, if it is only on disk, its file is open. At most `MAX_OFFERS` such offers exist at
a time. Further requests, of which each node sends few at a time (`reading`), wait in order. After a long wait they get
Backpressure.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from dataplane.background_tasks import BackgroundTasks
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, PeerUnavailable, ProtocolMismatch
from dataplane.store.spill_file import CHUNK, SpillFile
from dataplane.store.store import Store
from dataplane.transport.channels import Transport
from dataplane.transport.sockets import Memory
from dataplane.wire import peer_messages as pm

MAX_OFFERS = 48
"""Shards that other nodes read at a time: with four streams each, fewer than the connections that tcp accepts."""

READERS = 1
"""Readers of one shard at one place at a time."""

SHARED = 1 << 20
"""Bytes of the smallest shard whose readers are sent to copies."""

_MOST_SHARDS, _MOST_HOLDERS = 4096, 64  # the most remembered, and holders of each; the oldest are forgotten
_WAIT = 0.8  # part of the reader's timeout after which the request is refused
_LONGEST_S = 3600.0
_SLOW_S, _SLOWEST_S, _SLOW_RATE = 1.0, 15.0, 10e6  # the least and the most seconds of a slow read; bytes/s in between


@dataclass(frozen=True, slots=True)
class _Reader:
    """Another node, as a holder of pins."""

    node: bytes

    def __str__(self) -> str:
        return f"node {self.node.hex()}"


@dataclass(frozen=True, slots=True)
class _Offer:
    """`undo` releases the pin or file. `own`: whether the shard is this node's own, not a copy. `here`: whether the
    shard is read here, not at a third node."""

    reader: _Reader
    shard: int
    size: int
    own: bool
    here: bool
    until: asyncio.TimerHandle
    undo: AsyncExitStack


class Offers:
    """The offers of one node. `member(node)`: whether this is a member. `copy(owner, shard)`: the local number of a
    copy that is in memory as a whole, or None."""

    def __init__(
        self,
        node: bytes,
        store: Store,
        transports: Sequence[Transport],
        member: Callable[[bytes], bool],
        copy: Callable[[bytes, int], int | None],
    ) -> None:
        self._node = node
        self._store = store
        self._transports = transports
        self._member, self._copy = member, copy
        self._sources = Sources(node)
        self._gate = asyncio.Semaphore(MAX_OFFERS)
        self._offers: dict[bytes, _Offer] = {}
        self._background = BackgroundTasks()
        self.sent_bytes = 0

    def __len__(self) -> int:
        return len(self._offers)

    async def offer(self, request: pm.Offer) -> pm.Offered:
        """Permit another node to read a shard. Returns the ticket, and the third node if the shard is to be read there.
        Raises Freed, Corrupt, ProtocolMismatch, Backpressure; PeerUnavailable for a copy that is not here."""
        if not request.timeout_s >= 0:  # NaN too
            raise ProtocolMismatch(f"a timeout is seconds, not {request.timeout_s}")
        transport = next((t for t in self._transports if t.name == request.transport), None)
        if transport is None:
            raise ProtocolMismatch(f"this node has no transport {request.transport!r}")
        self._check_member(request.node)
        timeout_s = min(request.timeout_s, _LONGEST_S)
        deadline = Deadline.after(_WAIT * timeout_s)
        reader, shard = _Reader(request.node), self._number(request)
        async with AsyncExitStack() as undo:
            size = self._store.shards.find(shard).room
            place = self._node
            if request.whole and not request.owner and size >= SHARED:
                patience_s = min(_SLOW_S + size / _SLOW_RATE, _SLOWEST_S)
                place = await self._sources.choose(shard, request.node, request.avoid, patience_s, deadline)
                undo.callback(self._sources.ended, shard, place)
            if place == self._node:
                await self._enter(deadline, undo)
                offered = await self._offer_file(transport, request, shard, undo)
                if offered is None:
                    offered = await self._offer_memory(transport, request, shard, deadline, undo)
            else:
                self._store.shards.find(shard)  # raises if it was freed meanwhile
                offered = pm.Offered(request.id, secrets.token_bytes(16), place)
            self._check_member(request.node)  # it may have ended while it waited
            late = functools.partial(self._withdraw, offered.ticket)
            until = asyncio.get_running_loop().call_later(timeout_s + 1.0, lambda: self._background.spawn(late()))
            own, here = self._is_own(request), place == self._node
            self._offers[offered.ticket] = _Offer(reader, request.shard, size, own, here, until, undo.pop_all())
        return offered

    def _check_member(self, node: bytes) -> None:
        """Refuse a node that is no member: its end would not be noticed, so its pins would stay. Raises
        Backpressure."""
        if not self._member(node):
            raise Backpressure(f"node {node[:8].hex()} is not known here as a member, or not yet")

    def _is_own(self, request: pm.Offer) -> bool:
        return request.owner in (b"", self._node)

    def _number(self, request: pm.Offer) -> int:
        """The shard's local number."""
        if self._is_own(request):
            return request.shard
        number = self._copy(request.owner, request.shard)
        if number is None:
            raise PeerUnavailable("this node has no copy of the shard")
        return number

    async def _enter(self, deadline: Deadline, undo: AsyncExitStack) -> None:
        try:
            async with asyncio.timeout(deadline.remaining_s):
                await self._gate.acquire()
        except TimeoutError:
            raise Backpressure(f"{MAX_OFFERS} shards are being read here", waited_s=deadline.waited_s) from None
        undo.callback(self._gate.release)

    async def _offer_file(
        self, transport: Transport, request: pm.Offer, shard: int, undo: AsyncExitStack
    ) -> pm.Offered | None:
        """Offer a shard that is only on disk to a reader that verifies checksums. The shard is sent from its file, and
        takes no memory. Returns None if the shard cannot be offered so."""
        found = self._store.shards.find(shard)
        if not request.checks or not transport.sends_files:
            return None
        if found.extent is not None or not isinstance(found.file, SpillFile):
            return None
        opened = await self._store.disk.open(found.file, found.room)
        if opened is None:
            return None
        fd, sums = opened
        undo.callback(self._store.disk.release, fd)
        ticket = transport.offer_file(Memory(fd, 0, found.room))
        undo.push_async_callback(transport.withdraw, ticket)
        return pm.Offered(request.id, ticket, b"", CHUNK, sums)

    async def _offer_memory(
        self, transport: Transport, request: pm.Offer, shard: int, deadline: Deadline, undo: AsyncExitStack
    ) -> pm.Offered:
        reader = _Reader(request.node)
        if self._is_own(request):
            (held,) = await self._store.pin(reader, [shard], deadline)
        else:  # a copy is not fetched for others: they can fetch it themselves
            there = self._store.pin_now(reader, [shard])
            if there is None:
                raise PeerUnavailable("this node has no copy of the shard any more")
            (held,) = there
        undo.callback(self._store.unpin, reader, [shard])
        extent = held.extent
        ticket = transport.offer(Memory(self._store.arena[extent.segment].readonly_fd, extent.offset, extent.size))
        undo.push_async_callback(transport.withdraw, ticket)
        return pm.Offered(request.id, ticket)

    def withdraw(self, request: pm.Withdraw) -> None:
        """End an offer, since its reader has finished. A ticket of another reader is ignored."""
        offer = self._offers.get(request.ticket)
        if offer is not None and offer.reader.node == request.node:
            if offer.here:
                self.sent_bytes += max(0, min(request.came, offer.size))
            if request.whole and offer.own:
                self._sources.has(offer.shard, request.node)
            self._background.spawn(self._withdraw(request.ticket))

    def gone(self, nodes: Collection[bytes]) -> None:
        """Withdraw the offers to nodes that are no longer members."""
        self._sources.gone(nodes)
        for ticket in [ticket for ticket, offer in self._offers.items() if offer.reader.node in nodes]:
            self._background.spawn(self._withdraw(ticket))

    async def _withdraw(self, ticket: bytes) -> None:
        offer = self._offers.pop(ticket, None)
        if offer is not None:
            offer.until.cancel()
            await offer.undo.aclose()

    async def aclose(self) -> None:
        for ticket in list(self._offers):
            await self._withdraw(ticket)
        await self._background.join()


class Sources:
    """The places at which a shard of this node can be read: here, or at a host that has read all of it.

    If many hosts want one shard, each place serves few readers at a time. The others wait until further hosts have read
    the shard, and read it there. The number of places doubles with each round.

    Invariants: a reader waits a bounded time. If no read ends within the time of a slow read (`patience_s` of
    `choose`), the reader is sent to the place with the fewest readers. A node is named as a place only while it is a
    member, and not again after a reader found no copy there. A copy only provides bytes. This node is asked first, and
    decides whether a shard exists and what was freed.

    Rejected: all hosts read here at once, since the sixth waits as long as six reads take. Rejected: hosts forward
    pieces as they arrive. This may be faster, but each host of the chain may stall or die in the middle.
    """

    def __init__(self, node: bytes) -> None:
        self._node = node
        self._holders: dict[int, dict[bytes, None]] = {}
        self._readers: Counter[tuple[int, bytes]] = Counter()
        self._changed: dict[int, asyncio.Event] = {}

    async def choose(
        self, shard: int, reader: bytes, avoid: Collection[bytes], patience_s: float, deadline: Deadline
    ) -> bytes:
        """Choose the node at which a reader reads the shard, and count the read until `ended`. `avoid`: nodes that have
        no copy. Waits until a place has few readers. If no read ends for `patience_s`, or at the deadline, returns the
        place with the fewest."""
        idle = False
        for node in avoid:
            self._holders.get(shard, {}).pop(node, None)
        while True:
            holders = [node for node in self._holders.get(shard, ()) if node != reader]
            best = min((*holders, self._node), key=lambda node: self._readers[shard, node])
            if self._readers[shard, best] < READERS or idle:
                self._readers[shard, best] += 1
                return best
            try:
                async with asyncio.timeout(min(patience_s, deadline.remaining_s)):
                    await self._changed.setdefault(shard, asyncio.Event()).wait()
            except TimeoutError:
                idle = True

    def ended(self, shard: int, node: bytes) -> None:
        """Count a read at that place as ended."""
        self._readers[shard, node] -= 1
        if not self._readers[shard, node]:
            del self._readers[shard, node]
        self._tell(shard)

    def has(self, shard: int, node: bytes) -> None:
        """Note that this node has the entire shard."""
        holders = self._holders.setdefault(shard, {})
        holders[node] = None
        if len(holders) > _MOST_HOLDERS:
            del holders[next(iter(holders))]
        if len(self._holders) > _MOST_SHARDS:
            del self._holders[next(iter(self._holders))]
        self._tell(shard)

    def gone(self, nodes: Collection[bytes]) -> None:
        """Forget copies on nodes that are no longer members."""
        for holders in self._holders.values():
            for node in nodes & holders.keys():
                del holders[node]

    def _tell(self, shard: int) -> None:
        changed = self._changed.pop(shard, None)
        if changed is not None:
            changed.set()
