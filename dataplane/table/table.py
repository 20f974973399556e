"""The rows of a table by key, until they are cleared: their columns (`table_cells`), their tags, and the tasks that
have claimed them (`claims`).

Rows are numbered in the order of their arrival, and no number is reused. Each row has a line in arrays
(`table_cells.ColumnArrays`).

Invariants: a refused call changes nothing. The only loops in Python over rows look up keys and merge tags. No cost
depends on the number of rows that were removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse
from dataplane.stream.packing import pack, unpack
from dataplane.stream.page import Flags, Index
from dataplane.table.claims import Claims
from dataplane.table.replica_state import TableState
from dataplane.table.table_cells import ColumnArrays, TableCells
from dataplane.table.write_effects import UnneededCells, WriteEffect

_NUMBER, _GONE, _TAG_BYTES = "number", "gone", "tag bytes"
_FEW = 1024  # with more lines than this, those of removed rows are deleted once they are the majority


class KnownRows(NamedTuple):
    """The metadata of rows, in the order of arrival or of the request. `have`: flags [rows, columns] of the columns
    that each row has."""

    numbers: Index
    keys: list[str]
    tags: list[dict[str, Any]]
    have: Flags


class TableRows:
    """A table. Each call of `change` returns a higher number than the one before."""

    def __init__(self, name: str, change: Callable[[], int], first: int = 0) -> None:
        self.name = name
        self.next = first
        """The number of the next row."""
        self._change = change
        self.changes = change()
        """Grows whenever rows, columns or tags change."""
        self._lines = ColumnArrays()
        self._lines.make(_NUMBER, np.int64, -1)
        self._lines.make(_GONE, np.bool_, False)
        self._lines.make(_TAG_BYTES, np.int64, 0)
        self._keys: list[str] = []  # by line
        self._tags: list[dict[str, Any] | None] = []
        self._by_key: dict[str, int] = {}  # -> number of the row
        self.cells = TableCells(self._lines)
        self.claims = Claims(self._lines, self.there)

    def __len__(self) -> int:
        return len(self._by_key)

    # naming rows

    def numbers(self, rows: Sequence[str] | Index) -> Index:
        """The numbers of rows by key or number. Raises Misuse for an unknown key."""
        found = self._numbers(rows)
        if isinstance(rows, list) and (found < 0).any():
            key = rows[int(np.flatnonzero(found < 0)[0])]
            raise Misuse(f"the table {self.name!r} has no row {key!r}: it was never written, or was cleared")
        return found

    def known(self, rows: Sequence[str] | Index) -> Index:
        """The numbers of rows by key or number, without those that do not exist."""
        found = self._numbers(rows)
        return found[self.there(found)]

    def _numbers(self, rows: Sequence[str] | Index) -> Index:
        """The numbers of rows by key or number; -1 for an unknown key."""
        if isinstance(rows, np.ndarray):
            return rows
        get = self._by_key.get
        return np.fromiter((get(key, -1) for key in rows), np.int64, len(rows))

    def there(self, numbers: Index) -> Flags:
        return self._find(numbers) >= 0

    def _present(self) -> Index:
        return np.flatnonzero(~self._lines[_GONE])

    def _find(self, numbers: Index) -> Index:
        """The lines of these rows; -1 for a row that does not exist."""
        known = self._lines[_NUMBER]
        if not len(known):
            return np.full(len(numbers), -1)
        at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
        return np.where((known[at] == numbers) & ~self._lines[_GONE][at], at, -1)

    def _at(self, numbers: Index) -> Index:
        at = self._find(numbers)
        if (at < 0).any():
            number = int(numbers[int(np.flatnonzero(at < 0)[0])])
            raise Misuse(f"the table {self.name!r} has no row number {number}: it was never there, or was cleared")
        return at

    # writing

    def upsert(
        self,
        rows: Sequence[str] | Index,
        ref: BatchRef | None = None,
        tags: Sequence[Mapping[str, Any]] = (),
        tag_bytes: Sequence[int] | Index = (),
    ) -> tuple[Index, list[UnneededCells]]:
        """Write rows by key, adding missing ones, or by number: the columns of `ref` replace theirs, and the tags are
        merged. Returns their numbers, and the cells that are no longer needed.

        tag_bytes: an upper bound of the encoded size of the merged tags of each row.

        Raises Misuse (a row is named twice, or a number has no row), SchemaMismatch, LimitExceeded.
        """
        numbers, new = self._named(rows)
        at = self._at(numbers) if not isinstance(rows, list) else np.where(numbers < 0, -1, self._find(numbers))
        fields = {} if ref is None else self.cells.fields(ref, at[at >= 0])
        if new:
            at[at < 0] = np.arange(self._lines.count, self._lines.count + len(new))
            added = np.arange(self.next, self.next + len(new))
            numbers[numbers < 0] = added
            self._add(new, added)
            self.next += len(new)
        over = [] if ref is None else self.cells.put(WriteEffect.of(ref), fields, at)
        if len(tags):
            self._tag(at, tags, tag_bytes)
        self.changes = self._change()
        return numbers, over

    def _named(self, rows: Sequence[str] | Index) -> tuple[Index, list[str]]:
        """The numbers of rows, -1 for new ones; and the keys of the new ones."""
        if isinstance(rows, np.ndarray):
            if len(np.unique(rows)) != len(rows):
                raise Misuse("a row is named twice; name each once")
            return rows.copy(), []
        if len(set(rows)) != len(rows):
            seen: set[str] = set()
            twice = next(key for key in rows if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise Misuse(f"the key {twice!r} is given twice; name each row once")
        numbers = self._numbers(rows)
        return numbers, [rows[at] for at in np.flatnonzero(numbers < 0).tolist()]

    def _add(self, keys: list[str], numbers: Index) -> None:
        first = self._lines.count
        self._lines.add(len(keys))
        self._lines[_NUMBER][first:] = numbers
        self._keys += keys
        self._tags += [None] * len(keys)
        self._by_key.update(zip(keys, numbers.tolist(), strict=True))

    def _tag(self, at: Index, tags: Sequence[Mapping[str, Any]], tag_bytes: Sequence[int] | Index) -> None:
        for line, more in zip(at.tolist(), tags, strict=True):
            known = self._tags[line]
            self._tags[line] = {**known, **more} if known else dict(more)
        if len(tag_bytes):
            self._lines[_TAG_BYTES][at] = tag_bytes

    def tag_bytes(self, rows: Sequence[str] | Index) -> Index:
        """An upper bound of the size of the tags of each of these rows; 0 for a row that does not exist."""
        at = self._find(self._numbers(rows))
        return np.where(at >= 0, self._lines[_TAG_BYTES][at], 0) if self._lines.count else np.zeros(len(at), np.int64)

    def tags(self, rows: Sequence[str] | Index) -> list[dict[str, Any]]:
        """The tags of each of these rows; none for a row that does not exist."""
        return [(self._tags[line] if line >= 0 else None) or {} for line in self._find(self._numbers(rows)).tolist()]

    # reading

    def read(self, numbers: Index, columns: Sequence[str] | None = None) -> BatchRef:
        """A reference to these columns of these rows, in this order. With None: to all columns that each of the rows
        has. Raises Misuse for a row that does not exist or lacks one of the columns."""
        at = self._at(numbers)
        if columns is None:
            columns = [name for name in self.cells.schema if len(self.cells.having(at, [name])) == len(at)]
            if not columns:
                raise Misuse(f"these rows of the table {self.name!r} have no column that all of them have")
        self._check_have(at, columns)
        return self.cells.read(at, columns)

    def _check_have(self, at: Index, columns: Sequence[str]) -> None:
        if not columns or len(set(columns)) != len(columns):
            raise Misuse("name one column or more, and each once")
        have = self.cells.have(at, columns)
        if len(at) and not have.all():
            row, column = np.argwhere(~have)[0].tolist()
            raise Misuse(f"the row {self._keys[int(at[row])]!r} of {self.name!r} has no column {columns[column]!r}")
        for name in columns:
            if name not in self.cells.schema:
                raise Misuse(f"the table {self.name!r} has no column {name!r}")

    def after(self, number: int, most: int, most_bytes: int | None = None) -> tuple[Index, bool]:
        """The next rows after this number, and whether there are more. They are at most `most` rows, and their keys and
        tags have at most `most_bytes`; but if there is any row, at least one is returned."""
        at = self._present()
        at = at[np.searchsorted(self._lines[_NUMBER][at], number, side="right") :]
        fitting = at[:most] if most_bytes is None else self._fitting(at[:most], most_bytes)
        return self._lines[_NUMBER][fitting], len(fitting) < len(at)

    def first(self, numbers: Index, most_bytes: int) -> Index:
        """The first of these rows, as many as `after` returns."""
        return numbers[: len(self._fitting(self._at(numbers), most_bytes))]

    def _fitting(self, at: Index, most_bytes: int) -> Index:
        keys = (self._keys[line] for line in at.tolist())
        sizes = np.fromiter((len(key) if key.isascii() else 4 * len(key) for key in keys), np.int64, len(at))
        fits = np.searchsorted(np.cumsum(self._lines[_TAG_BYTES][at] + sizes), most_bytes, side="right")
        return at[: max(1, int(fits))]

    def look(self, numbers: Index, columns: Sequence[str] = (), *, tags: bool = True) -> KnownRows:
        """The metadata of these rows. Raises Misuse for a row that does not exist."""
        at = self._at(numbers)
        lines = at.tolist()
        found = [self._tags[line] or {} for line in lines] if tags else []
        return KnownRows(numbers, [self._keys[line] for line in lines], found, self.cells.have(at, columns))

    # claiming

    def ready(self, columns: Sequence[str], task: str | None = None) -> Index:
        """The rows, in the order of arrival, that have all these columns and that the task has not claimed."""
        at = self.cells.having(self._present(), columns)
        at = at[~self.claims.claimed(task, at)]
        numbers: Index = self._lines[_NUMBER][at]
        return numbers

    def claim(self, task: str, numbers: Index, give: Index | None = None, claim_id: str = "") -> Index | None:
        """Mark these rows as claimed by the task. Returns the rows of the claim: these, or `give`; for an id that was
        used before, those of the first claim. Returns None, and changes nothing, if a row is missing or was claimed.

        Raises Misuse for a row named twice, LimitExceeded for too many tasks.
        """
        made = self.claims.find(task, claim_id) if claim_id else None
        if made is not None:
            return made
        if len(np.unique(numbers)) != len(numbers):
            raise Misuse("a row is named twice; claim each once")
        at = self._find(numbers)
        given = (numbers if give is None else give).copy()
        return given if (at >= 0).all() and self.claims.claim(task, at, given, claim_id) else None

    def release(self, task: str | None = None, numbers: Index | None = None) -> None:
        """Undo the claims of the task, or of all tasks, on these rows, or on all, and forget the ids of these claims.
        Raises Misuse for a row that does not exist."""
        if numbers is None:
            self.claims.forget(task)
        else:
            self.claims.release(task, self._at(numbers), numbers)

    def claimed(self, task: str, numbers: Index) -> Flags:
        """Flags of these rows that the task has claimed. Raises Misuse for a row that does not exist."""
        return self.claims.claimed(task, self._at(numbers))

    # removing

    def clear(self, rows: Sequence[str] | Index) -> list[UnneededCells]:
        """Remove rows by key or number; missing ones are ignored. Returns the cells that are no longer needed."""
        gone = np.unique(self._numbers(rows))
        at = self._find(gone)
        gone, at = gone[at >= 0], at[at >= 0]
        if not len(at):
            return []
        over = self.cells.clear(at)
        self._lines[_GONE][at] = True
        for line in at.tolist():
            del self._by_key[self._keys[line]]
            self._keys[line], self._tags[line] = "", None
        self.claims.gone(gone)
        self._shrink()
        self.changes = self._change()
        return over

    def drop(self) -> list[UnneededCells]:
        return self.clear(self._lines[_NUMBER][self._present()])

    def _shrink(self) -> None:
        gone = self._lines[_GONE]
        if self._lines.count < _FEW or np.count_nonzero(gone) <= self._lines.count // 2:
            return
        left = np.flatnonzero(~gone).tolist()
        self._keys = [self._keys[line] for line in left]
        self._tags = [self._tags[line] for line in left]
        self._lines.keep(~gone)

    # its state

    def state(self) -> TableState:
        at = self._present()
        lines = at.tolist()
        return TableState(
            next=self.next,
            next_written=self.cells.next_write,
            changes=self.changes,
            numbers=pack(self._lines[_NUMBER][at]),
            keys=[self._keys[line] for line in lines],
            tags=[self._tags[line] for line in lines],
            tag_bytes=pack(self._lines[_TAG_BYTES][at]),
            columns=self.cells.columns_state(at),
            written=self.cells.writes_state(),
            tasks=self.claims.state(at),
        )

    def restore(self, state: TableState) -> None:
        """Restore a state; the table must have no rows. Raises ValueError or Misuse for an impossible state."""
        numbers, count = unpack(state.numbers), len(state.keys)
        if len(numbers) != count or len(state.tags) != count or len(set(state.keys)) != count:
            raise ValueError("keys or tags of other rows")
        if count and ((np.diff(numbers) <= 0).any() or not 0 <= numbers[0] <= numbers[-1] < state.next):
            raise ValueError("rows that are not in order")
        self._add(state.keys, numbers)
        self.next, self.cells.next_write, self.changes = state.next, state.next_written, state.changes
        self._tags[:] = state.tags
        self._lines[_TAG_BYTES][:] = unpack(state.tag_bytes, count)
        self.cells.restore(state.written, state.columns, count)
        self.claims.restore(state.tasks, count)
