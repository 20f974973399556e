"""The leader of a partition of a stream: turns requests into commands or answers.

Beside the replicated state, the leader has state of its own: leases, permits, choices of samplers, commands in flight.
`forget` drops it.

Invariants: rows of a command in flight are not delivered. The number of a grant contains the term, so requests about a
grant of an earlier leader raise `LeaseExpired`. Times are of the partition's clock: the leader's clock, shifted to
continue from the time of the last command. So the age of a row is never too high.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from msgspec.structs import replace

from dataplane.errors import Backpressure, DataplaneError, LeaseExpired, Misuse, NotReady
from dataplane.stream import commands as c
from dataplane.stream import reads
from dataplane.stream import requests as r
from dataplane.stream.admission import LAG, AppendSize
from dataplane.stream.extension import replaces
from dataplane.stream.lease import RowLease
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.page import NONE, Index
from dataplane.stream.pieces import SPANS
from dataplane.stream.progress import DEAD, LEASED, PENDING
from dataplane.stream.reads import Snapshots
from dataplane.stream.replicated import ReplicatedStream
from dataplane.stream.row_choice import Demand
from dataplane.stream.sampler import TokenBalanced
from dataplane.stream.settings import StreamSettings
from dataplane.stream.statistics import Waiting
from dataplane.stream.unfinished import check_joined

log = logging.getLogger(__name__)

_NAMED = 3  # the most rows that a log message names
_NAMED_GROUPS = 3  # the most groups that an error names
_HOLDERS = 64  # the most clients that an error names
_MOST_RETRIED = 1 << 16  # the most rows of one command
_TERM = 1 << 32  # the most grants of one term; the first number of term t is t * _TERM + 1


class StreamLeader(ReplicatedStream):
    """The leader's decisions about requests; see the module."""

    waits: Callable[[], Iterable[Any]]
    """Returns the requests that wait at the driver, encoded or decoded."""

    def __init__(self, name: str, settings: StreamSettings | None, mark: str) -> None:
        self._forget()
        super().__init__(name, settings, mark)

    def _forget(self) -> None:
        self._term = -1
        self._ahead_s = 0.0  # the partition's clock minus the leader's
        self._flying: dict[tuple[str, int], tuple[bytes, int]] = {}  # -> command and ticket
        self._decoded: dict[bytes, c.AnyCommand] = {}  # commands that were decided and not applied yet
        self._ticket = 0  # the ticket that the append being decided uses
        self.snapshots = Snapshots(self._term)

    def by_its_clock(self, now: float) -> float:
        """The time of the partition's clock at `now` of the leader's clock."""
        return now + self._ahead_s

    def _lead(self, term: int, now: float) -> None:
        """Begin a term, before its first decision. All earlier commands are applied."""
        self._forget()
        self.leased.forget_leases(term * _TERM + 1, leading=True)
        self._term, self.snapshots = term, Snapshots(term)
        self._ahead_s = self.clock_s - now

    def began(self) -> None:
        term = self._term
        self.leased.forget_leases(max(term, 0) * _TERM + 1, leading=term >= 0)

    def died(self, task: int, rows: Index, reason: str) -> None:
        if self._term < 0:  # only the leader logs it
            return
        leased = self.leased
        names, more = ", ".join(leased.partition.keys.names(rows[:_NAMED])), f" and {len(rows) - _NAMED} more"
        log.warning(
            "stream %r, %s: dead letters of task %r, deliveries: %d, reason: %s",
            self.name,
            names + more * (len(rows) > _NAMED),
            leased.settings.tasks[task],
            leased.settings.max_deliveries,
            reason or "given back without a reason",
        )

    def pending(self) -> Waiting:
        """The requests that wait at the driver, in the form of `statistics`."""
        found: list[tuple[int | None, tuple[str, ...]]] = []
        for waiting in self.waits():
            asked = r.decode_request(waiting) if isinstance(waiting, bytes) else waiting
            if isinstance(asked, r.Consume | r.Look):
                found.append((self.leased.settings.tasks.index(asked.task), asked.columns))
            elif isinstance(asked, r.Append | r.Admit):
                found.append((None, ()))
        return found

    @property
    def holding(self) -> set[str]:
        """The clients that have leases, permits or snapshots."""
        leased = self.leased
        found = {str(client) for grant in leased.leases for client in grant.held_by.values()}
        found |= leased.partition.unfinished.clients
        return found | {str(client) for client in leased.admission.clients()} | self.snapshots.clients

    @property
    def changes(self) -> int:
        """A number that increases whenever rows may have become ready, also when the leader changes."""
        return self._term * _TERM + self.leased.changes

    # Deciding

    def _known(self, asked: r.StreamRequest) -> bytes | None:
        """The result of a request that was executed before, else None. Raises Rejected if the result is not kept any
        more, or if some of several merged appends were executed alone."""
        if isinstance(asked, r.Append) and asked.parts:
            return self.known_parts(asked.parts)
        return self.sessions.result(asked.client, asked.sequence) if asked.sequence else None

    def _decided(self, asked: r.StreamRequest, term: int, now: float) -> tuple[list[c.AnyCommand], r.StreamResult]:
        if term != self._term:
            self._lead(term, now)
        now += self._ahead_s
        self._ticket = 0
        result = _DECIDE[type(asked)](self, asked, now) or _DONE
        if isinstance(result, r.StreamRequest):
            return [result], _DONE  # type: ignore[list-item]
        if isinstance(result, c.Command):
            result.client, result.sequence = asked.client, asked.sequence
            return [result], _DONE  # type: ignore[list-item]
        return (result, _DONE) if isinstance(result, list) else ([], result)

    def _append(self, asked: r.Append, now: float) -> r.Append:
        leased = self.leased
        leased.check_open()
        admitted = leased.admission.ticket(asked.ticket) if asked.ticket else None
        if admitted is None or admitted.client != asked.client:
            if leased.settings.limited:
                self._ticket = self._admit(asked)
        elif not 1 <= len(asked.ref) <= admitted.rows:
            raise Misuse(f"an append of {len(asked.ref)} rows, where {admitted.rows} were admitted")
        else:
            self._ticket = asked.ticket
        return replace(asked, ticket=0, time_s=now)

    def entry_of(self, asked: r.Append | r.Admit) -> AppendSize:
        """The rows and bytes that a request asks to append."""
        if isinstance(asked, r.Admit):
            return AppendSize(asked.client, asked.rows, asked.nbytes, asked.version)
        version = int(asked.versions.max(initial=0))
        return AppendSize(asked.client, len(asked.ref), asked.ref.stored_nbytes, version)

    def _admit(self, asked: r.Append | r.Admit) -> int:
        """Grant a permit for an append. Returns its ticket. Raises Backpressure if a limit would be exceeded now,
        LimitExceeded if it would be in an empty stream, and Closed."""
        self.leased.check_open()
        ticket = self.leased.admission.admit(entry := self.entry_of(asked))
        if ticket is None:
            raise refusal(self.leased, entry)
        return ticket

    def _give_back(self, asked: r.GiveBack, now: float) -> None:
        entry = self.leased.admission.ticket(asked.ticket)
        if entry is not None and entry.client == asked.client:
            self.leased.admission.give_back(asked.ticket)

    def _extend(self, asked: r.Extend, now: float) -> r.Extend:
        rows = self.leased.partition.keys.numbers(asked.keys) if asked.keys else asked.rows
        again = replaces(self.leased, rows, asked.ref, asked.holds) or asked.replace
        return replace(asked, rows=rows, keys=[], replace=again)

    def _begun(self, asked: r.BegunRow, token: int = 0) -> int | None:
        """The number of the row in progress that a request names by number, key or token. None if the token's row was
        finished or abandoned, or no row has the token. Raises LeaseExpired for the key of a row that does not exist."""
        partition = self.leased.partition
        if token in partition.unfinished.ended:
            return None
        if not asked.key and asked.row >= 0:
            return asked.row
        if not asked.key:
            return next((row for row, begun in partition.unfinished.begun.items() if begun.token == token), None)
        rows = partition.keys.known_rows([asked.key])
        if not partition.rows.there(rows)[0]:
            raise LeaseExpired(
                f"no row {asked.key!r} is in progress: it was never begun, or was dropped, lost, or finished by another"
            )
        return int(rows[0])

    def _extend_row(self, asked: r.ExtendRow, now: float) -> r.ExtendRow | r.StreamResult:
        unfinished, row = self.leased.partition.unfinished, self._begun(asked, asked.piece.token)
        if row is None:
            return r.AppendResult(-1, 1, False)
        if unfinished.is_new(row, asked.piece):
            check_joined(unfinished, row, asked.ref)
            unfinished.check(row, asked.ref)
            if SPANS in asked.ref.columns and not asked.piece.last:
                raise Misuse(f"a piece of a row has no column {SPANS!r}: it is made when the row is finished")
            unfinished.heard(row, asked.piece.token, now)
        return replace(asked, row=row, key="", time_s=now)

    def _resume_row(self, asked: r.ResumeRow, now: float) -> r.ResumeRow | r.StreamResult:
        if not 0 < asked.lease_s < float("inf"):
            raise Misuse(f"a row is held for more than 0 s, not {asked.lease_s}")
        unfinished = self.leased.partition.unfinished
        row = self._begun(asked) if asked.key or asked.row >= 0 else unfinished.first_free(now)
        if row is None:
            return r.UnfinishedRows([])
        unfinished.require_free(row, asked.token, now)
        unfinished.reserve(row, asked.client, asked.lease_s, now)
        before = unfinished.begun[row].token
        return replace(asked, row=row, key="", before=before, time_s=now)

    def _abandon_row(self, asked: r.AbandonRow, now: float) -> r.AbandonRow | None:
        row = self._begun(asked, asked.token)
        return None if row is None else replace(asked, row=row, key="")

    def _renew_row(self, asked: r.RenewRow, now: float) -> None:
        unfinished, row = self.leased.partition.unfinished, self._begun(asked, asked.token)
        if row is not None and asked.free:
            unfinished.release(row, asked.token)
        elif row is not None:
            unfinished.heard(row, asked.token, now)

    def _consume(self, asked: r.Consume, now: float) -> r.StreamResult:
        leased = self.leased
        if not 1 <= asked.min_rows <= asked.rows or not asked.lease_s > 0:
            raise Misuse(f"no delivery is of {asked.min_rows} to {asked.rows} rows for {asked.lease_s} s")
        demand = Demand(
            task=leased.settings.task(asked.task),
            rows=asked.rows,
            min_rows=asked.min_rows,
            columns=asked.columns,
            sampler=asked.sampler,
            who=asked.who,
            lease_s=asked.lease_s,
        )
        try:
            if asked.sampler is None:
                grant = leased.take(demand, asked.chosen, asked.expired, now)
            else:
                grant = leased.consume(demand, now)
        except DataplaneError:
            raise
        except Exception as error:  # the boundary: a sampler that fails ends its own call only
            raise Misuse(f"{type(error).__name__}: {error}") from error
        if grant is None:
            raise NotReady("no rows are ready", stream=self.name, task=asked.task)
        return self._delivered(grant, asked)

    def _delivered(self, grant: RowLease, asked: r.Consume) -> r.Delivered:
        leased, rows = self.leased, grant.rows
        groups, versions, tags = leased.partition.labels(rows)
        measured = asked.sampler.needs if isinstance(asked.sampler, TokenBalanced) else ()
        return r.Delivered(
            grant.number,
            rows,
            leased.partition.rows.ref(rows, grant.columns),
            grant.hold,
            leased.partition.keys.names(rows) if leased.partition.keys.given else [],
            groups,
            versions,
            tags,
            {name: leased.partition.metadata.lengths(leased.partition.rows.places(rows), name) for name in measured},
            asked.replica,
        )

    def _drop(self, asked: r.Drop, now: float) -> r.Drop:
        partition = self.leased.partition
        of_keys = partition.keys.numbers(asked.keys) if asked.keys else NONE
        rows = np.unique(np.concatenate((asked.rows, of_keys, partition.in_groups(asked.groups))))
        partition.require(rows)
        return replace(asked, rows=rows, keys=[], groups=[])

    def _retry(self, asked: r.Retry, now: float) -> r.Retry:
        leased, partition, task = self.leased, self.leased.partition, self.leased.settings.task(asked.task)
        dead = partition.progress.in_state(task, DEAD)
        rows = np.unique(partition.keys.numbers(asked.keys) if asked.keys else dead[:_MOST_RETRIED])
        partition.require(rows)
        if leased.settings.group_size or task in leased.group_sizes:  # the rest of a group would never be whole
            rows = np.union1d(rows, np.intersect1d(partition.mates(rows), dead))
        return replace(asked, rows=rows, keys=[])

    def _leave(self, asked: r.EndClient, now: float) -> c.Command | None:
        self.snapshots.leave(self, asked.client)
        self.leased.leave(asked.client)
        return c.EndCommand(clients=[asked.client]) if asked.ended else None

    def _leave_all(self, asked: r.EndClients, now: float) -> c.Command | None:
        for client in sorted(client for client in self.holding if client.startswith(asked.clients)):
            self.snapshots.leave(self, client)
            self.leased.leave(client)
        ended = [client for client in self.sessions.producers if client.startswith(asked.clients)]
        return c.EndCommand(clients=ended) if ended else None


