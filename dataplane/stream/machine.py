"""A partition of a stream as a state machine: requests become commands, commands change rows.

Over a `Home`, which does the bookkeeping and knows who waits and who holds what. What is the home's and what is the
replica's: rows, keys, groups, counts of deliveries, the lost, quotas and sequences are replicated; leases, who waits,
who was admitted and what samplers chose are the leader's own, and go by `forget`.

What always holds: `apply` depends on the state and the command; a command that can't be done changes nothing and has an
error as its result. A client's request is done once, by its sequence. A grant's number begins with the term, so that
one of an earlier leader is no grant: `LeaseExpired`. Rows that a command in flight is about are given to nobody.

Time is the partition's: it goes on with a leader's clock from where the last command left it, so that a row is never
taken for older than it is.

Without followers and disk, `run` decides and applies in one step, and nothing is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import (
    Backpressure,
    Corrupt,
    DataplaneError,
    LeaseExpired,
    Misuse,
    NotReady,
    OwnerDied,
    ProtocolMismatch,
    Rejected,
)
from dataplane.replication.errors import NotLeader
from dataplane.replication.machine import Decision, StateMachine
from dataplane.replication.sessions import Sessions, Settled
from dataplane.stream import commands as c
from dataplane.stream import requests as r
from dataplane.stream.admission import Entry
from dataplane.stream.choosing import Demand
from dataplane.stream.facts import Arrival
from dataplane.stream.home import Home
from dataplane.stream.lease import Grant, Who
from dataplane.stream.page import Index
from dataplane.stream.patch import Patch
from dataplane.stream.progress import ACKED
from dataplane.stream.quota import Loan, Quotas
from dataplane.stream.replica_state import (
    PartitionState,
    counts_of,
    open_sealed,
    restore_counts,
    restore_rows,
    rows_state,
    seal,
)
from dataplane.stream.sampler import TokenBalanced
from dataplane.stream.settings import Settings

_TERM = 1 << 32  # grants of one term
MAX_GONE = 4096
"""Lost nodes that are remembered."""

_LOOK_S = 0.5  # how often samplers that judge by age are asked again
_NONE: Index = np.empty(0, np.int64)


class Served(msgspec.Struct, frozen=True):
    """The answer of a client's request that was answered by `Waiting` before, under its number."""

    client: str
    number: int
    outcome: r.Delivered | r.Admitted | DataplaneError


