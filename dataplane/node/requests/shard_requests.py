"""The requests of one client about shards: to reserve, seal, pin, read, free, retain and copy them.

A request is answered at once if possible. If it has to wait for memory, the disk or another node, a coroutine is
returned that sends the answer. The descriptor of a segment is sent to a client at most twice: for reading, and for
writing if the client has reservations in it.
"""

from __future__ import annotations

import secrets
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from dataplane import waiting
from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.errors import Freed, LimitExceeded, OwnerDied, ProtocolMismatch, revive
from dataplane.node.sessions.checks import bound, deadline_of
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.node.shards.remote import wanted_of
from dataplane.node.shards.shard_replicas import links_of
from dataplane.store.arena import Arena
from dataplane.store.live_cells import LiveBlock
from dataplane.store.reservations import Reservation
from dataplane.store.shards import UNKNOWN, FreeCause
from dataplane.store.store import Pinned
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire import places
from dataplane.wire import shard_messages as sm
from dataplane.wire.local import LocalChannel

if TYPE_CHECKING:
    from dataplane.node.clients import Client, NodeServices
    from dataplane.node.shards.fetch import Fetcher

_Own = sm.PinShards | sm.UnpinShards | sm.InheritPins | sm.Reserve | sm.SealShards | sm.Keep | sm.Landed | sm.Stays
ShardRequest = _Own | sm.Abort | sm.Free | sm.Prefetch | sm.Retain | sm.ReplicateShards
SHARD_REQUESTS = frozenset(get_args(ShardRequest))


