"""What one node holds of the rows of a stream that have their home on another: the columns that are in its store, and
what is known of the rows that were appended from it.

It is kept so that the columns stay as long as the home needs them, and so that another home can be told of the rows,
should theirs die. Rows have the numbers that they have at their home, which says what becomes of them.

What always holds: what is here of a row goes when the home says that it is over, or all tasks are done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataplane.batch.field import MEASURED
from dataplane.batch.ref import BatchRef
from dataplane.stream.block import Block
from dataplane.stream.books import Books
from dataplane.stream.facts import Arrival
from dataplane.stream.keys import unnamed
from dataplane.stream.moving import Columns
from dataplane.stream.page import Index
from dataplane.stream.patch import Hold, Patch
from dataplane.stream.progress import ACKED, EXPIRED, PENDING
from dataplane.stream.settings import Settings
from dataplane.stream.snapshot import block_of, columns_of, put_back, put_columns


@dataclass(frozen=True, slots=True)
class _Half:
    settings: Settings
    books: Books


class Mirror:
    """What is here of the rows of one part. To be used from one event loop alone."""

    def __init__(self, settings: Settings, mark: str, released: Callable[[list[Patch]], None]) -> None:
        self.settings = settings
        self._mark = mark
        self._brought = Books(settings, released, mark)  # rows that were appended from here
        self._added = Books(settings, released, mark)  # columns of any rows that were brought later
        self._others: dict[int, tuple[bytes, ...]] = {}  # by row: other nodes that store columns of it

    def __len__(self) -> int:
        return self._brought.rows.count + self._added.rows.count

    @property
    def size(self) -> tuple[int, int]:
        """How many rows were appended from here, and about how many bytes."""
        return self._brought.rows.count, self._brought.nbytes

    def append(
        self, first: int, ref: BatchRef, keys: Sequence[str], digest: bytes, arrival: Arrival, now: float
    ) -> None:
        """Rows that were appended from here, of which the first got this number."""
        books, rows = self._brought, np.arange(first, first + len(ref))
        books.rows.put_back(rows)
        books.rows.extend(rows, ref, replace=False)
        books.nbytes += ref.stored_nbytes
        books.keys.add(keys, first, digest)
        places = books.rows.places(rows)
        groups = books.groups.enter(arrival.groups, rows)
        books.facts.enter(places, groups, arrival.versions, now, arrival.tags)
        books.facts.measure(places, arrival.lengths)
        books.progress.enter(arrival.versions)

    def extend(self, rows: Index, ref: BatchRef, lengths: Mapping[str, Index], hold: Hold) -> None:
        """Columns that were brought from here to these rows; `hold` as in `Patch`."""
        books = self._added
        new = np.unique(rows[~books.rows.there(rows)])
        books.rows.put_back(new)
        places, versions = books.rows.places(new), np.zeros(len(new), np.int64)
        books.progress.enter(versions)
        pending = np.full((len(self.settings.tasks), len(new)), PENDING, np.uint8)
        books.progress.put_back(places, versions, pending, np.zeros_like(pending))
        books.facts.enter(places, -1 - new, versions, 0.0, {})
        books.extend(rows, ref, lengths, replace=True, hold=hold)

    # what the home says

    def take(self, block: Block, columns: Columns, now: float) -> None:
        """Rows and columns that another home has come to have, by their numbers there."""
        half = _Half(self.settings, self._brought)
        put_back(half, block, now, anew=True)
        for rows, task, ref, lengths in columns:
            put_columns(half, rows, task, ref, lengths)

    def settle(self, task: int, rows: Index, state: int) -> None:
        """The task is done with these rows, which are ACKED or EXPIRED."""
        for books in (self._brought, self._added):
            there = rows[books.rows.there(rows)]
            states = books.progress.states(books.rows.places(there), len(there))[task]
            books.settle(task, there[(states != ACKED) & (states != EXPIRED)], state)

    def done(self, rows: Index) -> list[tuple[int, Index, int]]:
        """Which tasks are done with which of these rows, and in which state."""
        found = []
        for books in (self._brought, self._added):
            there = rows[books.rows.there(rows)]
            for task, states in enumerate(books.progress.states(books.rows.places(there), len(there))):
                found += [(task, there[states == state], state) for state in (ACKED, EXPIRED)]
        return [each for each in found if len(each[1])]

    def note_others(self, rows: Index, others: Mapping[bytes, Index]) -> None:
        """Those of these rows that are in `others` have columns on that node, too, and the rest have none elsewhere."""
        if others or self._others:
            self._forget_others(rows)
        for node, of in others.items():
            for row in of[self._brought.rows.there(of)].tolist():
                self._others[row] = (*self._others.get(row, ()), node)

    def _forget_others(self, rows: Index) -> None:
        for row in rows.tolist() if self._others else ():
            self._others.pop(row, None)

    def others(self, rows: Index) -> dict[bytes, Index]:
        """Which of these rows have columns on which other nodes."""
        found: dict[bytes, list[int]] = {}
        for row in rows.tolist():
            for node in self._others.get(row, ()):
                found.setdefault(node, []).append(row)
        return {node: np.array(of, np.int64) for node, of in found.items()}

    def over(self, rows: Index) -> None:
        """These rows are gone, whatever tasks have done."""
        self._forget_others(rows)
        for books in (self._brought, self._added):
            books.lose(rows[books.rows.there(rows)])

    def announced(self, rows: Index) -> None:
        """These rows, as they were appended from here, are at another home now, and kept for that."""
        self._brought.lose(rows[self._brought.rows.there(rows)])

    def announced_columns(self, rows: Index) -> None:
        """So are the columns of these rows that were brought later."""
        self._added.lose(rows[self._added.rows.there(rows)])

    def clear(self) -> None:
        """Nothing is needed any more."""
        self._brought.clear()
        self._added.clear()
        self._others.clear()

    # what another home is told

    def places(self) -> tuple[Index, list[str | int]]:
        """The rows that were appended from here, and of each by what it is placed: its group, or its key."""
        rows = self._brought.rows.all()
        made = unnamed(self._mark, rows.tolist())
        placed = self._brought.places_of(rows)
        return rows, [other if place is None else place for place, other in zip(placed, made, strict=True)]

    @property
    def last(self) -> int:
        """The highest number that a row here ever had; -1 for none."""
        return max(self._brought.rows.next, self._added.rows.next) - 1

    def all(self) -> Index:
        """All rows of which something is here."""
        return np.union1d(self._brought.rows.all(), self._added.rows.all())

    def brought(self, rows: Index) -> Index:
        """Which of these rows were appended from here."""
        return rows[self._brought.rows.there(rows)]

    def block(self, rows: Index, now: float) -> Block:
        """What is known of some of these rows."""
        return block_of(self._brought, rows, now)

    def columns(self, rows: Index) -> Columns:
        """Their columns that were brought from here, with them or later."""
        later = measured(self._added, rows[self._added.rows.there(rows)])
        return [*later, *_without(measured(self._brought, rows), later)]

    def added(self) -> Columns:
        """All columns that were brought later of rows that were appended from elsewhere."""
        rows = self._added.rows.all()
        return measured(self._added, rows[~self._brought.rows.there(rows)])


def _without(columns: Columns, later: Columns) -> Columns:
    """The columns, but for those of rows that were brought again later."""
    for rows, _, again, _ in later:
        names = set(again.columns)
        found: Columns = []
        for of, task, ref, lengths in columns:
            both = np.isin(of, rows)
            if not both.any() or names.isdisjoint(ref.columns):
                found.append((of, task, ref, lengths))
                continue
            for at, left in ((both, [n for n in ref.columns if n not in names]), (~both, list(ref.columns))):
                if at.any() and left:
                    kept = {name: values[at] for name, values in lengths.items() if name in left}
                    found.append((of[at], task, ref[at].select(*left), kept))
        columns = found
    return columns


def measured(books: Books, rows: Index) -> Columns:
    """The columns of these rows, with their lengths."""
    found: list[Any] = []
    for of, task, ref in columns_of(books.rows, rows):
        lengths = {name: books.lengths(of, name) for name, field in ref.schema.items() if field.kind in MEASURED}
        found.append((of, task, ref, lengths))
    return found
