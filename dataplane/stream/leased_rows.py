"""The rows of a stream with their leases and limits, as the state machine of its partition keeps them (`machine`).

`LeasedRows` combines `admission`, the `partition_state` and the `leases`. It does no I/O, reads no clock, and knows
clients by name only.

Changes of rows are decided as commands (`commands`) and applied by `do` once they are committed. Until then the rows of
a command stay leased, so that they are not delivered again. Dropped rows are removed by `tick` only.

Invariants: each row is delivered to each task at least once and acknowledged once; rows are offered in ascending
order; no append exceeds a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.errors import Backpressure, Closed, LeaseExpired, Misuse
from dataplane.stream.admission import Admission, Entry, Usage
from dataplane.stream.blocked import blocked
from dataplane.stream.column_batch import ColumnBatch, Hold
from dataplane.stream.commands import Command, Drop, Remove, Settle, Unkeep
from dataplane.stream.lease import Grant, Leases
from dataplane.stream.partition_state import StreamState
from dataplane.stream.pieces import Listed, Piece
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED, PENDING
from dataplane.stream.row_choice import Demand, choose, least
from dataplane.stream.row_metadata import Arrival
from dataplane.stream.settings import MAX_TASKS, Settings

Index = npt.NDArray[np.int64]

LostRow = tuple[str, str | int | None, int, int]
"""Key, group and policy version of a lost row, and the tasks that had acked it (bit t for task t)."""
_HOLDERS = 64  # clients that an error names
_LEASE_OVER = "the lease ran out before they were acked"
_CLIENT_GONE = "the process that had them ended or disconnected"

MAX_LOST = 1 << 16
"""Lost rows of a stream that are remembered, the latest ones."""


@dataclass(slots=True, eq=False)
class _Replaced:
    """Replaced patches, by number. They stay until no grant reads them. `readers`: the leader's grants that may.
    `over`: their removal is decided."""

    patches: Index
    readers: set[int] = field(default_factory=set)
    over: bool = False


class LeasedRows:
    """The rows of one stream. Not thread-safe: used from one event loop."""

    def __init__(
        self,
        settings: Settings,
        released: Callable[[list[ColumnBatch]], None] = lambda _: None,
        mark: str = "",
    ) -> None:
        """`released(patches)` is called with patches that no row needs any more. `mark`: the prefix of generated
        keys."""
        self.settings: Settings = settings
        self.changes = 0
        self.closed = False
        self.partition: StreamState = StreamState(settings, released, mark)
        self.admission = Admission(settings, self._held)
        self.leases = Leases()
        self.commands: list[Command] = []
        """Decided commands that the leader has not taken yet."""
        self.loose: list[Index] = []
        """At the leader: dropped rows whose leases may have ended."""
        self._leading = False
        self.group_sizes: dict[int, int] = {}
        """By task, the size of the whole groups of its last request."""
        self.lost: dict[int, LostRow] = {}
        """The lost rows that were not reported yet, by number."""
        self._replaced: list[_Replaced] = []
        self.partition.loose = self._note_loose

    def _note_loose(self, rows: Index) -> None:
        if self._leading:
            self.loose.append(rows)

    def forget_leases(self, first: int, *, leading: bool) -> None:
        """Forget all leases and permits. The next grant has the number `first`."""
        partition = self.partition
        partition.progress.unlease(partition.rows.places(partition.rows.all()))
        partition.unfinished.forget_leases()
        self._replaced = [_Replaced(each.patches) for each in self._replaced]
        self.group_sizes.clear()
        self.leases = Leases(first)
        self.admission = Admission(self.settings, self._held)
        self.commands.clear()
        self.loose.clear()
        self._leading = leading
        if leading:
            self._note_loose(partition.dropped())
        self.changes += 1

    @property
    def kept(self) -> list[Index]:
        """The numbers of replaced patches that may still be read."""
        return [each.patches for each in self._replaced]

    def keep(self, patches: Index) -> None:
        """Keep these replaced patches until `unkeep`."""
        self._replaced.append(_Replaced(patches))

    def unkeep(self, patches: Index) -> None:
        """Free these replaced patches, which have no readers any more."""
        same = [each for each in self._replaced if np.array_equal(each.patches, patches)]
        if same:
            self._replaced.remove(next((each for each in same if each.over), same[0]))
            self.partition.unkept(patches)

    def forget_kept(self) -> None:
        """Forget all replaced patches."""
        self._replaced.clear()

    @property
    def unread(self) -> bool:
        """Whether some replaced patches have no reader left and their removal is not decided yet."""
        return any(not each.over and not self._read(each) for each in self._replaced)

    def _read(self, replaced: _Replaced) -> bool:
        return any(self.leases.live(number) is not None for number in replaced.readers)

    def _decide(self, command: Settle | Drop | Remove | Unkeep) -> None:
        self.commands.append(command)

    def do(self, command: Settle | Drop | Remove | Unkeep) -> None:
        """Apply a command about existing rows."""
        if isinstance(command, Drop):
            self.partition.drop_rows(command.rows)
        elif isinstance(command, Remove):
            self.partition.remove(command.rows)
        elif isinstance(command, Unkeep):
            self.unkeep(command.patches)
        elif command.state == PENDING:
            self.partition.give_back(command.task, command.rows)
        else:
            self.partition.settle(command.task, command.rows, command.state)

    def expire(self, task: int, rows: Index) -> None:
        """Expire ready rows for a task, as its sampler decided."""
        if len(rows):
            self.partition.progress.reserve(task, self.partition.rows.places(rows))
            self._decide(Settle(task=task, rows=rows, state=EXPIRED))

    def _sweep(self) -> None:
        """Decide the removal of dropped rows that are not leased any more."""
        if self.loose:
            rows = np.unique(np.concatenate(self.loose))
            self.loose.clear()
            free = self.partition.free(rows)
            if len(free):
                self._decide(Remove(rows=free))

    def _held(self) -> Usage:
        partition = self.partition
        oldest = min((min(left) for left in partition.progress.left if left), default=None)
        return Usage(partition.rows.count, partition.nbytes, oldest)

    # appending

    def admit(self, entry: Entry) -> int:
        """A permit for an append. Raises Backpressure if a limit is exceeded now, Closed, LimitExceeded."""
        self.check_open()
        ticket = self.admission.admit(entry)
        if ticket is None:
            raise self.refusal(entry)
        return ticket

    def refusal(self, entry: Entry) -> Backpressure:
        """The error of a refused append: the limit that is exceeded, and the tasks that are behind."""
        why, holders = self._why(entry), tuple(self._holders())
        return Backpressure(f"the stream is full ({why})", needed=entry.nbytes, holders=holders)

    def _why(self, entry: Entry) -> str:
        why = self.admission.full(entry) or "others before it"
        if stuck := blocked(self.partition, self.group_sizes):
            return f"{why}; {stuck}"
        behind = self.partition.behind()
        if not behind and (dead := self.partition.dead_letters()):
            return f"{why}; it holds dead letters of {', '.join(dead)}, which are there until they are dropped"
        return f"{why}; it waits for {', '.join(behind)}" if behind else why

    def _holders(self) -> Iterator[dict[str, Any]]:
        """The holders of room in the stream: tasks that are behind, and clients with permits."""
        behind = [(name, "not consumed") for name in self.partition.behind()]
        for name, how in behind or [(name, "dead letters") for name in self.partition.dead_letters()]:
            yield {"holder": f"task {name!r}", "bytes": self.partition.nbytes, "how": how}
        for client, nbytes in islice(self.admission.coming().items(), _HOLDERS):
            yield {"holder": client, "bytes": nbytes, "how": "admitted"}

    def append(
        self, ref: BatchRef, keys: Sequence[str], digest: bytes, arrival: Arrival, now: float
    ) -> tuple[int, bool]:
        """Append admitted rows. Returns the number of the first, and whether they are new. A repeated append with the
        same digest gets the first answer; its columns are not needed.

        Raises Misuse for an existing key, SchemaMismatch, LimitExceeded, Closed.
        """
        self.check_open()
        said = self.partition.keys.retried(keys, digest) if keys else None
        if said is not None:
            return said, False
        first = self.partition.append(ref, keys, digest, arrival, now)
        self.changes += 1
        return first, True

    def replaces(self, rows: Index, ref: BatchRef, holds: Index | None) -> bool:
        """Whether these columns replace those of an earlier holder that has not acked. `holds`: the delivery number
        of each row. Raises LeaseExpired for rows that were delivered to this producer and are now held by others or
        gone; Misuse for other rows that do not exist or are named twice."""
        self._require(rows, ref, holds)
        under = np.empty(0, np.int64) if holds is None or not len(holds) else np.unique(holds)
        again = [hold > 0 and self._extends_again(rows[holds == hold], int(hold), ref.columns) for hold in under]
        return len(again) > 0 and all(again)

    def extend(
        self,
        rows: Index,
        ref: BatchRef,
        lengths: Mapping[str, Index],
        *,
        replace: bool,
        holds: Index | None,
        spares: Sequence[bytes],
    ) -> None:
        """Add columns to these rows; the nodes `spares` have copies. `replace` was decided before. Raises as
        `replaces`, Misuse for an existing column, SchemaMismatch, LimitExceeded."""
        self._require(rows, ref, holds)  # the state may have changed since it was decided
        under = np.empty(0, np.int64) if holds is None or not len(holds) else np.unique(holds)
        readers = self.leases.holding(rows) if replace else set()
        hold: Hold = -1
        if holds is not None and len(under) > 1:
            hold = np.where(holds > 0, holds, -1)
        elif len(under) and under[0] > 0:
            hold = int(under[0])
        # Only the leader knows the readers of replaced columns: replicas keep these until its `Unkeep`.
        kept = self.partition.extend(rows, ref, lengths, replace=replace, hold=hold, keep=replace, spares=spares)
        if len(kept):
            self._replaced.append(_Replaced(kept, readers))
        self.changes += 1

    def _require(self, rows: Index, ref: BatchRef, holds: Index | None) -> None:
        """Raises LeaseExpired if rows that were delivered to this producer are gone; Misuse for other rows that do
        not exist, for a row named twice, and for a reference with another number of rows."""
        if len(rows) != len(ref):
            raise Misuse(f"{len(ref)} rows of new columns for {len(rows)} rows")
        self._require_there(rows, holds)
        if len(np.unique(rows)) != len(rows):
            raise Misuse("a row is named twice; each is extended once")

    def _require_there(self, rows: Index, holds: Index | None) -> None:
        stored = self.partition.rows
        there = stored.there(rows)
        if there.all():
            self.partition.unfinished.refuse(rows)
            return
        delivered = None if holds is None or not len(holds) else (holds > 0) & (rows >= 0) & (rows < stored.next)
        self.partition.require(rows, delivered)
        raise LeaseExpired(
            f"{np.count_nonzero(~there)} of these rows are gone: they went to others who have done them, or were"
            " dropped; what was computed from them does not count"
        )

    def _extends_again(self, rows: Index, hold: int, columns: Sequence[str]) -> bool:
        """Whether earlier holders of the same task added all of these columns that the rows have. `hold`: the delivery
        number of the rows. Raises LeaseExpired if the rows are not held under it any more."""
        number, task = divmod(hold, MAX_TASKS)
        grant, partition = self.leases.live(number), self.partition
        under = np.concatenate([partition.rows.holds(rows, name) for name in columns])
        others = under[under != -2]
        if grant is None or grant.task != task or not np.isin(rows, grant.rows).all():
            states = partition.progress.states(partition.rows.places(rows), len(rows))[task : task + 1]
            theirs = (others >= 0) & (others % MAX_TASKS == task) & (others != hold)
            if self.leases.lost(number) or np.isin(states, (PENDING, LEASED, DEAD)).any() or theirs.any():
                raise LeaseExpired(
                    "these rows were not acknowledged in time, or given back, and go to others; what was computed"
                    " from them does not count"
                )
            return False
        # A replica that was restarted is given the same grant again.
        return bool(((others >= 0) & (others % MAX_TASKS == task) & ((others != hold) | grant.shared)).all())

    def check_open(self) -> None:
        """Raises Closed if the stream is closed."""
        if self.closed:
            raise Closed("the stream is closed: nothing is appended any more")

    # delivering

    def consume(self, demand: Demand, now: float) -> Grant | None:
        """A grant for the demand; None if too few rows are ready. Raises Misuse, the errors of the sampler, and
        Closed if no row will ever be ready for the task again."""
        size = getattr(demand.sampler, "group_size", None)
        if size is not None:
            self.group_sizes[demand.task] = size
        grant = self.waiting(demand)
        if grant is None:
            rows = choose(self.partition, demand, now, closed=self.closed, expire=self.expire)
            grant = self._lease(demand, rows, now) if len(rows) else None
        if grant is None:
            self.check_drained(demand.task)
        else:
            self.leases.hand(grant, demand.who, now)
        return grant

    def take(self, demand: Demand, chosen: Index, expired: Index, now: float) -> Grant | None:
        """A grant of the rows `chosen` by the client that are still ready; None if too few are. Rows in `expired`
        expire for the task. Raises Misuse."""
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

    def waiting(self, demand: Demand) -> Grant | None:
        """The next grant of the member that this replica has not received; None if there is none. Raises Misuse if it
        asks for other columns."""
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
            self.changes += 1

    def _note_lost(self, rows: Index) -> None:
        keys, (groups, versions, _) = self.partition.keys.names(rows), self.partition.labels(rows)
        states = self.partition.progress.states(self.partition.rows.places(rows), len(rows))
        acked = [sum(1 << task for task in np.flatnonzero(of == ACKED).tolist()) for of in states.T]
        self.lost.update(zip(rows.tolist(), zip(keys, groups, versions, acked, strict=True), strict=True))
        for row in list(self.lost)[:-MAX_LOST]:
            del self.lost[row]

    def _unkeep(self) -> None:
        for each in [each for each in self._replaced if not each.over and not self._read(each)]:
            each.over = True
            self._decide(Unkeep(patches=each.patches))

    def _lease(self, demand: Demand, rows: Index, now: float) -> Grant:
        self.partition.lease(demand.task, rows)
        return self.leases.give(demand.task, rows, demand.columns, demand.who, demand.lease_s, now)

    # settling

    def hold(self, grant: Grant) -> int:
        """The delivery number of the rows of a grant."""
        return grant.number * MAX_TASKS + grant.task

    def ack(self, number: int, client: Hashable, replica: int | None) -> None:
        """Acknowledge the rows of a grant. Raises LeaseExpired."""
        grant = self.leases.ack(number, client, replica)
        if grant is not None:
            self._decide(Settle(task=grant.task, rows=grant.rows, state=ACKED))
        self.changes += 1

    def nack(self, number: int, client: Hashable, replica: int | None, *, seen: bool = True, reason: str = "") -> None:
        """Give back the rows of a grant. Unless they were `seen`, this does not count as a delivery. Raises
        LeaseExpired."""
        grant = self.leases.find(number, client, replica)
        if seen:
            self.leases.end(grant)
            self._decide(Settle(task=grant.task, rows=grant.rows, state=PENDING, reason=reason))
        elif self.leases.let_go(grant, replica):
            self.partition.give_back(grant.task, grant.rows, seen=False)
        self.changes += 1

    def tick(self, now: float) -> None:
        """End expired leases, and decide the removal of rows and replaced columns that are no longer needed."""
        for grant in self.leases.ended(now):
            state, reason = (ACKED, "") if grant.done_as_far_as_known else (PENDING, _LEASE_OVER)
            self._decide(Settle(task=grant.task, rows=grant.rows, state=state, reason=reason))
        self._sweep()
        self._unkeep()

    def next_tick(self) -> float | None:
        """The earliest time at which a lease may expire; None if there is none."""
        return self.leases.next_end()

    def leave(self, client: str) -> None:
        """End the leases and permits of a client that has gone."""
        self.admission.leave(client)
        self.partition.unfinished.leave(client)
        for grant in self.leases.left(client):
            self._decide(Settle(task=grant.task, rows=grant.rows, state=PENDING, reason=_CLIENT_GONE))
        self.changes += 1

    # in progress: see `unfinished`

    def grow(
        self,
        row: int,
        piece: Piece,
        ref: BatchRef,
        lengths: Mapping[str, Index],
        now: float,
        spares: Sequence[bytes] = (),
    ) -> bool:
        """Add a piece to a row in progress; see `StreamState.grow`."""
        new = self.partition.grow(row, piece, ref, lengths, spares, now)
        self.changes += 1
        return new

    def take_up(self, row: int, token: int, client: str, lease_s: float, now: float) -> Listed:
        """Make the holder of this token the producer of the row. Raises LeaseExpired."""
        self.partition.unfinished.take(row, token, client, lease_s, now)
        listed = self.partition.listed(np.array([row]), now)[0]
        return msgspec.structs.replace(listed, columns=self.partition.unfinished.columns(row).encode())

    def give_up(self, row: int, token: int) -> None:
        """Drop the row, by its producer. Raises LeaseExpired."""
        if token not in self.partition.unfinished.ended:
            self.partition.unfinished.require(row, token)
            self.partition.unfinished.end(row)
            self.do(Drop(rows=np.array([row])))
            self.changes += 1

    def unfinished(self, most: int, now: float) -> list[Listed]:
        """The rows in progress, the oldest first."""
        rows = sorted(self.partition.unfinished.begun)[: max(0, most)]
        return self.partition.listed(np.array(rows, np.int64), now)

    # the end

    def close(self) -> None:
        """Close the stream: further appends are refused; consumers go on until all rows are done."""
        self.closed = True
        self.partition.look_again()
        self.changes += 1

    def end(self) -> None:
        """Break all reference cycles of a dropped stream, so that its memory is freed at once."""
        self.partition.end()
        self.admission.end()

    def drained(self, task: int) -> bool:
        """Whether no row will ever be ready for this task again."""
        return self.closed and not self.partition.progress.left[task]

    def check_drained(self, task: int) -> None:
        """Raises Closed if no row will ever be ready for this task again."""
        if self.drained(task):
            raise self._done_with(task)

    def _done_with(self, task: int) -> Closed:
        counts, name = self.partition.progress.counts[task], self.settings.tasks[task]
        dead, expired = counts[DEAD], counts[EXPIRED]
        if not dead and not expired:
            return Closed("the stream is closed, and this task has done all of it", drained=True)
        parts = [f"{dead} are dead letters (stream.dead_letters({name!r}))"] * (dead > 0)
        parts += [f"{expired} were dropped or expired"] * (expired > 0)
        what = f"the stream is closed, and task {name!r} has not done {dead + expired} of its rows: {'; '.join(parts)}"
        return Closed(what, drained=True, dead=dead, expired=expired)