class ShardRequests:
    """See the module. The shards that `client` reserves and pins are its own until it ends."""

    def __init__(self, client: Client, services: NodeServices, staged: StagedColumns, channel: LocalChannel) -> None:
        self._client = client
        self._node = services.node
        self._store = services.store
        self._needed = services.needed
        self._hosts = services.hosts
        self._others = services.clients
        self._staged = staged
        self._channel = channel
        self.grants = Grants(services.store.arena)

    def answer(self, request: ShardRequest) -> Coroutine[Any, Any, None] | None:
        """Execute the request and send its reply, if any. For a request that has to wait, return a coroutine that
        does both."""
        match request:
            case sm.PinShards():
                return self._pin(request)
            case sm.UnpinShards():
                self._store.unpin(self._client, request.shards)
            case sm.Reserve():
                return self._reserve(request)
            case sm.SealShards():
                self._seal(request)
            case sm.Free() if request.node:
                return self._free_elsewhere(request)
            case sm.Free():
                self._free(request)
            case sm.InheritPins():
                self._inherit(request)
            case sm.Prefetch():
                return self._prefetch(request)
            case sm.Retain():
                return self._retain(request)
            case sm.ReplicateShards():
                return self._replicate(request)
            case sm.Abort():
                self._store.reservations.abort(self._client, request.shards)
            case sm.Keep():
                self._keep(request)
            case sm.Landed():
                self._store.land(self._client, request.shard, request.reserved)
                self._channel.send(m.Done(request.id))
            case sm.Stays():
                why = revive(request.name, request.message, request.fields)
                self._store.client_shards.stays(self._client, request.shard, why)
        return None

    # Writing

    def _reserve(self, request: sm.Reserve) -> Coroutine[Any, Any, None] | None:
        bound("reservation of so many shards", sm.MAX_SHARDS, len(request.sizes))
        made = self._store.reservations.reserve_now(self._client, request.sizes, request.purpose)
        if made is None:
            return self._reserve_later(request)
        self._send_reserved(request.id, made)
        return None

    def _seal(self, request: sm.SealShards) -> None:
        bound("layout", sm.MAX_LAYOUT, max((len(layout) for _, layout in request.shards), default=0))
        bound("scope", sm.MAX_SCOPE, len(request.scope))
        self._staged.begin(request.scope)
        holder = self._client.label
        self._store.seal(self._client, request.shards, scope=request.scope, holder=holder, hold=request.hold)
        self._channel.send(m.Done(request.id))

    async def _reserve_later(self, request: sm.Reserve) -> None:
        self._send_reserved(
            request.id,
            await self._store.reservations.reserve(
                self._client, request.sizes, deadline_of(request.timeout_s), request.purpose
            ),
        )

    def _send_reserved(self, identifier: int, made: list[Reservation]) -> None:
        extents = [(r.shard, r.extent.segment, r.extent.offset, r.extent.size) for r in made]
        gone = self.grants.gone()
        grants, descriptors = self.grants.new((r.extent.segment for r in made), writable=True)
        self._channel.send(sm.Reserved(identifier, extents, grants, gone), descriptors)

    def _keep(self, request: sm.Keep) -> None:
        bound("shards to be kept", sm.MAX_RETAINED, len(request.shards))
        bound("scope", sm.MAX_SCOPE, len(request.scope))
        for size, layout, handle in request.shards:
            bound("layout", sm.MAX_LAYOUT, len(layout))
            bound("handle", sm.MAX_HANDLE, len(handle))
            if size < 0:
                raise ProtocolMismatch(f"a shard of {size} bytes")
        self._staged.begin(request.scope)
        how = {"scope": request.scope, "holder": self._client.label}
        numbers: list[int] = []
        try:
            for size, layout, handle in request.shards:
                numbers.append(self._store.keep(self._client, size, layout, handle, **how, tell=self._tell_kept))
        except BaseException:
            self._store.free(numbers)
            raise
        self._channel.send(sm.Kept(request.id, numbers))

    def _tell_kept(self, shard: int, land: bool) -> None:
        self._channel.send(sm.Keeping(0, shard, land))

    # Reading

    def _pin(self, request: sm.PinShards) -> Coroutine[Any, Any, None] | None:
        first = self._store.first
        lost = [shard for shard in request.shards if shard < first and shard not in self._store.shards]
        return self._pin_regained(request, lost) if lost and self._hosts is not None else self._pin_here(request)

    async def _pin_regained(self, request: sm.PinShards, lost: Sequence[int]) -> None:
        """Answer with copies in place of shards that were lost when this node was restarted."""
        deadline = deadline_of(request.timeout_s)
        copies = await self._fetcher(self._node, "").regain(lost, deadline)
        shards = [copies.get(shard, shard) for shard in request.shards]
        waits = self._pin_here(msgspec.structs.replace(request, shards=shards, timeout_s=deadline.remaining_s))
        if waits is not None:
            await waits

    def _pin_here(self, request: sm.PinShards) -> Coroutine[Any, Any, None] | None:
        if request.devices and self._store.client_shards.has_any(request.shards):
            return self._pin_rest(request)
        if request.others:
            return self._pin_others(request)
        self._check_pin(request.shards)
        held = self._store.pin_now(self._client, request.shards)
        if held is None:
            return self._pin_later(request)
        self._send_held(request, held)
        return None

    async def _pin_later(self, request: sm.PinShards) -> None:
        held = await self._store.pin(self._client, request.shards, deadline_of(request.timeout_s))
        await self._when_room(held)
        self._send_held(request, held)

    async def _pin_others(self, request: sm.PinShards) -> None:
        bound("request for so many shards", sm.MAX_SHARDS, len(request.shards) + len(request.others))
        deadline = deadline_of(request.timeout_s)
        copies = await self._copies(request.others, deadline, request.parts, request.chunks)
        shards = [*request.shards, *copies]
        self._check_pin(shards)
        held = self._store.pin_now(self._client, shards)
        if held is None:
            async with self._patched(copies, request.chunks, deadline):
                held = await self._store.pin(self._client, shards, deadline)
        await self._when_room(held)
        self._send_held(request, held)

    async def _pin_rest(self, request: sm.PinShards) -> None:
        """Answer with handles for the shards whose memory clients keep, and with pins for the others."""
        kept = self._store.client_shards.map(self._client, request.shards)
        mapped = {shard.number for shard, _ in kept}
        rest = [number for number in request.shards if number not in mapped]
        try:
            deadline = deadline_of(request.timeout_s)
            copies = await self._copies(request.others, deadline, request.parts) if request.others else []
            shards = [*rest, *copies]
            self._check_pin(shards)
            held = await self._store.pin(self._client, shards, deadline) if shards else []
            await self._when_room(held)
        except BaseException:
            self._store.unpin(self._client, [each.number for _, each in kept])
            raise
        told = [(s.number, each.number, s.size, s.layout, s.live_blocks(), each.handle) for s, each in kept]
        self._send_held(request, held, told)

    def _check_pin(self, shards: list[int]) -> None:
        bound("request for so many shards", sm.MAX_SHARDS, len(shards))
        if len(set(shards)) < len(shards):
            raise ProtocolMismatch("a request for shards names one twice")
        bound(
            "description of what is to be read; get fewer shards at a time, or put fewer rows if they are freed singly",
            m.MAX_FRAME // 4 * 3,
            self._store.shards.described_nbytes(shards),
        )

    async def _when_room(self, held: list[Pinned]) -> None:
        """Wait until the client can receive a reply. If that fails, release these pins."""
        try:
            await self._channel.room()
        except BaseException:
            self._store.unpin(self._client, [each.shard for each in held])
            raise

    def _send_held(self, request: sm.PinShards, held: list[Pinned], kept: Sequence[sm.KeptOne] = ()) -> None:
        layouts: dict[bytes, int] = {}
        lives: list[list[LiveBlock]] = []
        numbers: list[int] = []
        for shard, extent, layout, cells in held:
            live = 0
            if cells is not None:
                lives.append(cells.blocks)
                live = len(lives)
            numbers += shard, extent.segment, extent.offset, extent.size, layouts.setdefault(layout, len(layouts)), live
        gone = self.grants.gone()
        carried = self._carried(held) if request.carry and not kept else b""
        if carried:
            at = 0
            for first, size in enumerate(numbers[3 :: places.WIDTH]):
                numbers[first * places.WIDTH + 1 : first * places.WIDTH + 3] = -1, at
                at += size
        segments = {p.extent.segment for p in held} if not carried else ()
        grants, descriptors = self.grants.new(segments, writable=False)
        packed = places.pack(numbers)
        reply = sm.Held(request.id, packed, list(layouts), grants, lives, gone, list(kept), carried)
        self._channel.send(reply, descriptors)

    def _carried(self, held: Sequence[Pinned]) -> bytes:
        """Return the concatenated bytes of pinned shards, and release a pin of each. If all shards together have more
        than `sm.MAX_CARRIED` bytes, or are more than `sm.MAX_CARRIED / 64`, return no bytes and release nothing."""
        if len(held) > sm.MAX_CARRIED >> 6 or sum([each.extent.size for each in held]) > sm.MAX_CARRIED:
            return b""
        found = [self._store.arena.read(each.extent) for each in held]
        self._store.unpin(self._client, [each.shard for each in held])
        return b"".join(found)

    def _inherit(self, request: sm.InheritPins) -> None:
        for client in self._others:
            if secrets.compare_digest(client.token, request.token):
                self._store.pins.inherit(client, self._client)
                self._channel.send(m.Done(request.id))
                return
        raise Freed("the client whose pins were to be inherited has gone")

    # Freeing

    def _free(self, request: sm.Free) -> None:
        freeings = self._store.shards.freeings
        freeings.cause = FreeCause("scope" if request.scope else "free", self._client.label)
        try:
            parts = [(shard, columns, RowIndices.decode(rows)) for shard, columns, rows in request.parts]
            self._needed.free_parts(parts)
            self._store.free(request.shards)
            if request.scope:
                self._staged.free(request.scope)
        except (ValueError, IndexError) as error:
            raise ProtocolMismatch(f"no part of a shard: {error}") from None
        finally:
            freeings.cause = UNKNOWN
        self._channel.send(m.Done(request.id))

    # Other nodes

    def _fetcher(self, node: bytes, why: str) -> Fetcher:
        """The fetcher of shards. Raises OwnerDied if this node is in no cluster. `why`: the message, with braces in
        place of `node`."""
        if self._hosts is None:
            raise OwnerDied(why.format(node.hex()), node=node.hex())
        return self._hosts.fetcher

    async def _prefetch(self, request: sm.Prefetch) -> None:
        bound("request for so many shards", sm.MAX_SHARDS, len(request.own) + len(request.others))
        deadline = deadline_of(request.timeout_s)
        copies = await self._copies(request.others, deadline, request.parts) if request.others else []
        for number in dict.fromkeys([*request.own, *copies]):  # one by one: all need not fit at once
            held = await self._store.pin(self._client, [number], deadline)
            self._store.unpin(self._client, [each.shard for each in held])
        self._channel.send(m.Done(request.id))

    async def _copies(
        self,
        shards: Sequence[sm.Wanted],
        deadline: Deadline,
        parts: Sequence[sm.RowParts] = (),
        chunks: Sequence[sm.ChunkPart] = (),
    ) -> list[int]:
        """Fetch shards of other nodes, or only their `parts` or `chunks`. Returns the numbers of the local copies."""
        own = f"this is node {self._node.hex()}; either it was stopped, or it is another host's, and this node is alone"
        fetcher = self._fetcher(shards[0][0] if shards else b"", f"the shards were put on node {{}}, and {own}")
        try:
            wanted = wanted_of(shards, parts, chunks)
        except ValueError as error:
            raise ProtocolMismatch(f"no rows of a shard: {error}") from None
        waiting.turn("fetch", shards[0][0].hex() if shards else "")
        return await fetcher.find(wanted, deadline)

    def _patched(
        self, copies: Sequence[int], chunks: Sequence[sm.ChunkPart], deadline: Deadline
    ) -> AbstractAsyncContextManager[None]:
        """A context in which copies are computed here from their deltas where possible, rather than fetched."""
        if self._hosts is None or not any(steps for _, steps in chunks):
            return nullcontext()
        steps = [(number, steps) for number, (_, steps) in zip(copies, chunks, strict=True)]
        return self._hosts.fetcher.patching.ready(steps, deadline)

    async def _replicate(self, request: sm.ReplicateShards) -> None:
        bound("request for so many shards", pm.MAX_SHARDS, len(request.shards))
        if not request.shards or request.replicas < 2:
            raise ProtocolMismatch(f"{request.replicas} replicas of {len(request.shards)} shards")
        if self._hosts is None:
            what = "nodes of the cluster"
            raise LimitExceeded(
                f"replicas={request.replicas}, and this node is in no cluster: use --seeds, or replicas=1",
                what=what,
                asked=request.replicas,
                limit=1,
            )
        replicas = self._hosts.fetcher.replicas
        deadline = deadline_of(request.timeout_s)
        nodes = await replicas.replicate(request.shards, request.replicas, deadline, staged=request.staged)
        self._channel.send(sm.ShardsReplicated(request.id, nodes))

    async def _free_elsewhere(self, request: sm.Free) -> None:
        if request.shards or request.scope:
            raise ProtocolMismatch("of another node, only parts of shards are freed")
        why = "what is to be freed is on node {}, and this node is alone: free it there"
        await self._fetcher(request.node, why).free(request.node, request.parts)
        self._channel.send(m.Done(request.id))

    def _retain(self, request: sm.Retain) -> Coroutine[Any, Any, None] | None:
        bound("links to so many shards", sm.MAX_RETAINED, len(request.shards))
        wanted = links_of(request.shards)
        if request.node != self._node:
            return self._retain_elsewhere(request)
        self._channel.send(
            sm.Retained(request.id, self._node, self._store.owners.retain(wanted, holder=self._client.label))
        )
        return None

    async def _retain_elsewhere(self, request: sm.Retain) -> None:
        why = "the shards were put on node {}, which is not in the cluster: put again"
        links = await self._fetcher(request.node, why).retain(request.node, request.shards)
        self._channel.send(sm.Retained(request.id, request.node, links))


class Grants:
    """The segments whose descriptors a client has. Each descriptor is sent at most once for reading, and once for
    writing."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._granted: set[tuple[int, bool]] = set()
        self._closed = arena.closed

    def new(self, segments: Iterable[int], *, writable: bool) -> tuple[list[m.SegmentGrant], list[int]]:
        """Grants for the segments that the client does not have yet, and their descriptors, which the arena keeps
        open."""
        grants, descriptors = [], []
        for number in segments:
            if (number, writable) not in self._granted:
                self._granted.add((number, writable))
                segment = self._arena[number]
                grants.append(m.SegmentGrant(number, segment.size, writable))
                descriptors.append(segment.fd if writable else segment.readonly_fd)
        return grants, descriptors

    def gone(self) -> list[int]:
        """The granted segments that were closed since the last call."""
        if self._closed == self._arena.closed:
            return []
        self._closed = self._arena.closed
        gone = {number for number, _ in self._granted if number not in self._arena}
        self._granted = {grant for grant in self._granted if grant[0] not in gone}
        return sorted(gone)
