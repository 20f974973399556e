"""Shards of other hosts, as shards of this one: described when they are first asked for, fetched when they are read.

A fetched shard is a copy. The store keeps it like any shard that is on disk too: many may ask for it, and it is fetched
once; it is bounded by the same budget; and its memory is the first to be taken. Read again, it is fetched again. A copy
that is in memory outlives its owner.

What always holds: what a copy holds was checked as everything is that a client writes; a copy is never another's bytes,
since a node's number is new with each start.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from dataplane.batch.layout import ShardLayout, check_contents
from dataplane.batch.ref import ShardKey
from dataplane.batch.rows import Rows
from dataplane.batch.stretches import Stretches, merged, tables, total, values, without
from dataplane.clock import Deadline
from dataplane.cluster.membership import Member, Membership
from dataplane.errors import DataplaneError, Misuse, OwnerDied, PeerUnavailable, ProtocolMismatch
from dataplane.store.store import Store
from dataplane.transport.base import Transport, TransportError
from dataplane.transport.choice import Choice
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers

MAX_COPIES = 1 << 16
"""Shards of others that are remembered; the first known are forgotten."""

Want = tuple[Sequence[int], Rows]
"""Rows, ascending, of columns by their ordinals."""

_CONTROL_S = 5.0
_WORTH = 256 << 10  # bytes of a shard from which on less than all of it is fetched
_MOST_WANTS, _MOST_STRETCHES = 64, 4096
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
        self.choice = Choice(transports)
        self._copies: dict[ShardKey, int] = {}
        self._remotes: dict[int, _Remote] = {}
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
                        await remote.complete(view)
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
                    backing = _Remote(self, owner, shard, layout, size, whole=bool(payload))
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
        for shard, columns, rows in parts:
            copy = self._copies.get((owner, shard))
            if copy is not None:
                try:
                    self._store.free_part(copy, columns, Rows.decode(rows))
                except (ValueError, IndexError) as error:
                    raise ProtocolMismatch(f"no part of a shard: {error}") from None
                if not self._store.mend(copy):
                    self._forget((owner, shard))
        member = self._membership.members.get(owner)
        if member is not None:
            request = pm.FreeParts(self._peers.next_id(), parts)
            await self._peers.request(member.address, request, Done, _CONTROL_S)

    async def read(self, owner: bytes, shard: int, memory: memoryview, stretches: Stretches) -> None:
        """Fill these stretches of the memory with a shard's, by the best transport that both have and that works.
        Raises OwnerDied, Freed, PeerUnavailable."""
        why = "no transport is on both sides"
        member = self._member(owner)
        for transport in self.choice.of(owner, member.transports):
            address = member.transports[transport.name]
            try:
                await self._read_by(transport, address, self._member(owner), shard, memory, stretches)
            except TransportError as error:
                why = str(error)
                self.choice.failed(owner, transport, error)
                continue
            self.choice.worked(owner, transport, total(stretches))
            self.fetched_bytes += total(stretches)
            return
        self._member(owner)
        raise PeerUnavailable(f"a shard of node {owner.hex()} did not come: {why}", address=member.address)

    async def _read_by(
        self,
        transport: Transport,
        address: str,
        member: Member,
        shard: int,
        memory: memoryview,
        stretches: Stretches,
    ) -> None:
        timeout_s = _LEAST_S + total(stretches) / _LEAST_RATE
        offer = pm.Offer(self._peers.next_id(), self._node, shard, transport.name, timeout_s)
        offered = await self._peers.request(member.address, offer, pm.Offered, timeout_s)
        try:
            await transport.read(address, offered.ticket, memory, timeout_s, stretches)
        finally:
            withdraw = pm.Withdraw(self._peers.next_id(), self._node, offered.ticket)
            self._peers.tell(member.address, withdraw, Done)


class _Remote:
    """A shard of another host, to be read again whenever its memory here was taken: what of it anybody wanted.

    What always holds: what is `_there` is in the memory that the shard has here now; what is wanted only grows.
    """

    def __init__(self, fetcher: Fetcher, owner: bytes, shard: int, encoded: bytes, size: int, *, whole: bool) -> None:
        self._fetcher = fetcher
        self._owner = owner
        self._shard = shard
        self._layout = ShardLayout.decode(encoded)
        self._size = size
        self._whole = size < _WORTH
        self._wants: list[Want] = []
        self._there: Stretches = [(0, size)] if whole else []
        self._reading = asyncio.Lock()

    def want(self, wants: Iterable[Want]) -> bool:
        """Somebody reads these rows of these columns. Whether that was not wanted before. Raises Misuse."""
        new = [want for want in wants if want not in self._wants]
        for ordinals, rows in new:
            columns = self._layout.columns
            if not all(0 <= o < len(columns) for o in ordinals) or rows.stop > columns[0][1].rows:
                raise Misuse(f"shard {self._shard} of node {self._owner.hex()} has not these columns or rows")
        if self._whole or not new:
            return False
        self._wants += new
        self._whole = len(self._wants) > _MOST_WANTS
        return True

    async def read(self, memory: memoryview) -> None:
        async with self._reading:
            self._there = []
            await self._complete(memory)

    async def complete(self, memory: memoryview) -> None:
        """Fetch what is wanted and not there. Raises as `Fetcher.read`."""
        async with self._reading:
            await self._complete(memory)

    async def _complete(self, memory: memoryview) -> None:
        array = np.frombuffer(memory, np.uint8)
        everything = [(0, self._size)]
        if not self._whole:
            if not self._there:
                await self._fetch(memory, tables(self._layout))
                check_contents(self._layout, array)
            wanted = merged(s for ordinals, rows in self._wants for s in values(self._layout, ordinals, rows, array))
            if 2 * total(wanted) < self._size and len(wanted) <= _MOST_STRETCHES:
                await self._fetch(memory, wanted)
                return
        await self._fetch(memory, everything)
        check_contents(self._layout, array)

    async def _fetch(self, memory: memoryview, wanted: Stretches) -> None:
        missing = without(wanted, self._there)
        if missing:
            await self._fetcher.read(self._owner, self._shard, memory, missing)
            self._there = merged([*self._there, *missing], gap=0)