def refusal(leased: LeasedRows, entry: AppendSize) -> Backpressure:
    """The error of an append to a full stream. It names the limit, and the tasks and clients that use the room."""
    why, holders = _why_full(leased, entry), tuple(_holders(leased))
    return Backpressure(f"the stream is full ({why})", needed=entry.nbytes, holders=holders)


def _why_full(leased: LeasedRows, entry: AppendSize) -> str:
    why = leased.admission.full(entry) or "others before it"
    if why == LAG:
        why = (
            f"{LAG} is {leased.settings.max_lag}, the append has version {entry.version}, and the oldest rows that are"
        )
        why += f" left have version {leased.admission.oldest}"
    if stuck := _never_free(leased):
        return f"{why}; {stuck}"
    if not any(leased.partition.progress.left) and (dead := leased.partition.dead_letters()):
        return f"{why}; it holds dead letters of {', '.join(dead)}, which stay until they are dropped or retried"
    left = {
        task: sum(rows.values())
        for task, rows in zip(leased.settings.tasks, leased.partition.progress.left, strict=True)
    }
    acks = ", ".join(f"{task!r} ({rows} row{'s' * (rows > 1)} left)" for task, rows in left.items() if rows)
    return (
        f"{why}; the append waits for acks of {acks}: give it a longer timeout, or the stream a higher limit"
        if acks
        else why
    )


