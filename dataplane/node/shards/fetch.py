"""Shards of other hosts as local shards: described at the first request, fetched when they are read.

A fetched shard is a copy. The store keeps it like a shard that is also on disk: it is fetched once for many readers,
counts in the same budget, and its memory is the first to be reclaimed. A later read fetches it again. A copy in memory
outlives its owner.

Invariants: a copy's contents are validated like everything that a client writes. A copy never has another shard's
bytes, since a node gets a new identity with each start, and requests and tickets are for one node (`wire.peer`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from dataplane.background_tasks import BackgroundTasks
from dataplane.batch.locations import shard_of
from dataplane.batch.ref import ShardKey
from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.cluster.membership import Membership
from dataplane.errors import DataplaneError, Freed, LimitExceeded, OutcomeUnknown, PeerUnavailable, ProtocolMismatch
from dataplane.node.shards.patching import Patching
from dataplane.node.shards.pending_changes import Part
from dataplane.node.shards.reading import ShardReads, absent, member_of
from dataplane.node.shards.remote import Patch, Remote, Want
from dataplane.node.shards.shard_replicas import ShardReplicas
from dataplane.store.store import Store
from dataplane.transport.choice import TransportChoice
from dataplane.wire import peer_messages as pm
from dataplane.wire.peer import Peers
from dataplane.wire.shard_messages import Selection

MAX_COPIES = 1 << 16
"""The most copies that are remembered. Those that were requested longest ago are forgotten."""

_CONTROL_S = 4.0  # less than clients wait for this node, so that the error names the node that is silent


class Fetcher:
    """The copies of one node."""

    def __init__(
        self, node: bytes, store: Store, peers: Peers, membership: Membership, choice: TransportChoice
    ) -> None:
        self._node = node
        self._store = store
        self._peers = peers
        self._membership = membership
        self.reading = ShardReads(node, peers, membership, choice)
        self._copies: dict[ShardKey, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._inline_bytes = 0
        self._background = BackgroundTasks()
        self.replicas = ShardReplicas(node, store, peers, membership, self.reading)
        self.patching = Patching(node, store, self)

    def __str__(self) -> str:
        return "reads of other nodes' shards"

    @property
    def fetched_bytes(self) -> int:
        return self._inline_bytes + self.reading.fetched_bytes

    @property
    def copies(self) -> int:
        """Shards of other nodes that are known here, in memory or not."""
        return len(self._copies)

    async def find(self, wanted: Sequence[tuple[bytes, int, Sequence[Want]]], deadline: Deadline) -> list[int]:
        """Return the local numbers of shards of other nodes. `wanted`: for each its node, its number there, and the
        parts to be read. When this returns, these parts are here, or the next pin fetches them. Raises OwnerDied,
        Freed, PeerUnavailable, Backpressure, Misuse for columns or rows that a shard does not have."""
        keys = [(owner, shard) for owner, shard, _ in wanted]
        unknown: defaultdict[bytes, dict[int, None]] = defaultdict(dict)
        for owner, shard, wants in wanted:
            if self.replicas.here((owner, shard)) is None and not self._known((owner, shard), wants):
                unknown[owner][shard] = None
        asked = [self._describe(owner, list(shards), deadline) for owner, shards in unknown.items()]
        for error in [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked):
            if error is not None:
                raise error
        return [await self._ready(key, wants, deadline) for key, (_, _, wants) in zip(keys, wanted, strict=True)]

    def _known(self, key: ShardKey, wants: Sequence[Want]) -> bool:
        """Whether the shard is known here, and its owner is a member or the wanted parts are in memory."""
        copy = self._copies.get(key)
        if copy is None or not self._store.shards.clear_error(copy):
            return False
        self._copies[key] = self._copies.pop(key)  # now the last to be forgotten
        remote = self._remotes[copy]
        return remote.source in self._membership.members or (
            self._store.shards.find(copy).coming and remote.covers(wants)
        )

    async def _ready(self, key: ShardKey, wants: Sequence[Want], deadline: Deadline) -> int:
        """Return the local number of a shard that was known or described just now. Describe the shard again if it was
        freed or forgotten meanwhile. If it is in memory without the wanted parts, fetch them first."""
        replica = self.replicas.here(key)
        if replica is not None:
            return replica
        while (number := self._copies.get(key)) is None:
            if (error := await self._describe(key[0], [key[1]], deadline)) is not None:
                raise error
        remote = self._remotes[number]
        if remote.want(wants) and self._store.shards.find(number).coming:
            (held,) = await self._store.pin(self, [number], deadline)
            try:
                with self._store.arena.view(held.extent) as view:
                    await remote.add(view)
            finally:
                self._store.unpin(self, [number])
        return number

    async def _describe(self, owner: bytes, shards: list[int], deadline: Deadline) -> DataplaneError | None:
        """Get descriptions of these shards from the owner or, if it is gone, from a holder of replicas. An error is
        returned, so that the other shards are described too."""
        await self._joined(deadline)
        there = True
        while there:
            there = owner in self._membership.members
            try:
                places = {owner: [(shard, shard) for shard in shards]}
                await self._learn_all(owner, places if there else await self.replicas.locate(owner, shards), deadline)
                break
            except DataplaneError as error:
                if there and isinstance(error, Freed) and await self._learn_copied(owner, shards, deadline):
                    break
                if not there or owner in self._membership.members:
                    return error  # else the owner has ended meanwhile: ask holders of replicas
        return None

    async def _joined(self, deadline: Deadline) -> bool:
        """Wait, until the deadline, for this node to know the other nodes. Returns whether it does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining_s):
                await self._membership.joined()
                return True
        return False

    async def regain(self, shards: Sequence[int], deadline: Deadline) -> dict[int, int]:
        """The local numbers of copies of shards that this node lost when it was restarted on its data directory. The
        copies are read from replicas as a whole; shards without a replica are left out."""
        unknown = [shard for shard in shards if not self._known((self._node, shard), [])]
        await self._joined(deadline)
        places = await self.replicas.located(self._node, unknown) if unknown else {}
        await self._learn_all(self._node, places, deadline)
        copies = {shard: self._copies.get((self._node, shard)) for shard in shards}
        found = {shard: number for shard, number in copies.items() if number is not None}
        for number in found.values():
            self._remotes[number].want_whole()
        return found

    async def _learn_copied(self, owner: bytes, shards: Sequence[int], deadline: Deadline) -> bool:
        """Get descriptions of shards that the owner lost when it was restarted on its data directory from holders of
        replicas, and of the others from the owner. Returns whether all were learned."""
        member = self._membership.members.get(owner)
        old = [shard for shard in shards if member is not None and shard < member.first]
        places = await self.replicas.located(owner, old) if old else {}
        copied = {shard for numbered in places.values() for shard, _ in numbered}
        places[owner] = [(shard, shard) for shard in shards if shard not in copied]
        with suppress(DataplaneError):
            if copied:
                await self._learn_all(owner, places, deadline)
                return True
        return False

    async def _learn_all(self, owner: bytes, places: dict[bytes, list[tuple[int, int]]], deadline: Deadline) -> None:
        for source, numbered in places.items():
            for first in range(0, len(numbered), pm.MAX_SHARDS):
                await self._learn(owner, source, numbered[first : first + pm.MAX_SHARDS], deadline)
        while len(self._copies) > MAX_COPIES:
            self.forget(next(iter(self._copies)))

    async def _learn(self, owner: bytes, source: bytes, numbered: list[tuple[int, int]], deadline: Deadline) -> None:
        """Get descriptions of the owner's shards from the node `source`. `numbered`: for each its number at the owner
        and at `source`."""
        shards = await self._described(source, [number for _, number in numbered], deadline)
        for (shard, there), described in zip(numbered, shards, strict=True):
            key = (owner, shard)
            copy = self._copies.get(key)
            if copy is not None and self._store.shards.clear_error(copy) and self._remotes[copy].source == source:
                continue  # another request has learned it meanwhile
            if copy is not None:
                self.forget(key)
            size, rows, columns, layout, live, payload = described
            backing = Remote(self.reading, source, there, layout, size, whole=bool(payload))
            number = self._store.adopt(
                size, rows, columns, layout, live, payload, backing, holder=f"copy of {owner.hex()}"
            )
            self._copies[key], self._remotes[number] = number, backing
            self._inline_bytes += len(payload)

    async def _described(self, source: bytes, numbers: list[int], deadline: Deadline) -> list[pm.Description]:
        """The descriptions of these shards of the node `source`, by several requests if they do not fit into one
        reply."""
        request = pm.DescribeShards(self._peers.next_id(), numbers)
        member = member_of(self._membership, source)
        try:
            reply = await self._peers.request(member, request, pm.Described, min(_CONTROL_S, deadline.remaining_s))
        except LimitExceeded:
            if len(numbers) == 1:
                raise
            half = len(numbers) // 2
            parts = [await self._described(source, part, deadline) for part in (numbers[:half], numbers[half:])]
            return parts[0] + parts[1]
        if len(reply.shards) != len(numbers):
            raise ProtocolMismatch(f"node {source.hex()} described {len(reply.shards)} of {len(numbers)} shards")
        return reply.shards

    async def free(self, owner: bytes, parts: list[Part]) -> None:
        """Free parts of the owner's shards, of their local copies and, if the owner is no member, of their replicas.
        Raises OutcomeUnknown if the owner may be alive but is no member, or does not answer: then this node repeats it;
        ProtocolMismatch for invalid parts."""
        away = not await self._joined(Deadline.after(_CONTROL_S)) or owner.hex() in self._membership.missing
        member = self._membership.members.get(owner)
        if member is not None:
            request = pm.FreeParts(self._peers.next_id(), parts)
            try:
                freed = await self._peers.request(member, request, pm.PartsFreed, _CONTROL_S)
                self._free_here(owner, parts, frozenset(freed.owned))
                return
            except PeerUnavailable as error:
                if owner in self._membership.members or owner.hex() in self._membership.missing:
                    self.replicas.changes.free(owner, owner, parts)
                    raise OutcomeUnknown(f"{error}; whether this is freed is not known: free it again") from error
        self._free_here(owner, parts, frozenset())
        self.replicas.free_all(owner, parts)
        if away:
            self.replicas.changes.free(owner, owner, parts)
            raise OutcomeUnknown(f"{absent(self._membership, owner)}; its own copy is not freed: free it again")

    def free_lost(self, lost: Sequence[tuple[int, Sequence[int], RowIndices]]) -> None:
        """Free parts of shards that this node lost when it was restarted: of their replicas, and of the copies here."""
        parts = [(number, [*columns], rows.encode()) for number, columns, rows in lost]
        self._free_here(self._node, parts, frozenset())
        self.replicas.freed_lost(parts)

    def _free_here(self, owner: bytes, parts: Sequence[Part], owned: Collection[int]) -> None:
        """Free the same parts of local copies. Copies of shards with other owners (`owned`) are described again when
        they are read."""
        for number, columns, rows in parts:
            shard = shard_of(number)
            copy = self._copies.get((owner, shard))
            if copy is None:
                continue
            try:
                if shard in owned:
                    self._store.free([copy])
                elif columns:
                    self._store.free_part(copy, columns, RowIndices.decode(rows))
            except (ValueError, IndexError) as error:
                raise ProtocolMismatch(f"no part of a shard: {error}") from None
            if not self._store.shards.clear_error(copy):
                self.forget((owner, shard))

    async def retain(self, owner: bytes, shards: list[tuple[int, Selection]]) -> list[int]:
        """Have the owner make links to parts of its shards. Returns the numbers of the links. Raises OwnerDied,
        PeerUnavailable, Freed, Corrupt, LimitExceeded. Links whose numbers arrive after an error or a cancellation are
        freed."""
        member = member_of(self._membership, owner)
        request = pm.RetainParts(self._peers.next_id(), shards)

        def unlink(linked: pm.Linked) -> None:
            self._background.spawn(self._unlink(owner, linked.links))

        linked = await self._peers.request(member, request, pm.Linked, _CONTROL_S, unlink)
        if len(linked.links) != len(shards):
            raise ProtocolMismatch(f"node {owner.hex()} made {len(linked.links)} links to {len(shards)} shards")
        return linked.links

    async def _unlink(self, owner: bytes, links: Sequence[int]) -> None:
        with suppress(DataplaneError):  # the owner is away
            await self.free(owner, [(link, [], (0, 0, b"")) for link in links])

    def patch(self, number: int, patch: Patch) -> Callable[[], None]:
        """Let a read of the copy with this number make the copy by `patch`, until the returned function is called."""
        remote = self._remotes.get(number)
        if remote is None:  # a replica, or forgotten meanwhile
            return lambda: None
        remote.patch = patch

        def undo() -> None:
            if remote.patch is patch:
                remote.patch = None

        return undo

    def forget(self, key: ShardKey) -> None:
        """Forget the copy of another node's shard, if there is one, and free its memory."""
        number = self._copies.pop(key, None)
        if number is not None:
            del self._remotes[number]
            self._store.free([number])

    def copy(self, owner: bytes, shard: int) -> int | None:
        """The local number of a shard that is in memory here as a whole, for others to read."""
        number = self._copies.get((owner, shard))
        there = number is not None and self._remotes[number].complete and self._store.shards.ready(number)
        return number if there else None

    async def aclose(self) -> None:
        await self._background.aclose()
        await self.replicas.aclose()
        await self.patching.aclose()
        await self.reading.aclose()
