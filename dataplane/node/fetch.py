"""Shards of other hosts, as shards of this one: described when they are first asked for, fetched when they are read.

A fetched shard is a copy. The store keeps it like any shard that is on disk too: many may ask for it, and it is fetched
once; it is bounded by the same budget; and its memory is the first to be taken. Read again, it is fetched again. A copy
that is in memory outlives its owner.

What always holds: what a copy holds was checked as everything is that a client writes; a copy is never another's bytes,
since a node's number is new with each start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.batch.ref import ShardKey
from dataplane.batch.rows import Rows
from dataplane.batch.stretches import Stretches, total
from dataplane.clock import Deadline
from dataplane.cluster.membership import Member, Membership
from dataplane.errors import Backpressure, DataplaneError, OwnerDied, PeerUnavailable, ProtocolMismatch
from dataplane.node.gate import Gate
from dataplane.node.remote import Remote, Want
from dataplane.node.running import Running
from dataplane.store.store import Store
from dataplane.transport.base import Transport, TransportError
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

MAX_COPIES = 1 << 16
"""Shards of others that are remembered; the first known are forgotten."""

_CONTROL_S = 5.0
_LEAST_RATE = 10e6  # bytes/s that a read is given time for
_LEAST_S = 20.0
_AT_ONCE, _FROM_ONE = 256, 16  # reads at a time, and of these from one node
_COPIES_TRIED = 4
_PATIENCE_S, _AGAIN_S = 120.0, 0.1  # for how long, and how soon, who has too much to do is asked again


class Fetcher:
    """The copies of one node."""

    def __init__(
        self, node: bytes, store: Store, peers: Peers, membership: Membership, transports: Sequence[Transport]
    ) -> None:
        """`transports`: those of this node, the best first."""
        self._node = node
        self._store = store
        self._peers = peers
        self._membership = membership
        self._transports = transports
        self._running = Running(membership)
        self._turns = Gate(_AT_ONCE, _FROM_ONE)
        self._copies: dict[ShardKey, int] = {}
        self._remotes: dict[int, Remote] = {}
        self.fetched_bytes = 0

    async def find(self, wanted: Sequence[tuple[bytes, int, Sequence[Want]]], deadline: Deadline) -> list[int]:
        """The numbers that shards of other nodes have here: of each its node, its number there, and what of it is to be
        read. When this returns, that comes with the shard, or is there. Raises OwnerDied, Freed, PeerUnavailable,
        Backpressure, Misuse for columns or rows that a shard has not."""
        keys = [(owner, shard) for owner, shard, _ in wanted]
        unknown = defaultdict(list)
        for owner, shard in dict.fromkeys(keys):
            copy = self._copies.get((owner, shard))
            if copy is None or not self._store.mend(copy):
                unknown[owner].append(shard)
        asked = [self._describe(owner, shards, deadline) for owner, shards in unknown.items()]
        for error in [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked):
            if error is not None:
                raise error
        numbers = [self._copies[key] for key in keys]
        for number, (_, _, wants) in zip(numbers, wanted, strict=True):
            remote = self._remotes[number]
            if remote.want(wants) and self._store.coming(number):
                (held,) = await self._store.pin(self, [number], deadline)
                try:
                    with self._store.arena.view(held.extent) as view:
                        await remote.add(view)
                finally:
                    self._store.unpin(self, [number])
        return numbers

    async def _describe(self, owner: bytes, shards: list[int], deadline: Deadline) -> DataplaneError | None:
        """Learn what these shards of the owner are. An error is returned, so that the others are learnt of too."""
        try:
            member = self._member(owner)
            for first in range(0, len(shards), pm.MAX_SHARDS):
                asked = shards[first : first + pm.MAX_SHARDS]
                request = pm.Describe(self._peers.next_id(), asked)
                timeout_s = min(_CONTROL_S, deadline.remaining_s)
                reply = await self._peers.request(member.address, request, pm.Described, timeout_s)
                if len(reply.shards) != len(asked):
                    raise ProtocolMismatch(f"node {owner.hex()} described {len(reply.shards)} of {len(asked)} shards")
                for shard, (size, rows, columns, layout, live, payload) in zip(asked, reply.shards, strict=True):
                    known = self._copies.get((owner, shard))
                    if known is not None and self._store.mend(known):
                        continue  # somebody else has asked meanwhile
                    backing = Remote(self, owner, shard, layout, size, whole=bool(payload))
                    number = self._store.adopt(
                        size, rows, columns, layout, live, payload, backing, holder=f"copy of {owner.hex()}"
                    )
                    self._copies[owner, shard], self._remotes[number] = number, backing
                    self.fetched_bytes += len(payload)
        except DataplaneError as error:
            return error
        while len(self._copies) > MAX_COPIES:
            self._forget(next(iter(self._copies)))
        return None

    def _forget(self, key: ShardKey) -> None:
        number = self._copies.pop(key)
        del self._remotes[number]
        self._store.free([number])

    def _member(self, node: bytes) -> Member:
        member = self._membership.members.get(node)
        if member is None:
            raise OwnerDied(f"node {node.hex()} is not in the cluster: it has died, or was never", node=node.hex())
        return member

    async def free(self, owner: bytes, parts: list[tuple[int, list[int], tuple[int, int, bytes]]]) -> None:
        """Free parts of the owner's shards, and of their copies here; what has gone with it is passed over. Raises
        PeerUnavailable, ProtocolMismatch for no parts of a shard."""
        self._free_here(owner, parts)
        member = self._membership.members.get(owner)
        if member is not None:
            request = pm.FreeParts(self._peers.next_id(), parts)
            await self._peers.request(member.address, request, Done, _CONTROL_S)
            self._free_here(owner, parts)  # what was described meanwhile

    def _free_here(self, owner: bytes, parts: list[tuple[int, list[int], tuple[int, int, bytes]]]) -> None:
        for shard, columns, rows in parts:
            copy = self._copies.get((owner, shard))
            if copy is not None:
                try:
                    self._store.free_part(copy, columns, Rows.decode(rows))
                except (ValueError, IndexError) as error:
                    raise ProtocolMismatch(f"no part of a shard: {error}") from None
                if not self._store.mend(copy):
                    self._forget((owner, shard))

    def copy(self, owner: bytes, shard: int) -> int | None:
        """The number here of a shard of which all is here in memory, for others to read."""
        number = self._copies.get((owner, shard))
        there = number is not None and self._remotes[number].complete and self._store.ready(number)
        return number if there else None

    async def read(
        self, owner: bytes, shard: int, memory: memoryview, stretches: Stretches, *, whole: bool = False
    ) -> None:
        """Fill these stretches of the memory with a shard's, by the best transport that both have and that works.
        Raises OwnerDied, Freed, PeerUnavailable, Backpressure."""
        async with self._turns.turn(owner):
            await self._read(_Wanted(owner, shard, memory, stretches, whole))

    async def _read(self, wanted: _Wanted) -> None:
        owner, why = wanted.owner, "no transport is on both sides"
        for transport in self._transports:
            member = self._member(owner)
            address = member.transports.get(transport.name)
            if address is None:
                continue
            try:
                async with self._running.needing(owner):
                    await self._read_by(transport, address, member, wanted)
                self.fetched_bytes += total(wanted.stretches)
                return
            except (TransportError, TimeoutError, PeerUnavailable) as error:
                self._member(owner)  # whether it is the owner that has gone
                if isinstance(error, PeerUnavailable):
                    raise
                why = str(error)
                log.warning("a shard of %s did not come: %s", owner.hex(), error)
        self._member(owner)
        raise PeerUnavailable(f"a shard of node {owner.hex()} did not come: {why}", address=member.address)

    async def _read_by(self, transport: Transport, address: str, member: Member, wanted: _Wanted) -> None:
        """Read at the owner, or where it says; what has no copy there any more, at the next place that it says."""
        avoid: list[bytes] = []
        while True:
            whole = wanted.whole and len(avoid) < _COPIES_TRIED
            offered = await self._ask(member, transport, wanted, whole=whole, avoid=avoid)
            came = False
            try:
                if offered.holder:
                    came = await self._read_copy(transport, offered.holder, wanted)
                else:
                    await transport.read(address, offered.ticket, wanted.memory, wanted.timeout_s, wanted.stretches)
                    came = True
            finally:
                self._withdraw(member, offered, wanted, came=came)
            if came:
                return
            avoid.append(offered.holder)

    async def _read_copy(self, transport: Transport, holder: bytes, wanted: _Wanted) -> bool:
        """Read at a node that has a copy; whether that came."""
        member = self._membership.members.get(holder)
        address = None if member is None else member.transports.get(transport.name)
        if member is None or address is None:
            return False
        try:
            async with self._running.needing(holder):
                offered = await self._ask(member, transport, wanted, owner=wanted.owner, patience_s=0.0)
                came = False
                try:
                    await transport.read(address, offered.ticket, wanted.memory, wanted.timeout_s, wanted.stretches)
                    came = True
                finally:
                    self._withdraw(member, offered, wanted, came=came)
        except (TransportError, TimeoutError, DataplaneError) as error:
            log.info("a copy of a shard did not come from %s: %s", holder.hex(), error)
            return False
        return True

    async def _ask(
        self,
        member: Member,
        transport: Transport,
        wanted: _Wanted,
        *,
        owner: bytes = b"",
        whole: bool = False,
        avoid: Sequence[bytes] = (),
        patience_s: float = _PATIENCE_S,
    ) -> pm.Offered:
        """Leave to read; asked for again and again from who has much to do."""
        patience = Deadline.after(patience_s)
        timeout_s = wanted.timeout_s
        while True:
            number, name = self._peers.next_id(), transport.name
            offer = pm.Offer(number, self._node, wanted.shard, name, timeout_s, owner, whole, list(avoid))
            try:
                return await self._peers.request(member.address, offer, pm.Offered, timeout_s)
            except Backpressure:
                if not patience.remaining_s:
                    raise
                await asyncio.sleep(_AGAIN_S)

    def _withdraw(self, member: Member, offered: pm.Offered, wanted: _Wanted, *, came: bool) -> None:
        count = total(wanted.stretches) if came else 0
        withdraw = pm.Withdraw(self._peers.next_id(), self._node, offered.ticket, count, came and wanted.whole)
        self._peers.tell(member.address, withdraw, Done)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Stretches of a shard, and where they are to be. `whole`: then all of it is there."""

    owner: bytes
    shard: int
    memory: memoryview
    stretches: Stretches
    whole: bool

    @property
    def timeout_s(self) -> float:
        return _LEAST_S + total(self.stretches) / _LEAST_RATE
