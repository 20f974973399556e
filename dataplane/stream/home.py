"""A stream's bookkeeping: rows that arrive, become ready, are leased to tasks and acknowledged, and go.

The home puts the mechanisms of a stream together: `admission` of producers, the `rows` with their `keys`, `groups` and
`facts`, the `progress` of each task, and the `leases`. It decides and remembers; it does no I/O, reads no clock, and
knows clients only as keys. Patches whose bytes nobody needs any more are told to `released`.

What always holds: each row is delivered to each task at least once, and acknowledged once; rows are offered in the
order of their numbers; what waits is served in the order in which it began to wait; a limit is never passed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.errors import Closed, LeaseExpired, Misuse
from dataplane.stream.admission import Admission, Entry, Held
from dataplane.stream.facts import Arrival, Facts
from dataplane.stream.groups import Groups
from dataplane.stream.keys import Keys
from dataplane.stream.lease import Grant, Leases, Who
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED, PENDING, Progress
from dataplane.stream.rows import PAGE, Patch, Rows
from dataplane.stream.sampler import Candidates, Fifo, Sampler, checked
from dataplane.stream.settings import MAX_TASKS, Settings

Index = npt.NDArray[np.int64]

MEASURED = ("ragged", "text", "bytes")
"""The kinds of columns whose rows have lengths."""

_WINDOW = 16 * PAGE  # rows that a sampler is shown first; four times as many when it finds too little among them


@dataclass(slots=True, eq=False)
class Demand:
    """Somebody who waits for rows. `serve(grant)` is called once when there are some, `fail(error)` when there will
    be none."""

    task: int
    rows: int
    min_rows: int
    columns: tuple[str, ...]
    sampler: Sampler | None
    """None: it has chosen itself, see `Home.take`."""
    who: Who
    lease_s: float
    serve: Callable[[Grant], None]
    fail: Callable[[Exception], None]

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a row must have: those that are asked for, and those that the sampler measures."""
        return needed(self.columns, self.sampler)


def needed(columns: tuple[str, ...], sampler: Any) -> tuple[str, ...]:
    """The columns that a row must have to be shown to the sampler."""
    return (*columns, *(name for name in getattr(sampler, "needs", ()) if name not in columns))


