"""The replicated state of a partition of a stream, and the effect of each command.

A `LeasedRows` has the rows, keys, groups, counts of deliveries and lost rows. The state also has the results of each
client's last requests by sequence number, and for each node the releases of columns that the node has not confirmed
(its outbox).

Invariants: `apply` depends on the state and the command only; a command that fails changes nothing but the clock, and
its result is the error. A request with a sequence number that was executed before gets the earlier result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np

from dataplane.batch.locations import unlinked
from dataplane.batch.ref import BatchRef
from dataplane.errors import DataplaneError, LeaseExpired, Misuse, Rejected
from dataplane.replication.outbox import LostNodes, Outboxes
from dataplane.replication.sessions import Sessions
from dataplane.stream import commands as c
from dataplane.stream import requests as r
from dataplane.stream.column_batch import ColumnBatch, ReplacedBatches
from dataplane.stream.extension import extend
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.page import Index
from dataplane.stream.pieces import RowBeginning
from dataplane.stream.progress import PENDING
from dataplane.stream.row_metadata import Arrival
from dataplane.stream.settings import StreamSettings
from dataplane.stream.snapshot import (
    columns_state,
    finish,
    head_of,
    restore_block,
    restore_column_batch,
    restore_columns,
    restore_head,
    restore_rows,
    rows_state,
)
from dataplane.stream.snapshot_format import SavedStreamState, open_sealed, refused, seal

_DONE = r.Succeeded()
_UNOPENED = StreamSettings(("unopened",))


class ColumnStore(Protocol):
    """The store with the columns of an unreplicated stream."""

    def free(self, batches: list[ColumnBatch]) -> None:
        """Free column batches that no row needs any more."""

    def read(self, refs: Sequence[BatchRef]) -> None:
        """Keep these columns even if no row needs them."""

    def unread(self, refs: Sequence[BatchRef]) -> None:
        """End a `read` of these columns."""


class ReplicatedStream:
    """See the module. `StreamLeader` adds to it, and overrides the methods at the end."""

    def __init__(self, name: str, settings: StreamSettings | None, mark: str) -> None:
        """Without settings, the first command is `Open`."""
        self.name = name
        self.columns: ColumnStore | None = None
        """The store of an unreplicated stream, which frees unneeded columns in place of the outboxes of nodes."""
        self._first = settings, mark
        self._begin(settings, mark)

    def _begin(self, settings: StreamSettings | None, mark: str) -> None:
        self.opened = settings is not None
        settings = settings or _UNOPENED
        self.leased = LeasedRows(settings, self._released, mark=mark)
        self.sessions = Sessions()
        self.clock_s = 0.0
        self.lost_nodes = LostNodes()
        self.outboxes = Outboxes(self.lost_nodes)

    def _released(self, batches: list[ColumnBatch]) -> None:
        if self.columns is not None:
            self.columns.free(batches)
            return
        for batch in batches:
            self.outboxes.release(batch.ref.encode(), (*batch.nodes, *batch.spares))

    def _holds(self, ref: BatchRef, nodes: Sequence[bytes]) -> None:
        """For each node, count the needed columns of this reference that it stores."""
        if self.columns is None:
            self.outboxes.hold((*(node for node, _ in ref.shards()), *nodes))

    # Applying

    def applied(self, command: c.AnyCommand) -> bytes:
        """Apply a command, unless its sequence was applied before. Returns the encoded result."""
        if isinstance(command, r.Append) and command.parts:
            return self._applied_parts(command)
        key = command.client, command.sequence
        if not command.sequence:
            return r.encode_result(self._done(command))
        try:
            known = self.sessions.result(*key)
        except Rejected as error:
            return r.encode_result(r.CommandRefused.of(error))
        if known is None:
            known = r.encode_result(self._done(command))
            self.sessions.keep(*key, known)
        return known

    def _applied_parts(self, command: r.Append) -> bytes:
        try:
            known = self.known_parts(command.parts)
        except Rejected as error:
            return r.encode_result(r.CommandRefused.of(error))
        if known is not None:
            return known
        result = self._done(command)
        if isinstance(result, r.AppendResult):
            first = result.first
            for client, sequence, rows in command.parts:
                self.sessions.keep(client, sequence, r.encode_result(r.AppendResult(first, rows, True)))
                first += rows
        return r.encode_result(result)

    def known_parts(self, parts: Sequence[tuple[str, int, int]]) -> bytes | None:
        """The result of merged appends that were applied before; None if none was. Raises Rejected if only some were
        applied, or not together; then each must be requested alone."""
        try:
            found = [self.sessions.result(client, sequence) for client, sequence, _ in parts]
        except Rejected:
            raise Rejected("one of these appends was answered long ago; make each by itself") from None
        if all(each is None for each in found):
            return None
        results = [r.decode_result(each) for each in found if each is not None]
        first = results[0].first if results and isinstance(results[0], r.AppendResult) else -1
        firsts = list(accumulate((rows for _, _, rows in parts), initial=first))
        if results != [r.AppendResult(at, rows, True) for at, (_, _, rows) in zip(firsts, parts, strict=False)]:
            raise Rejected("some of these appends were made by themselves; make each by itself")
        return r.encode_result(r.AppendResult(first, firsts[-1] - first, True))

    def _done(self, command: c.AnyCommand) -> r.StreamResult:
        try:
            return self.act(command)
        except DataplaneError as error:
            return r.CommandRefused.of(error)

    def act(self, command: c.AnyCommand) -> r.StreamResult:
        """Apply a command without regard to its sequence. Returns the result. Raises the error that refuses the
        command; then nothing has changed but the clock."""
        self.clock_s = max(self.clock_s, getattr(command, "time_s", 0.0))
        return _APPLY[type(command)](self, command) or _DONE

    def _do_append(self, command: r.Append) -> r.StreamResult:
        begin = None if command.begin is None else RowBeginning(*command.begin, command.client)
        count = len(command.ref)
        if begin is not None and count != 1:
            raise Misuse(f"{count} rows in progress are begun at once; it is one")
        if not count or (command.parts and sum(rows for _, _, rows in command.parts) != count):
            raise Misuse(f"an append of {count} rows, with {len(command.parts)} parts of others")
        _check_counts(count, [command.versions, *command.lengths.values(), *command.tags.values()])
        if len(command.keys) not in (0, count) or len(command.groups or command.keys) not in (0, count):
            raise Misuse(f"an append of {count} rows, with more or fewer keys or groups")
        spares = self._spares(command)
        arrival = Arrival(command.groups, command.versions, command.tags, command.lengths, spares, begin)
        first, new = self.leased.append(command.ref, command.keys, command.digest, arrival, command.time_s)
        if new:
            self._holds(command.ref, spares)
        return r.AppendResult(first, count, new)

    def _spares(self, command: r.Append | r.Extend | r.ExtendRow | r.RestoreColumnBatch) -> tuple[bytes, ...]:
        """The nodes of a command with copies of its columns, without those that were lost meanwhile. Raises OwnerDied
        if there are none, and columns were lost with the node that stored them."""
        spares = tuple(node for node in command.nodes if node not in self.lost_nodes)
        if self.lost_nodes and not spares:
            self.lost_nodes.require(unlinked(command.ref).shards())
        return spares

    def _do_extend(self, command: r.Extend) -> None:
        _check_counts(len(command.rows), list(command.lengths.values()))
        spares = self._spares(command)
        extend(self.leased, command, spares)
        self._holds(command.ref, spares)

    def _do_extend_row(self, command: r.ExtendRow) -> r.StreamResult:
        _check_counts(1, list(command.lengths.values()))
        partition, row, spares = self.leased.partition, command.row, self._spares(command)
        new = partition.grow(row, command.piece, command.ref, command.lengths, spares, self.clock_s)
        if new:
            self._holds(command.ref, spares)
        return r.AppendResult(row, 1, new)

    def _do_resume_row(self, command: r.ResumeRow) -> r.StreamResult:
        unfinished, row = self.leased.partition.unfinished, command.row
        unfinished.require(row, command.before, command.token)
        unfinished.take(row, command.token, command.client, command.lease_s, self.clock_s)
        (listed,) = self.leased.partition.listed([row], self.clock_s)
        return r.UnfinishedRows([msgspec.structs.replace(listed, columns=unfinished.columns(row).encode())])

    def _do_abandon_row(self, command: r.AbandonRow) -> None:
        unfinished = self.leased.partition.unfinished
        if command.token not in unfinished.ended:
            unfinished.require(command.row, command.token)
            unfinished.end(command.row)
            self.leased.partition.drop_rows(np.array([command.row]))

    def _do_settle(self, command: c.SettleCommand) -> None:
        """Set the state of all rows of the command that are pending or leased for the task. If a client sent the
        command and some of its rows are lost, set none, and raise LeaseExpired."""
        partition, rows = self.leased.partition, command.rows
        if not len(rows):
            return
        if self.columns is not None:  # without a log, no other command came between the decision and this
            self._settle(command)
            return
        there = partition.rows.there(rows)
        if not there.all():
            rows = rows[there]
            if command.client:
                places = partition.rows.places(rows)
                partition.progress.unlease(places, command.task)
                # The last lease of the dropped ones has ended.
                partition.let_go(rows[partition.progress.dropped(places, len(rows))])
                raise LeaseExpired("some of these rows are lost, so the request is refused for all of them")
        places = partition.rows.places(rows)
        fits = partition.progress.open(command.task, places, len(rows))
        if not fits.all():
            rows = rows[fits]
        if len(rows):
            self._settle(command if len(rows) == len(command.rows) else msgspec.structs.replace(command, rows=rows))

    def _settle(self, command: c.SettleCommand) -> None:
        partition, task, rows = self.leased.partition, command.task, command.rows
        if command.state != PENDING:
            partition.settle(task, rows, command.state)
        elif len(dead := partition.give_back(task, rows, reason=command.reason)):
            self.died(task, dead, command.reason)

    def died(self, task: int, rows: Index, reason: str) -> None:
        """Called with rows that have become dead letters of the task, and the reason."""

    def _do_drop(self, command: r.Drop) -> None:
        partition = self.leased.partition
        rows = command.rows[partition.rows.there(command.rows)]
        if len(rows):
            partition.drop_rows(rows)

    def _do_remove(self, command: c.RemoveCommand) -> None:
        partition = self.leased.partition
        rows = command.rows[partition.rows.there(command.rows)]
        partition.remove(rows[partition.progress.dropped(partition.rows.places(rows), len(rows))])

    def _do_free_replaced(self, command: c.FreeReplacedCommand) -> None:
        if self.leased.replaced.remove(command.batches):
            self.leased.partition.unkept(command.batches)

    def _do_lose(self, command: r.Lose) -> None:
        """Remove rows that have lost a column, and report them as lost. The holder of a dropped row may go on. A node
        that was restarted releases copies that it has stored since."""
        self.lost_nodes.lose(command.node, command.before)
        partition = self.leased.partition
        for _, batch in partition.rows.batches.stored():
            if command.node in batch.spares:
                batch.spares = tuple(spare for spare in batch.spares if spare != command.node)
                self.outboxes.tell(batch.ref.encode(), [command.node])
        dead = partition.rows.dead(self.lost_nodes.there)
        self.leased.lose_rows(dead[~partition.progress.dropped(partition.rows.places(dead), len(dead))])
        self._count_holders()

    def _count_holders(self) -> None:
        """Count again, for each node, the columns there that rows need."""
        batches = self.leased.partition.rows.batches.stored()
        self.outboxes.recount((*batch.nodes, *batch.spares) for _, batch in batches)

    def _do_take_lost(self, command: r.TakeLost) -> r.StreamResult:
        lost = self.leased.lost
        return r.LostRowsResult([(row, *lost.pop(row)) for row in list(lost)[: command.most]])

    def _do_clear(self, command: r.Clear) -> None:
        leased = self.leased
        for grant in leased.leases:
            leased.leases.end(grant)
        leased.replaced = ReplacedBatches()
        leased.partition.clear()
        leased.close()

    def _do_open(self, command: r.Open) -> None:
        if not self.opened:
            self._begin(command.settings, command.mark)
            self.leased.partition.rows.next = command.first
            self.began()

    # From a snapshot for users

    def _do_restore_columns(self, command: r.RestoreColumnBatch) -> None:
        spares = self._spares(command)
        restore_column_batch(self.leased, command.rows, command.task, command.ref, spares)
        self._holds(command.ref, spares)

    # The state as bytes

    def snapshot(self) -> bytes:
        leased, partition = self.leased, self.leased.partition
        rows = np.sort(partition.rows.all())
        return seal(
            SavedStreamState(
                name=self.name,
                head=head_of(leased),
                rows=rows_state(partition, rows, 0.0),
                columns=columns_state(partition, rows, list(leased.replaced)),
                tag_names=sorted(partition.metadata.tag_names),
                clock_s=self.clock_s,
                lost=[(row, *told) for row, told in leased.lost.items()],
                lost_nodes=self.lost_nodes.state(),
                opened=self.opened,
                outboxes=self.outboxes.state(),
                sessions=self.sessions.snapshot(),
                ended=list(partition.unfinished.ended),
            )
        )

    def restore(self, state: bytes) -> None:
        if not state:
            self._begin(*self._first)
            self.began()
            return
        found = open_sealed(state, self.name, SavedStreamState)
        leased, sessions = LeasedRows(found.head.settings, self._released, mark=found.head.mark), Sessions()
        partition = leased.partition
        with refused(f"a snapshot of the stream {self.name!r} that no replica made"):
            restore_head(leased, found.head)
            restore_rows(partition, found.rows, 0.0)
            kept = restore_columns(partition, np.sort(partition.rows.all()), found.columns)
            leased.replaced = ReplacedBatches(kept)
            sessions.restore(found.sessions)
        partition.metadata.know_tags(found.tag_names)
        partition.unfinished.ended = dict.fromkeys(found.ended)
        leased.lost.update({row: (key, group, version, acked) for row, key, group, version, acked in found.lost})
        self._begin(found.head.settings, found.head.mark)
        self.opened = found.opened
        self.leased, self.sessions, self.clock_s = leased, sessions, found.clock_s
        self.lost_nodes = LostNodes(found.lost_nodes)
        self.outboxes = Outboxes(self.lost_nodes, found.outboxes)
        self._count_holders()
        self.began()

    # For the leader

    def began(self) -> None:
        """Called when `leased` is a new object."""


def _check_counts(rows: int, listed: list[Sized]) -> None:
    """Raises Misuse unless each list has a value for each row."""
    if any(len(values) != rows for values in listed):
        raise Misuse(f"{rows} rows, with more or fewer versions, lengths or tags")


_APPLY: dict[type, Callable[[ReplicatedStream, Any], r.StreamResult | None]] = {
    r.Append: ReplicatedStream._do_append,
    r.Extend: ReplicatedStream._do_extend,
    c.SettleCommand: ReplicatedStream._do_settle,
    r.Drop: ReplicatedStream._do_drop,
    r.Retry: lambda machine, command: r.RetryResult(
        machine.leased.partition.retry(machine.leased.settings.task(command.task), command.rows)
    ),
    c.RemoveCommand: ReplicatedStream._do_remove,
    c.FreeReplacedCommand: ReplicatedStream._do_free_replaced,
    r.ExtendRow: ReplicatedStream._do_extend_row,
    r.ResumeRow: ReplicatedStream._do_resume_row,
    r.AbandonRow: ReplicatedStream._do_abandon_row,
    c.EndCommand: lambda machine, command: machine.sessions.drop(command.clients),
    r.RestoreBlock: lambda machine, command: restore_block(machine.leased, command.block, command.time_s),
    r.Lose: ReplicatedStream._do_lose,
    r.Return: lambda machine, command: machine.lost_nodes.come_back(command.node, command.first),
    r.OutboxReceived: lambda machine, command: machine.outboxes.confirm(command.node, command.last),
    r.TakeLost: ReplicatedStream._do_take_lost,
    r.Close: lambda machine, command: machine.leased.close(),
    r.Clear: ReplicatedStream._do_clear,
    r.Open: ReplicatedStream._do_open,
    r.Restore: lambda machine, command: restore_head(machine.leased, command.head),
    r.RestoreColumnBatch: ReplicatedStream._do_restore_columns,
    r.FinishRestore: lambda machine, command: finish(machine.leased),
}
