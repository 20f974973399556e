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

import numpy as np

from dataplane.batch.layout import ShardLayout, check_contents
from dataplane.batch.ref import ShardKey
from dataplane.batch.rows import Rows
from dataplane.clock import Deadline
from dataplane.cluster.membership import Member, Membership
from dataplane.errors import DataplaneError, OwnerDied, PeerUnavailable, ProtocolMismatch
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
        self._copies: dict[ShardKey, int] = {}
        self.fetched_bytes = 0

    async def find(self, keys: Sequence[ShardKey], deadline: Deadline) -> list[int]:
        """The numbers that these shards have here. Raises OwnerDied, Freed, PeerUnavailable."""
        unknown = defaultdict(list)
        for owner, shard in dict.fromkeys(keys):
            copy = self._copies.get((owner, shard))
            if copy is None or not self._store.mend(copy):
                unknown[owner].append(shard)
        asked = [self._describe(owner, shards, deadline) for owner, shards in unknown.items()]
        for error in [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked):
            if error is not None:
                raise error
        return [self._copies[key] for key in keys]

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
                for shard, (size, rows, columns, layout, payload) in zip(asked, reply.shards, strict=True):
                    known = self._copies.get((owner, shard))
                    if known is not None and self._store.mend(known):
                        continue  # somebody else has asked meanwhile
                    backing = _Remote(self, owner, shard, layout)
                    self._copies[owner, shard] = self._store.adopt(
                        size, rows, columns, layout, payload, backing, holder=f"copy of {owner.hex()}"
                    )
                    self.fetched_bytes += len(payload)
        except DataplaneError as error:
            return error
        while len(self._copies) > MAX_COPIES:
            self._store.free([self._copies.pop(next(iter(self._copies)))])
        return None

    def _member(self, node: bytes) -> Member:
        member = self._membership.members.get(node)
        if member is None:
            raise OwnerDied(f"node {node.hex()} is not in the cluster: it has died, or was never", node=node.hex())
        return member

    async def free(self, owner: bytes, parts: list[tuple[int, list[int], tuple[int, int, bytes]]]) -> None:
        """Free parts of the owner's shards, and of their copies here; what has gone with it is passed over. Raises
        PeerUnavailable, ProtocolMismatch for no parts of a shard."""
        for shard, columns, rows in parts:
            copy = self._copies.get((owner, shard))
            if copy is not None:
                try:
                    self._store.free_part(copy, columns, Rows.decode(rows))
                except (ValueError, IndexError) as error:
                    raise ProtocolMismatch(f"no part of a shard: {error}") from None
                if not self._store.mend(copy):
                    del self._copies[owner, shard]
        member = self._membership.members.get(owner)
        if member is not None:
            request = pm.FreeParts(self._peers.next_id(), parts)
            await self._peers.request(member.address, request, Done, _CONTROL_S)

    async def read(self, owner: bytes, shard: int, memory: memoryview) -> None:
        """Fill the memory with a shard, by the best transport that both have and that works. Raises OwnerDied, Freed,
        PeerUnavailable."""
        why = "no transport is on both sides"
        for transport in self._transports:
            member = self._member(owner)
            address = member.transports.get(transport.name)
            if address is None:
                continue
            try:
                await self._read_by(transport, address, member, shard, memory)
                self.fetched_bytes += len(memory)
                return
            except TransportError as error:
                why = str(error)
                log.warning("a shard of %s did not come: %s", owner.hex(), error)
        self._member(owner)
        raise PeerUnavailable(f"a shard of node {owner.hex()} did not come: {why}", address=member.address)

    async def _read_by(
        self, transport: Transport, address: str, member: Member, shard: int, memory: memoryview
    ) -> None:
        timeout_s = _LEAST_S + len(memory) / _LEAST_RATE
        offer = pm.Offer(self._peers.next_id(), self._node, shard, transport.name, timeout_s)
        offered = await self._peers.request(member.address, offer, pm.Offered, timeout_s)
        try:
            await transport.read(address, offered.ticket, memory, timeout_s)
        finally:
            withdraw = pm.Withdraw(self._peers.next_id(), self._node, offered.ticket)
            self._peers.tell(member.address, withdraw, Done)


class _Remote:
    """A shard of another host, to be read again whenever its memory here was taken."""

    def __init__(self, fetcher: Fetcher, owner: bytes, shard: int, layout: bytes) -> None:
        self._fetcher = fetcher
        self._owner = owner
        self._shard = shard
        self._layout = layout

    async def read(self, memory: memoryview) -> None:
        await self._fetcher.read(self._owner, self._shard, memory)
        layout = ShardLayout.decode(self._layout)
        check_contents(layout, np.frombuffer(memory, np.uint8))