class StreamMachine(StateMachine):
    """See the module. `served` and `released` are for the driver to take, after each call."""

    def __init__(self, name: str, partition: int, settings: Settings, mark: str = "") -> None:
        self.name = name
        self.partition = partition
        self.served: list[Served] = []
        self.released: list[BatchRef] = []
        """References that rows came with and that no row needs any more. After `restore`: see `references`."""
        self._first = settings, mark
        self._begin(settings, mark)

    def _begin(self, settings: Settings, mark: str) -> None:
        self.home = Home(settings, self._released, mark=mark)
        self.home.replicate()
        self.quotas = Quotas(settings, self.partition)
        self.sessions = Sessions()
        self.clock_s = 0.0
        self.gone: dict[bytes, int] = {}
        """Of nodes that were lost, the last ones: the first shard that is not gone with them."""
        self._forget()

    def _released(self, patches: list[Patch]) -> None:
        self.released.extend(patch.ref for patch in patches)

    @property
    def references(self) -> list[BatchRef]:
        """All that rows need, for who keeps their bytes to compare with."""
        return self.home.books.rows.patches

    # What is volatile

    def _forget(self) -> None:
        self._term = -1
        self._ahead_s = 0.0  # of the leader's clock, the partition's
        self._flying: dict[tuple[str, int], tuple[bytes, int]] = {}  # -> command and ticket
        self._promised: list[tuple[int, int]] = []  # of quotas, what will be left
        self._ticket = 0  # that the append being decided uses
        self._waiting: dict[tuple[str, int], Demand | Entry] = {}

    def forget(self) -> None:
        gone = NotLeader("this replica leads the partition no more")
        self.served.extend(Served(*key, gone) for key in self._waiting)
        self._forget()
        self.home.forget_leases(1, leading=False)
        self._limit()

    def _lead(self, term: int, now: float) -> None:
        """The first decision of a term: all earlier commands are applied."""
        self._forget()
        self.home.forget_leases(term * _TERM + 1, leading=True)
        self._limit()
        self._term = term
        self._ahead_s = self.clock_s - now

    def deadline(self, now: float) -> float:
        """When this leader is to be asked to `Tick`, by its clock; `now` if at once."""
        home = self.home
        if self._term < 0:
            return now
        due = home.next_tick()
        when = float("inf") if due is None else due - self._ahead_s
        if home.commands or home.loose or (home.stale and (home.demands or len(home.admission))):
            return now
        return min(when, now + _LOOK_S) if home.watches_age else when

    # Deciding

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        return self.decide_decoded(r.decode_request(request), term, now)

    def decide_decoded(self, asked: r.AnyRequest, term: int, now: float) -> Decision:
        """As `decide`, for who has the request decoded."""
        if asked.sequence:
            known = self._known(asked)
            if known is not None:
                return Decision((), known)
            flying = self._flying.get((asked.client, asked.sequence))
            if flying is not None:
                return Decision((flying[0],))
        elif type(asked) is r.Append:
            raise ProtocolMismatch("an append to replicas has a sequence, or could be done twice")
        commands, result = self._decided(asked, term, now)
        if not commands:
            return Decision((), r.encode_result(result))
        encoded = tuple(map(c.encode, commands))
        if asked.sequence:
            self._flying[asked.client, asked.sequence] = encoded[-1], self._ticket
        return Decision(encoded)

    def run(self, request: r.AnyRequest, now: float) -> r.AnyResult:
        """Decide a request and apply what comes of it, for a partition that nobody else has. Raises DataplaneError."""
        if request.sequence:
            known = self._known(request)
            if known is not None:
                return r.decode_result(known)
        commands, result = self._decided(request, 0, now)
        for command in commands:
            result = self._done(command)
        if request.sequence and commands:
            self.sessions.keep(request.client, request.sequence, r.encode_result(result))
        if self._ticket:
            self.home.admission.give_back(self._ticket)
        while self.deadline(now) <= now:
            for command in self._decided(_TICK, 0, now)[0]:
                self._done(command)
        if isinstance(result, r.Refused):
            raise result.error
        return result

    def _known(self, asked: r.AnyRequest) -> bytes | None:
        try:
            return self.sessions.result(asked.client, asked.sequence)
        except Settled:
            raise Rejected(f"sequence {asked.sequence} of {asked.client!r} was answered long ago") from None

    def _decided(self, asked: r.AnyRequest, term: int, now: float) -> tuple[list[c.AnyCommand], r.AnyResult]:
        if term != self._term:
            self._lead(term, now)
        now += self._ahead_s
        self._ticket = 0
        result = _DECIDE[type(asked)](self, asked, now)
        if isinstance(result, c.Command):
            result.client, result.sequence = asked.client, asked.sequence
            return [result], _DONE  # type: ignore[list-item]
        if type(asked) is not r.Tick:
            return [], result
        commands: list[Any] = self.home.commands or []
        self.home.commands = []
        return commands, result

    def _append(self, asked: r.Append, now: float) -> c.Command:
        home = self.home
        home.check_open()
        admitted = home.admission.ticket(asked.ticket)
        if admitted is None or admitted.client != asked.client:
            entry = self._entry(
                asked.client, len(asked.ref), asked.ref.stored_nbytes, int(asked.versions.max(initial=0))
            )
            tickets: list[int] = []
            entry.admit = tickets.append
            home.admit(entry)
            if not tickets:
                why = home.withdraw(entry)
                raise Backpressure(f"the stream {self.name!r} is full ({why})", needed=asked.ref.stored_nbytes)
            self._ticket = tickets[0]
        elif not 1 <= len(asked.ref) <= admitted.rows:
            raise Misuse(f"an append of {len(asked.ref)} rows, where {admitted.rows} were admitted")
        else:
            self._ticket = asked.ticket
        return c.Append(
            ref=asked.ref,
            versions=asked.versions,
            time_s=now,
            groups=asked.groups,
            keys=asked.keys,
            digest=asked.digest,
            tags=asked.tags,
            lengths=asked.lengths,
            nodes=asked.nodes,
        )

    def _entry(self, client: str, rows: int, nbytes: int, version: int) -> Entry:
        return Entry(client, rows, nbytes, version, _ignore, _ignore)

    def _admit(self, asked: r.Admit, now: float) -> r.AnyResult:
        entry = self._entry(asked.client, asked.rows, asked.nbytes, asked.version)
        key, found = (asked.client, asked.number), _Outcome()
        if key in self._waiting:
            return r.Waiting()
        entry.admit = lambda ticket: self._serve(key, found, r.Admitted(ticket))
        entry.fail = lambda error: self._serve(key, found, error)
        self.home.admit(entry)
        return self._later(key, entry, found)

    def _give_back(self, asked: r.GiveBack, now: float) -> r.AnyResult:
        entry = self.home.admission.ticket(asked.ticket)
        if entry is not None and entry.client == asked.client:
            self.home.admission.give_back(asked.ticket)
        return _DONE

    def _extend(self, asked: r.Extend, now: float) -> c.Command:
        rows = self.home.books.keys.numbers(asked.keys) if asked.keys else asked.rows
        replace = self.home.replaces(rows, asked.ref, asked.holds) or asked.replace
        return c.Extend(
            rows=rows, ref=asked.ref, lengths=asked.lengths, holds=asked.holds, replace=replace, nodes=asked.nodes
        )

    def _consume(self, asked: r.Consume, now: float) -> r.AnyResult:
        home, key, found = self.home, (asked.client, asked.number), _Outcome()
        if key in self._waiting:
            return r.Waiting()
        if not 1 <= asked.min_rows <= asked.rows or not asked.lease_s > 0:
            raise Misuse(f"no delivery is of {asked.min_rows} to {asked.rows} rows for {asked.lease_s} s")
        demand = Demand(
            task=home.settings.task(asked.task),
            rows=asked.rows,
            min_rows=asked.min_rows,
            columns=asked.columns,
            sampler=asked.sampler,
            who=Who(asked.client, asked.member, asked.replica, asked.replicas),
            lease_s=asked.lease_s,
            serve=lambda grant: self._serve(key, found, self._delivered(grant, asked.sampler)),
            fail=lambda error: self._serve(key, found, error),
        )
        if asked.sampler is None:
            grant = home.take(demand, asked.chosen, asked.expired, now)
            if grant is not None:
                return self._delivered(grant, None)
        else:
            home.consume(demand, now)
            if asked.wait or found.outcome is not None:
                return self._later(key, demand, found)
            home.forget(demand)
        raise NotReady("no rows are ready", stream=self.name, task=asked.task)

    def _later(self, key: tuple[str, int], waits: Demand | Entry, found: _Outcome) -> r.AnyResult:
        """The answer, if it is there, or that it comes later."""
        outcome = found.outcome
        if outcome is None:
            found.waits = True
            self._waiting[key] = waits
            return r.Waiting()
        if isinstance(outcome, DataplaneError):
            raise outcome
        if isinstance(outcome, Exception):
            raise Misuse(f"{type(outcome).__name__}: {outcome}") from outcome
        answer: r.AnyResult = outcome
        return answer

    def _serve(self, key: tuple[str, int], found: _Outcome, outcome: Any) -> None:
        found.outcome = outcome
        if found.waits:
            self._waiting.pop(key, None)
            if isinstance(outcome, Exception) and not isinstance(outcome, DataplaneError):
                outcome = Misuse(f"{type(outcome).__name__}: {outcome}")
            self.served.append(Served(*key, outcome))

    def _delivered(self, grant: Grant, sampler: Any) -> r.Delivered:
        home, rows = self.home, grant.rows
        groups, versions, tags = home.books.told(rows)
        measured = sampler.needs if isinstance(sampler, TokenBalanced) else ()
        return r.Delivered(
            grant.number,
            rows,
            home.books.rows.ref(rows, grant.columns),
            home.hold(grant),
            home.books.keys.names(rows) if home.books.keys.given else [],
            groups,
            versions,
            tags,
            {name: home.books.lengths(rows, name) for name in measured},
        )

    def _cancel(self, asked: r.Cancel, now: float) -> r.AnyResult:
        waits = self._waiting.pop((asked.client, asked.number), None)
        if isinstance(waits, Demand):
            self.home.forget(waits)
        elif waits is not None:
            self.home.withdraw(waits)
        return _DONE

    def _settled(self, act: Callable[[], None]) -> c.Command:
        """The command that an ack or a nack makes; one that does nothing where others have to ack too, or where this
        was done before and may be on its way."""
        gathered, self.home.commands = self.home.commands, []
        try:
            act()
            made = self.home.commands
        finally:
            self.home.commands = gathered
        return made[0] if made else c.Settle(task=0, rows=_NONE, state=ACKED)

    def _ack(self, asked: r.Ack, now: float) -> c.Command:
        return self._settled(lambda: self.home.ack(asked.grant, asked.client, asked.replica, now))

    def _nack(self, asked: r.Nack, now: float) -> c.Command:
        return self._settled(lambda: self.home.nack(asked.grant, asked.client, asked.replica, now, seen=asked.seen))

    def _renew(self, asked: r.Renew, now: float) -> r.AnyResult:
        self.home.leases.renew(asked.grant, asked.client, asked.replica, now)
        return _DONE

    def _drop(self, asked: r.Drop, now: float) -> c.Command:
        books = self.home.books
        of_keys = books.keys.numbers(asked.keys) if asked.keys else _NONE
        rows = np.unique(np.concatenate((asked.rows, of_keys, books.in_groups(asked.groups))))
        books.require(rows)
        return c.Drop(rows=rows)

    def _borrow(self, asked: r.Borrow, now: float) -> c.Command:
        if self.partition:
            raise Misuse(f"partition {self.partition} lends nothing; ask the first")
        wanted = Loan(asked.version, asked.rows, asked.nbytes)
        lent, kept = self.quotas.offer(self.home.settings, asked.partition, wanted, self.home.admission.used)
        self._promise(kept)
        return c.Lend(
            partition=asked.partition,
            version=lent.version,
            rows=lent.rows,
            nbytes=lent.nbytes,
            own_rows=kept.rows,
            own_bytes=kept.nbytes,
        )

    def _yield_quota(self, asked: r.YieldQuota, now: float) -> c.Command:
        own, (rows, nbytes) = self.quotas.own, self.home.admission.used
        left = Loan(own.version, min(own.rows, max(asked.rows, rows)), min(own.nbytes, max(asked.nbytes, nbytes)))
        self._promise(left)
        return c.SetQuota(version=left.version, rows=left.rows, nbytes=left.nbytes)

    def _promise(self, kept: Loan) -> None:
        self._promised.append((kept.rows, kept.nbytes))
        self._limit()

    def _limit(self) -> None:
        """Nobody is let in on a quota that is about to be lower."""
        quotas = [(self.quotas.own.rows, self.quotas.own.nbytes), *self._promised]
        self.home.admission.quota = min(rows for rows, _ in quotas), min(nbytes for _, nbytes in quotas)

    def _leave(self, asked: r.Leave, now: float) -> r.AnyResult | c.Command:
        for key in [key for key in self._waiting if key[0] == asked.client]:
            del self._waiting[key]
        self.home.leave(asked.client, now)
        return c.End(clients=[asked.client]) if asked.ended else _DONE

    def _tick(self, asked: r.Tick, now: float) -> r.AnyResult:
        self.home.tick(now)
        return _DONE

    # Applying

    def apply(self, command: bytes) -> bytes:
        return self.apply_decoded(c.decode(command))

    def apply_decoded(self, command: c.AnyCommand) -> bytes:
        """As `apply`, for who has the command decoded; it is left as it is."""
        if not command.sequence:
            return r.encode_result(self._done(command))
        key = command.client, command.sequence
        flying = self._flying.pop(key, None)
        try:
            known = self.sessions.result(*key)
        except Settled:
            return r.encode_result(r.Refused.of(Rejected("this sequence was answered long ago")))
        if known is not None:
            return known
        result = r.encode_result(self._done(command))
        self.sessions.keep(*key, result)
        if flying is not None and flying[1]:  # after the rows are counted
            self.home.admission.give_back(flying[1])
        return result

    def _done(self, command: c.AnyCommand) -> r.AnyResult:
        try:
            return _APPLY[type(command)](self, command)
        except DataplaneError as error:
            return r.Refused.of(error)

    def _do_append(self, command: c.Append) -> r.AnyResult:
        self.clock_s = max(self.clock_s, command.time_s)
        arrival = Arrival(command.groups, command.versions, command.tags, command.lengths, command.nodes)
        count = len(command.ref)
        listed: list[Sized] = [command.versions, *command.lengths.values(), *command.tags.values()]
        if not count or any(len(values) != count for values in listed):
            raise Misuse(f"an append of {count} rows, with more or fewer versions, lengths or tags")
        if len(command.keys) not in (0, count) or len(command.groups or command.keys) not in (0, count):
            raise Misuse(f"an append of {count} rows, with more or fewer keys or groups")
        self._require_there(command.ref, command.nodes)
        first, new = self.home.appended(command.ref, command.keys, command.digest, arrival, command.time_s)
        return r.Appended(first, count, new)

    def _there(self, node: bytes, shard: int) -> bool:
        return shard >= self.gone.get(node, 0)

    def _require_there(self, ref: BatchRef, nodes: tuple[bytes, ...]) -> None:
        """Raises OwnerDied where columns that come are gone with the node that stored them."""
        if self.gone and not any(node not in self.gone for node in nodes):
            for node, shard in ref.shards():
                if not self._there(node, shard):
                    raise OwnerDied(f"node {node.hex()} was lost, and what it stored: put this again", node=node.hex())

    def _do_extend(self, command: c.Extend) -> r.AnyResult:
        self._require_there(command.ref, command.nodes)
        self.home.extended(
            command.rows,
            command.ref,
            command.lengths,
            self.clock_s,
            replace=command.replace,
            holds=command.holds,
            spares=command.nodes,
        )
        return _DONE

    def _do_settle(self, command: c.Settle) -> r.AnyResult:
        """Of rows that are open to the task. Of a client's, if some have been lost meanwhile, of none."""
        books, rows = self.home.books, command.rows
        if not len(rows):
            return _DONE
        there = books.rows.there(rows)
        if not there.all():
            rows = rows[there]
            if command.client:
                books.progress.unlease(books.rows.places(rows), command.task)
                self.home.stale = True
                raise LeaseExpired("some of these rows are lost; what was computed from them does not count")
        places = books.rows.places(rows)
        fits = books.progress.open(command.task, places, len(rows))
        if not fits.all():
            rows = rows[fits]
        if len(rows):
            self.home.do(command if len(rows) == len(command.rows) else msgspec.structs.replace(command, rows=rows))
        if command.state != ACKED or self.home.minds_acks:
            self.home.stale = True
        return _DONE

    def _do_drop(self, command: c.Drop) -> r.AnyResult:
        rows = command.rows[self.home.books.rows.there(command.rows)]
        if len(rows):
            self.home.do(c.Drop(rows=rows))
        self.home.stale = True
        return _DONE

    def _do_remove(self, command: c.Remove) -> r.AnyResult:
        books = self.home.books
        rows = command.rows[books.rows.there(command.rows)]
        self.home.do(c.Remove(rows=rows[books.progress.dropped(books.rows.places(rows), len(rows))]))
        self.home.stale = True
        return _DONE

    def _do_lose(self, command: c.Lose) -> r.AnyResult:
        before = max(command.before, self.gone.pop(command.node, 0))
        self.gone[command.node] = before
        if len(self.gone) > MAX_GONE:
            del self.gone[next(iter(self.gone))]
        books = self.home.books
        books.rows.forget_spare(command.node)
        dead = books.rows.dead(self._there)
        dropped = books.progress.dropped(books.rows.places(dead), len(dead))
        self.home.lose_rows(dead[~dropped], self.clock_s)  # who holds a dropped one goes on
        return _DONE

    def _do_take_lost(self, command: c.TakeLost) -> r.AnyResult:
        lost = self.home.lost
        return r.LostRows([(row, *lost.pop(row)) for row in list(lost)[: command.most]])

    def _do_close(self, command: c.Close) -> r.AnyResult:
        self.home.close(self.clock_s)
        return _DONE

    def _do_clear(self, command: c.Clear) -> r.AnyResult:
        self.home.closed = True
        for grant in self.home.leases:
            self.home.leases.end(grant)
        self.home.books.clear()
        self.home.close(self.clock_s)
        return _DONE

    def _do_configure(self, command: c.Configure) -> r.AnyResult:
        if command.settings.tasks != self.home.settings.tasks:
            raise Misuse(f"the tasks of the stream {self.name!r} are {', '.join(self.home.settings.tasks)}")
        self.home.configure(command.settings)
        self.quotas.configure(command.settings, self.partition)
        self._limit()
        return _DONE

    def _do_set_quota(self, command: c.SetQuota) -> r.AnyResult:
        self.quotas.take(Loan(command.version, command.rows, command.nbytes))
        self._kept(command.rows, command.nbytes)
        return r.Lent(self.quotas.own)

    def _do_lend(self, command: c.Lend) -> r.AnyResult:
        asked = Loan(command.version, command.rows, command.nbytes)
        kept = Loan(0, command.own_rows, command.own_bytes)
        lent = self.quotas.lend(self.home.settings, command.partition, asked, kept)
        self._kept(command.own_rows, command.own_bytes)
        return r.Lent(lent)

    def _kept(self, rows: int, nbytes: int) -> None:
        if (rows, nbytes) in self._promised:
            self._promised.remove((rows, nbytes))
        self._limit()
        self.home.stale = True

    def _do_end(self, command: c.End) -> r.AnyResult:
        for client in command.clients:
            self.sessions.drop(client)
        return _DONE

    # The state as bytes

    def snapshot(self) -> bytes:
        home = self.home
        books = home.books
        return seal(
            PartitionState(
                name=self.name,
                partition=self.partition,
                settings=home.settings,
                mark=books.keys.mark,
                next_offset=books.rows.next,
                next_patch=books.rows.next_patch,
                columns=[(name, books.rows.schema[name]) for name in books.rows.bits],
                tag_names=sorted(books.facts.tag_names),
                appended=books.appended,
                latest=books.facts.latest,
                closed=home.closed,
                clock_s=self.clock_s,
                counts=counts_of(books),
                lost=[(row, *told) for row, told in home.lost.items()],
                own=self.quotas.own,
                lent=sorted(self.quotas.lent.items()),
                gone=list(self.gone.items()),
                sessions=self.sessions.snapshot(),
                rows=rows_state(books),
            )
        )

    def restore(self, state: bytes) -> None:
        if not state:
            self._begin(*self._first)
            return
        found = open_sealed(state)
        if (found.name, found.partition) != (self.name, self.partition):
            raise Corrupt(
                f"a snapshot of partition {found.partition} of the stream {found.name!r}, and this is partition"
                f" {self.partition} of {self.name!r}"
            )
        home, sessions = Home(found.settings, self._released, mark=found.mark), Sessions()
        books = home.books
        try:
            books.rows.resume(found.next_offset, found.next_patch)
            restore_rows(books, found.rows, found.columns)
            restore_counts(books, found.counts)
            sessions.restore(found.sessions)
        except (ValueError, LookupError, OverflowError, msgspec.MsgspecError, DataplaneError) as error:
            raise Corrupt(f"a snapshot of the stream {self.name!r} that no replica made: {error}") from error
        books.facts.know_tags(found.tag_names)
        books.facts.latest, books.appended, home.closed = found.latest, found.appended, found.closed
        home.lost.update({row: (key, group, version) for row, key, group, version in found.lost})
        home.replicate()
        self._begin(found.settings, found.mark)
        self.home, self.sessions, self.clock_s = home, sessions, found.clock_s
        self.quotas.own, self.quotas.lent = found.own, dict(found.lent)
        self.gone = dict(found.gone)
        self._limit()


