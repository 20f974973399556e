"""Shards whose bytes came in a message: validated, placed and written at once, by the node itself.

Invariants: no memory is taken before the bytes match their layout; all memory is granted by the budget; a shard gets
its number when it is placed, so a shard that waited for room has a higher number than those that came meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataplane.batch.layout import aligned
from dataplane.batch.layout_check import CheckedLayout, check_layout
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, Corrupt, ProtocolMismatch
from dataplane.store.arena import OWN, Arena
from dataplane.store.budget import Budget
from dataplane.store.shard import Shard, check_cost
from dataplane.store.small_extents import MOST, SmallExtents


class InlinePuts:
    """Puts shards from messages into the memory of one store. `numbers`: the numbers of the next shards."""

    def __init__(self, budget: Budget, arena: Arena, small: SmallExtents, numbers: Iterator[int]) -> None:
        self._budget = budget
        self._arena = arena
        self._small = small
        self._numbers = numbers

    def put_now(self, payload: bytes, layout: bytes, *, scope: str, holder: str) -> Shard | None:
        """The placed shard, or None if it would have to wait for room. Raises as `put`."""
        shard = _described(payload, layout, scope, holder)
        if shard.size <= MOST and self._small.fits(shard.size):
            return self._placed(shard, payload, 0)
        return self._placed(shard, payload, shard.room) if self._budget.try_reserve(shard.room) else None

    async def put(self, payload: bytes, layout: bytes, deadline: Deadline, *, scope: str, holder: str) -> Shard:
        """The placed shard, waiting until the deadline. Raises Corrupt or LimitExceeded for an invalid layout,
        LimitExceeded if the shard never fits, and Backpressure. If it raises or is cancelled, nothing is taken."""
        shard = _described(payload, layout, scope, holder)
        await self._budget.reserve(shard.room, deadline)
        return self._placed(shard, payload, shard.room)

    def _placed(self, shard: Shard, payload: bytes, given: int) -> Shard:
        """Write the shard into memory, of which the budget has granted `given` bytes, the most that it can need. If the
        system refuses, it gives the bytes back and raises Backpressure."""
        before, shared = self._arena.used, shard.size <= MOST
        try:
            extent = self._small.take(shard.size) if shared else self._arena.allocate(OWN, shard.room)
        except OSError as error:
            self._budget.release(given)
            raise Backpressure(f"the node can not make a segment: {error.strerror}", needed=shard.room) from None
        self._arena.write(extent, payload.ljust(extent.size, b"\0"))
        spare = given - (self._arena.used - before)
        if spare:
            self._budget.release(spare)
        shard.number, shard.extent, shard.shared = next(self._numbers), extent, shared
        return shard


def laid_out(encoded: bytes, size: int) -> CheckedLayout:
    """The layout of a shard of so many bytes. Raises Corrupt, LimitExceeded."""
    try:
        layout = check_layout(encoded, size)
    except ProtocolMismatch as error:  # the message is well formed, so it fails alone
        raise Corrupt(str(error)) from None
    check_cost(layout, encoded, size)
    return layout


def rounded(nbytes: int) -> int:
    """The size of the extent of a shard with this many bytes."""
    return max(aligned(nbytes), aligned(1))


def _described(payload: bytes, encoded: bytes, scope: str, holder: str) -> Shard:
    """A shard of these bytes, which match the layout, without a number and a place."""
    size = rounded(len(payload))
    layout = laid_out(encoded, size)
    layout.check_contents(np.frombuffer(payload.ljust(size, b"\0"), np.uint8))
    columns = len(layout.outline.columns)
    return Shard(0, size, layout.rows, columns, encoded, holder, scope, 0)
