"""Leases: the client that holds each leased row of a task, and the end of its lease.

A grant is the rows of one delivery, with one lease, held by a client (`RowLease`). Ranks that must see the same rows
name the same member and different replicas. Each replica is given the grants of the member in order, each once. A
replica that returns as another client was restarted, and is given its unacked grants again.

A grant ends when it is acked, nacked or not renewed in time, or when its holder ends. A grant of replicas is acked once
the announced number of replicas has acked. Without an announced number, at least two replicas must ack, and all known
replicas of the member. If the lease of a grant expires after all its holders have acked, the grant is acked too. It
does not end with a holder's process, which may be restarting.

Invariants: a row is in one grant of its task at a time; a grant ends once, and later requests about it raise
`LeaseExpired`, except for a repeated ack whose answer was lost. Of the members without grants, only the latest
`_MEMBERS` are remembered. No clock is read here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from dataplane.errors import LeaseExpired, Misuse
from dataplane.stream.page import Index
from dataplane.stream.settings import MAX_TASKS

_SLACK = 64  # entries of ended leases that may stay in the heap
_REPLICAS = 1 << 20  # the most replicas of a member
_SHOWN = 64  # the announced replicas of a grant that statistics look at
_ACKS = 4096  # the last acks that are remembered
_LOST = 1 << 14  # the last grants without an ack that are remembered
_MEMBERS = 1024  # the last members whose replicas are remembered, beside those that hold grants
_TRIED = 8  # members that are looked at to find one to forget


@dataclass(frozen=True, slots=True)
class Who:
    """The requester: a client and, for ranks, its member and replica. `replicas`: their number, 0 if unknown. `after`:
    the last grant that the replica has received, 0 for none; None: it has received all its grants. `loop`: the number
    of the client's loop that receives the grants and settles them in order; 0: none."""

    client: Hashable
    member: str = ""
    replica: int | None = None
    replicas: int = 0
    after: int | None = None
    loop: int = 0

    def __post_init__(self) -> None:
        if not self.member and self.replica is not None:
            raise Misuse("replica= is one of the processes of a member: name it with member=")
        if self.replicas < 0 or not 0 <= (self.replica or 0) < (self.replicas or _REPLICAS):
            of = f" of {self.replicas}" if self.replicas else ""
            raise Misuse(f"replica is 0 to replicas - 1, not {self.replica}{of}")


@dataclass(slots=True, eq=False)
class RowLease:
    """Rows of a task, held until `expires`, in seconds of the clock of the stream."""

    number: int
    task: int
    rows: Index
    columns: tuple[str, ...]
    who: Who
    lease_s: float
    expires: float
    held_by: dict[int | None, Hashable] = field(default_factory=dict)
    """By replica, the client to which the grant was given."""
    acked: set[int | None] = field(default_factory=set)
    unseen: bool = False
    """Whether the grant was fetched ahead, and its loop has not settled an earlier grant yet."""

    @property
    def shared(self) -> bool:
        return self.who.replica is not None

    @property
    def hold(self) -> int:
        return self.number * MAX_TASKS + self.task

    def done(self, replicas: set[int]) -> bool:
        """Whether all replicas that must ack have acked. `replicas`: the known replicas of the member."""
        if not self.shared:
            return bool(self.acked)
        if self.who.replicas:
            return len(self.acked) == self.who.replicas
        return len(self.acked) > 1 and self.acked >= replicas

    @property
    def done_as_far_as_known(self) -> bool:
        """Whether a grant whose lease has expired counts as acked. If the number of replicas is announced, all of them
        must have acked. Otherwise each replica with the grant must have acked, and at least one."""
        if self.who.replicas:
            return len(self.acked) == self.who.replicas
        return bool(self.acked) and self.acked >= self.held_by.keys()


