"""The rows of a stream with their leases and limits, as the state machine of its partition keeps them (`machine`).

`LeasedRows` combines `admission`, the `partition_state` and the `leases`. It does no I/O, reads no clock, and knows
clients by name only.

Changes of rows are decided as commands (`commands`), which `replicated` applies once they are committed. Until then the
rows of a command stay leased, so that they are not delivered again. Dropped rows are removed by commands of `tick`
only.

Invariants: each row is delivered to each task at least once, unless it expires, is dropped or is lost, and each task
acks it at most once. Rows are offered in ascending order. No append exceeds a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Closed, Misuse
from dataplane.stream.admission import Admission, Usage
from dataplane.stream.column_batch import ColumnBatch, ReplacedBatches
from dataplane.stream.commands import Command, FreeReplacedCommand, RemoveCommand, SettleCommand
from dataplane.stream.lease import Leases, RowLease
from dataplane.stream.page import NONE, Index
from dataplane.stream.partition_state import StreamState
from dataplane.stream.progress import ACKED, EXPIRED, PENDING
from dataplane.stream.row_choice import Demand, choose, least
from dataplane.stream.row_metadata import Arrival
from dataplane.stream.settings import StreamSettings

LossRecord = tuple[str, str | int | None, int, int]
"""Key, group and policy version of a lost row, and the tasks that had acked it (bit t for task t)."""
_LEASE_OVER = "the lease ran out before they were acked"
_CLIENT_GONE = "the process that had them ended or disconnected"

_COMMAND_ROWS = 1 << 16  # the most rows of a command that a tick decides

MAX_LOST_ROWS = 1 << 16
"""Lost rows of a stream that are remembered, the latest ones."""


class LeasedRows:
    """The rows of one stream. Not thread-safe: used from one event loop."""

    def __init__(
        self, settings: StreamSettings, released: Callable[[list[ColumnBatch]], None] = lambda _: None, mark: str = ""
    ) -> None:
        """`released(batches)` is called with column batches that no row needs any more. `mark`: the prefix of generated
        keys."""
        self.settings: StreamSettings = settings
        self.changes = 0
        self.closed = False
        self.partition: StreamState = StreamState(settings, released, mark)
        self.admission = Admission(settings, self._held)
        self.leases = Leases()
        self.commands: list[Command] = []
        """Decided commands that no `tick` has returned yet."""
        self.loose: list[Index] = []
        """At the leader: dropped rows whose leases may have ended."""
        self._leading = False
        self.group_sizes: dict[int, int] = {}
        """By task, the `group_size` of the last sampler that had one: the number of rows of a whole group. Tasks
        without such a sampler are absent."""
        self.asked: dict[int, tuple[str, ...]] = {}
        """By task, the columns that its last request needs."""
        self.lost: dict[int, LossRecord] = {}
        """The lost rows that were not reported yet, by number."""
        self.replaced = ReplacedBatches()
        self.partition.loose = self._note_loose

    def _note_loose(self, rows: Index) -> None:
        if self._leading:
            self.loose.append(rows)

    def forget_leases(self, first: int, *, leading: bool) -> None:
        """Forget all leases and permits. The next lease is numbered `first`."""
        partition = self.partition
        partition.progress.unlease(partition.rows.places(partition.rows.all()))
        partition.unfinished.forget_leases()
        self.replaced = ReplacedBatches(self.replaced)
        self.group_sizes.clear()
        self.asked.clear()
        self.leases = Leases(first)
        self.admission = Admission(self.settings, self._held)
        self.commands.clear()
        self.loose.clear()
        self._leading = leading
        if leading:
            self._note_loose(partition.dropped())
        self.changes += 1

    def expire(self, task: int, rows: Index) -> None:
        """Expire ready rows for a task, by the decision of its sampler."""
        if len(rows):
            self.partition.progress.reserve(task, self.partition.rows.places(rows))
            self.commands += [SettleCommand(task=task, rows=some, state=EXPIRED) for some in _parted(rows)]

    def expire_blocked(self, task: int, columns: tuple[str, ...]) -> None:
        """Note the columns that a request needs. In a closed stream, expire the rows that will never have them, because
        they are dead letters of another task."""
        self.asked[task] = columns
        if self.closed:
            self.expire(task, self.partition.progress.blocked(task, self.asked))

    def _held(self) -> Usage:
        partition = self.partition
        oldest = min((min(left) for left in partition.progress.left if left), default=None)
        return Usage(partition.rows.count, partition.nbytes, oldest)

    # appending

    def append(
        self, ref: BatchRef, keys: Sequence[str], digest: bytes, arrival: Arrival, now: float
    ) -> tuple[int, bool]:
        """Append rows that were admitted. `digest`: of the request. Returns the number of the first row, and whether
        the rows are new. If an append with the same keys and digest was applied before, the number is that of its first
        row, and the columns of this append are not needed.

        Raises Misuse for another existing key or too large a group, SchemaMismatch for columns of other types,
        LimitExceeded for too many columns or tags, and Closed.
        """
        self.check_open()
        said = self.partition.keys.retried(keys, digest) if keys else None
        if said is not None:
            return said, False
        return self.partition.append(ref, keys, digest, arrival, now), True

    def check_open(self) -> None:
        """Raises Closed if the stream is closed."""
        if self.closed:
            raise Closed("the stream is closed: nothing is appended any more")

    # delivering

    def consume(self, demand: Demand, now: float) -> RowLease | None:
        """Lease rows for the demand. A replica first gets the member's grants that it lacks. Returns the grant; None if
        too few rows are ready. Raises Misuse for an invalid choice or other columns than the member's, the errors of
        the sampler, and Closed if no row will ever be ready again."""
        size = getattr(demand.sampler, "group_size", None)
        if size is not None:
            self.group_sizes[demand.task] = size
        grant = self.waiting(demand)
        if grant is None:
            self.expire_blocked(demand.task, demand.needed)
            rows = choose(self.partition, demand, now, closed=self.closed, expire=self.expire)
            grant = self._lease(demand, rows, now) if len(rows) else None
        if grant is None:
            self.check_drained(demand.task)
        else:
            self.leases.hand(grant, demand.who, now)
        return grant

    def take(self, demand: Demand, chosen: Index, expired: Index, now: float) -> RowLease | None:
        """Lease the rows `chosen` by the client that are still ready, and expire those in `expired`. A replica first
        gets the member's grants that it lacks. Returns the grant; None if too few rows are ready. Raises Misuse for
        other columns than the member's."""
        grant, still_ready = self.waiting(demand), self.partition.progress.still_ready
        if grant is None:
            self.expire(demand.task, still_ready(demand.task, demand.needed, expired))
            rows = still_ready(demand.task, demand.needed, chosen)[: demand.rows]
            enough = max(1, least(self.partition, demand, closed=self.closed))
            grant = self._lease(demand, rows, now) if len(rows) >= enough else None
        if grant is not None:
            self.leases.hand(grant, demand.who, now)
            self.changes += 1  # other replicas may wait for the grant
        return grant

    def waiting(self, demand: Demand) -> RowLease | None:
        """The next grant of the member that this replica has not received; None if there is none. Raises Misuse if this
        replica asks for other columns."""
        grant = self.leases.waiting(demand.task, demand.who)
        if grant is not None and grant.columns != demand.columns:
            raise Misuse(
                f"the replicas of member {demand.who.member!r} are given the same: others asked for the columns"
                f" {', '.join(grant.columns)}, and this one for {', '.join(demand.columns)}"
            )
        return grant

    def lose_rows(self, rows: Index) -> None:
        """Remove rows that have lost columns, and report them as lost."""
        if len(rows):
            for number in self.leases.holding(rows):
                grant = self.leases.live(number)
                if grant is not None:  # its rows are gone
                    self.leases.end(grant)
                    self.partition.give_back(grant.task, grant.rows, seen=False)
            rows = rows[self.partition.rows.there(rows)]
            self.partition.progress.unlease(self.partition.rows.places(rows))  # also those reserved for commands
            self._note_lost(rows[~self.partition.progress.dropped(self.partition.rows.places(rows), len(rows))])
            self.partition.lose(rows)

    def _note_lost(self, rows: Index) -> None:
        keys, (groups, versions, _) = self.partition.keys.names(rows), self.partition.labels(rows)
        states = self.partition.progress.states(self.partition.rows.places(rows), len(rows))
        acked = [sum(1 << task for task in np.flatnonzero(of == ACKED).tolist()) for of in states.T]
        self.lost.update(zip(rows.tolist(), zip(keys, groups, versions, acked, strict=True), strict=True))
        for row in list(self.lost)[:-MAX_LOST_ROWS]:
            del self.lost[row]

    def _lease(self, demand: Demand, rows: Index, now: float) -> RowLease:
        self.partition.progress.lease(demand.task, self.partition.rows.places(rows))
        return self.leases.give(demand.task, rows, demand.columns, demand.who, demand.lease_s, now)

    # settling

    def ack(self, number: int, client: Hashable, replica: int | None) -> SettleCommand:
        """Record the ack of one holder. Returns the command that marks the rows of the grant as acked; it has no rows
        if other replicas have to ack too, or this holder has acked before. Raises LeaseExpired if the grant has ended
        or is not this holder's."""
        grant = self.leases.ack(number, client, replica)
        self.changes += 1
        return _nothing() if grant is None else SettleCommand(task=grant.task, rows=grant.rows, state=ACKED)

    def nack(
        self, number: int, client: Hashable, replica: int | None, *, seen: bool = True, reason: str = ""
    ) -> SettleCommand:
        """Give back the rows of a grant. Returns the command that makes them pending, or dead letters after
        `max_deliveries` deliveries. Rows that were not `seen` become pending at once, without counting a delivery, and
        the command has no rows. Replicas give unseen rows back each for itself. `reason`: for the dead letter. Raises
        LeaseExpired if the grant has ended or is not this holder's."""
        grant = self.leases.find(number, client, replica)
        self.changes += 1
        if seen:
            self.leases.settle(grant)
            return SettleCommand(task=grant.task, rows=grant.rows, state=PENDING, reason=reason)
        if self.leases.let_go(grant, replica):
            self.partition.give_back(grant.task, grant.rows, seen=False)
        return _nothing()

    def tick(self, now: float) -> list[Command]:
        """The commands that are due: those decided since the last tick, those that end expired leases, and those that
        remove rows and replaced columns that are no longer needed."""
        due, self.commands = self.commands, []
        for grant in self.leases.ended(now):
            if grant.done_as_far_as_known:
                due.append(SettleCommand(task=grant.task, rows=grant.rows, state=ACKED))
            else:
                due += self._taken_back(grant, _LEASE_OVER)
        if self.loose:
            free = self.partition.free(np.unique(np.concatenate(self.loose)))
            self.loose.clear()
            due += [RemoveCommand(rows=some) for some in _parted(free)]
        for each in self.replaced.unread(self.leases):
            each.over = True
            due.append(FreeReplacedCommand(batches=each.batches))
        return due

    def leave(self, client: str) -> None:
        """End the permits of a client that has gone, its leases except those of replicas, and free its rows in
        progress."""
        self.admission.leave(client)
        self.partition.unfinished.leave(client)
        for grant in self.leases.left(client):
            self.commands += self._taken_back(grant, _CLIENT_GONE)
        self.changes += 1

    def _taken_back(self, grant: RowLease, reason: str) -> list[Command]:
        """The command that gives back the rows of an ended grant. Rows that were only fetched ahead become pending at
        once, without a command or a counted delivery."""
        if grant.unseen:
            self.partition.give_back(grant.task, grant.rows, seen=False)
            self.changes += 1
            return []
        return [SettleCommand(task=grant.task, rows=grant.rows, state=PENDING, reason=reason)]

    # the end

    def close(self) -> None:
        """Close the stream: further appends are refused; consumers go on until all rows are done."""
        self.closed = True
        self.partition.look_again()

    def end(self) -> None:
        """Break all reference cycles of a dropped stream, so that its memory is freed at once."""
        self.partition.end()
        self.admission.end()

    def drained(self, task: int) -> bool:
        """Whether no row will ever be ready for this task again."""
        return self.closed and not self.partition.progress.left[task]

    def check_drained(self, task: int) -> None:
        """Raises Closed if no row will ever be ready for this task again."""
        if not self.drained(task):
            return
        progress, name = self.partition.progress, self.settings.tasks[task]
        dead, expired = progress.tally(task)["dead"], progress.counts[task][EXPIRED]
        if not dead and not expired:
            raise Closed("the stream is closed, and this task has done all of it", drained=True)
        letters = "is a dead letter" if dead == 1 else "are dead letters"
        parts = [f"{dead} {letters} (stream.dead_letters({name!r}))"] * (dead > 0)
        parts += [f"{expired} {'was' if expired == 1 else 'were'} dropped or expired"] * (expired > 0)
        what = f"the stream is closed, and task {name!r} has not done {dead + expired} of its rows: {'; '.join(parts)}"
        raise Closed(what, drained=True, dead=dead, expired=expired)


def _parted(rows: Index) -> list[Index]:
    """The rows in parts, each small enough for a command."""
    return [rows[start : start + _COMMAND_ROWS] for start in range(0, len(rows), _COMMAND_ROWS)]


def _nothing() -> SettleCommand:
    return SettleCommand(task=0, rows=NONE, state=ACKED)