class _Outcome:
    """What a demand or an entry has come to, and whether its client was told to wait."""

    __slots__ = ("outcome", "waits")

    def __init__(self) -> None:
        self.outcome: Any = None
        self.waits = False


def _ignore(_: object) -> None:
    return


def _as(make: Callable[..., c.Command], *names: str) -> Callable[[StreamMachine, Any, float], c.Command]:
    """Of a request, the command that has the same fields."""
    return lambda machine, asked, now: make(**{name: getattr(asked, name) for name in names})


_DONE, _TICK = r.Done(), r.Tick()

_DECIDE: dict[type, Callable[[StreamMachine, Any, float], Any]] = {
    r.Admit: StreamMachine._admit,
    r.GiveBack: StreamMachine._give_back,
    r.Append: StreamMachine._append,
    r.Extend: StreamMachine._extend,
    r.Consume: StreamMachine._consume,
    r.Cancel: StreamMachine._cancel,
    r.Ack: StreamMachine._ack,
    r.Nack: StreamMachine._nack,
    r.Renew: StreamMachine._renew,
    r.Drop: StreamMachine._drop,
    r.Close: _as(c.Close),
    r.Clear: _as(c.Clear),
    r.TakeLost: _as(c.TakeLost, "most"),
    r.Lose: _as(c.Lose, "node", "incarnation", "before"),
    r.Configure: _as(c.Configure, "settings"),
    r.Borrow: StreamMachine._borrow,
    r.TakeQuota: lambda machine, asked, now: c.SetQuota(
        version=asked.loan.version, rows=asked.loan.rows, nbytes=asked.loan.nbytes
    ),
    r.YieldQuota: StreamMachine._yield_quota,
    r.Leave: StreamMachine._leave,
    r.Tick: StreamMachine._tick,
}

_APPLY: dict[type, Callable[[StreamMachine, Any], r.AnyResult]] = {
    c.Append: StreamMachine._do_append,
    c.Extend: StreamMachine._do_extend,
    c.Settle: StreamMachine._do_settle,
    c.Drop: StreamMachine._do_drop,
    c.Remove: StreamMachine._do_remove,
    c.Lose: StreamMachine._do_lose,
    c.TakeLost: StreamMachine._do_take_lost,
    c.Close: StreamMachine._do_close,
    c.Clear: StreamMachine._do_clear,
    c.Configure: StreamMachine._do_configure,
    c.SetQuota: StreamMachine._do_set_quota,
    c.Lend: StreamMachine._do_lend,
    c.End: StreamMachine._do_end,
}