def _holders(leased: LeasedRows) -> Iterator[dict[str, Any]]:
    """The holders of room in the stream: tasks that are behind, and clients with permits."""
    partition = leased.partition
    behind = [(name, "not acked") for name in partition.behind(leased.asked)]
    for name, how in behind or [(name, "dead letters") for name in partition.dead_letters()]:
        yield {"holder": f"task {name!r}", "bytes": partition.nbytes, "how": how}
    for client, nbytes in islice(leased.admission.coming().items(), _HOLDERS):
        yield {"holder": client, "bytes": nbytes, "how": "admitted"}


def _never_free(leased: LeasedRows) -> str:
    """The reason if the stream can never have room again: a task's remaining rows are all of incomplete groups, and the
    limits leave no room for the missing rows. Empty otherwise."""
    partition, progress = leased.partition, leased.partition.progress
    for task, size in leased.group_sizes.items():
        rows = progress.in_state(task, PENDING)
        if not len(rows) or len(progress.in_state(task, LEASED)):
            continue
        groups = partition.metadata.groups(partition.rows.places(rows))
        members, dropped = partition.groups.sizes(groups, task)
        if not (members + dropped < size).all():
            continue
        names = list(dict.fromkeys(partition.groups.names(groups)))
        more = f" and {len(names) - _NAMED_GROUPS} more" if len(names) > _NAMED_GROUPS else ""
        named = ", ".join(map(repr, names[:_NAMED_GROUPS])) + more
        return (
            f"it holds rows of groups that lack some of their {size} alone ({named}), which task"
            f" {partition.settings.tasks[task]!r} takes whole, and has no room for the others: give it room for all"
            " groups that are begun at a time, or drop some"
        )
    return ""


