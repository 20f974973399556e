"""A checkpoint of a stream: a copy of its state at one moment, which is read in blocks while the stream goes on; and
the restoration of a stream from the blocks.

A `Snapshot` copies the arrays of the partition. A block is the metadata of some rows; the columns of the same rows are
references. The restored stream has the same rows, numbers and keys, and the same progress of each task.

Invariants: leased rows are pending, and that delivery does not count as a try; dropped rows are absent. Times are
ages, since a clock does not outlive its process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import NamedTuple

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, Misuse, SchemaMismatch
from dataplane.stream.block import Block, Head
from dataplane.stream.groups import Groups
from dataplane.stream.keys import Keys
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.page import PAGE, Index
from dataplane.stream.partition_state import StreamState
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED, PENDING, REDELIVERED, Progress
from dataplane.stream.row_metadata import RowMetadata
from dataplane.stream.rows import Rows
from dataplane.stream.settings import MAX_TASKS
from dataplane.stream.unfinished import Unfinished

_COUNTS = (LEASED, ACKED, EXPIRED, DEAD, REDELIVERED)
_MOST_ROWS = 1 << 46  # and so many numbers at most
_MOST_EVER = 1 << 62  # so that adding to it gives a number that a message holds
_GAP = PAGE << 20  # numbers, of rows that may have been appended after a snapshot


class Copy(NamedTuple):
    """The parts of the partition from which blocks are made."""

    rows: Rows
    metadata: RowMetadata
    progress: Progress
    keys: Keys
    groups: Groups
    unfinished: Unfinished


class Snapshot:
    """The state of a stream at time `now` of its clock."""

    def __init__(self, leased: LeasedRows, now: float) -> None:
        self._now = now
        partition, rows = leased.partition, leased.partition.rows.copy()
        self._books = Copy(
            rows,
            partition.metadata.copy(rows),
            partition.progress.copy(rows),
            partition.keys.copy(),
            partition.groups.copy(),
            partition.unfinished.copy(rows),
        )
        counts = [[of[what] for what in _COUNTS] for of in partition.progress.counts]
        pages = [number for number, page in rows.pages.items() if page.left]
        self.head = Head(
            leased.settings,
            partition.keys.mark,
            partition.rows.next,
            partition.appended,
            partition.metadata.latest,
            leased.closed,
            counts,
            pages,
        )

    @property
    def refs(self) -> list[BatchRef]:
        """References to all of its columns. They have to be kept while the snapshot is read."""
        return self._books.rows.patches

    def _there(self, first: int, count: int) -> Index:
        rows, partition = np.arange(first, first + count), self._books
        rows = rows[partition.rows.there(rows)]
        return rows[~partition.progress.dropped(partition.rows.places(rows), len(rows))]

    def block(self, first: int, count: int) -> Block:
        """The metadata of the rows with numbers from `first` on, `count` numbers."""
        return block_of(self._books, self._there(first, count), self._now)

    def columns(self, first: int, count: int) -> list[tuple[Index, int, BatchRef]]:
        """The columns of the same rows: the rows, the task for which their producer held them (-1: none), and a
        reference."""
        return columns_of(self._books, self._there(first, count))


def block_of(partition: StreamState | Copy, rows: Index, now: float) -> Block:
    """The metadata of these existing rows, which are not dropped."""
    places = partition.rows.places(rows)
    groups = partition.metadata.groups(places)
    states, tries = partition.progress.states(places, len(rows)), partition.progress.tries(places, len(rows))
    held = states == LEASED
    tries[held] -= 1
    states[held] = PENDING
    return Block(
        rows=rows.tobytes(),
        groups=partition.groups.names(groups),
        versions=partition.metadata.versions(places).tobytes(),
        ages_s=(now - partition.metadata.arrived(places)).tobytes(),
        tags={name: values.tolist() for name, values in partition.metadata.tags(places).items()},
        keys=partition.keys.named(rows),
        calls=partition.keys.calls(rows),
        states=states.tobytes(),
        tries=tries.tobytes(),
        dropped=partition.groups.dropped(groups),
        begun=partition.unfinished.told(rows),
    )


def columns_of(partition: StreamState | Copy, rows: Index) -> list[tuple[Index, int, BatchRef]]:
    """The columns of these rows; see `Snapshot.columns`."""
    stored, begun = partition.rows, partition.unfinished
    found = [(np.array([row]), -1, begun.columns(row)) for row in rows.tolist() if row in begun.begun]
    for names, having, holds in stored.by_columns(rows):
        tasks = np.where(holds < 0, -1, holds % MAX_TASKS)
        for task in np.unique(tasks).tolist():
            of = having[tasks == task]
            found.append((of, int(task), stored.ref(of, names)))
    return found


def begin(leased: LeasedRows, head: Head) -> None:
    """Make a new stream that of the head. Its rows follow by `put_back`. Raises Corrupt."""
    fits = len(head.counts) == len(leased.settings.tasks) and all(len(of) == len(_COUNTS) for of in head.counts)
    totals = [head.appended, *(count for of in head.counts for count in of)]
    if not fits or not 0 <= head.following < _MOST_ROWS or not all(0 <= n < _MOST_EVER for n in totals):
        raise Corrupt("a head that no stream had")
    if not -(1 << 63) <= head.latest < 1 << 63:
        raise Corrupt("a policy version that no stream had")
    leased.partition.rows.next = head.following
    leased.partition.appended = head.appended
    leased.partition.metadata.latest = head.latest
    leased.closed = head.closed
    for counts, of in zip(leased.partition.progress.counts, head.counts, strict=True):
        for what, count in zip(_COUNTS, of, strict=True):
            counts[what] = count


def put_back(leased: LeasedRows, block: Block, now: float) -> None:
    """Restore the rows of a block, without columns. Raises Corrupt, LimitExceeded.

    Blocks come in ascending order.
    """
    tasks, rows = len(leased.settings.tasks), _array("rows", block.rows, "<i8")
    count = len(rows)
    if not count:
        return
    in_order = bool((rows[1:] > rows[:-1]).all()) and 0 <= rows[0] <= rows[-1] < leased.partition.rows.next
    in_order = in_order and max(leased.partition.rows.pages, default=0) * PAGE <= rows[0]
    if not in_order or leased.partition.rows.there(rows).any():
        raise Corrupt("a block of rows that are not in order, there, or none of the stream's")
    versions, ages = _array("versions", block.versions, "<i8", count), _array("ages", block.ages_s, "<f8", count)
    states = _array("states", block.states, "u1", tasks * count).reshape(tasks, count)
    tries = _array("tries", block.tries, "u1", tasks * count).reshape(tasks, count)
    listed: list[Sized] = [block.groups, block.keys, *block.tags.values()]
    if any(len(values) != count for values in listed):
        raise Corrupt(f"a block of {count} rows with more or fewer groups, keys or tags")
    if not np.isin(states, (PENDING, ACKED, EXPIRED, DEAD)).all() or not np.isfinite(ages).all():
        raise Corrupt("a block with states or ages that no row has")
    if not all(len(of) == tasks and all(0 <= n < _MOST_ROWS for n in of) for _, of in block.dropped):
        raise Corrupt("a group of which more rows were dropped than any stream has")
    leased.partition.metadata.require_room(block.tags)
    try:
        leased.partition.keys.check([key for key in block.keys if key])
    except Misuse as error:
        raise Corrupt(str(error)) from None

    leased.partition.rows.put_back(rows)
    leased.partition.keys.put_back(block.keys, rows, block.calls)
    places = leased.partition.rows.places(rows)
    groups = leased.partition.groups.put_back(block.groups, rows, block.dropped)
    leased.partition.metadata.enter(places, groups, versions, now - ages, block.tags)
    leased.partition.unfinished.put_back(block.begun, rows)
    leased.partition.progress.restore(places, versions, states, tries)
    for task, of in enumerate(states):
        leased.partition.groups.done(task, groups[(of == ACKED) | (of == EXPIRED)])
        leased.partition.groups.dead(task, groups[of == DEAD])


def put_columns(
    leased: LeasedRows,
    rows: Index,
    task: int,
    ref: BatchRef,
    lengths: Mapping[str, Index],
    spares: Sequence[bytes] = (),
) -> None:
    """Restore columns of rows that were put back. `task`: the task for which their producer held the rows. The nodes
    `spares` have copies. Raises Corrupt, SchemaMismatch, LimitExceeded."""
    if len(rows) != len(ref) or len(np.unique(rows)) != len(rows) or not -1 <= task < len(leased.settings.tasks):
        raise Corrupt(f"{len(ref)} rows of columns for {len(rows)} rows, of task {task}")
    try:
        leased.partition.require(rows)
        leased.partition.rows.extend(
            rows, ref, replace=False, hold=task, spares=spares
        )  # of no grant: their numbers begin with 1
    except SchemaMismatch:
        raise
    except Misuse as error:
        raise Corrupt(str(error)) from None
    for row in rows.tolist() if len(leased.partition.unfinished) else ():
        if row in leased.partition.unfinished.begun:
            if len(rows) > 1:
                raise Corrupt("columns of a row in progress together with those of others")
            leased.partition.unfinished.hide(row)
    leased.partition.nbytes += ref.stored_nbytes
    leased.partition.metadata.measure(leased.partition.rows.places(rows), lengths)


def finish(leased: LeasedRows) -> None:
    """All rows are restored. New rows get numbers that the old stream cannot have given since the snapshot."""
    leased.partition.rows.next += _GAP - leased.partition.rows.next % PAGE


def _array(what: str, packed: bytes, code: str, count: int | None = None) -> Index:
    kind = np.dtype(code)
    if len(packed) % kind.itemsize or (count is not None and len(packed) != count * kind.itemsize):
        raise Corrupt(f"{what} of {len(packed)} bytes, not one of {kind.itemsize} for each of {count} rows")
    return np.frombuffer(packed, kind).astype(kind.newbyteorder("="))
