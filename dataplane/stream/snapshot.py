"""Snapshots of a stream, in the form of `snapshot_format`, and their restoration.

A `StreamSnapshot` is a checkpoint for users: a copy of the partition at one moment, which is read in blocks while the
stream goes on. A block is the metadata of some rows, with references to their columns. A replica's snapshot is the
metadata of all rows, and their column batches.

Invariants: leased rows are saved as pending, and their current leases do not count as tries. Derived counts are left
out and computed again. In a checkpoint, dropped rows are absent, and times are ages, because a clock ends with its
process. A restoration that is refused changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, Misuse, SchemaMismatch
from dataplane.stream.column_batch import ColumnBatch, ColumnBatches, Hold
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.packing import PackedIntegers, pack, unpack
from dataplane.stream.page import PAGE, Index
from dataplane.stream.partition_state import StreamState
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED, PENDING
from dataplane.stream.row_metadata import UNFINISHED
from dataplane.stream.rows import MAX_COLUMNS
from dataplane.stream.settings import MAX_TASKS
from dataplane.stream.snapshot_format import (
    BatchState,
    ColumnsState,
    Head,
    LayerState,
    RowsState,
    decode_rows,
    encode_rows,
    refused,
)
from dataplane.stream.unfinished import MAX_PIECES

_COUNTED = (ACKED, EXPIRED, DEAD)
_MOST = 1 << 62  # an upper bound of row numbers, beyond which numbers still fit into a message
_GAP = PAGE << 20  # row numbers that are skipped, since the old stream may have used them after the snapshot


class StreamSnapshot:
    """The state of a stream at time `now` of its clock."""

    def __init__(self, leased: LeasedRows, now: float) -> None:
        self._now = now
        self._partition = leased.partition.copy()
        self.head = head_of(leased)

    @property
    def pages(self) -> list[int]:
        return [number for number, page in self._partition.rows.pages.items() if page.left]

    @property
    def refs(self) -> list[BatchRef]:
        """References to all columns of the snapshot, which must be kept while it is read."""
        return [batch.ref for _, batch in self._partition.rows.batches.stored()]

    def _there(self, first: int, count: int) -> Index:
        rows, partition = np.arange(first, first + count), self._partition
        rows = rows[partition.rows.there(rows)]
        return rows[~partition.progress.dropped(partition.rows.places(rows), len(rows))]

    def block(self, first: int, count: int) -> bytes:
        """The encoded `RowsState` of the rows with numbers from `first` to `first + count - 1`, without dropped
        rows."""
        state = rows_state(self._partition, self._there(first, count), self._now)
        state.begun = [msgspec.structs.replace(each, token=0, client="") for each in state.begun]
        return encode_rows(state)

    def columns(self, first: int, count: int) -> list[tuple[Index, int, BatchRef]]:
        """The columns of the rows of `block`. Each entry: rows, the task for which their producer held them (-1: none),
        and a reference."""
        rows, stored, begun = self._there(first, count), self._partition.rows, self._partition.unfinished
        found = [(np.array([row]), -1, begun.columns(row)) for row in rows.tolist() if row in begun.begun]
        together: dict[tuple[bytes, bytes], tuple[list[str], Index, Index]] = {}
        for name in stored.schema.bits:
            holds = stored.holds(rows, name)
            having, holds = rows[holds > -2], holds[holds > -2]
            if len(having):
                together.setdefault((having.tobytes(), holds.tobytes()), ([], having, holds))[0].append(name)
        for names, having, holds in together.values():
            tasks = np.where(holds < 0, -1, holds % MAX_TASKS)
            for task in np.unique(tasks).tolist():
                of = having[tasks == task]
                found.append((of, int(task), stored.ref(of, names)))
        return found


# The stream as a whole


def head_of(leased: LeasedRows) -> Head:
    partition = leased.partition
    return Head(
        settings=leased.settings,
        mark=partition.keys.mark,
        next=partition.rows.next,
        appended=partition.appended,
        latest=partition.metadata.latest,
        closed=leased.closed,
        counts=[[of[what] for what in _COUNTED] for of in partition.progress.counts],
    )


def restore_head(leased: LeasedRows, head: Head) -> None:
    """Restore the head into a new stream, which keeps its own settings and key prefix. Raises Misuse for a stream that
    is not new or has other tasks, and Corrupt for an invalid head."""
    partition = leased.partition
    if partition.rows.next or head.settings.tasks != leased.settings.tasks:
        raise Misuse("the stream is not new, or has other tasks")
    fits = len(head.counts) == len(leased.settings.tasks) and all(len(of) == len(_COUNTED) for of in head.counts)
    totals = [head.next, head.appended, *(count for of in head.counts for count in of)]
    if not fits or not all(0 <= n < _MOST for n in totals) or not -(1 << 63) <= head.latest < 1 << 63:
        raise Corrupt("a head that no stream had")
    partition.rows.next, partition.appended, partition.metadata.latest = head.next, head.appended, head.latest
    leased.closed = head.closed
    for counts, of in zip(partition.progress.counts, head.counts, strict=True):
        for what, count in zip(_COUNTED, of, strict=True):
            counts[what] = count


# Rows


def rows_state(partition: StreamState, rows: Index, since: float) -> RowsState:
    """The state of these rows, which exist and are given in ascending order. Times are relative to `since`."""
    places = partition.rows.places(rows)
    which, groups, drops = partition.groups.state(partition.metadata.groups(places))
    states, tries = partition.progress.states(places, len(rows)), partition.progress.tries(places, len(rows))
    leased = states == LEASED
    tries -= leased
    states[leased] = PENDING
    tries[(states == ACKED) | (states == EXPIRED)] = 0
    tags = {name: values.tolist() for name, values in partition.metadata.tags(places).items()}
    lengths = {name: partition.metadata.lengths(places, name) for name in partition.metadata.measured(places)}
    keyed, keys, calls = partition.keys.state(rows)
    return RowsState(
        offsets=pack(rows),
        group=pack(which),
        groups=groups,
        drops=drops,
        versions=pack(partition.metadata.versions(places)),
        arrived=pack(partition.metadata.arrived(places) - since),
        tags={name: values for name, values in tags.items() if any(value is not None for value in values)},
        lengths={name: pack(values) for name, values in lengths.items() if values.any()},
        states=pack(states.reshape(-1)),
        tries=pack(tries.reshape(-1)),
        dropped=pack(partition.progress.dropped(places, len(rows)).astype(np.int64)),
        keyed=pack(keyed),
        keys=keys,
        calls=calls,
        begun=partition.unfinished.state(rows),
        reasons=[
            (task, at, of[row])
            for task, of in enumerate(partition.reasons)
            for at, row in enumerate(rows.tolist())
            if row in of
        ],
    )


def restore_rows(partition: StreamState, state: RowsState, since: float) -> None:
    """Restore these rows, without columns, after the existing ones. If the state is invalid, raises an error that
    `refused` replaces, and changes nothing."""
    tasks, rows = len(partition.settings.tasks), _integers(state.offsets)
    count, first = len(rows), max((page.first for page in partition.rows.pages.values() if page.left), default=0)
    which = _integers(state.group, count, -1, len(state.groups))
    versions = _integers(state.versions, count)
    arrived = unpack(state.arrived, count) + float(since)
    lengths = {name: _integers(values, count, 0) for name, values in state.lengths.items()}
    states = _integers(state.states, tasks * count).reshape(tasks, count)
    tries = _integers(state.tries, tasks * count, 0, 256).reshape(tasks, count)
    dropped = _integers(state.dropped, count, 0, 2).astype(np.bool_)
    keyed = _integers(state.keyed, len(state.keys), 0, count)
    begun = [each.row for each in state.begun]
    at = np.flatnonzero(np.isin(rows, begun)) if begun else rows[:0]
    if count and not (_ascending(rows) and first <= rows[0] and rows[-1] < partition.rows.next):
        raise ValueError("rows that are not in order, or none of the stream's")
    if partition.rows.there(rows).any():
        raise ValueError("rows that are there already")
    if not len(set(state.groups)) == len(state.groups) == len(np.unique(which[which >= 0])):
        raise ValueError("a group that is listed twice, or without a row")
    if not all(
        0 <= group < len(state.groups) and len(of) == tasks and all(0 <= n < _MOST for n in of)
        for group, of in state.drops
    ):
        raise ValueError("a group of which more rows were dropped than any stream has")
    if not np.isin(states, (PENDING, ACKED, EXPIRED, DEAD)).all() or not np.isfinite(arrived).all():
        raise ValueError("states or times that no row has")
    if len(lengths) > MAX_COLUMNS or any(len(values) != count for values in state.tags.values()):
        raise ValueError("lengths or tags of other rows")
    if not _ascending(keyed) or not {key for key, *_ in state.calls} <= set(state.keys):
        raise ValueError("keys of other rows")
    if rows[at].tolist() != begun or not all(0 <= each.pieces <= MAX_PIECES for each in state.begun):
        raise ValueError("rows in progress that are not in order, or not there")
    if any(not (0 <= task < tasks and 0 <= row < count) or states[task, row] != DEAD for task, row, _ in state.reasons):
        raise ValueError("the reason of a dead letter that is none")
    if (versions[at] != UNFINISHED).any():
        raise ValueError("a row in progress that is finished")
    partition.metadata.require_room(state.tags)
    partition.keys.check(state.keys)

    partition.rows.restore(rows)
    places, done = partition.rows.places(rows), (states == ACKED) | (states == EXPIRED)
    numbers = partition.groups.restore(rows, which, state.groups, state.drops, dropped, done, states == DEAD)
    partition.metadata.enter(places, numbers, versions, arrived, state.tags)
    partition.metadata.measure(places, lengths)
    partition.progress.restore(places, versions, states, tries)
    partition.progress.mark_dropped(places, dropped)
    partition.keys.restore(rows[keyed], state.keys, state.calls)
    partition.unfinished.begun.update({each.row: each for each in state.begun})
    for task, row, reason in state.reasons:
        partition.reasons[task][int(rows[row])] = reason


def _ascending(values: Index) -> bool:
    return bool((values[1:] > values[:-1]).all())


def _integers(packed: PackedIntegers, count: int | None = None, least: int = -(1 << 63), below: int = 1 << 63) -> Index:
    values = unpack(packed, count)
    if values.dtype != np.int64:
        raise ValueError("fractions where integers are expected")
    if len(values) and not least <= int(values.min()) <= int(values.max()) < below:
        raise ValueError(f"a number that is not from {least} to {below - 1}")
    return values


# The columns, for replicas


def columns_state(partition: StreamState, rows: Index, kept: Sequence[Index]) -> ColumnsState:
    """The columns of all rows (`rows`). `kept`: the numbers of replaced column batches that still have readers."""
    stored, layers = partition.rows, partition.rows.layers(rows)
    needed = np.unique(np.concatenate([*(of for _, of, _ in layers), *kept, rows[:0]]))
    return ColumnsState(
        schema=[(name, stored.schema.fields[name]) for name in stored.schema.bits],
        next=stored.batches.next,
        batches=[_batch_state(int(number), stored.batches[int(number)]) for number in needed if number >= 0],
        layers=[LayerState(names, pack(of), pack(index)) for names, of, index in layers],
        kept=[pack(np.array(of, np.int64)) for of in sorted(of.tolist() for of in kept)],
    )


def _batch_state(number: int, batch: ColumnBatch) -> BatchState:
    hold = PackedIntegers(1, batch.hold) if isinstance(batch.hold, int) else pack(batch.hold)
    pieces = [(piece.ref.encode(), piece.spares) for piece in batch.pieces]
    return BatchState(number, batch.ref.encode(), hold, batch.spares, pieces)


def _batch(state: BatchState) -> ColumnBatch:
    ref, one = BatchRef.decode(state.ref), state.hold.count == 1 and state.hold.step == 0
    hold: Hold = state.hold.first if one and state.hold.first < 1 << 63 else _integers(state.hold, len(ref))
    pieces = tuple(ColumnBatch(BatchRef.decode(piece), 1, spares=nodes) for piece, nodes in state.pieces)
    if pieces and len(ref) != 1:
        raise ValueError("pieces of more than one row")
    return ColumnBatch(ref, 0, hold, state.nodes, pieces=pieces)


def restore_columns(partition: StreamState, rows: Index, state: ColumnsState) -> list[Index]:
    """Restore the columns of all rows (`rows`). Returns the numbers of the kept column batches. Raises an error that
    `refused` replaces if the state is invalid."""
    count, kept = len(rows), [_integers(of) for of in state.kept]
    layers = [(layer.names, _integers(layer.batch, count), _integers(layer.index, count)) for layer in state.layers]
    begun = np.isin(rows, list(partition.unfinished.begun))
    if any(names and (batch[begun] >= 0).any() for names, batch, _ in layers):
        raise ValueError("a row in progress that tasks are given")
    batches = ColumnBatches({each.number: _batch(each) for each in state.batches}, state.next)
    partition.rows.restore_columns(rows, dict(state.schema), batches, layers, kept)
    partition.nbytes = sum(batch.nbytes for batch in batches.values())
    return kept


# From a checkpoint


def restore_block(leased: LeasedRows, block: bytes, now: float) -> None:
    """Restore the rows of the next block in ascending order, without columns. Raises Corrupt."""
    with refused("a block of rows that no stream wrote"):
        state = decode_rows(block)
        count = state.offsets.count
        if count > PAGE or state.dropped != PackedIntegers(count):
            raise ValueError("more rows than a page has, or dropped ones")
        restore_rows(leased.partition, state, now)


def restore_column_batch(
    leased: LeasedRows, rows: Index, task: int, ref: BatchRef, spares: Sequence[bytes] = ()
) -> None:
    """Restore columns of restored rows. `task`: the task for which the producer of the columns held the rows, -1 for
    none. `spares`: nodes that have copies of these columns. Raises Corrupt if they do not fit the rows, SchemaMismatch
    for another type, LimitExceeded for too many columns."""
    if len(rows) != len(ref) or len(np.unique(rows)) != len(rows) or not -1 <= task < len(leased.settings.tasks):
        raise Corrupt(f"{len(ref)} rows of columns for {len(rows)} rows, of task {task}")
    partition, begun = leased.partition, leased.partition.unfinished.begun
    named = [row for row in rows.tolist() if row in begun] if begun else []
    if named and len(rows) > 1:
        raise Corrupt("columns of a row in progress together with those of others")
    try:
        partition.require(rows)
        # This `hold` belongs to no grant: the numbers of grants begin with 1.
        partition.rows.extend(rows, ref, replace=False, hold=task, spares=spares)
    except SchemaMismatch:
        raise
    except Misuse as error:
        raise Corrupt(str(error)) from None
    for row in named:
        partition.unfinished.hide(row)
    partition.nbytes += ref.stored_nbytes


def finish(leased: LeasedRows) -> None:
    """End the restoration. New rows get numbers that the old stream cannot have used since the snapshot."""
    leased.partition.rows.next += _GAP - leased.partition.rows.next % PAGE