def _itself(leader: StreamLeader, asked: r.StreamRequest, now: float) -> r.StreamRequest:
    """The request itself, which is its own command."""
    return asked


_DONE = r.Succeeded()

_DECIDE: dict[type, Callable[[StreamLeader, Any, float], Any]] = {
    r.Admit: lambda leader, asked, now: r.AdmitResult(leader._admit(asked)),
    r.GiveBack: StreamLeader._give_back,
    r.Append: StreamLeader._append,
    r.Extend: StreamLeader._extend,
    r.Consume: StreamLeader._consume,
    r.Open: _itself,
    r.EndClients: StreamLeader._leave_all,
    r.OutboxReceived: _itself,
    r.Ack: lambda leader, asked, now: leader.leased.ack(asked.grant, asked.client, asked.replica),
    r.Nack: lambda leader, asked, now: leader.leased.nack(
        asked.grant, asked.client, asked.replica, seen=asked.seen, reason=asked.reason
    ),
    r.Renew: lambda leader, asked, now: leader.leased.leases.renew(asked.grant, asked.client, asked.replica, now),
    r.Drop: StreamLeader._drop,
    r.Retry: StreamLeader._retry,
    r.Close: lambda leader, asked, now: None if leader.leased.closed else asked,
    r.Clear: _itself,
    r.TakeLost: _itself,
    r.Lose: _itself,
    r.Return: _itself,
    r.EndClient: StreamLeader._leave,
    r.Restore: _itself,
    r.RestoreBlock: lambda leader, asked, now: replace(asked, time_s=now),
    r.RestoreColumnBatch: _itself,
    r.FinishRestore: _itself,
    r.Look: reads.look,
    r.Find: reads.find,
    r.ListDeadLetters: reads.dead_letters,
    r.ListHeldColumns: reads.holding,
    r.Measure: reads.measure,
    r.TakeSnapshot: lambda leader, asked, now: leader.snapshots.take(leader, asked, now),
    r.ReadSnapshot: lambda leader, asked, now: leader.snapshots.read(leader, asked, now),
    r.ReleaseSnapshot: lambda leader, asked, now: leader.snapshots.release(leader, asked, now),
    r.ExtendRow: StreamLeader._extend_row,
    r.ResumeRow: StreamLeader._resume_row,
    r.AbandonRow: StreamLeader._abandon_row,
    r.RenewRow: StreamLeader._renew_row,
    r.ListUnfinished: reads.unfinished,
    r.Tick: lambda leader, asked, now: leader.leased.tick(now),
}
