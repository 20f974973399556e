"""A checkpoint of a stream: a copy of its state at one moment, which is read in blocks while the stream goes on; and
the restoration of a stream from the blocks.

A `Snapshot` copies the arrays of the books. A block is the metadata of some rows; the columns of the same rows are
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
from dataplane.stream.home import Home
from dataplane.stream.keys import Keys
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
    """The parts of the books from which blocks are made."""

    rows: Rows
    facts: RowMetadata
    progress: Progress
    keys: Keys
    groups: Groups
    unfinished: Unfinished


class Snapshot:
    """The state of a stream at time `now` of its clock."""

    def __init__(self, home: Home, now: float) -> None:
        self._now = now
        books, rows = home.books, home.books.rows.copy()
        self._books = Copy(
            rows,
            books.facts.copy(rows),
            books.progress.copy(rows),
            books.keys.copy(),
            books.groups.copy(),
            books.unfinished.copy(rows),
        )
        counts = [[of[what] for what in _COUNTS] for of in books.progress.counts]
        pages = [number for number, page in rows.pages.items() if page.left]
        self.head = Head(
            home.settings,
            books.keys.mark,
            books.rows.next,
            books.appended,
            books.facts.latest,
            home.closed,
            counts,
            pages,
        )

    @property
    def refs(self) -> list[BatchRef]:
        """References to all of its columns. They have to be kept while the snapshot is read."""
        return self._books.rows.patches

    def _there(self, first: int, count: int) -> Index:
        rows, books = np.arange(first, first + count), self._books
        rows = rows[books.rows.there(rows)]
        return rows[~books.progress.dropped(books.rows.places(rows), len(rows))]

    def block(self, first: int, count: int) -> Block:
        """The metadata of the rows with numbers from `first` on, `count` numbers."""
        return block_of(self._books, self._there(first, count), self._now)

    def columns(self, first: int, count: int) -> list[tuple[Index, int, BatchRef]]:
        """The columns of the same rows: the rows, the task for which their producer held them (-1: none), and a
        reference."""
        return columns_of(self._books, self._there(first, count))


def block_of(books: StreamState | Copy, rows: Index, now: float) -> Block:
    """The metadata of these existing rows, which are not dropped."""
    places = books.rows.places(rows)
    groups = books.facts.groups(places)
    states, tries = books.progress.states(places, len(rows)), books.progress.tries(places, len(rows))
    held = states == LEASED
    tries[held] -= 1
    states[held] = PENDING
    return Block(
        rows=rows.tobytes(),
        groups=books.groups.names(groups),
        versions=books.facts.versions(places).tobytes(),
        ages_s=(now - books.facts.arrived(places)).tobytes(),
        tags={name: values.tolist() for name, values in books.facts.tags(places).items()},
        keys=books.keys.named(rows),
        calls=books.keys.calls(rows),
        states=states.tobytes(),
        tries=tries.tobytes(),
        dropped=books.groups.dropped(groups),
        begun=books.unfinished.told(rows),
    )


def columns_of(books: StreamState | Copy, rows: Index) -> list[tuple[Index, int, BatchRef]]:
    """The columns of these rows; see `Snapshot.columns`."""
    stored, begun = books.rows, books.unfinished
    found = [(np.array([row]), -1, begun.columns(row)) for row in rows.tolist() if row in begun.begun]
    for names, having, holds in stored.by_columns(rows):
        tasks = np.where(holds < 0, -1, holds % MAX_TASKS)
        for task in np.unique(tasks).tolist():
            of = having[tasks == task]
            found.append((of, int(task), stored.ref(of, names)))
    return found


def begin(home: Home, head: Head) -> None:
    """Make a new stream that of the head. Its rows follow by `put_back`. Raises Corrupt."""
    fits = len(head.counts) == len(home.settings.tasks) and all(len(of) == len(_COUNTS) for of in head.counts)
    totals = [head.appended, *(count for of in head.counts for count in of)]
    if not fits or not 0 <= head.following < _MOST_ROWS or not all(0 <= n < _MOST_EVER for n in totals):
        raise Corrupt("a head that no stream had")
    if not -(1 << 63) <= head.latest < 1 << 63:
        raise Corrupt("a policy version that no stream had")
    home.books.rows.next = head.following
    home.books.appended = head.appended
    home.books.facts.latest = head.latest
    home.closed = head.closed
    for counts, of in zip(home.books.progress.counts, head.counts, strict=True):
        for what, count in zip(_COUNTS, of, strict=True):
            counts[what] = count


def put_back(home: Home, block: Block, now: float) -> None:
    """Restore the rows of a block, without columns. Raises Corrupt, LimitExceeded.

    Blocks come in ascending order.
    """
    tasks, rows = len(home.settings.tasks), _array("rows", block.rows, "<i8")
    count = len(rows)
    if not count:
        return
    in_order = bool((rows[1:] > rows[:-1]).all()) and 0 <= rows[0] <= rows[-1] < home.books.rows.next
    in_order = in_order and max(home.books.rows.pages, default=0) * PAGE <= rows[0]
    if not in_order or home.books.rows.there(rows).any():
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
    home.books.facts.require_room(block.tags)
    try:
        home.books.keys.check([key for key in block.keys if key])
    except Misuse as error:
        raise Corrupt(str(error)) from None

    home.books.rows.put_back(rows)
    home.books.keys.put_back(block.keys, rows, block.calls)
    places = home.books.rows.places(rows)
    groups = home.books.groups.put_back(block.groups, rows, block.dropped)
    home.books.facts.enter(places, groups, versions, now - ages, block.tags)
    home.books.progress.enter(versions)
    home.books.unfinished.put_back(block.begun, rows)
    home.books.progress.put_back(places, versions, states, tries)
    for task, of in enumerate(states):
        home.books.groups.done(task, groups[(of == ACKED) | (of == EXPIRED)])
        home.books.groups.dead(task, groups[of == DEAD])


def put_columns(
    home: Home,
    rows: Index,
    task: int,
    ref: BatchRef,
    lengths: Mapping[str, Index],
    spares: Sequence[bytes] = (),
) -> None:
    """Restore columns of rows that were put back. `task`: the task for which their producer held the rows. The nodes
    `spares` have copies. Raises Corrupt, SchemaMismatch, LimitExceeded."""
    if len(rows) != len(ref) or len(np.unique(rows)) != len(rows) or not -1 <= task < len(home.settings.tasks):
        raise Corrupt(f"{len(ref)} rows of columns for {len(rows)} rows, of task {task}")
    try:
        home.books.require(rows)
        home.books.rows.extend(
            rows, ref, replace=False, hold=task, spares=spares
        )  # of no grant: their numbers begin with 1
    except SchemaMismatch:
        raise
    except Misuse as error:
        raise Corrupt(str(error)) from None
    for row in rows.tolist() if len(home.books.unfinished) else ():
        if row in home.books.unfinished.begun:
            if len(rows) > 1:
                raise Corrupt("columns of a row in progress together with those of others")
            home.books.unfinished.hide(row)
    home.books.nbytes += ref.stored_nbytes
    home.books.facts.measure(home.books.rows.places(rows), lengths)


def finish(home: Home) -> None:
    """All rows are restored. New rows get numbers that the old stream cannot have given since the snapshot."""
    home.books.rows.next += _GAP - home.books.rows.next % PAGE


def _array(what: str, packed: bytes, code: str, count: int | None = None) -> Index:
    kind = np.dtype(code)
    if len(packed) % kind.itemsize or (count is not None and len(packed) != count * kind.itemsize):
        raise Corrupt(f"{what} of {len(packed)} bytes, not one of {kind.itemsize} for each of {count} rows")
    return np.frombuffer(packed, kind).astype(kind.newbyteorder("="))
