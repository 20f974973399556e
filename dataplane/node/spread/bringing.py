"""Rows and columns that one client brings to a stream over several hosts, split over the homes that they belong to.

An append is split by group, or by key where rows have no group; rows with neither stay on this node. The columns stay
where they are, in this node's store; a home is told what they are.

What always holds: what was brought to a home elsewhere is kept here until that home is done with it
(`node.spread.mirrors`); where a home dies before it has answered, its share goes to the home that takes its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import LeaseExpired, Misuse, PeerUnavailable, ProtocolMismatch
from dataplane.node.spread.limits import LetIn
from dataplane.node.spread.reach import Reach, all_of
from dataplane.node.spread.wholes import Part, Whole
from dataplane.node.streams import packed
from dataplane.stream.keys import unnamed
from dataplane.stream.settings import MAX_TASKS
from dataplane.wire import messages as m

T = TypeVar("T")

_numbers = itertools.count(1)
"""Of tickets: of no two clients the same, nor of one before and after this node has begun anew."""

_NOWHERE = (1 << 50) * MAX_TASKS  # under which nothing is delivered
_HOMES = 3  # that one share is offered to, one after the other


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows, by position, that belong to one home."""

    part: Part
    rows: packed.Index


@dataclass(frozen=True, slots=True)
class _Came:
    """Which rows came to which part, and what that answered."""

    part: Part
    rows: packed.Index
    reply: m.Appended


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Leave to append, by the part whose node keeps the stream's limits; None: there are no limits."""

    whole: Whole
    part: Part | None = None
    number: int = 0
    came: LetIn | None = None


