"""Reads shards of other nodes, at the owner or a copy that the owner names, by the best transport that works.

Invariants: at most `_FROM_ONE` reads from one node run at a time, so that a thousand shards come one after the other.
When the owner is no longer a member, a read ends with OwnerDied or, if the owner may return, PeerUnavailable. A read of
a copy whose holder is gone begins again at the owner. Bytes from another node's disk are compared with the checksums of
the offer before they are used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import xxhash

from dataplane.batch.byte_ranges import ByteRanges, rounded, total, without
from dataplane.clock import Deadline
from dataplane.cluster.membership import Member, Membership
from dataplane.errors import Backpressure, DataplaneError, OwnerDied, PeerUnavailable
from dataplane.node.shards.offers import MAX_OFFERS
from dataplane.threads import Pool, stopped
from dataplane.transport.channels import Transport, TransportError
from dataplane.transport.choice import TransportChoice
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

_LEAST_RATE = 10e6  # bytes/s: a read has time for this rate at least, shared by all reads of one node
_LEAST_S = 20.0
_SILENT_S = 3.0  # seconds after which a node that does not answer counts as gone during a read
_AT_ONCE, _FROM_ONE = 256, 16  # the most reads at a time, and the most of these from one node
_COPIES_TRIED = 4
_LOOK_S = 1.0  # between pings of a node that is needed
_PATIENCE_S, _AGAIN_S = 120.0, 0.1  # for how long an overloaded node is asked again, and how often


def member_of(membership: Membership, node: bytes) -> Member:
    """The member. Raises OwnerDied if the node has died, PeerUnavailable if it may return."""
    member = membership.members.get(node)
    if member is None:
        raise absent(membership, node)
    return member


def absent(membership: Membership, node: bytes) -> DataplaneError:
    """The error to raise for a node that is no member."""
    name = node.hex()
    if not membership.may_return(name):
        return OwnerDied(
            f"node {name} is not in the cluster: it has died, or never existed. Rows without a replica are lost, and"
            " stream.lost() returns their keys. Others can be read and appended, but not retained: put them again",
            node=name,
        )
    return PeerUnavailable(f"node {name} is away from the cluster, and may come back")


@dataclass(frozen=True, slots=True)
class WantedRanges:
    """Byte ranges of a shard, and the memory to write them to.

    `there`: ranges that the memory has already. `whole`: whether the memory has the whole shard once `ranges` were
    read. `fresh`: the memory has no readers yet, so invalid or additional bytes may be written to it, except to the
    ranges `there`.
    """

    owner: bytes
    shard: int
    memory: memoryview
    ranges: ByteRanges
    there: ByteRanges
    whole: bool
    fresh: bool

    @property
    def timeout_s(self) -> float:
        return _LEAST_S + MAX_OFFERS * total(self.ranges) / _LEAST_RATE


class RemoteOperations:
    """Operations that need another node. Each is aborted as soon as that node leaves the cluster or does not answer a
    ping, even before the connection fails. A node is pinged every second while it is needed, so that operations end
    soon if its host becomes unreachable.

    Invariants: an aborted operation raises TimeoutError, so it is never mistaken for a cancellation by the caller.
    Operations that have ended are forgotten.
    """

    def __init__(self, membership: Membership, answers: Callable[[bytes], Awaitable[bool]]) -> None:
        """`answers(node)`: whether a member answers, within a few seconds."""
        self._membership = membership
        self._answers = answers
        self._ends: defaultdict[bytes, set[asyncio.Timeout]] = defaultdict(set)
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        membership.watch(self._changed)

    @asynccontextmanager
    async def needing(self, node: bytes) -> AsyncIterator[None]:
        """A context that needs this node. Raises TimeoutError as soon as it is no member, or does not answer."""
        async with asyncio.timeout(None) as end:
            self._ends[node].add(end)
            if node not in self._asking:
                self._asking[node] = asyncio.get_running_loop().create_task(self._ask(node))
            self._changed()
            try:
                yield
            finally:
                self._ends[node].discard(end)
                if not self._ends[node]:
                    del self._ends[node]
                    self._asking.pop(node).cancel()

    async def _ask(self, node: bytes) -> None:
        """Ping this node while it is needed."""
        while True:
            await asyncio.sleep(_LOOK_S)
            needing = {*self._ends[node]}
            if not await self._answers(node):
                self._end(needing & self._ends[node])

    def _changed(self) -> None:
        for node in self._ends.keys() - self._membership.members.keys():
            self._end(self._ends[node])

    def _end(self, ends: set[asyncio.Timeout]) -> None:
        now = asyncio.get_running_loop().time()
        for end in ends:
            if end.when() is None:  # it was not ended before
                end.reschedule(now)


class _Damaged(Exception):
    """The bytes received differ from the bytes that were written."""


class ShardReads:
    """The reads of one node. Used from its event loop."""

    def __init__(self, node: bytes, peers: Peers, membership: Membership, choice: TransportChoice) -> None:
        self._node = node
        self._peers = peers
        self._membership = membership
        self._choice = choice
        self.needing = RemoteOperations(membership, self._answers).needing
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._turns_of: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()
        self._checking = Pool(2, "dataplane-check")
        self._closed = False
        self.fetched_bytes = 0
        self._under_way, self._since, self._under_way_s = 0, 0.0, 0.0
        self.timed: Callable[[str, int, int], None] = lambda operation, began, nbytes: None
        """Called for each read that succeeded: "fetch", its start in nanoseconds of the monotonic clock, its bytes."""

    @property
    def under_way_s(self) -> float:
        """The time since the start, in seconds, during which at least one read was running."""
        return self._under_way_s + (time.monotonic() - self._since if self._under_way else 0.0)

    @contextmanager
    def _one_more(self) -> Iterator[None]:
        """A context in which a read counts as running."""
        if not self._under_way:
            self._since = time.monotonic()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._under_way_s += time.monotonic() - self._since

    async def _answers(self, node: bytes) -> bool:
        """Whether a member answers within `_SILENT_S`."""
        member = self._membership.members.get(node)
        if member is None:
            return False
        try:
            await self._peers.request(member, pm.DescribeShards(self._peers.next_id(), []), pm.Described, _SILENT_S)
        except PeerUnavailable:
            return False
        except DataplaneError:  # it answered with an error, such as overload
            return True
        return True

    async def read(self, wanted: WantedRanges) -> ByteRanges:
        """Fill the wanted memory, by the best working transport that both nodes have. Returns the ranges read, at least
        the wanted ones. Raises OwnerDied, Freed, Corrupt, PeerUnavailable, Backpressure."""
        turns = self._turns_of.setdefault(wanted.owner, asyncio.Semaphore(_FROM_ONE))
        async with turns, self._turns:
            with self._one_more():
                return await self._read(wanted)

    async def _read(self, wanted: WantedRanges) -> ByteRanges:
        owner, why = wanted.owner, "no transport is on both sides"
        member = member_of(self._membership, owner)
        for transport in self._choice.of(owner, member.transports):
            try:
                async with self.needing(owner):
                    came = await self._read_by(transport, member.transports[transport.name], member, wanted)
            except (TransportError, TimeoutError, PeerUnavailable) as error:
                member_of(self._membership, owner)  # raises OwnerDied if the owner has ended
                if isinstance(error, PeerUnavailable):
                    raise
                if isinstance(error, TimeoutError):
                    raise PeerUnavailable(f"node {owner.hex()} does not answer", address=member.address) from None
                why = str(error)
                self._choice.failed(owner, transport, error)
                continue
            self._choice.worked(owner, transport, total(came))
            return came
        member_of(self._membership, owner)
        raise PeerUnavailable(f"a shard of node {owner.hex()} did not come: {why}", address=member.address)

    async def _read_by(self, transport: Transport, address: str, member: Member, wanted: WantedRanges) -> ByteRanges:
        """Read at the owner, or at a copy that the owner names. If that copy is gone, ask for another. If bytes from
        the owner's disk were wrong, read again from its memory."""
        avoid: list[bytes] = []
        while True:
            whole = wanted.whole and len(avoid) < _COPIES_TRIED
            offered = await self._ask(member, transport, wanted, whole=whole, avoid=avoid)
            came: ByteRanges = []
            try:
                if offered.holder and not whole:
                    raise TransportError("the copy that was offered refers to another copy")
                if offered.holder:
                    came = await self._read_copy(transport, offered.holder, wanted)
                else:
                    came = await self._take(transport, address, offered, wanted)
            except (_Damaged, TransportError) as error:
                if not offered.chunk or not wanted.fresh:
                    raise
                log.warning("reading a shard from the disk of %s failed: %s", wanted.owner.hex(), error)
                wanted = replace(wanted, fresh=False)
            finally:
                self._withdraw(member, offered, wanted, came)
            if came:
                return came
            if offered.holder:
                avoid.append(offered.holder)

    async def _take(self, transport: Transport, address: str, offered: pm.Offered, wanted: WantedRanges) -> ByteRanges:
        """Read an offered shard at this address, and verify bytes from a disk. Returns the ranges read."""
        ranges, began = wanted.ranges, time.monotonic_ns()
        if offered.chunk:
            size = len(wanted.memory)
            if not wanted.fresh or offered.chunk < 0 or len(offered.sums) != 8 * -(-size // offered.chunk):
                raise TransportError("an offer that can not be checked")
            ranges = rounded(ranges, offered.chunk, size)
            if without(ranges, wanted.there) != ranges:
                raise TransportError("a part of these chunks was received already")
        await transport.read(address, offered.ticket, wanted.memory, wanted.timeout_s, ranges)
        if offered.chunk:
            if self._closed:
                raise TransportError("this node has stopped")
            try:
                checking = self._checking.submit(_verify_checksums, wanted.memory, ranges, offered.chunk, offered.sums)
            except OSError as error:
                raise TransportError(f"the bytes received cannot be checked: {error.strerror}") from None
            try:
                await asyncio.wrap_future(checking)
            finally:
                await stopped([checking])
        self.fetched_bytes += total(ranges)
        self.timed("fetch", began, total(ranges))
        return ranges

    async def _read_copy(self, transport: Transport, holder: bytes, wanted: WantedRanges) -> ByteRanges:
        """Read at a node with a copy. Returns the ranges read; none if that fails."""
        member = self._membership.members.get(holder)
        address = None if member is None else member.transports.get(transport.name)
        if member is None or address is None:
            return []
        try:
            async with self.needing(holder):
                offered = await self._ask(member, transport, wanted, owner=wanted.owner, patience_s=0.0)
                came: ByteRanges = []
                try:
                    came = await self._take(transport, address, offered, wanted)
                finally:
                    self._withdraw(member, offered, wanted, came)
        except (TransportError, TimeoutError, DataplaneError, _Damaged) as error:
            log.info("reading a copy of a shard from %s failed: %s", holder.hex(), error)
            return []
        return came

    async def _ask(
        self,
        member: Member,
        transport: Transport,
        wanted: WantedRanges,
        *,
        owner: bytes = b"",
        whole: bool = False,
        avoid: Sequence[bytes] = (),
        patience_s: float = _PATIENCE_S,
    ) -> pm.Offered:
        """Request an offer, and repeat the request for `patience_s` while the node is busy. Raises Backpressure, and
        the errors of the node."""
        patience = Deadline.after(patience_s)
        timeout_s, node, checks = wanted.timeout_s, self._node, wanted.fresh and not owner
        while True:
            number, name = self._peers.next_id(), transport.name
            offer = pm.Offer(number, node, wanted.shard, name, timeout_s, owner, whole, list(avoid), checks)
            try:
                return await self._peers.request(member, offer, pm.Offered, timeout_s)
            except Backpressure:
                if not patience.remaining_s:
                    raise
                await asyncio.sleep(_AGAIN_S)

    def _withdraw(self, member: Member, offered: pm.Offered, wanted: WantedRanges, came: ByteRanges) -> None:
        number, whole = self._peers.next_id(), bool(came) and wanted.whole
        withdraw = pm.Withdraw(number, self._node, offered.ticket, total(came), whole)
        self._peers.tell(member, withdraw, Done)

    async def aclose(self) -> None:
        self._closed = True
        await self._checking.aclose()


def _verify_checksums(memory: memoryview, ranges: ByteRanges, chunk: int, sums: bytes) -> None:
    """Check the chunks of these ranges, in a thread. Raises _Damaged if one does not match its checksum."""
    for start, stop in ranges:
        for begin in range(start, stop, chunk):
            expected = int.from_bytes(sums[8 * (begin // chunk) :][:8], "little")
            with memory[begin : min(begin + chunk, stop)] as part:
                if xxhash.xxh3_64_intdigest(part) != expected:
                    raise _Damaged(f"its bytes from {begin} on are not those that were written")
