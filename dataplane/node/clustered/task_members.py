"""Task members whose replicas are on several hosts: one node takes rows for a member, and gives each replica the same.

That node is chosen by hash among those that the stream was made with, so one that joins moves no member. It
takes rows in its own name, for longer than the lease that replicas are given: when that ends is decided here. What
members were given is volatile, as leases are: if their node dies, their rows are delivered again.

What always holds: each replica of a member is given each delivery once, in the same order, also if it is asked for
twice because an answer was lost; the rows are acked when all replicas have acked, and given back when the lease ends
before.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from dataplane.clock import Clock, Deadline
from dataplane.cluster.placement import Placement
from dataplane.errors import Closed, DataplaneError, LeaseExpired, Misuse, OutcomeUnknown
from dataplane.node.clustered.acks import Acks
from dataplane.node.clustered.asking import ended
from dataplane.node.clustered.candidates import CandidateRows
from dataplane.node.clustered.gather import Gather, Turns
from dataplane.node.clustered.grants import Grants, renew, settle
from dataplane.node.clustered.merge import merged, reordered
from dataplane.node.clustered.session import Session
from dataplane.node.clustered.streams import Stream
from dataplane.node.partitions.table import Table
from dataplane.node.streams.delivering import not_ready
from dataplane.stream.lease import Grant, Leases, Who
from dataplane.wire import messages as m

_LONGER = 4  # times a lease, that the rows are taken for
_REMEMBERED = 4096  # answers, by replica


def member_node(table: Table, task: str, member: str) -> str:
    """The node that gives rows to this member. Raises Closed where no partition is open."""
    open_ = [each for each in table.partitions if each.open]
    nodes = {each.node for each in open_ if each.number < table.first} or {each.node for each in open_}
    if not nodes:
        raise Closed(f"no partition of stream {table.stream!r} is open")
    return Placement(node.encode() for node in nodes).winner(table.stream, f"{task}\0{member}").decode()


@dataclass(slots=True, eq=False)
class _Delivery:
    """What a member was given: as replicas are told, and the partitions' grants."""

    reply: m.Delivered
    grants: Grants


