"""Members of tasks whose replicas are on several hosts: one node, the home of the member, gives all of them the same.

It takes rows from the streams' homes in its own name, as one client, and each replica is handed what it took.

What always holds: each replica of a member is given each delivery once, in the same order; the rows are acked when all
replicas have acked, and given back when the lease ends before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from dataplane.clock import Clock, Deadline
from dataplane.errors import Misuse
from dataplane.node.spread.gathering import Gathering
from dataplane.node.spread.looking import Looking
from dataplane.node.spread.merging import Told, merged
from dataplane.node.spread.reach import Reach
from dataplane.node.spread.wholes import Whole
from dataplane.node.streams.delivering import not_ready
from dataplane.stream.lease import Grant, Leases, Who
from dataplane.wire import messages as m

_LONGER = 4  # times a lease, that the rows are taken for: when it ends is decided here


@dataclass(slots=True, eq=False)
class _Shared:
    """A stream's members that have their home here."""

    leases: Leases = field(default_factory=Leases)
    told: dict[int, Sequence[Told]] = field(default_factory=dict)
    turns: WeakValueDictionary[tuple[int, str], asyncio.Lock] = field(default_factory=WeakValueDictionary)
    timer: asyncio.TimerHandle | None = None


class Sharing:
    """The members that have their home on one node."""

    def __init__(self, reach: Callable[[], Reach], clock: Clock) -> None:
        """`reach()` makes the node's own way to all homes."""
        self._make = reach
        self._clock = clock
        self._reach: Reach | None = None
        self._looking: Looking | None = None
        self._shared: dict[bytes, _Shared] = {}

    def home(self, whole: Whole, task: str, member: str) -> bytes:
        """The node that gives to this member."""
        return self._own.wholes.placement.home(whole.name, f"{task}\0{member}")

    @property
    def _own(self) -> Reach:
        if self._reach is None:
            self._reach = self._make()
        return self._reach

    @property
    def _looks(self) -> Looking:
        if self._looking is None:
            self._looking = Looking(self._own)
        return self._looking

    async def look(self, client: Hashable, request: m.Look, whole: Whole, deadline: Deadline) -> m.Shown:
        """As `Looking.look`, for a replica. Raises as that."""
        who = Who(client, request.member, request.replica, request.replicas)
        return await self._looks.look(request, whole, deadline, lambda: self._waiting(whole, request, who))

    async def consume(self, client: Hashable, request: m.Consume, whole: Whole, deadline: Deadline) -> m.Delivered:
        """What this replica is to be given next. Raises NotReady, Closed, Misuse."""
        shared = self._shared.setdefault(whole.token, _Shared())
        task = whole.settings.task(request.task)
        who = Who(client, request.member, request.replica, request.replicas)
        turn = shared.turns.setdefault((task, request.member), asyncio.Lock())
        try:
            async with asyncio.timeout(deadline.remaining_s):
                await turn.acquire()
        except TimeoutError:
            raise not_ready(whole.name, request.task, deadline) from None
        try:
            grant = self._waiting(whole, request, who)
            if grant is None:
                grant = await self._take(shared, task, request, whole, who, deadline)
            shared.leases.hand(grant, who, self._clock())
        finally:
            turn.release()
        self._schedule(whole, shared)
        return merged(request.id, whole.token, shared.told[grant.number], grant.number, request.replica)

    def _waiting(self, whole: Whole, request: m.Consume | m.Look, who: Who) -> Grant | None:
        """What other replicas were granted, and this one has to be. Raises Misuse where it asks for other columns."""
        shared = self._shared.get(whole.token)
        grant = None if shared is None else shared.leases.waiting(whole.settings.task(request.task), who)
        if grant is not None and grant.columns != tuple(request.columns):
            raise Misuse(
                f"the replicas of member {who.member!r} are given the same: others asked for the columns"
                f" {', '.join(grant.columns)}, and this one for {', '.join(request.columns)}"
            )
        return grant

    async def _take(
        self, shared: _Shared, task: int, request: m.Consume, whole: Whole, who: Who, deadline: Deadline
    ) -> Grant:
        alone = msgspec.structs.replace(request, member="", replica=None, replicas=0, lease_s=request.lease_s * _LONGER)
        told = await Gathering(self._own, self._looks).compose(alone, whole, deadline)
        rows = np.empty(0, np.int64)
        grant = shared.leases.give(task, rows, tuple(request.columns), who, request.lease_s, self._clock())
        shared.told[grant.number] = told
        return grant

    async def ack(self, client: Hashable, request: m.Ack, whole: Whole) -> None:
        """A replica is done with what it was given, or gives it back. Raises LeaseExpired."""
        shared = self._shared.setdefault(whole.token, _Shared())
        if request.done:
            ended = shared.leases.ack(request.grant, client, request.replica)
        else:
            grant = shared.leases.find(request.grant, client, request.replica)
            if request.seen:
                shared.leases.end(grant)
            ended = grant if request.seen or shared.leases.let_go(grant, request.replica) else None
        if ended is not None:
            await self._settle(shared, ended, done=request.done, seen=request.seen)

    async def renew(self, client: Hashable, request: m.Renew, whole: Whole) -> None:
        """The lease begins again. Raises LeaseExpired."""
        shared = self._shared.setdefault(whole.token, _Shared())
        shared.leases.renew(request.grant, client, request.replica, self._clock())
        self._schedule(whole, shared)
        await Gathering.each(
            self._own, shared.told[request.grant], lambda part, number: m.Renew(0, part.token, number, None)
        )

    async def _settle(self, shared: _Shared, grant: Grant, *, done: bool, seen: bool = True) -> None:
        told = shared.told.pop(grant.number, ())
        await Gathering.settle(self._own, told, done=done, seen=seen)

    def _schedule(self, whole: Whole, shared: _Shared) -> None:
        if shared.timer is not None:
            shared.timer.cancel()
            shared.timer = None
        due = shared.leases.next_end()
        if due is not None:
            left = max(0.0, due - self._clock())
            shared.timer = asyncio.get_running_loop().call_later(left, self._tick, whole, shared)

    def _tick(self, whole: Whole, shared: _Shared) -> None:
        shared.timer = None
        for grant in shared.leases.ended(self._clock()):
            self._own.run_soon(self._settle(shared, grant, done=grant.done_as_far_as_known))
        self._schedule(whole, shared)

    def begin_anew(self) -> None:
        """What members were given is over."""
        for token in list(self._shared):
            self._forget(token)

    def dropped(self, whole: Whole) -> None:
        """The stream was dropped."""
        self._forget(whole.token)

    def _forget(self, token: bytes) -> None:
        shared = self._shared.pop(token, None)
        if shared is not None and shared.timer is not None:
            shared.timer.cancel()

    async def aclose(self) -> None:
        """The node stops."""
        for shared in self._shared.values():
            if shared.timer is not None:
                shared.timer.cancel()
        self._shared.clear()
