"""The rows of a stream with their metadata and progress, and all operations that change them.

`StreamState` combines the `rows` with their columns, the `keys`, the `groups`, the `row_metadata`, and the `progress`
of each task. Leases, limits and waiting requests are in `leased_rows`. Column batches that no row needs any more are
passed to `released`.

Invariants: a call that fails changes nothing; a row is removed once all tasks are done with it, or once it is
dropped and not leased.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse
from dataplane.stream.column_batch import ColumnBatch, Hold
from dataplane.stream.groups import GroupCounts
from dataplane.stream.keys import Keys
from dataplane.stream.page import Flags, Index
from dataplane.stream.pieces import Listed, RowPiece
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED, PENDING, StreamProgress
from dataplane.stream.row_metadata import UNFINISHED, Arrival, RowMetadata
from dataplane.stream.rows import StreamRows
from dataplane.stream.settings import StreamSettings
from dataplane.stream.unfinished import UnfinishedRowsTable


class StreamState:
    """The rows of one stream. Not thread-safe: used from one event loop."""

    def __init__(self, settings: StreamSettings, released: Callable[[list[ColumnBatch]], None], mark: str) -> None:
        """`mark`: the prefix of generated keys."""
        self.settings = settings
        self.nbytes = 0
        self.appended = 0
        """Number of rows appended so far."""
        self.loose: Callable[[Index], None] = lambda _: None
        """Called with dropped rows whose leases may have ended, so that they can be `remove`d."""
        self._released = released
        self._mark = mark
        self._empty()

    def _empty(self) -> None:
        self.rows = StreamRows(len(self.settings.tasks))
        self.keys = Keys(self._mark)
        self.groups = GroupCounts(len(self.settings.tasks))
        self.metadata = RowMetadata(self.rows)
        self.progress = StreamProgress(self.rows, len(self.settings.tasks))
        self.unfinished = UnfinishedRowsTable(self.rows, self.metadata)
        self.reasons: list[dict[int, str]] = [{} for _ in self.settings.tasks]  # by task: why dead letters died

    def copy(self) -> StreamState:
        copied = StreamState(self.settings, _nobody, self._mark)
        rows = copied.rows = self.rows.copy()
        copied.keys, copied.groups = self.keys.copy(), self.groups.copy()
        copied.metadata, copied.progress = self.metadata.copy(rows), self.progress.copy(rows)
        copied.unfinished = self.unfinished.copy(rows, copied.metadata)
        copied.reasons = [dict(of) for of in self.reasons]
        return copied

    # appending and extending

    def append(self, ref: BatchRef, keys: Sequence[str], digest: bytes, arrival: Arrival, now: float) -> int:
        """Append rows. Returns the number of the first. Raises Misuse for an invalid or existing key and too large a
        group, SchemaMismatch for another type, LimitExceeded for too many columns or tags."""
        if keys:
            self.keys.check(keys)
        if arrival.tags:
            self.metadata.require_room(arrival.tags)
        if self.settings.group_size and arrival.groups:
            self.groups.check(arrival.groups, self.settings.group_size)
        first = self.rows.append(ref, arrival.spares)
        self.keys.add(keys, first, digest)
        self.nbytes += ref.stored_nbytes
        self.appended += len(ref)
        if len(ref) == 1:
            page, inside = self.rows.place(first)
            name = arrival.groups[0] if arrival.groups else None
            group = -1 - first if name is None else self.groups.enter_one(name)
            version = arrival.versions.item() if arrival.begin is None else UNFINISHED
            self.metadata.enter_one(page, inside, group, version, now, arrival.tags, arrival.lengths)
            self.progress.enter(np.array([version]))
            if arrival.begin is not None:
                self.unfinished.begin(first, arrival.begin, arrival.versions.item(), now)
            return first
        rows = np.arange(first, first + len(ref))
        places = self.rows.places(rows)
        groups = self.groups.enter(arrival.groups, rows)
        self.metadata.enter(places, groups, arrival.versions, now, arrival.tags)
        self.metadata.measure(places, arrival.lengths)
        self.progress.enter(arrival.versions)
        return first

    def extend(
        self,
        rows: Index,
        ref: BatchRef,
        lengths: Mapping[str, Index],
        *,
        replace: bool = False,
        hold: Hold = -1,
        keep: bool = False,
        spares: Sequence[bytes] = (),
    ) -> Index:
        """Add columns to these existing rows, each named once. With `keep`, replaced column batches stay stored, and
        their numbers are returned for `unkept`. `hold`: see `ColumnBatch`. Raises Misuse for an existing column unless
        `replace`, SchemaMismatch for another type, LimitExceeded for too many columns."""
        kept, done = self.rows.extend(rows, ref, replace=replace, hold=hold, keep=keep, spares=spares)
        self.nbytes += ref.stored_nbytes
        self.metadata.measure(self.rows.places(rows), lengths)
        self._release(done)
        return kept

    def grow(
        self,
        row: int,
        piece: RowPiece,
        ref: BatchRef,
        lengths: Mapping[str, Index],
        spares: Sequence[bytes],
        now: float,
    ) -> bool:
        """Add a piece to a row in progress; the last one finishes it. Returns False if the piece was added before; then
        its columns are not needed. Raises LeaseExpired, Misuse and SchemaMismatch (see `UnfinishedRowsTable`), and
        LimitExceeded for too many columns."""
        if not self.unfinished.is_new(row, piece):
            return False
        self.unfinished.check(row, ref)
        self.unfinished.grow(row, piece, ref, lengths, spares)
        self.nbytes += ref.stored_nbytes
        if piece.last:
            self.unfinished.finish(row)
            self.progress.date(self.rows.place(row), UNFINISHED, piece.version)
            self.metadata.set_version(self.rows.place(row), piece.version, now)
        return True

    def unkept(self, kept: Index) -> None:
        """Free kept column batches, which have no readers any more."""
        self._release(self.rows.batches.release(kept))

    def require(self, rows: Index, once: Flags | None = None) -> None:
        """Raise Misuse if one of these rows does not exist. Rows whose flag in `once` is set are not checked."""
        there = self.rows.there(rows)
        if once is not None:
            there |= once
        if not there.all():
            at = int(np.flatnonzero(~there)[0])
            raise Misuse(
                f"row {self.keys.names(rows[at : at + 1])[0]!r} (number {at} of those named) is not in the stream:"
                " each task is done with it, it was dropped, or it never was"
            )

    # delivering and settling

    def give_back(self, task: int, rows: Index, *, seen: bool = True, reason: str = "") -> Index:
        """Make leased rows pending again. After `max_deliveries` tries they become dead letters, with this reason.
        Unless they were `seen`, the lease does not count as a try. Returns the new dead letters."""
        places = self.rows.places(rows)
        if not seen:
            self.progress.unseen(task, places)
        versions, most = self.metadata.versions(places), self.settings.max_deliveries
        dead, dropped = self.progress.give_back(task, places, versions, most)
        self.groups.dead(task, self.metadata.groups(places)[dead & ~dropped])
        if reason and dead.any():
            self.reasons[task].update(dict.fromkeys(rows[dead].tolist(), reason))
        self.let_go(rows[dropped])
        return rows[dead]

    def retry(self, task: int, rows: Index) -> int:
        """Make pending all rows among these that exist and are dead letters of the task. Returns their number."""
        rows = rows[self.rows.there(rows)]
        places = self.rows.places(rows)
        dead = self.progress.states(places, len(rows))[task] == DEAD
        rows = rows[dead & ~self.progress.dropped(places, len(rows))]
        places = self.rows.places(rows)
        self.progress.retry(task, places, self.metadata.versions(places))
        self.groups.dead(task, self.metadata.groups(places), -1)
        for row in rows.tolist():
            self.reasons[task].pop(row, None)
        return len(rows)

    def settle(self, task: int, rows: Index, state: int) -> None:
        """Mark rows as ACKED or EXPIRED for a task. Rows with which all tasks are done are removed."""
        if not len(rows):
            return
        places = self.rows.places(rows)
        finished, dropped = self.progress.settle(task, places, self.metadata.versions(places), state)
        over = finished & ~dropped
        groups = self.metadata.groups(places)
        self.groups.done(task, groups[~dropped] if dropped.any() else groups)
        self._remove(rows[over])
        self.let_go(rows[dropped])

    def drop_rows(self, rows: Index) -> None:
        """Drop rows: they are not delivered to any task any more. Leased rows stay until they are given back or acked.
        Raises Misuse for a row that does not exist."""
        self.require(rows)
        rows = np.unique(rows)
        self.unfinished.forget(rows)
        fresh = rows[self.progress.drop(self.rows.places(rows), len(rows))]
        places = self.rows.places(fresh)
        states = self.progress.states(places, len(fresh))
        self.groups.drop(self.metadata.groups(places), (states == ACKED) | (states == EXPIRED), states == DEAD)
        self.let_go(rows)
        self.look_again()  # the other rows of their groups may be complete now

    def look_again(self) -> None:
        """Note that rows may have become ready, so that waiting requests are tried again."""
        for page in self.rows.pages.values():
            page.changes += 1

    def let_go(self, rows: Index) -> None:
        """Pass the dropped rows among these that may be removed now to `loose`."""
        if len(rows):
            self.loose(rows)

    def dropped(self) -> Index:
        rows = self.rows.all()
        dropped: Index = rows[self.progress.dropped(self.rows.places(rows), len(rows))]
        return dropped

    def free(self, rows: Index) -> Index:
        """The rows among these that can be removed: dropped, not leased, and still stored."""
        rows = rows[self.rows.there(rows)]
        places = self.rows.places(rows)
        held = (self.progress.states(places, len(rows)) == LEASED).any(axis=0)
        free: Index = rows[self.progress.dropped(places, len(rows)) & ~held]
        return free

    def remove(self, rows: Index) -> None:
        """Remove dropped rows that are not leased."""
        if len(rows):
            places = self.rows.places(rows)
            self.progress.let_go(places, self.metadata.versions(places))
            self._remove(rows)

    def lose(self, rows: Index) -> None:
        """Remove rows as if they had never been appended. Leased rows are dropped instead; dropped ones stay."""
        places = self.rows.places(rows)
        states, before = self.progress.states(places, len(rows)), self.progress.dropped(places, len(rows))
        held = (states == LEASED).any(axis=0)
        if held.any():
            self.drop_rows(rows[held])
        free = rows[~held & ~before]
        if len(free):
            places, states = self.rows.places(free), states[:, ~held & ~before]
            self.progress.lose(places, self.metadata.versions(places))
            self.groups.lose(self.metadata.groups(places), (states == ACKED) | (states == EXPIRED), states == DEAD)
            self._forget(free)

    def _remove(self, rows: Index) -> None:
        if not len(rows):
            return
        places = self.rows.places(rows)
        self.groups.gone(self.metadata.groups(places), self.progress.dropped(places, len(rows)))
        self._forget(rows)

    def _forget(self, rows: Index) -> None:
        self.unfinished.forget(rows)
        for reasons in filter(None, self.reasons):
            for row in rows.tolist():
                reasons.pop(row, None)
        self.keys.remove(rows)
        self._release(self.rows.remove(rows))

    def _release(self, batches: list[ColumnBatch]) -> None:
        if batches:
            self.nbytes -= sum(batch.nbytes for batch in batches)
            self._released([each for batch in batches for each in batch.each])

    def end(self) -> None:
        """Remove the callbacks: the stream is dropped."""
        self.loose = self._released = _nobody

    def clear(self) -> None:
        batches = self.rows.clear()
        self._empty()
        self._release(batches)

    # queries

    def behind(self, asked: Mapping[int, tuple[str, ...]], idle: Container[int] = ()) -> list[str]:
        """The tasks with the most leased and ready rows. In a stream with `max_lag`, only tasks with rows left of the
        oldest policy version count. `asked`: by task, the columns of its last request. `idle`: tasks that are left out,
        unless all are."""
        progress = self.progress
        tasks = [task for task, left in enumerate(progress.left) if left]
        tasks = [task for task in tasks if task not in idle] or tasks
        open_to = {task: progress.open_to(task, asked.get(task)) for task in tasks}
        tasks = [task for task in tasks if open_to[task]] or tasks
        marks = {
            task: (min(progress.left[task]) if self.settings.max_lag >= 0 else 0, -open_to[task]) for task in tasks
        }
        return [self.settings.tasks[task] for task, mark in marks.items() if mark == min(marks.values())]

    def dead_letters(self) -> list[str]:
        return [name for task, name in enumerate(self.settings.tasks) if len(self.progress.in_state(task, DEAD))]

    def labels(self, rows: Index) -> tuple[list[Any], list[int], dict[str, list[Any]]]:
        """Groups, versions and tags of these rows, in the form of a delivery."""
        places = self.rows.places(rows)
        named = self.groups.names(self.metadata.groups(places))
        tags = {name: values.tolist() for name, values in self.metadata.tags(places).items()}
        versions = self.metadata.versions(places).tolist()
        if len(self.unfinished):  # rows in progress may be lost
            begun = self.unfinished.begun
            versions = [
                begun[row].version if row in begun else v for row, v in zip(rows.tolist(), versions, strict=True)
            ]
        return named, versions, tags

    def listed(self, rows: Sequence[int], now: float) -> list[Listed]:
        """These rows in progress, in the form for users."""
        found = []
        for row in rows:
            one = np.array([row])
            groups, _, tags = self.labels(one)
            found.append(self.unfinished.listed(row, now, self.keys.names(one)[0], groups[0], tags))
        return found

    def mates(self, rows: Index) -> Index:
        """All rows of the groups of these rows."""
        numbers = np.unique(self.metadata.groups(self.rows.places(rows)))
        return self.metadata.in_groups(numbers[numbers >= 0].tolist())

    def whole_groups(self, task: int, rows: Index) -> Index:
        """These rows and the others of their groups that are pending for the task, ready or not; rows in progress are
        left out."""
        others = self.mates(rows)
        others = others[~np.isin(others, list(self.unfinished.begun))]
        places = self.rows.places(others)
        pending = self.progress.states(places, len(others))[task] == PENDING
        return np.union1d(rows, others[pending & ~self.progress.dropped(places, len(others))])

    def in_groups(self, names: Sequence[Any]) -> Index:
        """The rows of these groups. Raises Misuse for a group without rows."""
        numbers = []
        for name in names:
            number = self.groups.number(name)
            if number is None:
                raise Misuse(f"there is no row of the group {name!r}: each task is done with it, or it never was")
            numbers.append(number)
        return self.metadata.in_groups(numbers)


def _nobody(_: object) -> None:
    """A callback that does nothing."""
