"""Leases: which client holds which rows of a task, and until when.

A grant is the rows of one delivery, held by a client. Ranks that must see the same rows name the same member and
different replicas: each replica is given the grants of the member's log in order, each once. A replica that comes back
as another client was restarted, and is given again what it has not acked.

A grant ends when it is acked, nacked or not renewed in time, or when its holder goes. A grant of replicas is acked once
all have acked: as many as were announced or, if that is unknown, at least two and all that the member was ever seen to
have; if its lease runs out after all its holders have acked, it is acked too. It does not end when a holder goes, which
may be restarting.

Invariants: a row is in one grant of its task at a time; a grant ends once, and later requests about it raise
`LeaseExpired`, except for a repeated ack whose answer was lost. Of members that hold nothing the latest `_MEMBERS`
are remembered. No clock is read here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dataplane.errors import LeaseExpired, Misuse

Index = npt.NDArray[np.int64]

_SLACK = 64  # leases that may be remembered for nothing
_REPLICAS = 1 << 20  # of a member
_ACKS = 4096  # acks that are remembered, the last ones
_LOST = 1 << 14  # grants that ended otherwise and are remembered, the last ones
_MEMBERS = 1024  # members whose replicas are remembered, the last ones; those that hold something anyway
_TRIED = 8  # of them, looked at for one to forget


@dataclass(frozen=True, slots=True)
class Who:
    """The requester: a client and, for ranks, its member and replica. `replicas`: how many there are, 0 if unknown.
    `after`: the last grant that the replica has received, 0 for none; None: it received every grant it was given."""

    client: Hashable
    member: str = ""
    replica: int | None = None
    replicas: int = 0
    after: int | None = None

    def __post_init__(self) -> None:
        if not self.member and self.replica is not None:
            raise Misuse("a replica is one of a member; name the member")
        if self.replicas < 0 or not 0 <= (self.replica or 0) < (self.replicas or _REPLICAS):
            raise Misuse(f"there is no replica {self.replica}" + f" of {self.replicas}" * bool(self.replicas))


@dataclass(slots=True, eq=False)
class Grant:
    """Rows of a task, held until `expires`, in seconds of the clock of the stream."""

    number: int
    task: int
    rows: Index
    columns: tuple[str, ...]
    who: Who
    lease_s: float
    expires: float
    held_by: dict[int | None, Hashable] = field(default_factory=dict)
    """The client that each replica was granted this through."""
    acked: set[int | None] = field(default_factory=set)

    @property
    def shared(self) -> bool:
        """Whether replicas share it."""
        return self.who.replica is not None

    def done(self, replicas: set[int]) -> bool:
        """Whether all that have to ack have done so. `replicas`: those that the member has had."""
        if not self.shared:
            return bool(self.acked)
        if self.who.replicas:
            return len(self.acked) == self.who.replicas
        return len(self.acked) > 1 and self.acked >= replicas

    @property
    def done_as_far_as_known(self) -> bool:
        """Whether all announced replicas have acked or, if their number is unknown, all that were seen. Asked when
        the lease ends."""
        if self.who.replicas:
            return len(self.acked) == self.who.replicas
        return bool(self.acked) and self.acked >= self.held_by.keys()


class Leases:
    """The grants of all tasks of a stream."""

    def __init__(self, first: int = 1) -> None:
        """`first`: the number of the first grant."""
        self._grants: dict[int, Grant] = {}
        self._logs: dict[tuple[int, str], list[Grant]] = {}
        self._expiring: list[tuple[float, int]] = []
        self._numbers = itertools.count(first)
        self._replicas: dict[tuple[int, str], set[int]] = {}
        self._acks: dict[tuple[int, Hashable, int | None], None] = {}
        self._lost: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._grants)

    def __iter__(self) -> Iterator[Grant]:
        return iter(list(self._grants.values()))

    def waiting(self, task: int, who: Who) -> Grant | None:
        """The first grant of the member that this replica has not received, or not acked before it was restarted."""
        if who.replica is None:
            return None
        for grant in self._logs.get((task, who.member), ()):
            handed = grant.held_by.get(who.replica) == who.client
            if who.replica not in grant.acked and (grant.number > who.after if who.after is not None else not handed):
                return grant
        return None

    def give(self, task: int, rows: Index, columns: tuple[str, ...], who: Who, lease_s: float, now: float) -> Grant:
        """A new grant of these rows, which are in no other."""
        grant = Grant(next(self._numbers), task, rows, columns, who, lease_s, now + lease_s)
        self._grants[grant.number] = grant
        heapq.heappush(self._expiring, (grant.expires, grant.number))
        if grant.shared:
            self._logs.setdefault((task, who.member), []).append(grant)
        return grant

    def hand(self, grant: Grant, who: Who, now: float) -> None:
        """Give the grant to this client and replica."""
        grant.held_by[who.replica] = who.client
        if who.replica is not None:
            key = (grant.task, who.member)
            replicas = self._replicas.pop(key, set())
            replicas.add(who.replica)
            self._replicas[key] = replicas  # the last one now
            self._forget_members()
        grant.expires = max(grant.expires, now + grant.lease_s)

    def _forget_members(self) -> None:
        """Forget those members that hold nothing and have received nothing for longest."""
        for _ in range(_TRIED):
            if len(self._replicas) <= _MEMBERS:
                return
            key = next(iter(self._replicas))
            replicas = self._replicas.pop(key)
            if key in self._logs:
                self._replicas[key] = replicas

    def live(self, number: int) -> Grant | None:
        """The grant of this number; None if it has ended."""
        return self._grants.get(number)

    def lost(self, number: int) -> bool:
        """Whether the grant ended without being acked, as far as is remembered."""
        return number in self._lost

    def holding(self, rows: Index) -> set[int]:
        """The numbers of the grants that have one of these rows."""
        return {number for number, grant in self._grants.items() if np.isin(grant.rows, rows).any()}

    def find(self, number: int, client: Hashable, replica: int | None) -> Grant:
        """The grant of this number, held by this client. Raises LeaseExpired."""
        grant = self._grants.get(number)
        if grant is None or grant.held_by.get(replica) != client:
            raise LeaseExpired(
                "these rows were not acknowledged in time, or given back, and go to others; what was computed"
                " from them does not count",
                lease_s=0.0 if grant is None else grant.lease_s,
            )
        return grant

    def renew(self, number: int, client: Hashable, replica: int | None, now: float) -> None:
        """Renew the lease. Raises LeaseExpired."""
        grant = self.find(number, client, replica)
        grant.expires = now + grant.lease_s

    def ack(self, number: int, client: Hashable, replica: int | None) -> Grant | None:
        """One holder has acked. Returns the grant if it has ended by that, else None. Raises LeaseExpired."""
        if (number, client, replica) in self._acks:
            return None
        grant = self.find(number, client, replica)
        grant.acked.add(replica)
        self._acks[number, client, replica] = None
        if len(self._acks) > _ACKS:
            del self._acks[next(iter(self._acks))]
        if not grant.done(self._replicas.get((grant.task, grant.who.member), set())):
            return None
        self.end(grant, done=True)
        return grant

    def let_go(self, grant: Grant, replica: int | None) -> bool:
        """One holder gives the rows back unseen. Whether that ends the grant: other replicas may share it, and this
        one may ask again."""
        if not grant.shared:
            self.end(grant)
            return True
        grant.held_by.pop(replica, None)
        return False

    def end(self, grant: Grant, *, done: bool = False) -> None:
        """End the grant. Unless `done`, its rows go to others."""
        del self._grants[grant.number]
        if not done:
            self._lost[grant.number] = None
            if len(self._lost) > _LOST:
                del self._lost[next(iter(self._lost))]
        if len(self._expiring) > 2 * len(self._grants) + _SLACK:  # most are of grants that are no more
            self._expiring = [(g.expires, g.number) for g in self._grants.values()]
            heapq.heapify(self._expiring)
        if grant.shared:
            key = (grant.task, grant.who.member)
            self._logs[key].remove(grant)
            if not self._logs[key]:
                del self._logs[key]

    def next_end(self) -> float | None:
        """When the next lease may end; None if there is none."""
        while self._expiring:
            at, number = self._expiring[0]
            grant = self._grants.get(number)
            if grant is not None and grant.expires <= at:
                return at
            heapq.heappop(self._expiring)
            if grant is not None:
                heapq.heappush(self._expiring, (grant.expires, number))
        return None

    def ended(self, now: float) -> list[Grant]:
        """End the grants whose leases have run out."""
        over = []
        while (at := self.next_end()) is not None and at <= now:
            grant = self._grants[heapq.heappop(self._expiring)[1]]
            self.end(grant, done=grant.done_as_far_as_known)
            over.append(grant)
            if grant.shared:  # a replica that has not asked for it may have gone
                self._replicas.get((grant.task, grant.who.member), set()).intersection_update(grant.held_by)
        return over

    def left(self, client: Hashable) -> list[Grant]:
        """A client has gone: end its grants, except those of replicas."""
        mine = [g for g in self._grants.values() if not g.shared and client in g.held_by.values()]
        for grant in mine:
            self.end(grant)
        return mine
