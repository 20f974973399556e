"""The places at which a shard of this node can be read: here, or at a host that has read all of it.

If many hosts want one shard, each place serves few readers at a time. The others wait until further hosts have read the
shard, and read it there. The number of places doubles with each round.

Invariants: a reader waits a bounded time; if no read ends for as long as a slow read takes, it is sent to the place
with the fewest readers. A node is named as a place only while it is a member, and not again after a reader found no
copy there. A copy only provides bytes: this node, asked first, decides whether a shard exists and what was freed.

Rejected: all hosts read here at once (the sixth waits as long as six reads take); hosts forward pieces as they arrive
(perhaps faster, but each host of the chain may stall or die in the middle).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection

from dataplane.clock import Deadline

READERS = 1
"""Readers of one shard at one place at a time."""

SHARED = 1 << 20
"""Bytes of the smallest shard whose readers are sent to copies."""

_MOST_SHARDS, _MOST_HOLDERS = 4096, 64  # that are remembered; the oldest are forgotten


class Sources:
    """The places of one node's shards. Used from its event loop."""

    def __init__(self, node: bytes) -> None:
        self._node = node
        self._holders: dict[int, dict[bytes, None]] = {}
        self._readers: Counter[tuple[int, bytes]] = Counter()
        self._changed: dict[int, asyncio.Event] = {}

    async def choose(
        self, shard: int, reader: bytes, avoid: Collection[bytes], patience_s: float, deadline: Deadline
    ) -> bytes:
        """Choose the node at which a reader reads the shard. The read counts until `ended`. Waits until a place has
        few readers; if no read ends for `patience_s`, or at the deadline, returns the place with the fewest."""
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
