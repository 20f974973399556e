"""Replicas of shards: those of other nodes' shards here, and the places of the replicas of this node's shards.

A replica is a local shard with its own number, spilled and bounded like any other. If the owner is gone, a reader asks
the other nodes for the replica. When a part of the original is freed, the same part of each replica is freed. Replicas
are made right after the shards. The replicas of one put are on the same hosts, so that its rows stay together.

Invariants: a put with replicas returns when the replicas exist. A replica is complete, and has the bytes that were
written.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dataplane.background_tasks import BackgroundTasks
from dataplane.batch.locations import link_of, linked, shard_of
from dataplane.batch.ref import ShardKey
from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.cluster.membership import Member, Membership
from dataplane.cluster.placement import winner
from dataplane.errors import DataplaneError, OwnerDied, PeerUnavailable, ProtocolMismatch
from dataplane.node.shards.pending_changes import Part, PendingChanges
from dataplane.node.shards.reading import ShardReads, WantedRanges, absent, member_of
from dataplane.store.links import Selected
from dataplane.store.store import Store
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers
from dataplane.wire.shard_messages import MAX_RETAINED, Selection

_CONTROL_S = 4.0  # as in `fetch`
_SILENT_S = 10.0  # seconds for which a node that did not answer is chosen last


class ShardReplicas:
    """The replicas of one node."""

    def __init__(self, node: bytes, store: Store, peers: Peers, membership: Membership, reading: ShardReads) -> None:
        self._node = node
        self._store = store
        self._peers = peers
        self._membership = membership
        self._reading = reading
        self._here: dict[ShardKey, int] = {}
        self._keys: dict[int, ShardKey] = {}  # of the replicas here, by local number
        self._elsewhere: dict[int, list[bytes]] = {}
        self._staged: defaultdict[bytes, set[int]] = defaultdict(set)  # by node: shards whose replica is for a stream
        self._background = BackgroundTasks()
        self.changes = PendingChanges(peers, membership)
        self._lost_parts: list[Part] = []  # parts of shards from before the restart whose frees are not sent yet
        self._silent: dict[bytes, float] = {}  # nodes that did not answer, and until when others are chosen first
        self._taking: Counter[ShardKey] = Counter()  # requests that store each now; removed when its owner frees it
        self.freeing: Callable[[ShardKey, tuple[int, ...], RowIndices | None], None] = lambda key, columns, rows: None
        """Frees a part of a replica here, or all of it, once nothing needs it."""
        self.forgotten: Callable[[ShardKey], None] = lambda key: None
        """Called when a replica was removed from this node."""
        store.freed = self._freed
        store.owners.retained = self._retained

    def __str__(self) -> str:
        return "replicas of other nodes"

    # of this node's shards

    async def replicate(
        self, shards: Sequence[ShardKey], replicas: int, deadline: Deadline, *, staged: bool = False
    ) -> list[bytes]:
        """Store these shards, of this node and of others, such that any `replicas` - 1 nodes may be lost. Returns
        `replicas` - 1 nodes that have all shards and own none; if there are too few and the shards have several owners,
        `replicas` nodes, of which some own shards. Raises PeerUnavailable if the cluster has too few nodes or too few
        of them answer, OwnerDied, Backpressure, Freed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining_s):
                await self._membership.joined()  # before, this node does not know the others
        of: defaultdict[bytes, list[int]] = defaultdict(list)
        for owner, number in shards:
            of[owner].append(number)
        nodes, count = list(self._membership.members), replicas - 1
        keeping = [node for node in nodes if self._membership.keeps(node.hex())]
        if len(keeping) >= replicas:  # durable data must reach disks, and a put may yet become durable
            nodes = keeping
        left = [node for node in nodes if node not in of]
        if len(left) < count and len(of) > 1:
            left, count = nodes, replicas
        if len(left) < count:
            there = len(self._membership.members)
            raise PeerUnavailable(f"replicas={replicas}, and the cluster has {there} nodes now: start another")
        chosen: list[bytes] = []
        # The same from any node: rows that are appended again most often have replicas there.
        placed = min((owner.hex(), shard_of(number)) for owner, number in shards)
        while len(chosen) < count:
            own = [shard_of(number) for number in of.get(self._node, ())]
            awake = [node for node in left if self._silent.get(node, 0.0) < time.monotonic()] or left
            held = [node for node in awake if own and all(node in self._elsewhere.get(each, ()) for each in own)]
            node = winner(held or awake, *placed)
            left.remove(node)
            try:
                async with self._reading.needing(node):
                    for owner, numbers in of.items():
                        if owner != node:
                            asked = pm.CopyShards(self._peers.next_id(), numbers, node, deadline.remaining_s, staged)
                            await self._copy(owner, asked)
            except (OwnerDied, PeerUnavailable, TimeoutError) as error:
                self._silent[node] = time.monotonic() + _SILENT_S
                if len(left) < count - len(chosen):  # too few are left
                    if isinstance(error, TimeoutError):
                        raise PeerUnavailable(f"node {node.hex()} does not answer", address=node.hex()) from None
                    raise
            else:
                chosen.append(node)
        return chosen

    async def _copy(self, owner: bytes, asked: pm.CopyShards) -> None:
        """Have the owner of shards store replicas of them on a node."""
        if owner == self._node:
            await self.copy(asked)
        else:
            member = member_of(self._membership, owner)
            await self._peers.request(member, asked, Done, asked.timeout_s + 2 * _CONTROL_S)

    async def copy(self, request: pm.CopyShards) -> Done:
        """Store replicas of shards of this node, and of the links among them, on another node. Raises OwnerDied,
        PeerUnavailable, Backpressure, Freed."""
        if len(request.shards) > pm.MAX_SHARDS or not 0 <= request.timeout_s <= 3600:
            raise ProtocolMismatch(f"{len(request.shards)} replicas in {request.timeout_s} s")
        member, shards = member_of(self._membership, request.node), sorted(set(map(shard_of, request.shards)))
        for shard in shards:  # frees are sent to this node, since it may store replicas without an answer
            holders = self._elsewhere.setdefault(shard, [])
            if request.node not in holders:
                holders.append(request.node)
        take = pm.TakeReplicas(self._peers.next_id(), self._node, shards, request.timeout_s, request.staged)
        await self._peers.request(member, take, Done, request.timeout_s + _CONTROL_S)
        links = [(number, selection_of(self._store.owners.selected(number))) for number in request.shards]
        links = [(number, selection) for number, selection in links if link_of(number) and selection]
        for first in range(0, len(links), MAX_RETAINED):
            some = links[first : first + MAX_RETAINED]
            asked = pm.RetainReplicas(self._peers.next_id(), self._node, some)
            await self._peers.request(member, asked, Done, _CONTROL_S)
        return Done(request.id)

    def _retained(self, link: int, selected: Selected) -> None:
        """Tell the holders of replicas that a link to a part of a local shard was made."""
        for node in self._elsewhere.get(shard_of(link), ()):
            self.changes.retain(node, self._node, [(link, selection_of(selected))])

    def _freed(self, number: int, columns: Sequence[int], rows: RowIndices | None) -> None:
        """Tell the holders of replicas that a part of a local shard, or of a link to one, was freed. `rows` is None if
        all of it was."""
        if shard_of(number) in self._keys and shard_of(number) not in self._store.shards:
            key = self._keys.pop(shard_of(number))
            del self._here[key]
            self._unstaged([key])
            self.forgotten(key)
            return
        nodes = self._elsewhere.get(shard_of(number))
        unknown = nodes is None and shard_of(number) < self._store.first and shard_of(number) not in self._store.shards
        if nodes is None and not unknown:
            return
        parts: list[Part] = [(number, list(columns), (0, 0, b"") if rows is None else rows.encode())]
        if shard_of(number) not in self._store.shards:
            self._elsewhere.pop(shard_of(number), None)
            parts.append((shard_of(number), [], (0, 0, b"")))  # also what was freed before the replica was made
        if unknown:  # since the restart
            self.freed_lost(parts)
        for node in nodes or ():
            self.changes.free(node, self._node, parts)

    def freed_lost(self, parts: Sequence[Part]) -> None:
        """Free replicas of parts of this node's shards from before the restart, wherever they are."""
        if not self._lost_parts:
            self._background.spawn(self._send_frees())
        self._lost_parts += parts

    async def _send_frees(self) -> None:
        """Send the pending frees to all members, in few messages."""
        await self._membership.joined()  # before, this node does not know the others
        parts, self._lost_parts = self._lost_parts, []
        for first in range(0, len(parts), pm.MAX_SHARDS):
            self.free_all(self._node, parts[first : first + pm.MAX_SHARDS])

    async def aclose(self) -> None:
        await self._background.aclose()
        await self.changes.aclose()

    # of others' shards

    def gone(self, node: bytes) -> None:
        """Forget the replicas on a node whose process has ended. Free those here of its
        shards that were for a stream and that no stream needs."""
        self._silent.pop(node, None)
        self.free(node, [(shard, [], (0, 0, b"")) for shard in self._staged.pop(node, ())])
        for shard, nodes in list(self._elsewhere.items()):
            if node in nodes:
                self._elsewhere[shard] = [other for other in nodes if other != node]

    def here(self, key: ShardKey) -> int | None:
        """The local number of the replica of another node's shard, or of the same link to it; None if there is
        none."""
        node, number = key
        here = self._here.get((node, shard_of(number)))
        return None if here is None else linked(here, link_of(number))

    def restored(self, key: ShardKey, number: int) -> None:
        """Note a replica of another node's shard with this local number, after a restart."""
        self._here[key] = number
        self._keys[number] = key

    async def take(self, request: pm.TakeReplicas) -> Done:
        """Store replicas of another node's shards. Raises Backpressure, LimitExceeded, OwnerDied, PeerUnavailable,
        Freed."""
        if len(request.shards) > pm.MAX_SHARDS or not 0 <= request.timeout_s <= 3600:
            raise ProtocolMismatch(f"{len(request.shards)} replicas in {request.timeout_s} s")
        keys = [(request.node, shard) for shard in request.shards]
        self._taking.update(keys)
        if request.staged:
            self._staged[request.node].update(shard for owner, shard in keys if (owner, shard) not in self._here)
        try:
            await self._take(request, Deadline.after(request.timeout_s))
        finally:
            self._taking.subtract(keys)
            self._taking = +self._taking
            self._unstaged(key for key in keys if key not in self._here)
        return Done(request.id)

    def _unstaged(self, keys: Iterable[ShardKey]) -> None:
        """Forget that these replicas are for a stream."""
        for node, shard in keys:
            if node in self._staged:
                self._staged[node].discard(shard)
                if not self._staged[node]:
                    del self._staged[node]

    async def _take(self, request: pm.TakeReplicas, deadline: Deadline) -> None:
        owner = member_of(self._membership, request.node)
        asked = pm.DescribeShards(self._peers.next_id(), request.shards)
        reply = await self._peers.request(owner, asked, pm.Described, _CONTROL_S)  # the deadline is for room alone
        if len(reply.shards) != len(request.shards):
            raise ProtocolMismatch("shards that are described falsely")
        for shard, (size, _, _, layout, _, payload) in zip(request.shards, reply.shards, strict=True):
            key = (request.node, shard)
            if key not in self._here:
                number = await self._keep(request.node, shard, size, layout, payload, deadline)
                if self._taking[key] > 0 and key not in self._here:
                    self.restored(key, number)
                else:  # the owner freed the shard meanwhile, or another request stored it
                    self._store.free([number])

    async def _keep(
        self, owner: bytes, shard: int, size: int, layout: bytes, payload: bytes, deadline: Deadline
    ) -> int:
        (made,) = await self._store.reservations.reserve(self, [size], deadline)
        try:
            with self._alive(), self._store.arena.view(made.extent) as view:
                if payload:
                    view[: len(payload)] = payload
                else:
                    wanted = WantedRanges(owner, shard, view, [(0, size)], [], whole=True, fresh=True)
                    await self._reading.read(wanted)
        except BaseException:
            self._store.reservations.abort(self, [made.shard])
            raise
        self._store.seal(self, [(made.shard, layout)], scope="", holder=f"replica of {owner.hex()}")
        return made.shard

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """A context of a read, in which the reservation is not revoked like that of a silent client."""
        loop, going = asyncio.get_running_loop(), True

        def sign() -> None:
            if going:
                self._store.reservations.touch(self)
                loop.call_later(self._store.reservations.lease_s / 4, sign)

        sign()
        try:
            yield
        finally:
            going = False

    def free(self, owner: bytes, parts: Sequence[Part]) -> None:
        """Free parts of replicas that their owner freed: all of a shard if no columns are given. Raises
        ProtocolMismatch."""
        for named, columns, rows in parts:
            key = (owner, shard_of(named))
            if not columns and not link_of(named):
                del self._taking[key]
            if key not in self._here:
                continue
            try:
                self.freeing((owner, named), tuple(columns), RowIndices.decode(rows) if columns else None)
            except (ValueError, IndexError) as error:
                raise ProtocolMismatch(f"no part of a shard: {error}") from None

    def retain(self, request: pm.RetainReplicas) -> None:
        """Make the same links to replicas that their owner has made to its shards. Shards without a replica here are
        ignored. Raises ProtocolMismatch, Freed, Corrupt, LimitExceeded."""
        for number, selected in links_of(request.links):
            here = self._here.get((request.node, shard_of(number)))
            if here is not None:
                for columns, rows in selected:
                    self._store.owners.check(self._store.shards.find(here), columns, rows)
                self._store.owners.retain_as(
                    here, selected, holder=f"replica of {request.node.hex()}", link=link_of(number)
                )

    def found(self, request: pm.FindReplicas) -> pm.FoundReplicas:
        """The local numbers of the replicas of another node's shards; 0 for a shard without one here."""
        return pm.FoundReplicas(request.id, [self._here.get((request.node, shard), 0) for shard in request.shards])

    async def locate(self, owner: bytes, shards: Sequence[int]) -> dict[bytes, list[tuple[int, int]]]:
        """Find replicas of the shards of an `owner` that is gone. Returns by node the number of each shard that has a
        replica there, with the number of the replica. If a shard has no replica, raises OwnerDied or, if the owner may
        return, PeerUnavailable."""
        found = await self.located(owner, shards)
        if sum(map(len, found.values())) < len(set(shards)):
            raise absent(self._membership, owner)
        return found

    async def located(self, owner: bytes, shards: Sequence[int]) -> dict[bytes, list[tuple[int, int]]]:
        """Find replicas of these shards, as `locate` does, without those that have none."""
        others = [(node, each) for node, each in self._membership.members.items() if node != self._node]
        found: dict[bytes, list[tuple[int, int]]] = {}
        for first in range(0, len(shards), pm.MAX_SHARDS):
            left = dict.fromkeys(shards[first : first + pm.MAX_SHARDS])
            asked = pm.FindReplicas(self._peers.next_id(), owner, list(left))
            replies = await asyncio.gather(*(self._ask(member, asked) for _, member in others))
            for (node, _), numbers in zip(others, replies, strict=True):
                for shard, number in zip(asked.shards, numbers, strict=False):
                    if number and shard in left:
                        del left[shard]
                        found.setdefault(node, []).append((shard, number))
        return found

    async def _ask(self, member: Member, asked: pm.FindReplicas) -> list[int]:
        request = pm.FindReplicas(self._peers.next_id(), asked.node, asked.shards)
        try:
            return (await self._peers.request(member, request, pm.FoundReplicas, _CONTROL_S)).numbers
        except DataplaneError:
            return []

    def free_all(self, owner: bytes, parts: Sequence[Part]) -> None:
        """Free parts of the replicas of a node that is gone, or has lost the originals, on all nodes."""
        self.free(owner, parts)
        missing = map(bytes.fromhex, self._membership.missing)
        for node in {*self._membership.members, *missing} - {self._node, owner}:
            self.changes.free(node, owner, parts)


# Decodes and encodes the parts of shards to retain, for messages.


def links_of(shards: Sequence[tuple[int, Selection]]) -> list[tuple[int, Selected]]:
    """For each shard the rows of columns for a link. Raises ProtocolMismatch if there are none."""
    if not shards or not all(selection for _, selection in shards):
        raise ProtocolMismatch("a link to no rows of a shard")
    try:
        return [
            (shard, [(columns, RowIndices.decode(rows)) for columns, rows in selection]) for shard, selection in shards
        ]
    except ValueError as error:
        raise ProtocolMismatch(f"no rows of a shard: {error}") from None


def selection_of(selected: Selected) -> Selection:
    """The encoded selection, for a message."""
    return [(list(columns), rows.encode()) for columns, rows in selected]