class Home:
    """The bookkeeping of one stream. To be used from one event loop alone."""

    def __init__(
        self,
        settings: Settings,
        released: Callable[[list[Patch]], None] = lambda _: None,
        changed: Callable[[], None] = lambda: None,
        mark: str = "",
    ) -> None:
        """`released(patches)` is told whose bytes nobody needs any more, `changed()` when rows may be ready. `mark` is
        what the keys of rows that have none begin with."""
        self.settings = settings
        self.changes = 0
        self.closed = False
        self.nbytes = 0
        self.appended = 0
        """Rows that ever were."""
        self.demands: list[Demand] = []
        self.admission = Admission(settings, self._held)
        self.leases = Leases()
        self.group_sizes: dict[int, int] = {}
        """By task, of how many rows are the groups that it was last asked for as a whole."""
        self._released = released
        self._changed = changed
        self._replaced: list[tuple[list[Patch], set[int]]] = []  # and the grants whose holders may still read them
        self._mark = mark
        self._empty()

    def _empty(self) -> None:
        self.rows = Rows()
        self.keys = Keys(self._mark)
        self.groups = Groups(len(self.settings.tasks))
        self.facts = Facts(self.rows)
        self.progress = Progress(self.rows, len(self.settings.tasks))

    def _held(self) -> Held:
        oldest = min((min(left) for left in self.progress.left if left), default=None)
        return Held(self.rows.count, self.nbytes, oldest)

    # arriving

    def admit(self, entry: Entry) -> None:
        """Let the entry in as soon as the limits allow it, in turn. Raises Closed, LimitExceeded."""
        self._check_open()
        self.admission.enter(entry)

    def withdraw(self, entry: Entry) -> str:
        """The entry no longer waits. Why it did: the limit, and the tasks that the stream waits for."""
        why = self.admission.full(entry) or "others before it"
        self.admission.withdraw(entry)
        behind = self.behind()
        if not behind and (dead := self.dead_letters()):
            return f"{why}; it holds dead letters of {', '.join(dead)}, which are there until they are dropped"
        return f"{why}; it waits for {', '.join(behind)}" if behind else why

    def behind(self) -> list[str]:
        """The tasks that have the oldest policy version, or of one version the most rows, still to do."""
        marks = {
            name: (min(left), -sum(left.values()))
            for name, left in zip(self.settings.tasks, self.progress.left, strict=True)
            if left
        }
        return [name for name, mark in marks.items() if mark == min(marks.values())]

    def dead_letters(self) -> list[str]:
        """The tasks that have some."""
        return [name for task, name in enumerate(self.settings.tasks) if len(self.progress.in_state(task, DEAD))]

    def append(
        self, ticket: int, ref: BatchRef, keys: Sequence[str], digest: bytes, arrival: Arrival, now: float
    ) -> tuple[int, bool]:
        """Rows that were admitted come. The number of the first, and whether they are new: the very same append, made
        again with the same digest, is answered as it was, and its columns are not wanted.

        Raises Misuse for a key that is there, SchemaMismatch, LimitExceeded, Closed.
        """
        admitted = self.admission.ticket(ticket)
        if admitted is None:
            raise Misuse("this append was not admitted")
        try:
            if not 1 <= len(ref) <= admitted.rows:
                raise Misuse(f"an append of {len(ref)} rows, where {admitted.rows} were admitted")
            self._check_open()
            said = self.keys.retried(keys, digest)
            if said is not None:
                return said, False
            self.keys.check(keys)
            self.facts.require_room(arrival.tags)
            first = self.rows.append(ref)
            self.keys.add(keys, first, digest)
            self.nbytes += ref.stored_nbytes
            self.appended += len(ref)
            rows = np.arange(first, first + len(ref))
            places = self.rows.places(rows)
            groups = self.groups.enter(arrival.groups, rows)
            self.facts.enter(places, groups, arrival.versions, now, arrival.tags)
            self.facts.measure(places, arrival.lengths)
            self.progress.enter(arrival.versions)
        finally:  # after the rows are counted, or others would be let in on what they take
            self.admission.give_back(ticket)
        self._tell(now)
        return first, True

    def extend(
        self,
        rows: Index,
        ref: BatchRef,
        lengths: Mapping[str, Index],
        now: float,
        *,
        replace: bool = False,
        holds: Index | None = None,
    ) -> None:
        """More columns for these rows. `holds`: under which numbers the rows were delivered to who brings them.

        What a holder before brought, who has not acked, is replaced by what the holder now brings. Raises Misuse for a
        row that is not there or named twice, or a column that is; LeaseExpired for rows that are others' or pending
        again; SchemaMismatch, LimitExceeded.
        """
        if len(rows) != len(ref):
            raise Misuse(f"{len(ref)} rows of new columns for {len(rows)} rows")
        self.require(rows)
        if len(np.unique(rows)) != len(rows):
            raise Misuse("a row is named twice; each is extended once")
        under = np.empty(0, np.int64) if holds is None or not len(holds) else np.unique(holds)
        again = [hold > 0 and self._extends_again(rows[holds == hold], int(hold), ref.columns) for hold in under]
        hold = int(under[0]) if len(under) == 1 and under[0] > 0 else -1
        done = self.rows.extend(rows, ref, replace=replace or (len(again) > 0 and all(again)), hold=hold)
        self.nbytes += ref.stored_nbytes
        self.facts.measure(self.rows.places(rows), lengths)
        readers = self.leases.holding(rows) if done else set()
        if readers:
            self._replaced.append((done, readers))
        else:
            self._release(done)
        self._tell(now)

    def _extends_again(self, rows: Index, hold: int, columns: Sequence[str]) -> bool:
        """Whether all that these rows, delivered under this number, have of these columns was brought by who held them
        before for the same task. Raises LeaseExpired where they are not the holder's any more."""
        number, task = divmod(hold, MAX_TASKS)
        grant = self.leases.live(number)
        if grant is None or grant.task != task or not np.isin(rows, grant.rows).all():
            states = self.progress.states(self.rows.places(rows), len(rows))[task : task + 1]
            if np.isin(states, (PENDING, LEASED, DEAD)).any():
                raise LeaseExpired(
                    "these rows were not acknowledged in time, or given back, and go to others; what was computed"
                    " from them does not count"
                )
            return False
        under = np.concatenate([self.rows.holds(rows, name) for name in columns])
        others = under[under != -2]
        return bool(((others >= 0) & (others % MAX_TASKS == task) & (others != hold)).all())

    def require(self, rows: Index) -> None:
        """Raises Misuse where one of these rows is not in the stream."""
        there = self.rows.there(rows)
        if not there.all():
            at = int(np.flatnonzero(~there)[0])
            raise Misuse(
                f"row {self.keys.names(rows[at : at + 1])[0]!r} (number {at} of those named) is not in the stream:"
                " each task is done with it, it was dropped, or it never was"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the stream is closed: nothing is appended any more")

    # delivering

    def consume(self, demand: Demand, now: float) -> None:
        """Serve the demand now, or as soon as it can be."""
        size = getattr(demand.sampler, "group_size", None)
        if size is not None:
            self.group_sizes[demand.task] = size
        self.demands.append(demand)
        self._serve(now)
        if self.closed:  # its sampler may have let the last rows expire that others look for
            self._changed()

    def forget(self, demand: Demand) -> None:
        """The demand no longer waits."""
        if demand in self.demands:
            self.demands.remove(demand)

    def _tell(self, now: float) -> None:
        """Something has changed: see who can be served."""
        self.changes += 1
        if self._replaced:
            self._release_replaced()
        self._serve(now)
        self._changed()

    def _release_replaced(self) -> None:
        waiting, self._replaced = self._replaced, []
        for patches, readers in waiting:
            if any(self.leases.live(number) is not None for number in readers):
                self._replaced.append((patches, readers))
            else:
                self._release(patches)

    def _serve(self, now: float) -> None:
        progress = bool(self.demands)
        while progress:
            progress = False
            expired = self._expired()
            for demand in list(self.demands):
                try:
                    grant = self._grant(demand, now)
                except Exception as error:  # the boundary: a sampler that fails is the end of who brought it, no more
                    self.forget(demand)
                    demand.fail(error)
                    continue
                if grant is not None:
                    self.forget(demand)
                    self.leases.hand(grant, demand.who, now)
                    demand.serve(grant)
                    progress = bool(self.demands)
            if self.closed and expired != self._expired():
                progress = bool(self.demands)  # of fewer rows that are left, fewer are waited for
        for demand in [demand for demand in self.demands if self.drained(demand.task)]:
            self.forget(demand)
            demand.fail(self._done_with())

    def _expired(self) -> list[int]:
        return [counts[EXPIRED] for counts in self.progress.counts]

    def _grant(self, demand: Demand, now: float) -> Grant | None:
        waiting = self.waiting(demand)
        if waiting is not None:
            return waiting
        rows = self._choose(demand, now)
        return self._lease(demand, rows, now) if len(rows) else None

    def waiting(self, demand: Demand) -> Grant | None:
        """What other replicas of the member were granted, and this one has to be. Raises Misuse where it asks for other
        columns."""
        grant = self.leases.waiting(demand.task, demand.who)
        if grant is not None and grant.columns != demand.columns:
            raise Misuse(
                f"the replicas of member {demand.who.member!r} are given the same: others asked for the columns"
                f" {', '.join(grant.columns)}, and this one for {', '.join(demand.columns)}"
            )
        return grant

    def _lease(self, demand: Demand, rows: Index, now: float) -> Grant:
        self.progress.lease(demand.task, self.rows.places(rows))
        return self.leases.give(demand.task, rows, demand.columns, demand.who, demand.lease_s, now)

    def take(self, demand: Demand, chosen: Index, expired: Index, now: float) -> Grant | None:
        """A grant of the rows that the demand has chosen itself, as far as they are ready still; None where too few
        are. Those in `expired` are never to be delivered to its task. Raises Misuse."""
        grant = self.waiting(demand)
        if grant is None:
            self.expire(demand.task, self.progress.still_ready(demand.task, demand.needed, expired))
            rows = self.progress.still_ready(demand.task, demand.needed, chosen)[: demand.rows]
            grant = self._lease(demand, rows, now) if len(rows) >= max(1, self._least(demand)) else None
        if grant is not None:
            self.leases.hand(grant, demand.who, now)
        if grant is not None or len(expired):  # other replicas may wait for it, and at the end others for the last rows
            self._tell(now)
        return grant

    def _choose(self, demand: Demand, now: float) -> Index:
        """The rows that the demand is to have, at least `min_rows` of them unless no more fit, or none."""
        if demand.sampler is None or isinstance(demand.sampler, Fifo):  # sees no more than it takes
            first = self.progress.ready(demand.task, demand.columns, demand.rows)
            return first if len(first) >= self._least(demand) else first[:0]
        whole = getattr(demand.sampler, "sees_all", False)
        window = self.rows.count if whole else max(_WINDOW, 2 * demand.rows)
        while True:
            ready = self.progress.ready(demand.task, demand.needed, window)
            if not len(ready):
                return ready
            shown = self.candidates(demand.task, ready, demand.sampler, now, whole=whole or len(ready) < window)
            choice = checked(demand.sampler.choose(shown, demand.rows), shown, demand.rows)
            enough = choice.full or len(choice.rows) >= demand.rows or shown.whole
            self.expire(demand.task, ready[choice.expired])
            if enough:
                chosen: Index = ready[choice.rows]
                return chosen if choice.full or len(chosen) >= self._least(demand) else chosen[:0]
            window *= 4

    def _least(self, demand: Demand) -> int:
        """The rows that the demand has to wait for: at the end of a stream no more than are left."""
        return min(demand.min_rows, self.progress.is_left(demand.task)) if self.closed else demand.min_rows

    def candidates(self, task: int, rows: Index, sampler: Any, now: float, *, whole: bool) -> Candidates:
        """What a sampler of the task may know of these rows. Raises Misuse for a column that has no lengths."""
        for name in getattr(sampler, "needs", ()):
            field = self.rows.schema.get(name)
            if field is not None and field.kind not in MEASURED:
                raise Misuse(f"a sampler needs the lengths of {name!r}, and a {field.kind} column has none")
        places = self.rows.places(rows)
        group = self.facts.groups(places)
        members, dropped = self.groups.sizes(group, task)
        return Candidates(
            group=group,
            version=self.facts.versions(places),
            age_s=now - self.facts.arrived(places),
            group_rows=members,
            group_dropped=dropped,
            lengths={name: self.facts.lengths(places, name) for name in getattr(sampler, "needs", ())},
            tags=self.facts.tags(places, getattr(sampler, "tags_read", ())),
            latest=self.facts.latest,
            closed=self.closed,
            whole=whole,
        )

    # done with

    def ack(self, number: int, client: Hashable, replica: int | None, now: float) -> None:
        """The holder is done with the rows of a grant. Raises LeaseExpired."""
        grant = self.leases.ack(number, client, replica)
        if grant is not None:
            self._settle(grant.task, grant.rows, ACKED)
        self._tell(now)

    def nack(self, number: int, client: Hashable, replica: int | None, now: float, *, seen: bool = True) -> None:
        """The holder gives the rows of a grant back; if nobody has `seen` them, that was no delivery. Raises
        LeaseExpired."""
        grant = self.leases.find(number, client, replica)
        if seen:
            self.leases.end(grant)
            self._give_back(grant)
        elif self.leases.let_go(grant, replica):
            self.progress.unseen(grant.task, self.rows.places(grant.rows))
            self._give_back(grant)
        self._tell(now)

    def tick(self, now: float) -> None:
        """Time has passed: end the leases that are over, and look again at what samplers judge by age."""
        for grant in self.leases.ended(now):
            if grant.done_as_far_as_known:
                self._settle(grant.task, grant.rows, ACKED)
            else:
                self._give_back(grant)
        self._tell(now)

    def next_tick(self) -> float | None:
        """When `tick` is due by the leases; None while there is none."""
        return self.leases.next_end()

    @property
    def watches_age(self) -> bool:
        """Whether somebody waits whose sampler judges rows by their age."""
        return any(getattr(demand.sampler, "judges_age", False) for demand in self.demands)

    def leave(self, client: Hashable, now: float) -> None:
        """The client has gone: what it held goes to others, what it waited for goes to nobody."""
        self.demands = [demand for demand in self.demands if demand.who.client != client]
        self.admission.leave(client)
        for grant in self.leases.left(client):
            self._give_back(grant)
        self._tell(now)

    def _give_back(self, grant: Grant) -> None:
        """Rows of a grant that ended unacked are pending again or, after as many tries as there may be, dead."""
        places = self.rows.places(grant.rows)
        versions, most = self.facts.versions(places), self.settings.max_deliveries
        dead, dropped = self.progress.give_back(grant.task, places, versions, most)
        self.groups.dead(grant.task, self.facts.groups(places)[dead & ~dropped])
        self._let_go(grant.rows[dropped])

    def expire(self, task: int, rows: Index) -> None:
        """These pending rows are never to be delivered to the task."""
        if len(rows):
            self._settle(task, rows, EXPIRED)

    def _settle(self, task: int, rows: Index, state: int) -> None:
        """The task is done with these rows; those that all tasks are done with go."""
        places = self.rows.places(rows)
        finished, dropped = self.progress.settle(task, places, self.facts.versions(places), state)
        groups = self.facts.groups(places)
        self.groups.done(task, groups[~dropped] if dropped.any() else groups)
        self._remove(rows[finished & ~dropped])
        self._let_go(rows[dropped])

    def _remove(self, rows: Index) -> None:
        if not len(rows):
            return
        places = self.rows.places(rows)
        self.groups.gone(self.facts.groups(places), self.progress.dropped(places, len(rows)))
        self.keys.remove(rows)
        self._release(self.rows.remove(rows))
        self.facts.tidy()
        self.progress.tidy()
        self.admission.let_in()

    def _release(self, patches: list[Patch]) -> None:
        if patches:
            self.nbytes -= sum(patch.ref.stored_nbytes for patch in patches)
            self._released(patches)
            self.admission.let_in()

    # dropping

    def drop_rows(self, rows: Index, now: float) -> None:
        """No task is to see these rows any more; those that somebody holds stay until he is done. Raises Misuse."""
        self.require(rows)
        rows = np.unique(rows)
        fresh = rows[self.progress.drop(self.rows.places(rows), len(rows))]
        places = self.rows.places(fresh)
        states = self.progress.states(places, len(fresh))
        self.groups.drop(self.facts.groups(places), (states == ACKED) | (states == EXPIRED), states == DEAD)
        self._let_go(rows)
        for page in self.rows.pages.values():  # what is left of their groups may be complete now
            page.changes += 1
        self._tell(now)

    def _let_go(self, rows: Index) -> None:
        """Those of these dropped rows that nobody holds go."""
        if len(rows):
            places = self.rows.places(rows)
            self._remove(rows[self.progress.let_go(places, self.facts.versions(places))])

    def close(self, now: float) -> None:
        """Nothing is appended from now on. Who waits to append is told so; consumers go on until all is done."""
        self.closed = True
        self.admission.refuse(Closed("the stream was closed"))
        for page in self.rows.pages.values():
            page.changes += 1
        self._tell(now)

    def drop(self) -> None:
        """Everything goes; who waits is told so."""
        self.closed = True
        gone = Closed("the stream was dropped")
        self.admission.refuse(gone)
        for demand in self.demands:
            demand.fail(gone)
        self.demands.clear()
        for grant in self.leases:
            self.leases.end(grant)
        patches = self.rows.clear()
        patches += [patch for replaced, _ in self._replaced for patch in replaced]
        self._replaced.clear()
        self._empty()
        self._release(patches)
        self._changed()

    def drained(self, task: int) -> bool:
        """Whether nothing will ever come for this task again."""
        return self.closed and not self.progress.left[task]

    def check_drained(self, task: int) -> None:
        """Raises Closed where nothing will ever come for this task again."""
        if self.drained(task):
            raise self._done_with()

    def _done_with(self) -> Closed:
        return Closed("the stream is closed, and this task has done all of it", drained=True)

    # what there is

    def hold(self, grant: Grant) -> int:
        """The number under which the rows of a grant are delivered."""
        return grant.number * MAX_TASKS + grant.task

    def told(self, rows: Index) -> tuple[list[Any], list[int], dict[str, list[Any]]]:
        """What a delivery of these rows tells of them: groups, versions and tags."""
        places = self.rows.places(rows)
        named = self.groups.names(self.facts.groups(places))
        tags = {name: values.tolist() for name, values in self.facts.tags(places).items()}
        return named, self.facts.versions(places).tolist(), tags

    def lengths(self, rows: Index, column: str) -> Index:
        """The lengths of these rows in a ragged column; 0 where they were not said."""
        return self.facts.lengths(self.rows.places(rows), column)

    def in_groups(self, names: Sequence[Any]) -> Index:
        """The rows of these groups. Raises Misuse for a group of which there is none."""
        numbers = []
        for name in names:
            number = self.groups.number(name)
            if number is None:
                raise Misuse(f"there is no row of the group {name!r}: each task is done with it, or it never was")
            numbers.append(number)
        return self.facts.in_groups(numbers)
