"""Deliveries of a clustered stream to one client: of one partition where one has enough, else gathered from several.

Every so often all partitions are looked at first, so that rows of other hosts do not wait for ever.

What always holds: a delivery of several grants has a number of its own, and is acked as a whole (`grants`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, LeaseExpired, Misuse, OutcomeUnknown
from dataplane.node.clustered.acks import Acks
from dataplane.node.clustered.candidates import CandidateRows
from dataplane.node.clustered.grants import Grants, renew, settle
from dataplane.node.clustered.merge import Given, delivered, merged, reordered
from dataplane.node.clustered.search import Search, newest_first
from dataplane.node.clustered.streams import Stream
from dataplane.node.streams.delivering import MAX_LEASE_S, not_ready
from dataplane.node.streams.packed import bound
from dataplane.wire import messages as m

IN_A_ROW = 8
"""Deliveries of single partitions before all are looked at."""

_EXPIRED = (
    "these rows were not acknowledged in time, or given back, and go to others; what was computed from them does not"
    " count"
)


class Turns:
    """Clients of one node that ask for the same: one of them at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, tuple[asyncio.Lock, list[int]]] = {}

    @asynccontextmanager
    async def turn(self, of: Hashable) -> AsyncIterator[None]:
        """Cancelled, it takes no turn."""
        lock, waiting = self._turns.setdefault(of, (asyncio.Lock(), [0]))
        waiting[0] += 1
        try:
            async with lock:
                yield
        finally:
            waiting[0] -= 1
            if not waiting[0]:
                del self._turns[of]

    def __len__(self) -> int:
        """How many kinds of requests there are that somebody waits with."""
        return len(self._turns)


class Gather:
    """The deliveries of one client."""

    def __init__(self, acks: Acks, candidates: CandidateRows, turns: Turns) -> None:
        self._session = acks.session
        self._acks = acks
        self._candidates = candidates
        self._turns = turns
        self._numbers = itertools.count(1)
        self._several: dict[int, Grants] = {}
        self._in_a_row = 0

    async def consume(self, request: m.Consume, stream: Stream, deadline: Deadline) -> m.Delivered:
        """Rows of a task, once there are enough. Raises NotReady, Closed, Misuse."""
        given = await self.compose(request, stream, deadline)
        number = next(self._numbers) if len(given) > 1 else 0
        try:
            reply = (
                merged(request.id, stream.token, given, number, request.replica)
                if number
                else delivered(request, given[0])
            )
            order = self._candidates.order(request, given)
            reply = reply if order is None else reordered(reply, order)
        except BaseException:
            await self._session.give_back(given)
            raise
        if number:
            self._several[number] = Grants.of(given)
        return reply

    async def compose(self, request: m.Consume, stream: Stream, deadline: Deadline) -> list[Given]:
        """The grants that make a delivery. Raises as `consume`."""
        _check(request, stream)
        if request.sampler is None:
            return await self._candidates.take(request, stream)
        search = Search(self._session, request, stream)
        by_version = newest_first(request.sampler)
        if self._in_a_row >= IN_A_ROW or by_version:
            self._in_a_row = 0
            given = await search.all_now()
            if given:
                return given
        if request.min_rows == 1:
            given = await search.one(deadline)
        else:
            given = await self._enough(search, request, stream, deadline)
        if not given:
            raise not_ready(stream.name, request.task, deadline)
        if not by_version:
            self._in_a_row += len(given) == 1
        return given

    async def _enough(self, search: Search, request: m.Consume, stream: Stream, deadline: Deadline) -> list[Given]:
        """Rows of one partition or of several, in turn; none where there are too few before the deadline."""
        turn = self._turns.turn((stream.token, search.queue))
        try:
            async with asyncio.timeout(deadline.remaining_s) as waiting, turn:
                waiting.reschedule(None)
                return await search.one(Deadline.after(0.0)) or await search.several(deadline)
        except TimeoutError:
            return []

    # Ack, and what else is asked of a delivery of several grants

    async def ack(self, request: m.Ack) -> None:
        """The client is done with a delivery, or gives it back. Raises LeaseExpired, and then nothing of it counts;
        OutcomeUnknown where it is not known yet whether it does, and then it may be repeated."""
        grants = self._find(request.grant)
        try:
            await settle(self._acks, grants, done=request.done, seen=request.seen)
        except OutcomeUnknown:
            raise
        except DataplaneError:
            self._several.pop(request.grant, None)
            raise
        self._several.pop(request.grant, None)

    async def renew(self, request: m.Renew) -> None:
        """The leases of a delivery begin again. Raises LeaseExpired."""
        await renew(self._session, self._find(request.grant))

    def _find(self, number: int) -> Grants:
        grants = self._several.get(number)
        if grants is None:
            raise LeaseExpired(_EXPIRED)
        return grants

    def leave(self) -> None:
        """The client has gone; partitions hear it from its session, which goes after this."""
        for grants in self._several.values():
            grants.leave()
        self._several.clear()


def _check(request: m.Consume, stream: Stream) -> None:
    """Raises Misuse for what no partition would give, before any is asked."""
    bound("rows of a delivery", m.MAX_ROWS, request.rows)
    stream.settings.task(request.task)
    if not 1 <= request.min_rows <= request.rows:
        raise Misuse(f"a delivery is of one row or more: rows={request.rows}, min_rows={request.min_rows}")
    if not 0 < request.lease_s <= MAX_LEASE_S:
        raise Misuse(f"a lease is of more than 0 and at most {MAX_LEASE_S:.0f} s, not {request.lease_s}")
    if not request.columns or len(set(request.columns)) != len(request.columns):
        raise Misuse("a task asks for at least one column, and each once")