class Bringing:
    """What one client brings."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._wholes = reach.wholes
        self._streams = reach.streams
        self._tickets: dict[int, _Ticket] = {}

    # being let in

    async def admit(self, request: m.Admit, whole: Whole, deadline: Deadline) -> m.Reply:
        """Leave to append, from whoever keeps the limits. Raises Backpressure, Closed, LimitExceeded."""
        packed.bound("rows of an append", m.MAX_ROWS, request.rows)
        if request.rows < 1 or request.nbytes < 0:
            raise ProtocolMismatch(f"an append of {request.rows} rows and {request.nbytes} bytes")
        whole.stream.home.check_open()
        ticket = _Ticket(whole)
        if whole.settings.limited:
            if request.key and await self._known(request, whole):
                return m.Admitted(request.id, whole.token, 0)
            ticket = await self._let_in(request, whole, deadline)
        number = next(_numbers)
        self._tickets[number] = ticket
        return m.Admitted(request.id, whole.token, number)

    async def _let_in(self, request: m.Admit, whole: Whole, deadline: Deadline) -> _Ticket:
        """A ticket of who keeps the limits when it comes: one of who kept them before says nothing."""
        limits = self._reach.limits
        while True:
            keeper = limits.keeper(whole)
            part = await self._wholes.part(whole, keeper[0])
            if part is whole.here:
                number = await limits.admit(self._reach, request, whole, deadline)
            else:
                asked = msgspec.structs.replace(
                    request, id=0, stream=part.whole, key="", timeout_s=deadline.remaining_s
                )
                number = (await self._reach.ask(part, asked, m.Admitted, deadline)).ticket
            if limits.keeper(whole) == keeper:
                return _Ticket(whole, part, number, limits.let_in(whole, keeper, request.rows, request.nbytes))
            self._let_go(whole, part, number, [])

    async def _known(self, request: m.Admit, whole: Whole) -> bool:
        """Whether the very same append was made before."""
        part = await self._wholes.part(whole, self._wholes.placement.home(whole.name, request.place))
        reply = await self._reach.ask(part, m.Where(0, part.token, [request.key], request.digest), m.Placed)
        return bool((packed.numbers("rows", reply.rows, 1) >= 0).all())

    def give_back(self, number: int, brought: Sequence[tuple[bytes, int, int, int]] = ()) -> None:
        """What was admitted does not come, or was brought to these parts."""
        ticket = self._tickets.pop(number, None)
        if ticket is None or ticket.part is None:
            return
        self._let_go(ticket.whole, ticket.part, ticket.number, list(brought))
        if ticket.came is not None:
            self._reach.limits.over(ticket.came)

    def _let_go(self, whole: Whole, part: Part, number: int, brought: list[tuple[bytes, int, int, int]]) -> None:
        if part.node == self._wholes.node:
            self._reach.limits.give_back(whole, number, brought)
        else:
            self._reach.soon(part, m.GiveBack(part.whole, number, brought))

    @property
    def expected(self) -> bool:
        """Whether something was admitted that has not come."""
        return bool(self._tickets)

    def revoke(self) -> None:
        """The client gives no sign of life, or has gone."""
        for number in list(self._tickets):
            self.give_back(number)

    # appending

    async def append(self, request: m.Append, whole: Whole) -> m.Reply:
        """Rows that were admitted come. Raises as `Home.append`, PeerUnavailable, LeaseExpired."""
        if request.ticket not in self._tickets:
            raise LeaseExpired("this append was not admitted, or was given up since its process was silent for long")
        came: list[_Came] = []
        try:
            ref = _checked(request)
            shares = await self._shares(whole, len(ref), request.groups or list(request.keys))
            await all_of([self._append(request, ref, whole, share, came) for share in shares])
        finally:
            brought = [
                (each.part.node, each.reply.changes, len(each.rows), ref.stored_nbytes * len(each.rows) // len(ref))
                for each in came
                if each.reply.new
            ]
            self.give_back(request.ticket, brought)
        again = [each.rows for each in came if not each.reply.new]
        self._streams.kept(request.staged, ref, again)
        keys = [] if request.keys else _made(came, len(ref))
        return m.Appended(request.id, 0, any(each.reply.new for each in came), keys)

    async def _shares(self, whole: Whole, count: int, places: list[str | int]) -> list[_Share]:
        """Rows by home, in the order of the nodes."""
        if not places:
            return [_Share(whole.here, np.arange(count))]
        by_node = self._wholes.homes(whole, places)
        return [_Share(await self._wholes.part(whole, node), by_node[node]) for node in sorted(by_node)]

    async def _append(self, request: m.Append, ref: BatchRef, whole: Whole, share: _Share, came: list[_Came]) -> None:
        """Bring one home's share; to those that take its place, where it dies meanwhile."""
        for again in range(_HOMES):
            try:
                came.append(_Came(share.part, share.rows, await self._bring(request, ref, whole, share)))
                return
            except PeerUnavailable:
                if self._wholes.alive(share.part) or again == _HOMES - 1:
                    raise
            places = [(request.groups or request.keys)[at] for at in share.rows.tolist()]
            moved = await self._shares(whole, len(places), list(places))
            for each in moved[1:]:
                await self._append(request, ref, whole, _Share(each.part, share.rows[each.rows]), came)
            share = _Share(moved[0].part, share.rows[moved[0].rows])

    async def _bring(self, request: m.Append, ref: BatchRef, whole: Whole, share: _Share) -> m.Appended:
        rows, part = share.rows, share.part
        mine = ref if len(rows) == len(ref) else ref[rows]
        sub = m.Append(
            id=0,
            stream=part.token,
            ticket=m.LET_IN,
            staged="",
            ref=mine.encode(),
            keys=_picked(request.keys, rows),
            digest=request.digest,
            groups=_picked(request.groups, rows),
            versions=_of(request.versions, rows),
            tags={name: _picked(values, rows) for name, values in request.tags.items()},
            lengths={name: _of(values, rows) for name, values in request.lengths.items()},
            spares=request.spares,
        )
        async with self._reach.holds.bringing(whole, part, mine, request.spares) as others:
            if part.node == self._wholes.node:
                reply = await self._reach.ask(part, sub, m.Appended)
            else:
                with self._reach.mirrors.bringing(whole, part, mine) as kept:
                    reply = await self._reach.ask(part, sub, m.Appended)
                    if reply.new:
                        kept.append(reply.first, sub)
            if reply.new:
                others.done(sub, reply.first)
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
            spares=request.spares,
        )
        async with self._reach.holds.bringing(whole, part, mine, request.spares) as others:
            if part.node == self._wholes.node:
                reply: m.Message = await self._reach.ask(part, sub, m.Message)
            else:
                with self._reach.mirrors.bringing(whole, part, mine) as kept:
                    reply = await self._reach.ask(part, sub, m.Message)
                    if isinstance(reply, m.Done):
                        kept.extend(rows, sub)
            if isinstance(reply, m.Done):
                others.done(sub)
        if isinstance(reply, m.Elsewhere):
            await self._follow(sub, whole, mine, reply)

    async def _follow(self, sub: m.Extend, whole: Whole, mine: BatchRef, where: m.Elsewhere) -> None:
        """The rows have other homes now. Under what they were delivered says nothing there, but for which task."""
        numbers, holds = packed.int64("rows", where.rows), packed.int64("holds", sub.holds)
        holds = np.where(holds > 0, _NOWHERE + holds % MAX_TASKS, holds)
        found = await self._reach.rows_of(whole, len(numbers), where.origins, [])
        await all_of(
            [
                self._extend(sub, whole, part, (mine[at], at), numbers[at], holds[at] if len(holds) else holds)
                for part, at, _ in found
            ]
        )


def _checked(request: m.Append) -> BatchRef:
    """What an append brings, of which everything is there for each row. Raises ProtocolMismatch, LimitExceeded."""
    ref = BatchRef.decode(request.ref)
    if not len(ref):
        raise Misuse("an append has at least one row")
    for what, values in (("groups", request.groups), ("keys", request.keys)):
        packed.one_a_row(what, values, len(ref))
    packed.numbers("versions", request.versions, len(ref))
    packed.tags(request.tags, len(ref))
    packed.lengths(request.lengths, ref)
    return ref


def _made(came: Sequence[_Came], count: int) -> list[str]:
    """The keys of rows that were appended without."""
    keys = [""] * count
    for each in came:
        numbers = range(each.reply.first, each.reply.first + len(each.rows))
        for at, key in zip(each.rows.tolist(), unnamed(each.part.mark, numbers), strict=True):
            keys[at] = key
    return keys


def _picked(values: list[T], rows: packed.Index) -> list[T]:
    if not values or len(values) == len(rows):  # all, and in order
        return values
    return [values[at] for at in rows.tolist()]


def _of(values: bytes, rows: packed.Index) -> bytes:
    return values if len(values) == 8 * len(rows) else np.frombuffer(values, np.int64)[rows].tobytes()
