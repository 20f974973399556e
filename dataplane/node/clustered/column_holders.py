"""Retains columns for partitions, on this node and on all other nodes that store the columns or have copies of them.

Invariant: if a partition did not take the columns of a claim, the claim is released on all nodes. If the claiming node
ends before that, the other nodes ask the partition which columns it took.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from dataplane.background_tasks import BackgroundTasks
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.clock import Deadline
from dataplane.cluster.membership import Member, Membership
from dataplane.errors import DataplaneError, LimitExceeded, Misuse, OwnerDied, PeerUnavailable
from dataplane.node.clustered.retained_shards import Need, RetainedShards
from dataplane.node.partitions.record import is_durable
from dataplane.node.partitions.router import Router
from dataplane.stream import requests as r
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers

Keep = Callable[[str, Sequence[ShardKey], Deadline], Awaitable[None]]

_ASK_S = 5.0
_KEEP_S = 10.0
_AGAIN_S = (0.25, 5.0)  # the first and the longest pause between attempts to send a message to another node
_ENDED_S = 10.0  # after the end of a node, until a leader has decided all of its requests, or leads no more
_RELEASES_S = 1.0  # until releases that a leader has decided have arrived

_HELD_S = 10.0

# The number of a claim begins with bits of its process's incarnation: a node with a data directory may be restarted.
_LIFE, _NUMBER_BITS = (1 << 31) - 1, 32

MAX_CLAIMS = 1 << 16
"""The most claims of other nodes whose outcome is not known here yet."""


async def held_columns(router: Router, node: bytes, partition: str) -> tuple[list[bytes], int]:
    """The encoded references whose columns of a node the partition needs, and the number of the last entry of this
    node's outbox as of the first answer. Later entries of the outbox name the references that the partition has
    released meanwhile. Raises as `Router.ask`."""
    refs: list[bytes] = []
    last, after, pieces = None, -1, 0
    while True:
        asked = r.encode_request(r.ListHeldColumns(node=node, after=after, pieces=pieces))
        found = r.decode_result(await router.ask(partition, asked, Deadline.after(_HELD_S)))
        assert isinstance(found, r.HeldRows), f"{type(found)} is no answer to this"
        refs += found.refs
        last = found.last if last is None else last
        if found.next < 0:
            return refs, last
        after, pieces = found.next, found.pieces


class RetainedClaim:
    """Columns that are retained for a holder. The claim ends with `taken`, after which the holder releases the columns
    itself, or with `release`."""

    def __init__(self, holders: ColumnHolders, need: Need, nodes: Sequence[bytes], number: int) -> None:
        self.number = number
        self._holders = holders
        self._need: Need | None = need
        self._nodes = nodes

    def taken(self) -> None:
        """End the claim: the holder has taken the columns, and releases them itself later."""
        self._end(taken=True)

    def release(self) -> None:
        """Release the columns: the holder did not take them. Idempotent, and without effect after `taken`."""
        self._end(taken=False)

    def _end(self, *, taken: bool) -> None:
        need, self._need = self._need, None
        if need is not None and not taken:
            self._holders.retained.release(need)
        self._holders.tell(self._nodes, self.number, taken=taken)
        self._nodes = ()


class ColumnHolders:
    """The claims that this node makes, and the claims of other nodes to columns of this node. `keep`:
    `DurableColumns.keep`; None without a data directory."""

    def __init__(
        self,
        me: bytes,
        retained: RetainedShards,
        members: Membership,
        peers: Peers,
        router: Router,
        life: int,
        keep: Keep | None = None,
    ) -> None:
        """`life`: the incarnation of this process."""
        self.retained = retained
        self._router = router
        self._keep = keep
        self._me = me
        self._members = members
        self._peers = peers
        self._numbers = itertools.count((life & _LIFE) << _NUMBER_BITS)
        self._background = BackgroundTasks()
        self._claimed: dict[tuple[bytes, int], list[Need]] = {}
        self._ending: set[tuple[bytes, int]] = set()  # claims whose process seems to have ended

    # of this node

    async def claim(
        self, holder: str, ref: BatchRef, copies: Iterable[bytes] = (), until: Deadline | None = None, *, rows: int = 0
    ) -> RetainedClaim:
        """Retain the columns of a reference for a holder, on all nodes that store them and on the nodes with `copies`.
        `rows`: number of new rows that have the columns. `until`: the deadline to wait for a durable holder that has
        not reported its needs since this node's restart. Raises Freed, Corrupt, LimitExceeded, OwnerDied,
        PeerUnavailable, and for a durable holder Backpressure, Misuse, DirectoryUnusable. After an error nothing is
        retained."""
        nodes = [*dict.fromkeys((*(node for node, _ in ref.shards()), *copies))]
        need = Need(holder, ref, (), rows)
        if self._me in nodes:  # else the holder will not release a replica that happens to be here
            nodes.remove(self._me)
            need = self.retained.retain(holder, ref, rows)
        claim = RetainedClaim(self, need, nodes, next(self._numbers))
        try:
            if is_durable(holder):
                await self._persist(need, until)
            encoded = [ref.encode()] if nodes else []
            for node in nodes:
                asked = pm.RetainColumns(self._peers.next_id(), self._me, claim.number, holder, encoded)
                await self._peers.request(self._member(node), asked, Done, _ASK_S)
        except BaseException:
            claim.release()
            raise
        return claim

    async def _persist(self, need: Need, until: Deadline | None = None) -> None:
        if self._keep is None:
            raise Misuse(
                "this node has no data directory: start it with --data-dir DIR to write to durable streams and tables"
            )
        await self._keep(need.holder, need.shards, until or Deadline.after(_KEEP_S))

    def _member(self, node: bytes) -> Member:
        member = self._members.members.get(node)
        if member is None:
            raise OwnerDied(f"node {node.hex()} has died, or is cut off: put this again", node=node.hex())
        return member

    def tell(self, nodes: Iterable[bytes], number: int, *, taken: bool) -> None:
        """Tell other nodes the outcome of a claim."""
        for node in nodes:
            self._background.spawn(self._tell(node, number, taken))

    async def _tell(self, node: bytes, number: int, taken: bool) -> None:
        """Repeat the message until the node answers or is gone."""
        pause_s = _AGAIN_S[0]
        while not self._members.gone(node.hex()):
            member = self._members.members.get(node)
            with suppress(DataplaneError):
                if member is not None:
                    said = pm.ReleaseColumns(self._peers.next_id(), self._me, number, taken)
                    await self._peers.request(member, said, Done, _ASK_S)
                    return
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _AGAIN_S[1])

    # of others

    def retain(self, request: pm.RetainColumns) -> Awaitable[None] | None:
        """Retain columns that another node claims, at once, so that a later release finds the claim. For a durable
        partition, returns an awaitable that ends when the columns are on disk. It raises Backpressure, Misuse.

        Raises Freed, Corrupt, LimitExceeded; PeerUnavailable if that node is not a member yet, since this node would
        not notice when it ends."""
        if self._members.away(request.node.hex()):
            raise PeerUnavailable(f"node {request.node.hex()} is no member here, yet")
        if len(self._claimed) >= MAX_CLAIMS:
            what = "claims of other nodes"
            raise LimitExceeded(f"{MAX_CLAIMS} {what}", what=what, asked=MAX_CLAIMS + 1, limit=MAX_CLAIMS)
        needs = self._claimed.setdefault((request.node, request.number), [])
        refs = [BatchRef.decode(encoded) for encoded in request.refs]
        needs.extend(self.retained.retain(request.holder, ref) for ref in refs)
        return self._all_persisted([*needs]) if is_durable(request.holder) else None

    async def _all_persisted(self, needs: Sequence[Need]) -> None:
        for need in needs:
            await self._persist(need)

    def release(self, request: pm.ReleaseColumns) -> None:
        """End the claim of another node: release its columns unless they were taken."""
        for need in self._claimed.pop((request.node, request.number), ()):
            if not request.taken:
                self.retained.release(need)

    def sweep(self) -> None:
        """End the claims of processes that have ended, in the background."""
        ended = {key for key in self._claimed if self._has_ended(*key)} - self._ending
        if ended:
            self._ending |= ended
            self._background.spawn(self._end(ended))

    async def _end(self, claims: set[tuple[bytes, int]]) -> None:
        await asyncio.sleep(_ENDED_S)
        self._ending -= claims
        needs: defaultdict[str, list[Need]] = defaultdict(list)
        for key in claims:
            if self._has_ended(*key):  # else the claim came before the news of its process
                for need in self._claimed.pop(key, ()):
                    needs[need.holder].append(need)
        await asyncio.gather(*(self._release_untaken(holder, some) for holder, some in needs.items()))

    def _has_ended(self, node: bytes, number: int) -> bool:
        """Whether the process of the node that made the claim with this number has ended."""
        member = self._members.members.get(node)
        if member is None:
            return self._members.gone(node.hex())
        return number >> _NUMBER_BITS != member.life & _LIFE

    async def _release_untaken(self, holder: str, needs: Sequence[Need]) -> None:
        """Release those of these needs whose columns the holder has not taken. Needs of a shard of which it has other
        columns stay, until it releases these or no longer exists."""
        while holder in self.retained.holders:
            with suppress(DataplaneError):  # it has no leader now
                refs, last = await held_columns(self._router, self._me, holder)
                await asyncio.sleep(_RELEASES_S)
                if self.retained.executed(holder) >= last:
                    taken = {shard for ref in refs for shard in BatchRef.decode(ref).shards()}
                    for need in needs:
                        if taken.isdisjoint(need.shards):
                            self.retained.release(need)
                    return
            await asyncio.sleep(_AGAIN_S[1])

    async def aclose(self) -> None:
        await self._background.aclose()
