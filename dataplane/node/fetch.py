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
from collections.abc import Sequence

from dataplane.batch.ref import ShardKey
from dataplane.batch.rows import Rows
from dataplane.clock import Deadline
from dataplane.cluster.membership import Membership
from dataplane.errors import DataplaneError, ProtocolMismatch
from dataplane.node.reading import Reading, member_of
from dataplane.node.remote import Remote, Want
from dataplane.store.store import Store
from dataplane.transport.choice import Choice
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers

MAX_COPIES = 1 << 16
"""Shards of others that are remembered; the first known are forgotten."""

_CONTROL_S = 5.0


class Fetcher:
    """The copies of one node."""

    def __init__(self, node: bytes, store: Store, peers: Peers, membership: Membership, choice: Choice) -> None:
        self._node = node
        self._store = store
        self._peers = peers
        self._membership = membership
        self._reading = Reading(node, peers, membership, choice)
        self._copies: dict[ShardKey, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._inline_bytes = 0

    @property
    def fetched_bytes(self) -> int:
        """What has come from other nodes, ever."""
        return self._inline_bytes + self._reading.fetched_bytes

    @property
    def copies(self) -> int:
        """Shards of other nodes that are known here, in memory or not."""
        return len(self._copies)

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
            member = member_of(self._membership, owner)
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
                    backing = Remote(self._reading, owner, shard, layout, size, whole=bool(payload))
                    number = self._store.adopt(
                        size, rows, columns, layout, live, payload, backing, holder=f"copy of {owner.hex()}"
                    )
                    self._copies[owner, shard], self._remotes[number] = number, backing
                    self._inline_bytes += len(payload)
        except DataplaneError as error:
            return error
        while len(self._copies) > MAX_COPIES:
            self._forget(next(iter(self._copies)))
        return None

    def _forget(self, key: ShardKey) -> None:
        number = self._copies.pop(key)
        del self._remotes[number]
        self._store.free([number])

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

    async def aclose(self) -> None:
        """Wait for what has begun."""
        await self._reading.aclose()
