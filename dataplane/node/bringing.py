"""Rows and columns that one client brings to a stream over several hosts, split over the homes that they belong to.

An append is split by group, or by key where rows have no group; rows with neither stay on this node. The columns stay
where they are, in this node's store; a home is told what they are.

What always holds: what was brought to a home elsewhere is kept here until that home is done with it (`node.mirrors`);
where a home dies before it has answered, its share goes to the home that takes its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import LeaseExpired, Misuse, PeerUnavailable
from dataplane.node import packed
from dataplane.node.reach import Reach, all_of
from dataplane.node.wholes import Part, Whole
from dataplane.stream.keys import unnamed
from dataplane.wire import messages as m

T = TypeVar("T")

_HOMES = 3  # that one share is offered to, one after the other


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows, by position, that belong to one home, which let them in with this ticket; 0: it has not been asked."""

    part: Part
    rows: packed.Index
    ticket: int = 0


class Bringing:
    """What one client brings."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._wholes = reach.wholes
        self._streams = reach.streams
        self._plans: dict[int, list[_Share] | None] = {}  # None: no limits, so no home was asked
        self._tickets = itertools.count(1)

    # being let in

    async def admit(self, request: m.Admit, whole: Whole, deadline: Deadline) -> m.Reply:
        """Leave of all homes to append. Raises Backpressure, Closed, LimitExceeded."""
        packed.bound("rows of an append", m.MAX_ROWS, request.rows)
        packed.one_a_row("places", request.places, request.rows)
        whole.stream.home.check_open()
        plan: list[_Share] | None = None
        if whole.settings.limited:
            plan = []
            try:
                for share in await self._shares(whole, request.rows, request.places):
                    nbytes = request.nbytes * len(share.rows) // request.rows
                    key, digest = (request.key, request.digest) if not share.rows[0] else ("", b"")
                    asked = m.Admit(
                        0, share.part.token, len(share.rows), nbytes, request.version, key, digest, deadline.remaining_s
                    )
                    admitted = await self._reach.ask(share.part, asked, m.Admitted, deadline)
                    if not admitted.ticket:  # it was made before
                        self._give_back(plan)
                        return m.Admitted(request.id, whole.token, 0)
                    plan.append(_Share(share.part, share.rows, admitted.ticket))
            except BaseException:
                self._give_back(plan)
                raise
        ticket = next(self._tickets)
        self._plans[ticket] = plan
        return m.Admitted(request.id, whole.token, ticket)

    async def _shares(self, whole: Whole, count: int, places: list[str | int]) -> list[_Share]:
        """Rows by home, in the order of the nodes."""
        if not places:
            return [_Share(whole.here, np.arange(count))]
        by_node = self._wholes.homes(whole, places)
        return [_Share(await self._wholes.part(whole, node), by_node[node]) for node in sorted(by_node)]

    def give_back(self, ticket: int) -> None:
        """What was admitted does not come."""
        self._give_back(self._plans.pop(ticket, None) or [])

    def _give_back(self, plan: Sequence[_Share]) -> None:
        for share in plan:
            self._reach.soon(share.part, m.GiveBack(share.part.token, share.ticket))

    @property
    def expected(self) -> bool:
        """Whether something was admitted that has not come."""
        return bool(self._plans)

    def revoke(self) -> None:
        """The client gives no sign of life, or has gone."""
        for ticket in list(self._plans):
            self.give_back(ticket)

    # appending

    async def append(self, request: m.Append, whole: Whole) -> m.Reply:
        """Rows that were admitted come. Raises as `Home.append`, PeerUnavailable, LeaseExpired."""
        if request.ticket not in self._plans:
            raise LeaseExpired("this append was not admitted, or was given up since its process was silent for long")
        plan = self._plans.pop(request.ticket)
        try:
            ref = BatchRef.decode(request.ref)
            for what, values in (("groups", request.groups), ("keys", request.keys)):
                packed.one_a_row(what, values, len(ref))
            packed.numbers("versions", request.versions, len(ref))
            packed.tags(request.tags, len(ref))
            packed.lengths(request.lengths, ref)
            if plan is None:
                plan = await self._shares(whole, len(ref), request.groups or list(request.keys))
            elif sum(len(share.rows) for share in plan) != len(ref):
                raise Misuse(f"an append of {len(ref)} rows, where others were admitted")
        except BaseException:
            self._give_back(plan or [])
            raise
        appended = await all_of([self._append(request, ref, whole, share) for share in plan])
        keys: list[str] = [] if request.keys else [""] * len(ref)
        new = False
        for each in appended:
            for part, rows, reply in each:
                new = new or reply.new
                if keys:
                    for at, key in zip(
                        rows.tolist(), unnamed(part.mark, range(reply.first, reply.first + len(rows))), strict=True
                    ):
                        keys[at] = key
        self._streams.kept(request.staged, ref)
        return m.Appended(request.id, 0, new, keys)

    async def _append(
        self, request: m.Append, ref: BatchRef, whole: Whole, share: _Share
    ) -> list[tuple[Part, packed.Index, m.Appended]]:
        """One home's share; of which part its rows became, and what that answered."""
        for again in range(_HOMES):
            try:
                return [(share.part, share.rows, await self._bring(request, ref, whole, share))]
            except PeerUnavailable:
                if self._wholes.alive(share.part) or again == _HOMES - 1:
                    raise
                places = [(request.groups or request.keys)[at] for at in share.rows.tolist()]
                moved = await self._shares(whole, len(share.rows), list(places))
                if len(moved) > 1:
                    several = [_Share(each.part, share.rows[each.rows]) for each in moved]
                    found = await all_of([self._append(request, ref, whole, each) for each in several])
                    return [each for one in found for each in one]
                share = _Share(moved[0].part, share.rows)
        raise AssertionError("it returns or raises")

    async def _bring(self, request: m.Append, ref: BatchRef, whole: Whole, share: _Share) -> m.Appended:
        rows, part = share.rows, share.part
        mine = ref if len(rows) == len(ref) else ref[rows]
        sub = m.Append(
            id=0,
            stream=part.token,
            ticket=share.ticket,
            staged="",
            ref=mine.encode(),
            keys=_picked(request.keys, rows),
            digest=request.digest,
            groups=_picked(request.groups, rows),
            versions=_of(request.versions, rows),
            tags={name: _picked(values, rows) for name, values in request.tags.items()},
            lengths={name: _of(values, rows) for name, values in request.lengths.items()},
        )
        if part.node == self._wholes.node:
            return await self._reach.ask(part, sub, m.Appended)
        with self._reach.mirrors.bringing(whole, part, mine) as kept:
            reply = await self._reach.ask(part, sub, m.Appended)
            if reply.new:
                kept.append(reply.first, sub)
        return reply

    # extending

    async def extend(self, request: m.Extend, whole: Whole) -> None:
        """More columns for rows. Raises as `Home.extend`, PeerUnavailable."""
        ref, numbers = BatchRef.decode(request.ref), packed.int64("rows", request.rows)
        holds = packed.int64("holds", request.holds)
        packed.one_a_row("holds", holds, len(numbers))
        packed.lengths(request.lengths, ref)
        count = len(request.keys) or len(numbers)
        if count != len(ref):
            raise Misuse(f"{len(ref)} rows of new columns for {count} rows")
        shares = []
        for part, positions, keyed in await self._reach.rows_of(whole, count, request.origins, request.keys):
            rows = keyed if request.keys else numbers[positions]
            under = holds[positions] if len(holds) else holds
            shares.append(
                self._extend(
                    request, whole, part, (ref if len(rows) == count else ref[positions], positions), rows, under
                )
            )
        await all_of(shares)
        self._streams.kept(request.staged, ref)

    async def _extend(
        self,
        request: m.Extend,
        whole: Whole,
        part: Part,
        share: tuple[BatchRef, packed.Index],
        rows: packed.Index,
        holds: packed.Index,
    ) -> None:
        mine, positions = share
        sub = m.Extend(
            id=0,
            stream=part.token,
            staged="",
            ref=mine.encode(),
            rows=rows.tobytes(),
            holds=holds.tobytes(),
            keys=[],
            lengths={name: _of(values, positions) for name, values in request.lengths.items()},
            replace=request.replace,
        )
        if part.node == self._wholes.node:
            await self._reach.ask(part, sub, m.Done)
            return
        with self._reach.mirrors.bringing(whole, part, mine) as kept:
            await self._reach.ask(part, sub, m.Done)
            kept.extend(rows, sub)


def _picked(values: list[T], rows: packed.Index) -> list[T]:
    if not values or len(values) == len(rows):  # all, and in order
        return values
    return [values[at] for at in rows.tolist()]


def _of(values: bytes, rows: packed.Index) -> bytes:
    return values if len(values) == 8 * len(rows) else np.frombuffer(values, np.int64)[rows].tobytes()
