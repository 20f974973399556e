"""The home of a stream against a model of it: rows as plain objects, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import Closed, LeaseExpired, Misuse
from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.lease import Grant, Who
from dataplane.stream.progress import DEAD
from dataplane.stream.row_metadata import Arrival
from dataplane.stream.sampler import CompleteGroups, Fifo
from dataplane.stream.settings import Settings
from tests.unit.stream.example_streams import Demand, Entry, Home

TASKS = ("reward", "actor")
LEASE_S = 10.0
ROW_NBYTES = 8
MOST = 12  # rows, where there is a limit

CLIENTS = st.sampled_from(["p", "q", "r"])
TASK = st.integers(0, len(TASKS) - 1)
FIRST_COLUMNS = st.sampled_from([("x",), ("x", "y")])
MORE_COLUMNS = st.sampled_from([("y",), ("z",), ("y", "z"), ("x",)])
ROWS = st.integers(1, 5)
VERSION = st.sampled_from([0, 0, 1, 2])
GROUPS = st.one_of(st.none(), *[st.lists(st.sampled_from(["g", 7]), min_size=5, max_size=5)] * 2)
WANTED = st.sampled_from([("x",), ("x",), ("x",), ("y",), ("z", "x")])


def stored(shard: int, rows: int, columns: Sequence[str]) -> BatchRef:
    whole = [(name, Field("dense", "int64", ()), rows * ROW_NBYTES, shard, i) for i, name in enumerate(columns)]
    return BatchRef.of(b"the-node", rows, whole)


@dataclass(eq=False)
class Row:
    number: int
    key: str
    group: Any
    version: int
    columns: dict[str, tuple[int, int]]  # shard, and row of it
    patches: dict[tuple[str, ...], int]
    state: list[str] = field(default_factory=lambda: ["pending"] * len(TASKS))
    tries: list[int] = field(default_factory=lambda: [0] * len(TASKS))
    dropped: bool = False
    past: set[int] = field(default_factory=set)  # the tasks to which it counts no more as dropped


@dataclass(eq=False)
class Held:
    client: str
    task: int
    rows: list[Row]
    expires: float


@dataclass(eq=False)
class Waiting:
    name: int
    client: str
    task: int
    rows: int
    least: int
    columns: tuple[str, ...]
    complete: int  # whole groups of so many; 0: any rows


@dataclass(eq=False)
class Entering:
    name: int
    client: str
    rows: int
    nbytes: int
    version: int


class Model:
    """What a stream does, with no thought for how fast."""

    def __init__(self, limits: Settings) -> None:
        self.limits = limits
        self.rows: dict[int, Row] = {}
        self.members: dict[Any, list[Row]] = {}  # of each group that has rows: all that it ever had
        self.appended = 0
        self.latest = 0
        self.closed = False
        self.filled = False  # the whole groups that were chosen last are all that fit
        self.patch_nbytes: dict[int, int] = {}
        self.live: dict[int, Held] = {}
        self.readable: list[tuple[set[int], set[int]]] = []  # replaced patches, and the grants that may read them
        self.entering: list[Entering] = []
        self.admitted: dict[int, Entering] = {}
        self.waiting: list[Waiting] = []
        self.totals: Counter[tuple[int, str]] = Counter()
        self.told: list[tuple[Any, ...]] = []

    # what there is

    def left(self, task: int) -> list[Row]:
        return [row for row in self.rows.values() if row.state[task] in ("pending", "leased")]

    def count(self, task: int, state: str) -> int:
        return sum(row.state[task] == state for row in self.rows.values())

    def needed(self) -> set[int]:
        needed = {patch for row in self.rows.values() for patch in row.patches.values()}
        return needed.union(*(patches for patches, readers in self.readable if readers & self.live.keys()))

    @property
    def nbytes(self) -> int:
        return sum(self.patch_nbytes[patch] for patch in self.needed())

    def behind(self) -> list[str]:
        marks = [
            (min(row.version for row in self.left(task)), -len(self.left(task)), task)
            for task in range(len(TASKS))
            if self.left(task)
        ]
        return [TASKS[task] for *mark, task in marks if mark == list(min(marks)[:2])]

    # what happens

    def let_in(self, name: int) -> None:
        """This one was let in: it had to fit, and to pass none but those that wait for an older version to be done."""
        (entry,) = [entry for entry in self.entering if entry.name == name]
        assert not self.full(entry)
        earlier = self.entering[: self.entering.index(entry)]
        self.entering.remove(entry)
        self.admitted[name] = entry
        assert all(self.lags(entry) for entry in earlier)

    def nobody_waits_in_vain(self) -> None:
        for entry in self.entering:
            if not self.lags(entry):
                assert self.full(entry)
                return

    def lags(self, entry: Entering) -> bool:
        undone = [row.version for task in range(len(TASKS)) for row in self.left(task)]
        undone += [other.version for other in self.admitted.values()]
        return bool(self.limits.max_lag >= 0 and undone and entry.version - min(undone) > self.limits.max_lag)

    def full(self, entry: Entering) -> bool:
        limits, coming = self.limits, self.admitted.values()
        rows = len(self.rows) + sum(e.rows for e in coming) + entry.rows
        nbytes = self.nbytes + sum(e.nbytes for e in coming) + entry.nbytes
        return (
            bool(limits.max_rows and rows > limits.max_rows)
            or bool(limits.max_bytes and nbytes > limits.max_bytes)
            or self.lags(entry)
        )

    def settle(self, row: Row, task: int, state: str) -> None:
        row.state[task] = state
        if state != "dead" and not row.dropped:
            self.passed(task, row.group)
        self.totals[task, state] += 1

    def passed(self, task: int, group: Any) -> None:
        """Where the task has nothing left of the group, what was dropped of it counts no more."""
        members = self.members[group]
        there = [row for row in members if row.number in self.rows and not row.dropped]
        if not any(row.state[task] in ("pending", "leased") for row in there):
            for row in members:
                row.past |= {task} if row.dropped else set()

    def drop(self, numbers: list[int]) -> None:
        fresh = [row for number in sorted(set(numbers)) if not (row := self.rows[number]).dropped]
        for row in fresh:
            row.dropped = True
            row.past = {task for task in range(len(TASKS)) if row.state[task] in ("acked", "expired")}
        for row in fresh:
            for task in range(len(TASKS)):
                self.passed(task, row.group)

    def back(self, rows: list[Row], task: int) -> None:
        for row in rows:
            if row.tries[task] >= self.limits.max_deliveries:
                self.settle(row, task, "dead")
            else:
                row.state[task] = "pending"

    def go_on(self) -> None:
        """All that follows from what happened: rows go, who waits is served or let in."""
        self.sweep()
        before = None
        while before != (before := (len(self.waiting), self.totals.copy())):
            for demand in list(self.waiting):
                self.serve(demand)
        for demand in list(self.waiting):
            if self.closed and not self.left(demand.task):
                self.waiting.remove(demand)
                self.told.append(("fail", demand.name, Closed))

    def sweep(self) -> None:
        for row in list(self.rows.values()):
            if row.dropped and "leased" not in row.state:
                for task in range(len(TASKS)):
                    if row.state[task] == "pending":
                        self.settle(row, task, "expired")
            elif not all(state in ("acked", "expired") for state in row.state):
                continue
            del self.rows[row.number]
            if all(member.number not in self.rows for member in self.members[row.group]):
                del self.members[row.group]

    def serve(self, demand: Waiting) -> bool:
        ready = [
            row
            for row in self.rows.values()
            if row.state[demand.task] == "pending" and not row.dropped and row.columns.keys() >= set(demand.columns)
        ]
        self.filled = False
        try:
            chosen = self.whole_groups(demand, ready) if demand.complete else ready[: demand.rows]
        except Misuse:
            self.waiting.remove(demand)
            self.told.append(("fail", demand.name, Misuse))
            return True
        self.sweep()
        least = min(demand.least, len(self.left(demand.task))) if self.closed else demand.least
        if not chosen or (len(chosen) < least and not self.filled):
            return False
        for row in chosen:
            row.state[demand.task] = "leased"
            row.tries[demand.task] += 1
        self.waiting.remove(demand)
        self.told.append(("serve", demand.name, [row.number for row in chosen]))
        return True

    def whole_groups(self, demand: Waiting, ready: list[Row]) -> list[Row]:
        by_group: dict[Any, list[Row]] = {}
        for row in ready:
            by_group.setdefault(row.group, []).append(row)
        chosen: list[Row] = []
        hopeless: list[Row] = []
        full = misfit = False
        for group, rows in by_group.items():
            dropped = sum(row.dropped and demand.task not in row.past for row in self.members[group])
            lost = dropped + sum(not row.dropped and row.state[demand.task] == "dead" for row in self.members[group])
            there = sum(
                row.number in self.rows and not row.dropped and row.state[demand.task] in ("pending", "leased")
                for row in self.members[group]
            )
            if len(rows) == there and there + lost >= demand.complete:
                full = full or len(chosen) + len(rows) > demand.rows
                misfit = misfit or (full and not chosen)
                chosen += [] if full else rows
            elif there + lost < demand.complete and self.closed:
                hopeless += rows
        if misfit:
            raise Misuse("the first group is too large")
        for row in hopeless:
            self.settle(row, demand.task, "expired")
        self.filled = full
        return chosen


class HomeAgainstAModel(RuleBasedStateMachine):
    @initialize(
        max_rows=st.sampled_from([0, MOST]),
        max_bytes=st.sampled_from([0, 2 * MOST * ROW_NBYTES]),
        max_lag=st.sampled_from([-1, 1]),
        max_deliveries=st.sampled_from([1, 2, 5]),
    )
    def begin(self, max_rows: int, max_bytes: int, max_lag: int, max_deliveries: int) -> None:
        limits = Settings(TASKS, max_bytes, max_rows, max_lag, max_deliveries)
        self.leased = Home(limits, self.release, now=100.0)
        self.model = Model(limits)
        self.now = 100.0
        self.names = 0
        self.told: list[tuple[Any, ...]] = []
        self.served: list[tuple[Waiting, Grant]] = []
        self.released: list[ColumnBatch] = []
        self.live = self.model.live
        self.over: dict[int, str] = {}
        self.acked: set[tuple[int, int]] = set()
        self.demands: dict[int, tuple[Waiting, Demand]] = {}
        self.entries: dict[int, tuple[Entering, Entry]] = {}
        self.tickets: dict[int, int] = {}  # by entry
        self.calls: list[tuple[list[str], BatchRef, bytes, list[int], int]] = []
        self.done: set[int] = set()  # grants that were acked

    def release(self, patches: list[ColumnBatch]) -> None:
        self.released += patches

    def name(self) -> int:
        self.names += 1
        return self.names

    def then(self) -> None:
        """The model goes on, and must tell what the home told."""
        at_hand = dict(self.model.rows)
        self.model.go_on()
        for waiting, grant in self.served:
            rows = [at_hand[number] for number in grant.rows.tolist()]
            held = {(g.task, row.number) for g in self.live.values() for row in g.rows}
            assert (held | self.acked).isdisjoint((waiting.task, row.number) for row in rows)
            self.live[grant.number] = Held(waiting.client, waiting.task, rows, self.now + LEASE_S)
        self.served.clear()
        for told in self.told:
            if told[0] == "admit":
                self.model.let_in(told[1])
        self.model.nobody_waits_in_vain()
        assert [t for t in self.told if t[0] == "serve"] == [t for t in self.model.told if t[0] == "serve"]
        fails = sorted((t[1], t[2].__name__) for t in self.told if t[0] == "fail")
        assert fails == sorted((t[1], t[2].__name__) for t in self.model.told if t[0] == "fail")
        self.told.clear()
        self.model.told.clear()

    # arriving

    @rule(client=CLIENTS, rows=ROWS, columns=FIRST_COLUMNS, version=VERSION, named=st.booleans(), groups=GROUPS)
    def append_at_once(
        self, client: str, rows: int, columns: tuple[str, ...], version: int, named: bool, groups: list[Any] | None
    ) -> None:
        self.ask_to_append(client, rows, columns, version)
        if self.names in self.model.admitted:
            self.come(self.names, named, groups)

    @rule(client=CLIENTS, rows=ROWS, columns=FIRST_COLUMNS, version=VERSION)
    def ask_to_append(self, client: str, rows: int, columns: tuple[str, ...], version: int) -> None:
        nbytes = rows * len(columns) * ROW_NBYTES
        entering = Entering(self.name(), client, rows, nbytes, version)
        entry = Entry(client, rows, nbytes, version, self.admission(entering.name), self.failure(entering.name))
        if self.model.closed:
            with pytest.raises(Closed):
                self.leased.admit(entry, self.now)
            return
        self.entries[entering.name] = (entering, entry)
        self.model.entering.append(entering)
        self.leased.admit(entry, self.now)
        self.then()

    def admission(self, name: int) -> Callable[[int], None]:
        def admit(ticket: int) -> None:
            self.tickets[name] = ticket
            self.told.append(("admit", name))

        return admit

    def failure(self, name: int) -> Callable[[Exception], None]:
        return lambda error: self.told.append(("fail", name, type(error)))

    @precondition(lambda self: self.model.admitted)
    @rule(data=st.data(), named=st.booleans(), groups=GROUPS)
    def append_what_was_admitted(self, data: st.DataObject, named: bool, groups: list[Any] | None) -> None:
        self.come(data.draw(st.sampled_from(sorted(self.model.admitted))), named, groups)

    def come(self, name: int, named: bool, groups: list[Any] | None) -> None:
        entering = self.model.admitted[name]
        columns = ("x", "y")[: entering.nbytes // entering.rows // ROW_NBYTES]
        shard, count = self.name(), entering.rows
        ref = stored(shard, count, columns)
        keys, digest = [f"{shard}-{i}" for i in range(count)] if named else [], str(shard).encode()
        arrival = Arrival(groups and groups[:count], np.full(count, entering.version), {}, {})
        if self.model.closed:
            del self.model.admitted[name]
            with pytest.raises(Closed):
                self.leased.append(self.tickets[name], ref, keys, digest, arrival, self.now)
            self.then()
            return
        first, new = self.leased.append(self.tickets[name], ref, keys, digest, arrival, self.now)
        model = self.model
        assert new
        assert first == model.appended
        del model.admitted[name]
        model.patch_nbytes[shard] = ref.stored_nbytes
        for i in range(count):
            number = first + i
            group = groups[i] if groups else ("own", number)
            where = dict.fromkeys(columns, (shard, i))
            row = Row(
                number, keys[i] if keys else f"~.{number}", group, entering.version, where, {tuple(columns): shard}
            )
            model.rows[number] = row
            model.members.setdefault(group, []).append(row)
        model.appended += count
        model.latest = max(model.latest, entering.version)
        if keys:
            self.calls.append((keys, ref, digest, [entering.version] * count, first))
        self.then()

    @precondition(lambda self: self.calls and self.model.admitted and not self.model.closed)
    @rule(data=st.data())
    def append_again(self, data: st.DataObject) -> None:
        keys, ref, digest, versions, first = data.draw(st.sampled_from(self.calls))
        name = data.draw(st.sampled_from(sorted(self.model.admitted)))
        there = {row.key for row in self.model.rows.values()} & set(keys)
        if not there or len(keys) > self.model.admitted[name].rows:
            return
        del self.model.admitted[name]
        arrival = Arrival(None, np.array(versions), {}, {})
        if len(there) == len(keys):
            assert self.leased.append(self.tickets[name], ref, keys, digest, arrival, self.now) == (first, False)
        else:
            with pytest.raises(Misuse, match="already"):
                self.leased.append(self.tickets[name], ref, keys, digest, arrival, self.now)
        self.then()

    @precondition(lambda self: self.model.admitted)
    @rule(data=st.data())
    def give_a_ticket_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.admitted)))
        del self.model.admitted[name]
        self.leased.give_back(self.tickets[name], self.now)
        self.then()

    @precondition(lambda self: self.model.entering)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        entering = data.draw(st.sampled_from(self.model.entering))
        self.model.entering.remove(entering)
        why = self.leased.withdraw(self.entries[entering.name][1], self.now)
        assert why.startswith(("max_rows", "max_bytes", "max_lag") if self.model.full(entering) else "others before")
        self.then()

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), columns=MORE_COLUMNS, replace=st.booleans())
    def extend(self, data: st.DataObject, columns: tuple[str, ...], replace: bool) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1, max_size=6, unique=True))
        rows = [self.model.rows[number] for number in numbers]
        shard = self.name()
        ref = stored(shard, len(rows), columns)
        if not replace and any(name in row.columns for row in rows for name in columns):
            with pytest.raises(Misuse, match="has a column"):
                self.leased.extend(np.array(numbers), ref, {}, self.now)
            return
        replaced = {row.patches[key] for row in rows if (key := tuple(sorted(columns))) in row.patches}
        self.leased.extend(np.array(numbers), ref, {}, self.now, replace=replace)
        self.model.patch_nbytes[shard] = ref.stored_nbytes
        for i, row in enumerate(rows):
            row.columns.update(dict.fromkeys(columns, (shard, i)))
            row.patches[tuple(sorted(columns))] = shard
        readers = {
            number for number, held in self.live.items() if not {id(r) for r in held.rows}.isdisjoint(map(id, rows))
        }
        self.model.readable.append((replaced, readers))
        self.then()

    # delivering

    @rule(
        client=CLIENTS,
        task=TASK,
        rows=st.integers(1, 6),
        least=st.sampled_from([1, 1, 3]),
        columns=WANTED,
        complete=st.sampled_from([0, 0, 2, 3]),
    )
    def consume(self, client: str, task: int, rows: int, least: int, columns: tuple[str, ...], complete: int) -> None:
        waiting = Waiting(self.name(), client, task, rows, min(rows, least), columns, complete)
        demand = Demand(
            task=task,
            rows=rows,
            min_rows=waiting.least,
            columns=columns,
            sampler=CompleteGroups(complete) if complete else Fifo(),
            who=Who(client),
            lease_s=LEASE_S,
            serve=self.service(waiting),
            fail=self.failure(waiting.name),
        )
        self.demands[waiting.name] = (waiting, demand)
        self.model.waiting.append(waiting)
        self.leased.consume(demand, self.now)
        self.then()

    def service(self, waiting: Waiting) -> Callable[[Grant], None]:
        def serve(grant: Grant) -> None:
            self.told.append(("serve", waiting.name, grant.rows.tolist()))
            self.served.append((waiting, grant))

        return serve

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def wait_no_longer(self, data: st.DataObject) -> None:
        waiting = data.draw(st.sampled_from(self.model.waiting))
        self.model.waiting.remove(waiting)
        self.leased.forget(self.demands[waiting.name][1])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        held = self.live.pop(number)
        self.over[number] = held.client
        for row in held.rows:
            assert (held.task, row.number) not in self.acked
            self.acked.add((held.task, row.number))
            self.model.settle(row, held.task, "acked")
        self.done.add(number)
        self.leased.ack(number, held.client, None, self.now)
        self.then()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        held = self.end(number)
        self.leased.nack(number, held.client, None, self.now)
        self.then()

    def end(self, number: int) -> Held:
        held = self.live.pop(number)
        self.over[number] = held.client
        self.model.back(held.rows, held.task)
        return held

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        self.live[number].expires = self.now + LEASE_S
        self.leased.leases.renew(number, self.live[number].client, None, self.now)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def come_too_late(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.over)))
        if number in self.done:
            self.leased.ack(number, self.over[number], None, self.now)  # the answer may have been lost
        for late in (
            self.leased.nack,
            self.leased.leases.renew,
            *((self.leased.ack,) if number not in self.done else ()),
        ):
            with pytest.raises(LeaseExpired):
                late(number, self.over[number], None, self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def touch_what_another_holds(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.live)))
        with pytest.raises(LeaseExpired):
            self.leased.ack(number, "a stranger", None, self.now)

    @precondition(lambda self: self.live)
    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = [number for number, held in self.live.items() if held.expires <= self.now]
        first = min((held.expires for held in self.live.values()), default=None)
        assert self.leased.next_tick() == first
        for number in sorted(due, key=lambda number: self.live[number].expires):
            self.end(number)
        self.leased.tick(self.now)
        self.then()

    # going

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def drop_rows(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1, max_size=4))
        self.model.drop(numbers)
        self.leased.drop_rows(np.array(numbers), self.now)
        self.then()

    @precondition(lambda self: self.model.appended > len(self.model.rows))
    @rule(number=st.integers(-1, 30))
    def use_a_row_that_is_not_there(self, number: int) -> None:
        if number in self.model.rows:
            return
        with pytest.raises(Misuse, match="not in the stream"):
            self.leased.drop_rows(np.array([number]), self.now)
        with pytest.raises(Misuse, match="not in the stream"):
            self.leased.extend(np.array([number]), stored(0, 1, ["z"]), {}, self.now)

    @precondition(lambda self: self.live or self.model.waiting or self.model.admitted)
    @rule(client=CLIENTS)
    def leave(self, client: str) -> None:
        model = self.model
        model.waiting = [demand for demand in model.waiting if demand.client != client]
        model.entering = [entry for entry in model.entering if entry.client != client]
        model.admitted = {name: entry for name, entry in model.admitted.items() if entry.client != client}
        for number in [number for number, held in self.live.items() if held.client == client]:
            self.end(number)
        self.leased.leave(client, self.now)
        self.then()

    @precondition(lambda self: self.model.appended > 20 and not self.model.closed)
    @rule()
    def close(self) -> None:
        self.model.closed = True
        self.model.told += [("fail", entry.name, Closed) for entry in self.model.entering]
        self.model.entering.clear()
        self.leased.close(self.now)
        self.then()

    # what always holds

    @invariant()
    def figures_agree(self) -> None:
        if not hasattr(self, "leased"):
            return
        found, model = self.leased.figures(self.now), self.model
        assert (found["rows"], found["bytes"], found["appended"]) == (len(model.rows), model.nbytes, model.appended)
        assert (found["closed"], found["latest_version"]) == (model.closed, model.latest)
        assert (found["waiting"], found["behind"]) == (len(model.entering), model.behind())
        assert found["groups"] == sum(not isinstance(group, tuple) for group in model.members)
        for task, name in enumerate(TASKS):
            own = found["task"][name]
            for state in ("pending", "leased", "dead"):
                assert own[state] == model.count(task, state)
            for state in ("acked", "expired"):
                assert own[state] == model.totals[task, state]
            assert own["left"] == own["pending"] + own["leased"]
            assert own["waiting"] == sum(demand.task == task for demand in model.waiting)
            dead = [row.number for row in model.rows.values() if row.state[task] == "dead"]
            assert self.leased.partition.progress.in_state(task, DEAD).tolist() == dead

    @invariant()
    def limits_hold(self) -> None:
        if hasattr(self, "leased") and self.model.limits.max_rows:
            assert self.leased.partition.rows.count + sum(e.rows for e in self.model.admitted.values()) <= MOST

    @invariant()
    def patches_are_released_once_and_only_when_nothing_needs_them(self) -> None:
        if not hasattr(self, "leased"):
            return
        released = [patch.ref.shards()[0][1] for patch in self.released]
        assert len(released) == len(set(released))
        assert set(released) == self.model.patch_nbytes.keys() - self.model.needed()

    @invariant()
    def columns_are_where_they_were_put(self) -> None:
        if not hasattr(self, "leased") or not self.model.rows:
            return
        rows = list(self.model.rows.values())[::-1]
        numbers = np.array([row.number for row in rows])
        assert self.leased.partition.keys.names(numbers) == [row.key for row in rows]
        assert self.leased.partition.keys.numbers([row.key for row in rows]).tolist() == numbers.tolist()
        for name in ("x", "y", "z"):
            having = [row for row in rows if name in row.columns]
            if having:
                ref = self.leased.partition.rows.ref(np.array([row.number for row in having]), [name])
                found = [(piece.shard, at) for piece in ref.pieces(name) for at in piece.rows.array().tolist()]
                assert found == [row.columns[name] for row in having]

    def teardown(self) -> None:
        if not hasattr(self, "leased"):
            return
        for client in ("p", "q", "r"):
            self.leave(client)
        if not self.model.closed:
            self.close()
        for task in range(len(TASKS)):
            self.consume("p", task, 1000, 1, ("x",), 0)
            for number in list(self.live):
                held = self.live.pop(number)
                for row in held.rows:
                    self.model.settle(row, held.task, "acked")
                self.leased.ack(number, held.client, None, self.now)
            self.then()
            assert self.leased.drained(task)
        dead = sorted(self.model.rows)
        if dead:
            for number in dead:
                assert "dead" in self.model.rows[number].state
            self.model.drop(dead)
            self.leased.drop_rows(np.array(dead), self.now)
            self.then()
        self.figures_agree()
        self.patches_are_released_once_and_only_when_nothing_needs_them()
        assert (self.leased.partition.rows.count, len(self.leased.leases), self.model.needed()) == (0, 0, set())
        assert {patch.ref.shards()[0][1] for patch in self.released} == self.model.patch_nbytes.keys()


TestHomeAgainstAModel = HomeAgainstAModel.TestCase
TestHomeAgainstAModel.settings = settings(max_examples=100, stateful_step_count=40)