@dataclass(slots=True, eq=False)
class _Members:
    """The members of a stream that this node gives rows to."""

    stream: Stream
    leases: Leases = field(default_factory=lambda: Leases(secrets.randbits(40) << 20 | 1))  # of no earlier process
    deliveries: dict[int, _Delivery] = field(default_factory=dict)
    over: dict[int, None] = field(default_factory=dict)
    """Deliveries that all replicas have acked, and whose rows are not known to be."""
    failed: dict[int, None] = field(default_factory=dict)
    """Deliveries that all replicas have acked, and whose rows go to others."""
    turns: Turns = field(default_factory=Turns)
    given: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the next delivery."""
    timer: asyncio.TimerHandle | None = None


class TaskMembers:
    """The members that this node gives rows to."""

    def __init__(self, session: Callable[[], Session], turns: Turns, clock: Clock) -> None:
        """`session()` makes the node's own."""
        self._make = session
        self._turns = turns
        self._clock = clock
        self._session: Session | None = None
        self._members: dict[bytes, _Members] = {}
        self._answered: OrderedDict[tuple[bytes, Who], tuple[int, int]] = OrderedDict()  # -> the request's, the grant's

    def _own(self) -> tuple[Session, CandidateRows]:
        if self._session is None:
            self._session = self._make()
            self._candidates = CandidateRows(self._session)
            self._acks = Acks(self._session)
            self._gather = Gather(self._acks, self._candidates, self._turns)
        return self._session, self._candidates

    def _of(self, stream: Stream) -> _Members:
        members = self._members.get(stream.token)
        if members is None:
            for token in [token for token, each in self._members.items() if each.stream.dropped]:
                self._forget(token)
            members = self._members[stream.token] = _Members(stream)
        return members

    async def look(self, client: str, request: m.Look, stream: Stream, deadline: Deadline) -> m.Shown:
        """As `CandidateRows.look`, for a replica; none, as soon as it is to be given what others were. Raises as
        that."""
        who, members = Who(client, request.member, request.replica, request.replicas), self._of(stream)
        _, candidates = self._own()
        found: list[m.Shown] = []

        async def for_rows() -> None:
            found.append(await candidates.look(request, stream, deadline))

        async def for_others() -> None:
            while self._waiting(members, request, who) is None:
                await members.given.wait()
            found.append(candidates.together(request, {}))

        if self._waiting(members, request, who) is not None:
            return candidates.together(request, {})
        await ended([for_rows(), for_others()], first=True)
        return found[0]

    async def consume(
        self, client: str, number: int, request: m.Consume, stream: Stream, deadline: Deadline
    ) -> m.Delivered:
        """What this replica is to be given next. `number`: the client's, of this request; asked again under the same,
        it is given the same. Raises NotReady, Closed, Misuse."""
        members = self._of(stream)
        task = stream.settings.task(request.task)
        who = Who(client, request.member, request.replica, request.replicas)
        try:
            async with asyncio.timeout(deadline.remaining_s) as waiting, members.turns.turn((task, request.member)):
                waiting.reschedule(None)
                grant = self._again(members, who, number) or self._waiting(members, request, who)
                if grant is None:
                    grant = await self._take(members, task, request, who, deadline)
                members.leases.hand(grant, who, self._clock())
                self._remember(members, who, number, grant)
        except TimeoutError:
            raise not_ready(stream.name, request.task, deadline) from None
        self._schedule(members)
        return msgspec.structs.replace(members.deliveries[grant.number].reply, id=request.id, replica=request.replica)

    def _again(self, members: _Members, who: Who, number: int) -> Grant | None:
        answered = self._answered.get((members.stream.token, who))
        if answered is None or answered[0] != number:
            return None
        return members.leases.live(answered[1])

    def _remember(self, members: _Members, who: Who, number: int, grant: Grant) -> None:
        key = members.stream.token, who
        self._answered[key] = number, grant.number
        self._answered.move_to_end(key)
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)

    def _waiting(self, members: _Members, request: m.Consume | m.Look, who: Who) -> Grant | None:
        """What other replicas were granted, and this one has to be. Raises Misuse where it asks for other columns."""
        grant = members.leases.waiting(members.stream.settings.task(request.task), who)
        if grant is not None and grant.columns != tuple(request.columns):
            raise Misuse(
                f"the replicas of member {who.member!r} are given the same: others asked for the columns"
                f" {', '.join(grant.columns)}, and this one for {', '.join(request.columns)}"
            )
        return grant

    async def _take(self, members: _Members, task: int, request: m.Consume, who: Who, deadline: Deadline) -> Grant:
        _, candidates = self._own()
        alone = msgspec.structs.replace(request, member="", replica=None, replicas=0, lease_s=request.lease_s * _LONGER)
        given = await self._gather.compose(alone, members.stream, deadline)
        rows = np.empty(0, np.int64)
        grant = members.leases.give(task, rows, tuple(request.columns), who, request.lease_s, self._clock())
        try:
            reply = merged(request.id, members.stream.token, given, grant.number, request.replica)
        except BaseException:
            members.leases.end(grant)
            await self._acks.session.give_back(given)
            raise
        order = candidates.order(request, given)
        members.deliveries[grant.number] = _Delivery(
            reply if order is None else reordered(reply, order), Grants.of(given)
        )
        members.given.set()
        members.given = asyncio.Event()
        return grant

    async def ack(self, client: str, request: m.Ack, stream: Stream) -> None:
        """A replica is done with what it was given, or gives it back. Raises LeaseExpired, OutcomeUnknown."""
        members, number = self._of(stream), request.grant
        if number in members.failed:
            raise LeaseExpired("some of these rows go to others; what was computed from them does not count")
        if not request.done:
            grant = members.leases.find(number, client, request.replica)
            if request.seen:
                members.leases.end(grant)
            if request.seen or members.leases.let_go(grant, request.replica):
                await self._settle(members, number, done=False, seen=request.seen)
            return
        ended = members.leases.ack(number, client, request.replica)
        if ended is not None or number in members.over:
            await self._settle(members, number, done=True)

    async def renew(self, client: str, request: m.Renew, stream: Stream) -> None:
        """The lease begins again. Raises LeaseExpired."""
        members = self._of(stream)
        members.leases.renew(request.grant, client, request.replica, self._clock())
        self._schedule(members)
        await renew(self._own()[0], members.deliveries[request.grant].grants)

    async def _settle(self, members: _Members, number: int, *, done: bool, seen: bool = True) -> None:
        self._own()
        delivery = members.deliveries[number]
        _note(members.over, number, lambda oldest: members.deliveries.pop(oldest, None))
        try:
            await settle(self._acks, delivery.grants, done=done, seen=seen)
        except OutcomeUnknown:  # who acks again has it settled
            raise
        except DataplaneError:
            _note(members.failed, number)
            self._end(members, number)
            raise
        self._end(members, number)

    def _end(self, members: _Members, number: int) -> None:
        members.over.pop(number, None)
        members.deliveries.pop(number, None)

    def _schedule(self, members: _Members) -> None:
        if members.timer is not None:
            members.timer.cancel()
            members.timer = None
        due = members.leases.next_end()
        if due is not None:
            left = max(0.0, due - self._clock())
            members.timer = asyncio.get_running_loop().call_later(left, self._tick, members)

    def _tick(self, members: _Members) -> None:
        members.timer = None
        for grant in members.leases.ended(self._clock()):
            self._own()[0].run_soon(self._settle(members, grant.number, done=grant.done_as_far_as_known))
        self._schedule(members)

    def _forget(self, token: bytes) -> None:
        members = self._members.pop(token)
        if members.timer is not None:
            members.timer.cancel()

    async def aclose(self) -> None:
        """The node stops."""
        for token in list(self._members):
            self._forget(token)


def _note(numbers: dict[int, None], number: int, forget: Callable[[int], object] = lambda oldest: None) -> None:
    """Remember a number, and forget the oldest of many."""
    numbers[number] = None
    if len(numbers) > _REMEMBERED:
        oldest = next(iter(numbers))
        del numbers[oldest]
        forget(oldest)