class Leases:
    """The grants of all tasks of a stream."""

    def __init__(self, first: int = 1) -> None:
        """`first`: the number of the first grant."""
        self._grants: dict[int, RowLease] = {}
        self._logs: dict[tuple[int, str], list[RowLease]] = {}
        self._expiring: list[tuple[float, int]] = []
        self._numbers = itertools.count(first)
        self._replicas: dict[tuple[int, str], set[int]] = {}
        self._acks: dict[tuple[int, Hashable, int | None], None] = {}
        self._lost: dict[int, None] = {}
        self._loops: dict[tuple[Hashable, int], list[RowLease]] = {}

    def __len__(self) -> int:
        return len(self._grants)

    def __iter__(self) -> Iterator[RowLease]:
        return iter(list(self._grants.values()))

    def waiting(self, task: int, who: Who) -> RowLease | None:
        """The member's first grant that this replica has not received, has given back unseen, or had not acked when it
        was restarted."""
        if who.replica is None:
            return None
        for grant in self._logs.get((task, who.member), ()):
            handed = grant.held_by.get(who.replica) == who.client
            received = handed and (who.after is None or grant.number <= who.after)
            if who.replica not in grant.acked and not received:
                return grant
        return None

    def give(self, task: int, rows: Index, columns: tuple[str, ...], who: Who, lease_s: float, now: float) -> RowLease:
        """A new grant of these rows, which are in no other grant of the task."""
        grant = RowLease(next(self._numbers), task, rows, columns, who, lease_s, now + lease_s)
        self._grants[grant.number] = grant
        heapq.heappush(self._expiring, (grant.expires, grant.number))
        if grant.shared:
            self._logs.setdefault((task, who.member), []).append(grant)
        elif who.loop:
            fetched = self._loops.setdefault((who.client, who.loop), [])
            grant.unseen = bool(fetched)
            fetched.append(grant)
        return grant

    def hand(self, grant: RowLease, who: Who, now: float) -> None:
        """Record that this client and replica hold the grant."""
        grant.held_by[who.replica] = who.client
        if who.replica is not None:
            key = (grant.task, who.member)
            replicas = self._replicas.pop(key, set())
            replicas.add(who.replica)
            self._replicas[key] = replicas  # moved to the end
            self._forget_members()
        grant.expires = max(grant.expires, now + grant.lease_s)

    def _forget_members(self) -> None:
        """Forget members without grants, first those that have received none for the longest time."""
        for _ in range(_TRIED):
            if len(self._replicas) <= _MEMBERS:
                return
            key = next(iter(self._replicas))
            replicas = self._replicas.pop(key)
            if key in self._logs:
                self._replicas[key] = replicas

    def live(self, number: int) -> RowLease | None:
        """The grant with this number; None if it has ended, or never began."""
        return self._grants.get(number)

    def ended_unacked(self, number: int) -> bool:
        """Whether the grant is remembered to have ended without an ack."""
        return number in self._lost

    def holding(self, rows: Index) -> set[int]:
        """The numbers of the grants that have one of these rows."""
        return {number for number, grant in self._grants.items() if np.isin(grant.rows, rows).any()}

    def find(self, number: int, client: Hashable, replica: int | None) -> RowLease:
        """The grant of this number. Raises LeaseExpired if it has ended, or this replica of it was not given to this
        client or has been given back."""
        grant = self._grants.get(number)
        if grant is None or grant.held_by.get(replica) != client:
            raise LeaseExpired(
                "these rows are not leased to this delivery any more: the lease ended, they were given back, or they"
                " were lost with their host (stream.lost() names those); what was computed from them does not count",
                lease_s=0.0 if grant is None else grant.lease_s,
            )
        return grant

    def to_ack(self, grant: RowLease) -> dict[int | None, Hashable]:
        """For each replica that has not acked the grant, the client to which it was given, or None. Of the announced
        replicas, only the first `_SHOWN`."""
        replicas: set[int | None] = {*range(min(grant.who.replicas, _SHOWN)), *grant.held_by}
        if grant.shared:
            replicas |= self._replicas.get((grant.task, grant.who.member), set())
        return {replica: grant.held_by.get(replica) for replica in replicas - grant.acked}

    def renew(self, number: int, client: Hashable, replica: int | None, now: float) -> None:
        """Let the lease end `lease_s` seconds from now. Raises LeaseExpired if the grant has ended or is not this
        holder's."""
        grant = self.find(number, client, replica)
        grant.expires = now + grant.lease_s
        self._reach(grant)

    def ack(self, number: int, client: Hashable, replica: int | None) -> RowLease | None:
        """Record the ack of one holder. Returns the grant if the ack has ended it; None if others have to ack too, or
        this holder has acked before. Raises LeaseExpired if the grant has ended or is not this holder's."""
        if (number, client, replica) in self._acks:
            return None
        grant = self.find(number, client, replica)
        grant.acked.add(replica)
        self._acks[number, client, replica] = None
        if len(self._acks) > _ACKS:
            del self._acks[next(iter(self._acks))]
        if not grant.done(self._replicas.get((grant.task, grant.who.member), set())):
            return None
        self.settle(grant, done=True)
        return grant

    def settle(self, grant: RowLease, *, done: bool = False) -> None:
        """End the grant at the request of its holder, whose loop goes on to its next grant."""
        self.end(grant, done=done)
        self._reach(grant)

    def _reach(self, grant: RowLease) -> None:
        """Note that the loop of this grant has reached the first grant that it has not settled."""
        for first in self._loops.get((grant.who.client, grant.who.loop), ())[:1]:
            first.unseen = False

    def let_go(self, grant: RowLease, replica: int | None) -> bool:
        """Give back a grant whose rows one holder has not seen. Returns whether this has ended the grant. A grant of
        replicas does not end; this replica is given it again at its next request."""
        if not grant.shared:
            self.settle(grant)
            return True
        grant.held_by.pop(replica, None)
        return False

    def end(self, grant: RowLease, *, done: bool = False) -> None:
        """End a grant that has not ended yet. `done`: its rows were acked."""
        del self._grants[grant.number]
        if not done:
            self._lost[grant.number] = None
            if len(self._lost) > _LOST:
                del self._lost[next(iter(self._lost))]
        if len(self._expiring) > 2 * len(self._grants) + _SLACK:  # most entries are of ended grants
            self._expiring = [(g.expires, g.number) for g in self._grants.values()]
            heapq.heapify(self._expiring)
        if grant.shared:
            key = (grant.task, grant.who.member)
            self._logs[key].remove(grant)
            if not self._logs[key]:
                del self._logs[key]
        elif grant.who.loop:
            loop = grant.who.client, grant.who.loop
            self._loops[loop].remove(grant)
            if not self._loops[loop]:
                del self._loops[loop]

    def next_end(self) -> float | None:
        """The earliest time at which a lease may expire; None if there is none."""
        while self._expiring:
            at, number = self._expiring[0]
            grant = self._grants.get(number)
            if grant is not None and grant.expires <= at:
                return at
            heapq.heappop(self._expiring)
            if grant is not None:
                heapq.heappush(self._expiring, (grant.expires, number))
        return None

    def ended(self, now: float) -> list[RowLease]:
        """End and return the grants whose leases have expired."""
        over = []
        while (at := self.next_end()) is not None and at <= now:
            grant = self._grants[heapq.heappop(self._expiring)[1]]
            self.end(grant, done=grant.done_as_far_as_known)
            over.append(grant)
            if grant.shared:  # forget replicas that have not asked for it: they may have gone
                self._replicas.get((grant.task, grant.who.member), set()).intersection_update(grant.held_by)
        return over

    def left(self, client: Hashable) -> list[RowLease]:
        """End and return the grants of a client that has gone, except those of replicas."""
        mine = [g for g in self._grants.values() if not g.shared and client in g.held_by.values()]
        for grant in mine:
            self.end(grant)
        return mine
