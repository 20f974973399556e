"""Shards whose bytes came in a message: described, given a place and written in one go, by the node itself.

What always holds: nothing is taken before the bytes have been found to be what their layout says; the budget has given
what is taken; a shard is numbered as it is placed, so one that waited for room is younger than what came meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dataplane.batch.alike import Laid, one
from dataplane.batch.layout import aligned
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, Corrupt, ProtocolMismatch
from dataplane.store.arena import Arena
from dataplane.store.budget import Budget
from dataplane.store.residency import OWN
from dataplane.store.shard import Shard, check_cost
from dataplane.store.shared import MOST, SharedPages


class Carried:
    """Puts such shards into the memory of one store. `number()` gives the next number of a shard."""

    def __init__(self, budget: Budget, arena: Arena, small: SharedPages, number: Callable[[], int]) -> None:
        self._budget = budget
        self._arena = arena
        self._small = small
        self._number = number

    def put_now(self, payload: bytes, layout: bytes, *, scope: str, holder: str) -> Shard | None:
        """The shard in its place, or None where it would have to wait for room. Raises as `put`."""
        shard = _described(payload, layout, scope, holder)
        if _shares(shard) and self._small.fits(shard.size):
            return self._placed(shard, payload, 0)
        return self._placed(shard, payload, shard.room) if self._budget.try_reserve(shard.room) else None

    async def put(self, payload: bytes, layout: bytes, deadline: Deadline, *, scope: str, holder: str) -> Shard:
        """The same, waiting until the deadline. Raises Corrupt or LimitExceeded where the layout is false,
        LimitExceeded where the shard never fits, and Backpressure; nothing is taken then, nor where it is cancelled."""
        shard = _described(payload, layout, scope, holder)
        await self._budget.reserve(shard.room, deadline)
        return self._placed(shard, payload, shard.room)

    def _placed(self, shard: Shard, payload: bytes, given: int) -> Shard:
        """The shard, written into memory, of which the budget has given so many bytes, as many as it can need. Raises
        Backpressure where the system refuses, with the bytes given back."""
        before, shared = self._arena.used, _shares(shard)
        try:
            extent = self._small.take(shard.size) if shared else self._arena.allocate(OWN, shard.room)
        except OSError as error:
            self._budget.release(given)
            raise Backpressure(f"the node can not make a segment: {error.strerror}", needed=shard.room) from None
        self._arena.write(extent, payload.ljust(extent.size, b"\0"))
        spare = given - (self._arena.used - before)
        if spare:
            self._budget.release(spare)
        shard.number, shard.extent, shard.shared = self._number(), extent, shared
        return shard


def laid_out(encoded: bytes, size: int) -> Laid:
    """The layout of a shard of so many bytes. Raises Corrupt, LimitExceeded."""
    try:
        layout = one(encoded, size)
    except ProtocolMismatch as error:  # the message is well formed, so it fails alone
        raise Corrupt(str(error)) from None
    check_cost(layout, encoded, size)
    return layout


def rounded(nbytes: int) -> int:
    """The bytes that a shard of so many has."""
    return max(aligned(nbytes), aligned(1))


def _described(payload: bytes, encoded: bytes, scope: str, holder: str) -> Shard:
    """A shard of these bytes, which are what the layout says, without a number and a place."""
    size = rounded(len(payload))
    layout = laid_out(encoded, size)
    layout.check_contents(np.frombuffer(payload.ljust(size, b"\0"), np.uint8))
    columns = len(layout.outline.columns)
    return Shard(0, size, layout.rows, columns, encoded, holder, scope, 0)


def _shares(shard: Shard) -> bool:
    return shard.size <= MOST
