"""The rows of a table by key, until they are cleared: their columns, their tags, and the tasks that have claimed them
(`table.claims`).

A row has a number, in the order of arrival, which is never reused. For each column of each row the table has the write
with its value and the row of that write; a later write replaces it. Replaced and cleared cells are returned to be
freed one by one: a job may keep some rows for long, and the others of the same write should not stay with them.

Invariants: a column of a row stays until the row is cleared or the column is replaced; a cell is returned once; a
refused call changes nothing. Loops in Python only look up keys and merge tags, and no cost grows with the number of
rows that came and went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch.field import Field, merge_fields
from dataplane.batch.ref import BatchRef
from dataplane.errors import LimitExceeded, Misuse
from dataplane.stream.packing import pack, unpack
from dataplane.stream.rows import assembled
from dataplane.table.claims import Claims
from dataplane.table.column_arrays import ColumnArrays
from dataplane.table.replica_state import ColumnState, TableState, WrittenState
from dataplane.table.write_effects import UnneededCells, WriteEffect

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_COLUMNS = 1024
"""Columns of a table."""

_NUMBER, _GONE, _TAG_BYTES = "number", "gone", "tag bytes"
_FEW = 1024  # lines: from then on, those of removed rows are deleted once they are the majority


class KnownRows(NamedTuple):
    """The metadata of rows, in the order of arrival or of the request. `have`: flags [rows, columns] of the columns
    that each row has."""

    numbers: Index
    keys: list[str]
    tags: list[dict[str, Any]]
    have: Flags


class Table:
    """A table. `change` returns a number higher than all before."""

    def __init__(self, name: str, change: Callable[[], int], first: int = 0) -> None:
        self.name = name
        self.next = first
        """The number of the next row."""
        self._change = change
        self.changes = change()
        """Grows whenever rows, columns or tags change."""
        self.nbytes = 0
        """The approximate bytes of all cells: each cell counts an equal share of its write."""
        self.schema: dict[str, Field] = {}
        self._lines = ColumnArrays()
        self._lines.make(_NUMBER, np.int64, -1)
        self._lines.make(_GONE, np.bool_, False)
        self._lines.make(_TAG_BYTES, np.int64, 0)
        self._keys: list[str] = []  # by line
        self._tags: list[dict[str, Any] | None] = []
        self._by_key: dict[str, int] = {}  # -> number of the row
        self._written: dict[int, WriteEffect] = {}
        self._next_written = 0
        self._claims = Claims(self._lines, self.there)

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def refs(self) -> list[BatchRef]:
        """The references of writes of which cells are left."""
        return [written.ref for written in self._written.values()]

    @property
    def writes(self) -> Iterable[WriteEffect]:
        """The writes of which cells are left."""
        return self._written.values()

    def writes_after(self, number: int) -> Iterator[tuple[int, WriteEffect]]:
        """The writes after the one with this number, with their numbers."""
        return ((each, written) for each, written in self._written.items() if each > number)

    @property
    def tasks(self) -> list[str]:
        """The tasks that have ever claimed rows, except forgotten ones."""
        return self._claims.tasks

    # naming rows

    def numbers(self, keys: Sequence[str]) -> Index:
        """The rows of these keys. Raises Misuse for an unknown key."""
        found = self._numbers(keys)
        if (found < 0).any():
            key = keys[int(np.flatnonzero(found < 0)[0])]
            raise Misuse(f"the table {self.name!r} has no row {key!r}: it was never written, or was cleared")
        return found

    def _numbers(self, keys: Sequence[str]) -> Index:
        get = self._by_key.get
        return np.fromiter((get(key, -1) for key in keys), np.int64, len(keys))

    def there(self, numbers: Index) -> Flags:
        """Flags of the rows that exist."""
        return self._find(numbers) >= 0

    def all(self) -> Index:
        """The numbers of all rows, in the order of arrival."""
        numbers: Index = self._lines[_NUMBER][self._present()]
        return numbers

    def keys(self, numbers: Index) -> list[str]:
        """The keys of these rows. Raises Misuse for a row that does not exist."""
        return [self._keys[at] for at in self._at(numbers).tolist()]

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
        encoded: bytes = b"",
    ) -> tuple[Index, list[UnneededCells]]:
        """Write rows by key, adding missing ones, or by number: the columns of `ref` replace theirs, and the tags are
        merged. Returns their numbers, and the cells that are no longer needed.

        tag_bytes: the encoded size of the tags of each row. encoded: `ref` as bytes.

        Raises Misuse (a row is named twice, or a number has no row), SchemaMismatch, LimitExceeded.
        """
        numbers, new = self._named(rows)
        at = self._at(numbers) if not isinstance(rows, list) else np.where(numbers < 0, -1, self._find(numbers))
        fields = {} if ref is None else self._fields(ref, at[at >= 0])
        if new:
            at[at < 0] = np.arange(self._lines.count, self._lines.count + len(new))
            added = np.arange(self.next, self.next + len(new))
            numbers[numbers < 0] = added
            self._add(new, added)
            self.next += len(new)
        over = [] if ref is None else self._put(ref, fields, at, WriteEffect.of(ref, encoded))
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

    def _fields(self, ref: BatchRef, at: Index) -> dict[str, Field]:
        """The types of the columns of `ref` in this table after they are written to these lines. Raises
        SchemaMismatch, LimitExceeded."""
        new = [name for name in ref.columns if name not in self.schema]
        if len(self.schema) + len(new) > MAX_COLUMNS:
            raise LimitExceeded(
                f"a table has at most {MAX_COLUMNS} columns, and {new[MAX_COLUMNS - len(self.schema)]!r} is one more",
                what="columns of a table",
                asked=len(self.schema) + len(new),
                limit=MAX_COLUMNS,
            )
        found = {}
        for name, field in ref.schema.items():
            known = self.schema.get(name)
            if known is not None and known != field:
                there = self._lines["from", name] >= 0
                others = np.count_nonzero(there) - np.count_nonzero(there[at])
                field = merge_fields(name, [known, field]) if others else field
            found[name] = field
        return found

    def _add(self, keys: list[str], numbers: Index) -> None:
        first = self._lines.count
        self._lines.add(len(keys))
        self._lines[_NUMBER][first:] = numbers
        self._keys += keys
        self._tags += [None] * len(keys)
        self._by_key.update(zip(keys, numbers.tolist(), strict=True))

    def _put(self, ref: BatchRef, fields: Mapping[str, Field], at: Index, written: WriteEffect) -> list[UnneededCells]:
        self.schema.update(fields)
        number = self._next_written
        before = []
        for name in ref.columns:
            if ("from", name) not in self._lines:
                self._lines.make(("from", name), np.int64, -1)
                self._lines.make(("row", name), np.int64, 0)
            came, row = self._lines["from", name], self._lines["row", name]
            before.append((name, came[at], row[at]))
            came[at], row[at] = number, np.arange(len(at))
        if len(ref):
            self._next_written += 1
            self._written[number] = written
            self.nbytes += written.nbytes
        return self._over(before)

    def _tag(self, at: Index, tags: Sequence[Mapping[str, Any]], tag_bytes: Sequence[int] | Index) -> None:
        for line, more in zip(at.tolist(), tags, strict=True):
            known = self._tags[line]
            self._tags[line] = {**known, **more} if known else dict(more)
        if len(tag_bytes):
            self._lines[_TAG_BYTES][at] += np.asarray(tag_bytes, np.int64)

    def tag_bytes(self, rows: Sequence[str] | Index) -> Index:
        """An upper bound of the size of the tags of each of these rows; 0 for a row that does not exist."""
        at = self._find(rows if isinstance(rows, np.ndarray) else self._numbers(rows))
        return np.where(at >= 0, self._lines[_TAG_BYTES][at], 0) if self._lines.count else np.zeros(len(at), np.int64)

    # reading

    def have(self, at: Index, columns: Sequence[str]) -> Flags:
        """Flags [lines, columns] of the columns that each line has."""
        flags = np.zeros((len(at), len(columns)), np.bool_)
        for number, name in enumerate(columns):
            if ("from", name) in self._lines:
                flags[:, number] = self._lines["from", name][at] >= 0
        return flags

    def read(self, numbers: Index, columns: Sequence[str] | None = None) -> BatchRef:
        """A reference to these columns of these rows, in this order; None: to all columns that all of them have.
        Raises Misuse for a row that does not exist or lacks one of the columns."""
        at = self._at(numbers)
        if columns is None:
            names = list(self.schema)
            columns = [names[column] for column in np.flatnonzero(self.have(at, names).all(axis=0)).tolist()]
            if not columns:
                raise Misuse(f"these rows of the table {self.name!r} have no column that all of them have")
        self._check_have(at, columns)
        if not len(at):
            return self._empty(columns)
        made: BatchRef | None = None
        for together, written, row in self._alike([(name, *self._cells(name, at)) for name in columns]):
            part = assembled(lambda number: self._written[number].ref, written, row, together)
            made = part if made is None else made.union(part)
        assert made is not None, "there is a column"
        return made if made.columns == tuple(columns) else made.select(*columns)

    def _check_have(self, at: Index, columns: Sequence[str]) -> None:
        if not columns or len(set(columns)) != len(columns):
            raise Misuse("name one column or more, and each once")
        have = self.have(at, columns)
        if len(at) and not have.all():
            row, column = np.argwhere(~have)[0].tolist()
            raise Misuse(f"the row {self._keys[int(at[row])]!r} of {self.name!r} has no column {columns[column]!r}")
        for name in columns:
            if name not in self.schema:
                raise Misuse(f"the table {self.name!r} has no column {name!r}")

    def _cells(self, name: str, at: Index) -> tuple[Index, Index]:
        return self._lines["from", name][at], self._lines["row", name][at]

    def _empty(self, columns: Sequence[str]) -> BatchRef:
        """A reference without rows, to these columns."""
        return BatchRef.of(bytes(8), 0, [(name, self.schema[name], 0, 0, 0) for name in columns])

    def described(self) -> BatchRef | None:
        """A reference without rows, to all columns; None if there are none."""
        return self._empty(list(self.schema)) if self.schema else None

    def after(self, number: int, most: int, most_bytes: int) -> tuple[Index, bool]:
        """The next rows after this number, and whether there are more: at most `most` rows, with tags of at most
        `most_bytes`, but at least one if there is one."""
        at = self._present()
        at = at[np.searchsorted(self._lines[_NUMBER][at], number, side="right") :]
        fits = np.searchsorted(np.cumsum(self._lines[_TAG_BYTES][at[:most]]), most_bytes, side="right")
        fitting = at[: max(1, min(most, int(fits)))]
        return self._lines[_NUMBER][fitting], len(fitting) < len(at)

    def look(self, numbers: Index, columns: Sequence[str] = (), *, tags: bool = True) -> KnownRows:
        """The metadata of these rows. Raises Misuse for a row that does not exist."""
        at = self._at(numbers)
        lines = at.tolist()
        found = [self._tags[line] or {} for line in lines] if tags else []
        return KnownRows(numbers, [self._keys[line] for line in lines], found, self.have(at, columns))

    # claiming

    def ready(self, columns: Sequence[str], task: str | None = None) -> Index:
        """The rows, in the order of arrival, that have all these columns and that the task has not claimed."""
        at = self._present()
        for name in columns:
            if ("from", name) not in self._lines:
                return np.empty(0, np.int64)
            at = at[self._lines["from", name][at] >= 0]
        at = at[~self._claims.claimed(task, at)]
        numbers: Index = self._lines[_NUMBER][at]
        return numbers

    def find_claim(self, task: str, claim_id: str) -> Index | None:
        """The rows of the claim with this id; None if there is none."""
        return self._claims.find(task, claim_id)

    def claim(self, task: str, numbers: Index, give: Index | None = None, claim_id: str = "") -> Index | None:
        """Mark these rows as claimed by the task. Returns the rows of the claim: these, or `give`; for an id that was
        used before, those of the first claim. Returns None, and changes nothing, if a row is missing or was claimed.

        Raises Misuse for a row named twice, LimitExceeded for too many tasks.
        """
        made = self.find_claim(task, claim_id) if claim_id else None
        if made is not None:
            return made
        if len(np.unique(numbers)) != len(numbers):
            raise Misuse("a row is named twice; claim each once")
        at = self._find(numbers)
        given = (numbers if give is None else give).copy()
        return given if (at >= 0).all() and self._claims.claim(task, at, given, claim_id) else None

    def release(self, task: str | None = None, numbers: Index | None = None) -> None:
        """Undo the claims of the task, or of all tasks, on these rows, or on all, and forget the ids of these claims.
        Raises Misuse for a row that does not exist."""
        if numbers is None:
            self._claims.forget(task)
        else:
            self._claims.release(task, self._at(numbers), numbers)

    def claimed(self, task: str, numbers: Index | None = None) -> Flags:
        """Flags of these rows, or of all in the order of arrival, that the task has claimed. Raises Misuse for a row
        that does not exist."""
        return self._claims.claimed(task, self._present() if numbers is None else self._at(numbers))

    # removing

    def clear(self, numbers: Index) -> list[UnneededCells]:
        """Remove these rows; missing ones are ignored. Returns the cells that are no longer needed."""
        gone = np.unique(numbers)
        at = self._find(gone)
        gone, at = gone[at >= 0], at[at >= 0]
        if not len(at):
            return []
        before = []
        for name in self.schema:
            before.append((name, *self._cells(name, at)))
            self._lines["from", name][at] = -1
        self._lines[_GONE][at] = True
        for line in at.tolist():
            del self._by_key[self._keys[line]]
            self._keys[line], self._tags[line] = "", None
        for name in [name for name in self.schema if not (self._lines["from", name] >= 0).any()]:
            del self.schema[name]
            self._lines.drop(("from", name))
            self._lines.drop(("row", name))
        self._claims.gone(gone)
        self._shrink()
        self.changes = self._change()
        return self._over(before)

    def cleared(self, rows: Sequence[str] | Index) -> list[UnneededCells]:
        """As `clear`, for rows by key or number."""
        return self.clear(rows if isinstance(rows, np.ndarray) else self._numbers(rows))

    def drop(self) -> list[UnneededCells]:
        """Remove all rows. Returns all cells."""
        return self.clear(self.all())

    def _shrink(self) -> None:
        gone = self._lines[_GONE]
        if self._lines.count < _FEW or np.count_nonzero(gone) <= self._lines.count // 2:
            return
        left = np.flatnonzero(~gone).tolist()
        self._keys = [self._keys[line] for line in left]
        self._tags = [self._tags[line] for line in left]
        self._lines.keep(~gone)

    def _over(self, before: Iterable[tuple[str, Index, Index]]) -> list[UnneededCells]:
        """Release cells. `before`: for each column the writes, and the rows of those (-1: none). Returns the cells
        that are no longer needed, by write."""
        found = []
        for names, written, row in self._alike(before):
            order = np.argsort(written, kind="stable")
            order = order[np.searchsorted(written[order], 0) :]
            if not len(order):
                continue
            numbers, starts = np.unique(written[order], return_index=True)
            for number, rows in zip(numbers.tolist(), np.split(row[order], starts[1:]), strict=True):
                brought = self._written[number]
                self.nbytes -= brought.share
                brought.left -= len(rows) * len(names)
                self.nbytes += brought.share
                if not brought.left:
                    del self._written[number]
                found.append(UnneededCells(brought, names, rows, done=not brought.left))
        return found

    def _alike(self, cells: Iterable[tuple[str, Index, Index]]) -> list[tuple[tuple[str, ...], Index, Index]]:
        """Group columns that are in the same rows of the same writes."""
        together: dict[tuple[bytes, bytes], tuple[list[str], Index, Index]] = {}
        for name, written, row in cells:
            key = written.tobytes(), np.where(written >= 0, row, 0).tobytes()
            together.setdefault(key, ([], written, row))[0].append(name)
        return [(tuple(names), written, row) for names, written, row in together.values()]

    # its state

    def state(self) -> TableState:
        """The whole state, as values."""
        at = self._present()
        lines = at.tolist()
        return TableState(
            next=self.next,
            next_written=self._next_written,
            changes=self.changes,
            numbers=pack(self._lines[_NUMBER][at]),
            keys=[self._keys[line] for line in lines],
            tags=[self._tags[line] for line in lines],
            tag_bytes=pack(self._lines[_TAG_BYTES][at]),
            columns=[
                ColumnState(name, field, pack(written), pack(np.where(written < 0, 0, row)))
                for name, field in self.schema.items()
                for written, row in [self._cells(name, at)]
            ],
            written=[WrittenState(number, of.encode(), of.left, of.exact) for number, of in self._written.items()],
            tasks=self._claims.state(at),
        )

    def restore(self, state: TableState) -> None:
        """Restore a state; the table must have no rows. Raises ValueError or Misuse for an impossible state."""
        numbers, count = unpack(state.numbers), len(state.keys)
        if len(numbers) != count or len(state.tags) != count or len(set(state.keys)) != count:
            raise ValueError("keys or tags of other rows")
        if count and ((np.diff(numbers) <= 0).any() or not 0 <= numbers[0] <= numbers[-1] < state.next):
            raise ValueError("rows that are not in order")
        self._add(state.keys, numbers)
        self.next, self._next_written, self.changes = state.next, state.next_written, state.changes
        self._tags[:] = state.tags
        self._lines[_TAG_BYTES][:] = unpack(state.tag_bytes, count)
        for each in state.written:
            ref = BatchRef.decode(each.ref)
            self._written[each.number] = written = WriteEffect(ref, each.left, ref.stored_nbytes, each.exact, each.ref)
            self.nbytes += written.share
        for column in state.columns:
            self._restore_column(column, count)
        self._claims.restore(state.tasks, count)

    def _restore_column(self, column: ColumnState, count: int) -> None:
        written, row = unpack(column.written, count), unpack(column.row, count)
        there = written >= 0
        brought, which = np.unique(written[there], return_inverse=True)
        refs = [self._written[number].ref for number in brought.tolist()]
        rows = np.fromiter(map(len, refs), np.int64, len(refs))
        within = (row >= 0).all() and (row[there] < rows[which]).all()
        if not within or any(column.name not in ref.columns for ref in refs):
            raise ValueError("a cell that no write brought")
        self.schema[column.name] = column.field
        self._lines.make(("from", column.name), np.int64, -1)
        self._lines.make(("row", column.name), np.int64, 0)
        self._lines["from", column.name][:] = written
        self._lines["row", column.name][:] = row
