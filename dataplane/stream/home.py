"""A stream's bookkeeping: rows that arrive, become ready, are leased to tasks and acknowledged, and go.

It decides and remembers; it does no I/O, reads no clock, and knows clients only as keys. What it hands out to be done
comes back from each call or is told to `released`: patches whose bytes nobody needs any more.

A row goes through each task by itself:

    pending ──leased──> leased ──acked──> done          expired: a sampler found it stale, or its group incomplete
       ^                  │                             dead: given back `max_deliveries` times
       └── lease ended ───┘

and is gone when each task is done with it (acked or expired), or when it was dropped and nobody holds it. A dead row
stays, to be looked at, until it is dropped.

What always holds: each row is delivered to each task at least once, and acknowledged once; rows are offered in the
order of their numbers; what waits is served in the order in which it began to wait; a limit is never passed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.errors import Closed, LimitExceeded, Misuse
from dataplane.stream.groups import Groups
from dataplane.stream.keys import Keys
from dataplane.stream.lease import Grant, Leases, Who
from dataplane.stream.rows import PAGE, Page, Patch, Rows
from dataplane.stream.sampler import Candidates, Fifo, Sampler, checked

Index = npt.NDArray[np.int64]

PENDING, LEASED, ACKED, EXPIRED, DEAD = range(5)
STATES = ("pending", "leased", "acked", "expired", "dead")

MAX_TASKS = 64
_WINDOW = 16 * PAGE  # rows that a sampler is shown first; four times as many when it finds too little among them


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """What a stream was made with. Bytes and rows; 0 and -1: no limit."""

    tasks: tuple[str, ...]
    max_bytes: int = 0
    max_rows: int = 0
    max_lag: int = -1
    max_deliveries: int = 5

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) != len(self.tasks) or not all(self.tasks):
            raise Misuse(f"a stream has one or more tasks, each with a name of its own, not {list(self.tasks)}")
        if len(self.tasks) > MAX_TASKS:
            raise Misuse(f"a stream has at most {MAX_TASKS} tasks, not {len(self.tasks)}")
        if self.max_bytes < 0 or self.max_rows < 0 or self.max_lag < -1 or not 1 <= self.max_deliveries <= 255:
            raise Misuse(f"limits are positive, and max_deliveries at most 255: {self}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """What an append says about its rows, one entry a row. `tags` and `lengths` by name."""

    groups: Sequence[Any] | None
    versions: Index
    tags: Mapping[str, Sequence[Any]]
    lengths: Mapping[str, Index]


@dataclass(slots=True, eq=False)
class Demand:
    """Somebody who waits for rows. `serve(grant)` is called once when there are some, `fail(error)` when there will
    be none."""

    task: int
    rows: int
    min_rows: int
    columns: tuple[str, ...]
    need: np.uint64
    sampler: Sampler
    who: Who
    lease_s: float
    serve: Callable[[Grant], None]
    fail: Callable[[Exception], None]


@dataclass(slots=True, eq=False)
class Entry:
    """Somebody who waits to append. `admit(ticket)` is called once."""

    client: Hashable
    rows: int
    nbytes: int
    version: int
    admit: Callable[[int], None]
    fail: Callable[[Exception], None]


@dataclass(slots=True, eq=False)
class _Sheet:
    """What the tasks, and samplers, need to know of the rows of a page."""

    state: npt.NDArray[np.uint8]
    tries: npt.NDArray[np.uint8]
    group: Index = field(default_factory=lambda: np.zeros(PAGE, np.int64))
    version: Index = field(default_factory=lambda: np.zeros(PAGE, np.int64))
    arrived: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(PAGE))
    dropped: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(PAGE, np.bool_))
    tags: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    lengths: dict[str, Index] = field(default_factory=dict)
    idle: dict[tuple[int, int], int] = field(default_factory=dict)
    """By task and columns: at which change of the page nothing was ready."""


class Home:
    """The bookkeeping of one stream. To be used from one event loop alone."""

    def __init__(
        self,
        settings: Settings,
        released: Callable[[list[Patch]], None] = lambda _: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`released(patches)` is told whose bytes nobody needs any more, `changed()` when rows may be ready."""
        self.settings = settings
        self.changes = 0
        self._changed = changed
        self.closed = False
        self.rows = Rows()
        self.keys = Keys()
        self.leases = Leases()
        self._released = released
        self._groups = Groups(len(settings.tasks))
        self._sheets: dict[int, _Sheet] = {}
        self._demands: list[Demand] = []
        self._entries: deque[Entry] = deque()
        self._tickets: dict[int, Entry] = {}
        self._next_ticket = 1
        self._left = [Counter[int]() for _ in settings.tasks]  # by task: rows that are not done, by version
        self._counts = [Counter[int]() for _ in settings.tasks]  # by task: rows that ever came to be in a state
        self._nbytes = 0
        self._reserved_rows = 0
        self._reserved_bytes = 0
        self._latest = 0

    # arriving

    def task(self, name: str) -> int:
        """The number of a task. Raises Misuse."""
        if name not in self.settings.tasks:
            raise Misuse(f"this stream has no task {name!r}; it has {', '.join(self.settings.tasks)}")
        return self.settings.tasks.index(name)

    def admit(self, entry: Entry) -> None:
        """Let the entry in as soon as the limits allow it, in turn. Raises Closed, LimitExceeded."""
        self._check_open()
        for what, asked, limit in (
            ("rows of a stream", entry.rows, self.settings.max_rows),
            ("bytes of a stream", entry.nbytes, self.settings.max_bytes),
        ):
            if limit and asked > limit:
                raise LimitExceeded(
                    f"an append of {asked} {what} can never fit its {limit}", what=what, asked=asked, limit=limit
                )
        self._entries.append(entry)
        self._let_in()

    def _let_in(self) -> None:
        for entry in list(self._entries):
            why = self._full(entry)
            if why == "max_lag":  # the rows it waits for may be behind it
                continue
            if why:
                break
            self._entries.remove(entry)
            ticket = self._next_ticket
            self._next_ticket += 1
            self._tickets[ticket] = entry
            self._reserved_rows += entry.rows
            self._reserved_bytes += entry.nbytes
            entry.admit(ticket)

    def _full(self, entry: Entry) -> str:
        """Which limit the entry would pass; empty for none."""
        limits = self.settings
        if limits.max_lag >= 0:
            coming = (ticket.version for ticket in self._tickets.values())
            oldest = min((*(min(left) for left in self._left if left), *coming), default=entry.version)
            if entry.version - oldest > limits.max_lag:
                return "max_lag"
        if limits.max_rows and self.rows.count + self._reserved_rows + entry.rows > limits.max_rows:
            return "max_rows"
        if limits.max_bytes and self._nbytes + self._reserved_bytes + entry.nbytes > limits.max_bytes:
            return "max_bytes"
        return ""

    def withdraw(self, entry: Entry) -> str:
        """The entry no longer waits. Why it did: the limit, and the tasks that the stream waits for."""
        why = self._full(entry) or "others before it"
        if entry in self._entries:
            self._entries.remove(entry)
        self._let_in()
        behind = self.behind()
        return f"{why}; it waits for {', '.join(behind)}" if behind else why

    def behind(self) -> list[str]:
        """The tasks that have the oldest policy version, or of one version the most rows, still to do."""
        marks = {
            name: (min(left), -sum(left.values()))
            for name, left in zip(self.settings.tasks, self._left, strict=True)
            if left
        }
        return [name for name, mark in marks.items() if mark == min(marks.values())]

    def give_back(self, ticket: int) -> None:
        """What was admitted does not come."""
        entry = self._tickets.pop(ticket, None)
        if entry is not None:
            self._reserved_rows -= entry.rows
            self._reserved_bytes -= entry.nbytes
            self._let_in()

    def append(self, ticket: int, ref: BatchRef, keys: Sequence[str], arrival: Arrival, now: float) -> tuple[int, bool]:
        """Rows that were admitted come. The number of the first, and whether they are new: the very same append,
        made again, is answered as it was, and its columns are not wanted.

        Raises Misuse for a key that is there, SchemaMismatch, LimitExceeded, Closed.
        """
        if ticket not in self._tickets:
            raise Misuse("this append was not admitted")
        try:
            if not 1 <= len(ref) <= self._tickets[ticket].rows:
                raise Misuse(f"an append of {len(ref)} rows, where {self._tickets[ticket].rows} were admitted")
            self._check_open()
            said = self.keys.retried(keys, ref, arrival.versions)
            if said is not None:
                return said, False
            self.keys.check(keys)
            first = self.rows.append(ref)
            self.keys.add(keys, first, ref, arrival.versions)
            self._nbytes += ref.stored_nbytes
            self._enter(first, len(ref), arrival, now)
        finally:  # after the rows are counted, or others would be let in on what they take
            self.give_back(ticket)
        self._tell(now)
        return first, True

    def _enter(self, first: int, count: int, arrival: Arrival, now: float) -> None:
        rows = np.arange(first, first + count)
        groups = self._groups.enter(arrival.groups, rows)
        for page, inside, chosen in self.rows.by_page(rows):
            sheet = self._sheet(page)
            sheet.group[inside] = groups[chosen]
            sheet.version[inside] = arrival.versions[chosen]
            sheet.arrived[inside] = now
            for name, values in arrival.tags.items():
                column = sheet.tags.setdefault(name, np.full(PAGE, None, object))
                column[inside] = np.fromiter(values, object, count)[chosen]
        self._measure(rows, arrival.lengths)
        versions = dict(zip(*(a.tolist() for a in np.unique(arrival.versions, return_counts=True)), strict=True))
        for left in self._left:
            left.update(versions)
        self._latest = max(self._latest, *versions) if versions else self._latest

    def _measure(self, rows: Index, lengths: Mapping[str, Index]) -> None:
        for name, values in lengths.items():
            for page, inside, chosen in self.rows.by_page(rows):
                self._sheet(page).lengths.setdefault(name, np.zeros(PAGE, np.int64))[inside] = values[chosen]

    def _sheet(self, page: Page) -> _Sheet:
        number = page.first // PAGE
        if number not in self._sheets:
            shape = (len(self.settings.tasks), PAGE)
            self._sheets[number] = _Sheet(np.zeros(shape, np.uint8), np.zeros(shape, np.uint8))
        return self._sheets[number]

    def extend(
        self, rows: Index, ref: BatchRef, lengths: Mapping[str, Index], now: float, *, replace: bool = False
    ) -> None:
        """More columns for these rows. Raises Misuse for a row that is not there or named twice, or a column that is;
        SchemaMismatch, LimitExceeded."""
        if len(rows) != len(ref):
            raise Misuse(f"{len(ref)} rows of new columns for {len(rows)} rows")
        self.require(rows)
        if len(np.unique(rows)) != len(rows):
            raise Misuse("a row is named twice; each is extended once")
        done = self.rows.extend(rows, ref, replace=replace)
        self._nbytes += ref.stored_nbytes
        self._measure(rows, lengths)
        self._release(done)
        self._tell(now)

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
        self._demands.append(demand)
        self._serve(now)
        if self.closed:  # its sampler may have let the last rows expire that others look for
            self._changed()

    def forget(self, demand: Demand) -> None:
        """The demand no longer waits."""
        if demand in self._demands:
            self._demands.remove(demand)

    def _tell(self, now: float) -> None:
        """Something has changed: see who can be served."""
        self.changes += 1
        self._serve(now)
        self._changed()

    def _serve(self, now: float) -> None:
        progress = bool(self._demands)
        while progress:
            progress = False
            expired = [counts[EXPIRED] for counts in self._counts]
            for demand in list(self._demands):
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
                    progress = bool(self._demands)
            if self.closed and expired != [counts[EXPIRED] for counts in self._counts]:
                progress = bool(self._demands)  # of fewer rows that are left, fewer are waited for
        for demand in [demand for demand in self._demands if self.drained(demand.task)]:
            self.forget(demand)
            demand.fail(Closed("the stream is closed, and this task has done all of it"))

    def _grant(self, demand: Demand, now: float) -> Grant | None:
        waiting = self.leases.waiting(demand.task, demand.who)
        if waiting is not None:
            return waiting
        rows = self._choose(demand, now)
        if not len(rows):
            return None
        return self.lease(demand, rows, now)

    def lease(self, demand: Demand, rows: Index, now: float) -> Grant:
        """A new grant of rows that are ready."""
        for page, inside, _ in self.rows.by_page(rows):
            sheet = self._sheet(page)
            sheet.state[demand.task, inside] = LEASED
            sheet.tries[demand.task, inside] += 1
        self._counts[demand.task][LEASED] += len(rows)
        return self.leases.give(demand.task, rows, demand.columns, demand.who, demand.lease_s, now)

    def _choose(self, demand: Demand, now: float) -> Index:
        """The rows that the demand is to have, at least `min_rows` of them, or none."""
        if isinstance(demand.sampler, Fifo):  # sees no more than it takes
            first = self.ready(demand.task, demand.need, demand.rows)
            return first if len(first) >= self._least(demand) else first[:0]
        window = max(_WINDOW, 2 * demand.rows)
        while True:
            ready = self.ready(demand.task, demand.need, window)
            if not len(ready):
                return ready
            shown = self.candidates(ready, demand.sampler, now, whole=len(ready) < window, task=demand.task)
            choice = checked(demand.sampler.choose(shown, demand.rows), shown, demand.rows)
            enough = len(choice.rows) >= demand.rows or len(ready) < window
            if len(choice.expired):
                self.expire(demand.task, ready[choice.expired])
            if enough:
                chosen: Index = ready[choice.rows]
                return chosen if len(chosen) >= self._least(demand) else chosen[:0]
            window *= 4

    def _least(self, demand: Demand) -> int:
        """The rows that the demand has to wait for: at the end of a stream no more than are left."""
        return min(demand.min_rows, sum(self._left[demand.task].values())) if self.closed else demand.min_rows

    def ready(self, task: int, need: np.uint64, most: int) -> Index:
        """The first `most` rows, by number, that are pending for the task and have all the columns `need`."""
        found: list[Index] = []
        count = 0
        asked = (task, int(need))
        for number, page in self.rows.pages.items():
            sheet = self._sheets[number]
            if sheet.idle.get(asked) == page.changes:
                continue
            flags = (page.columns[: page.count] & need) == need
            flags &= sheet.state[task, : page.count] == PENDING
            flags &= ~(page.gone[: page.count] | sheet.dropped[: page.count])
            rows = np.flatnonzero(flags)
            if not len(rows):
                sheet.idle[asked] = page.changes
                continue
            found.append(rows + number * PAGE)
            count += len(rows)
            if count >= most:
                break
        return np.concatenate(found)[:most] if found else np.empty(0, np.int64)

    def candidates(self, rows: Index, sampler: Any, now: float, *, whole: bool, task: int | None = None) -> Candidates:
        """What a sampler may know of these rows; of their groups, as the task sees them: its dead rows are dropped."""
        group, version, age = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), np.empty(len(rows))
        lengths = {name: np.zeros(len(rows), np.int64) for name in getattr(sampler, "needs", ())}
        tags = {name: np.full(len(rows), None, object) for name in getattr(sampler, "tags_read", ())}
        for page, inside, chosen in self.rows.by_page(rows):
            sheet = self._sheet(page)
            group[chosen], version[chosen] = sheet.group[inside], sheet.version[inside]
            age[chosen] = now - sheet.arrived[inside]
            for values, known in ((lengths, sheet.lengths), (tags, sheet.tags)):
                for name in values:
                    if name in known:
                        values[name][chosen] = known[name][inside]
        members, dropped = self._groups.sizes(group, task)
        return Candidates(
            group=group,
            version=version,
            age_s=age,
            group_rows=members,
            group_dropped=dropped,
            lengths=lengths,
            tags=tags,
            latest=self._latest,
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
        self.leases.end(grant)
        if not seen:
            for page, inside, _ in self.rows.by_page(grant.rows):
                self._sheet(page).tries[grant.task, inside] -= 1
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

    def leave(self, client: Hashable, now: float) -> None:
        """The client has gone: what it held goes to others, what it waited for goes to nobody."""
        self._demands = [demand for demand in self._demands if demand.who.client != client]
        self._entries = deque(entry for entry in self._entries if entry.client != client)
        for ticket in [ticket for ticket, entry in self._tickets.items() if entry.client == client]:
            self.give_back(ticket)
        for grant in self.leases.left(client):
            self._give_back(grant)
        self._let_in()
        self._tell(now)

    def _give_back(self, grant: Grant) -> None:
        """Rows of a grant that ended unacked are pending again or, after as many tries as there may be, dead."""
        task, gone = grant.task, []
        for page, inside, _ in self.rows.by_page(grant.rows):
            sheet = self._sheet(page)
            dead = sheet.tries[task, inside] >= self.settings.max_deliveries
            sheet.state[task, inside] = np.where(dead, DEAD, PENDING)
            page.changes += 1
            self._done(task, sheet.version[inside[dead]], DEAD)
            self._groups.dead(task, sheet.group[inside[dead & ~sheet.dropped[inside]]])
            gone.append(inside[sheet.dropped[inside]] + page.first)
        self._drop_now(np.concatenate(gone))

    def expire(self, task: int, rows: Index) -> None:
        """These pending rows are never to be delivered to the task."""
        if len(rows):
            self._settle(task, rows, EXPIRED)

    def _settle(self, task: int, rows: Index, state: int) -> None:
        """The task is done with these rows; those that all tasks are done with go."""
        over, dropped = [], []
        for page, inside, _ in self.rows.by_page(rows):
            sheet = self._sheet(page)
            sheet.state[task, inside] = state
            self._done(task, sheet.version[inside], state)
            states = sheet.state[:, inside]
            finished = ((states == ACKED) | (states == EXPIRED)).all(axis=0)
            over.append(inside[finished & ~sheet.dropped[inside]] + page.first)
            dropped.append(inside[sheet.dropped[inside]] + page.first)
        self._remove(np.concatenate(over))
        self._drop_now(np.concatenate(dropped))

    def _done(self, task: int, versions: Index, state: int) -> None:
        """So many rows of these versions are none of the task's business any more."""
        if not len(versions):
            return
        left = self._left[task]
        for version, count in zip(*(a.tolist() for a in np.unique(versions, return_counts=True)), strict=True):
            left[version] -= count
            if not left[version]:
                del left[version]
        self._counts[task][state] += len(versions)

    def _remove(self, rows: Index) -> None:
        if not len(rows):
            return
        for page, inside, _ in self.rows.by_page(rows):
            self._groups.gone(self._sheet(page).group[inside])
        self.keys.remove(rows)
        self._release(self.rows.remove(rows))
        if len(self._sheets) > len(self.rows.pages):
            for number in self._sheets.keys() - self.rows.pages.keys():
                del self._sheets[number]
        self._let_in()

    def _release(self, patches: list[Patch]) -> None:
        if patches:
            self._nbytes -= sum(patch.ref.stored_nbytes for patch in patches)
            self._released(patches)
            self._let_in()

    # dropping

    def drop_rows(self, rows: Index, now: float) -> None:
        """No task is to see these rows any more; those that somebody holds stay until he is done. Raises Misuse."""
        self.require(rows)
        rows = np.unique(rows)
        for page, inside, _ in self.rows.by_page(rows):
            sheet = self._sheet(page)
            fresh = inside[~sheet.dropped[inside]]
            sheet.dropped[fresh] = True
            self._groups.drop(sheet.group[fresh])
            for task in range(len(self.settings.tasks)):
                self._groups.dead(task, sheet.group[fresh[sheet.state[task, fresh] == DEAD]], -1)
            page.changes += 1
        self._drop_now(rows)
        for page in self.rows.pages.values():  # what is left of their groups may be complete now
            page.changes += 1
        self._tell(now)

    def _drop_now(self, rows: Index) -> None:
        """Those of these dropped rows that nobody holds go."""
        free = []
        for page, inside, _ in self.rows.by_page(rows):
            sheet = self._sheet(page)
            unheld = inside[(sheet.state[:, inside] != LEASED).all(axis=0)]
            for task in range(len(self.settings.tasks)):
                pending = unheld[sheet.state[task, unheld] == PENDING]
                sheet.state[task, pending] = EXPIRED
                self._done(task, sheet.version[pending], EXPIRED)
            free.append(unheld + page.first)
        if free:
            self._remove(np.concatenate(free))

    def close(self, now: float) -> None:
        """Nothing is appended from now on. Who waits to append is told so; consumers go on until all is done."""
        self.closed = True
        entries, self._entries = self._entries, deque()
        for entry in entries:
            entry.fail(Closed("the stream was closed"))
        for page in self.rows.pages.values():
            page.changes += 1
        self._tell(now)

    def drop(self) -> None:
        """Everything goes; who waits is told so."""
        self.closed = True
        gone = Closed("the stream was dropped")
        for entry in self._entries:
            entry.fail(gone)
        for demand in self._demands:
            demand.fail(gone)
        self._entries.clear()
        self._demands.clear()
        for grant in self.leases:
            self.leases.end(grant)
        for left in self._left:
            left.clear()
        self._sheets.clear()
        self.keys = Keys()
        self._groups = Groups(len(self.settings.tasks))
        self._release(self.rows.clear())
        self._changed()

    def still_ready(self, demand: Demand, rows: Index) -> Index:
        """Those of these rows that could be granted to the demand now, each once."""
        rows = rows[np.sort(np.unique(rows, return_index=True)[1])]
        rows = rows[self.rows.there(rows)]
        fine = np.zeros(len(rows), np.bool_)
        for page, inside, chosen in self.rows.by_page(rows):
            sheet = self._sheet(page)
            fine[chosen] = (
                ((page.columns[inside] & demand.need) == demand.need)
                & (sheet.state[demand.task, inside] == PENDING)
                & ~sheet.dropped[inside]
            )
        return rows[fine]

    def check_drained(self, task: int) -> None:
        """Raises Closed where nothing will ever come for this task again."""
        if self.drained(task):
            raise Closed("the stream is closed, and this task has done all of it")

    @property
    def watches_age(self) -> bool:
        """Whether somebody waits whose sampler judges rows by their age."""
        return any(getattr(demand.sampler, "timeout", None) is not None for demand in self._demands)

    def drained(self, task: int) -> bool:
        """Whether nothing will ever come for this task again."""
        return self.closed and not self._left[task]

    # what there is

    def dead(self, task: int) -> Index:
        """The rows that were given back too often."""
        found = [
            np.flatnonzero((self._sheet(page).state[task, : page.count] == DEAD) & ~page.gone[: page.count])
            + page.first
            for page in self.rows.pages.values()
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def facts(self, rows: Index) -> tuple[list[Any], list[int], dict[str, list[Any]]]:
        """Of these rows: groups, versions and tags."""
        groups, versions = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        tags: dict[str, npt.NDArray[Any]] = {}
        for page, inside, chosen in self.rows.by_page(rows):
            sheet = self._sheet(page)
            groups[chosen], versions[chosen] = sheet.group[inside], sheet.version[inside]
            for name, values in sheet.tags.items():
                tags.setdefault(name, np.full(len(rows), None, object))[chosen] = values[inside]
        named = self._groups.names(groups)
        return named, versions.tolist(), {name: values.tolist() for name, values in tags.items()}

    def lengths(self, rows: Index, column: str) -> Index:
        """The lengths of these rows in a ragged column; 0 where they were not said."""
        found = np.zeros(len(rows), np.int64)
        for page, inside, chosen in self.rows.by_page(rows):
            known = self._sheet(page).lengths.get(column)
            if known is not None:
                found[chosen] = known[inside]
        return found

    def statistics(self, now: float) -> dict[str, Any]:
        """The stream's figures, as plain values."""
        ages, ready = [0.0], [Counter[str]() for _ in self.settings.tasks]
        for page in self.rows.pages.values():
            sheet = self._sheet(page)
            there = ~page.gone[: page.count]
            if there.any():
                ages.append(now - float(sheet.arrived[: page.count][there].min()))
            for task, counts in enumerate(ready):
                found = np.bincount(sheet.state[task, : page.count][there], minlength=len(STATES))
                counts.update(dict(zip(STATES, found.tolist(), strict=True)))
        tasks = {}
        for number, name in enumerate(self.settings.tasks):
            waiting = [demand for demand in self._demands if demand.task == number]
            totals = self._counts[number]
            tasks[name] = {
                "pending": ready[number]["pending"],
                "leased": ready[number]["leased"],
                "dead": ready[number]["dead"],
                "acked": totals[ACKED],
                "expired": totals[EXPIRED],
                "left": sum(self._left[number].values()),
                "waiting": len(waiting),
                "ready": {",".join(d.columns): len(self.ready(number, d.need, 1 << 62)) for d in waiting},
            }
        return {
            **msgspec.structs.asdict(self.settings),
            "rows": self.rows.count,
            "bytes": self._nbytes,
            "appended": self.rows.next,
            "oldest_s": max(ages),
            "latest_version": self._latest,
            "closed": self.closed,
            "waiting": len(self._entries),
            "groups": self._groups.open,
            "behind": self.behind(),
            "task": tasks,
        }

    def next_tick(self) -> float | None:
        """When `tick` is due by the leases; None while there is none."""
        return self.leases.next_end()
