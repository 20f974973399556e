"""The cells of a table. A cell has the write that contains its value, and the row of the value in that write; a later
write to the cell replaces both.

Each replaced or cleared cell is returned, so that it can be freed separately: a job may keep some rows for long, and
the other rows of the same write should not stay in memory because of them.

Invariants: a cell stays until its line is cleared or a later write replaces it; then it is returned once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch.field import Field, merge_fields
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import LimitExceeded
from dataplane.stream.packing import pack, unpack
from dataplane.stream.page import Flags, Index
from dataplane.stream.rows import assembled
from dataplane.table.replica_state import ColumnState, WrittenState
from dataplane.table.write_effects import UnneededCells, WriteEffect

MAX_COLUMNS = 1024
"""The most columns of a table."""


class TableCells:
    """The cells of a table whose rows are in `lines`."""

    def __init__(self, lines: ColumnArrays) -> None:
        self.schema: dict[str, Field] = {}
        self._counts: dict[str, int] = {}  # by column, the number of its cells
        self.writes: dict[int, WriteEffect] = {}
        """By number: the writes of which some cells are still in the table."""
        self.next_write = 0
        self.nbytes = 0
        """The approximate bytes of all cells: each cell counts an equal share of its write."""
        self._lines = lines

    # writing

    def fields(self, ref: BatchRef, at: Index) -> dict[str, Field]:
        """The types of the columns of `ref` after they are written to these lines. Raises SchemaMismatch,
        LimitExceeded."""
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
                others = self._counts[name] - np.count_nonzero(self._lines["from", name][at] >= 0)
                field = merge_fields(name, [known, field]) if others else field
            found[name] = field
        return found

    def put(self, written: WriteEffect, fields: Mapping[str, Field], at: Index) -> list[UnneededCells]:
        """Write to these lines columns of these types. Returns the cells that are no longer needed."""
        self.schema.update(fields)
        number = self.next_write
        before = []
        for name in written.ref.columns:
            if ("from", name) not in self._lines:
                self._make(name)
            came, row = self._of(name)
            before.append((name, came[at], row[at]))
            self._counts[name] += int(np.count_nonzero(came[at] < 0))
            came[at], row[at] = number, np.arange(len(at))
        if len(written.ref):
            self.next_write += 1
            self.writes[number] = written
            self.nbytes += written.nbytes
        return self._over(before)

    def clear(self, at: Index) -> list[UnneededCells]:
        """Clear these lines. Returns the cells that are no longer needed."""
        before, empty = [], []
        for name in self.schema:
            came, row = self._of(name)
            before.append((name, came[at], row[at]))
            self._counts[name] -= int(np.count_nonzero(came[at] >= 0))
            came[at] = -1
            if not self._counts[name]:
                empty.append(name)
        for name in empty:
            del self.schema[name], self._counts[name]
            self._lines.drop(("from", name))
            self._lines.drop(("row", name))
        return self._over(before)

    def _make(self, name: str) -> None:
        self._counts[name] = 0
        self._lines.make(("from", name), np.int64, -1)
        self._lines.make(("row", name), np.int64, 0)

    def _of(self, name: str) -> tuple[Index, Index]:
        """For each line: the write with its value (-1: none), and the row of the value in that write."""
        return self._lines["from", name], self._lines["row", name]

    def _over(self, before: Iterable[tuple[str, Index, Index]]) -> list[UnneededCells]:
        """Release cells. `before`: for each column the writes, and the rows of those (-1: none). Returns the cells
        that are no longer needed, by write."""
        found = []
        for names, written, row in _alike(before):
            order = np.argsort(written, kind="stable")
            order = order[np.searchsorted(written[order], 0) :]
            if not len(order):
                continue
            numbers, starts = np.unique(written[order], return_index=True)
            for number, rows in zip(numbers.tolist(), np.split(row[order], starts[1:]), strict=True):
                brought = self.writes[number]
                self.nbytes -= brought.share
                brought.left -= len(rows) * len(names)
                self.nbytes += brought.share
                if not brought.left:
                    del self.writes[number]
                found.append(UnneededCells(brought, names, rows, done=not brought.left))
        return found

    # reading

    def have(self, at: Index, columns: Sequence[str]) -> Flags:
        """Flags [lines, columns] of the columns that each line has."""
        flags = np.zeros((len(at), len(columns)), np.bool_)
        for number, name in enumerate(columns):
            if name in self.schema:
                flags[:, number] = self._lines["from", name][at] >= 0
        return flags

    def having(self, at: Index, columns: Sequence[str]) -> Index:
        """The lines among these that have all of these columns."""
        for name in columns:
            at = at[self._lines["from", name][at] >= 0] if name in self.schema else at[:0]
        return at

    def read(self, at: Index, columns: Sequence[str]) -> BatchRef:
        """A reference to these columns of these lines, in this order. The lines must have the columns."""
        if not len(at):
            return self.empty(columns)
        cells = [(name, came[at], row[at]) for name in columns for came, row in [self._of(name)]]
        made: BatchRef | None = None
        for together, written, row in _alike(cells):
            part = assembled(lambda number: self.writes[number].ref, written, row, together)
            made = part if made is None else made.union(part)
        assert made is not None, "there is a column"
        return made if made.columns == tuple(columns) else made.select(*columns)

    def empty(self, columns: Iterable[str]) -> BatchRef:
        return ref_to(bytes(8), 0, [(name, self.schema[name], 0, 0, 0) for name in columns])

    # its state

    def columns_state(self, at: Index) -> list[ColumnState]:
        return [
            ColumnState(name, field, pack(came[at]), pack(np.where(came[at] < 0, 0, row[at])))
            for name, field in self.schema.items()
            for came, row in [self._of(name)]
        ]

    def writes_state(self) -> list[WrittenState]:
        """The writes of which some cells are still in the table."""
        return [WrittenState(number, of.ref.encode(), of.left, of.exact) for number, of in self.writes.items()]

    def restore(self, writes: Iterable[WrittenState], columns: Iterable[ColumnState], count: int) -> None:
        """Restore the cells of `count` lines. Raises ValueError for an impossible state."""
        for each in writes:
            ref = BatchRef.decode(each.ref)
            self.writes[each.number] = written = WriteEffect(ref, each.left, ref.stored_nbytes, each.exact)
            self.nbytes += written.share
        for column in columns:
            came, row = unpack(column.written, count), unpack(column.row, count)
            there = came >= 0
            brought, which = np.unique(came[there], return_inverse=True)
            refs = [self.writes[number].ref for number in brought.tolist()]
            rows = np.fromiter(map(len, refs), np.int64, len(refs))
            within = (row >= 0).all() and (row[there] < rows[which]).all()
            if not within or any(column.name not in ref.columns for ref in refs):
                raise ValueError("a cell that no write brought")
            self.schema[column.name] = column.field
            self._make(column.name)
            self._counts[column.name] = int(np.count_nonzero(there))
            self._of(column.name)[0][:], self._of(column.name)[1][:] = came, row


def _alike(cells: Iterable[tuple[str, Index, Index]]) -> list[tuple[tuple[str, ...], Index, Index]]:
    """Group columns that are in the same rows of the same writes."""
    together: dict[tuple[bytes, bytes], tuple[list[str], Index, Index]] = {}
    for name, written, row in cells:
        key = written.tobytes(), np.where(written >= 0, row, 0).tobytes()
        together.setdefault(key, ([], written, row))[0].append(name)
    return [(tuple(names), written, row) for names, written, row in together.values()]


_LEAST = 64


class ColumnArrays:
    """Arrays of equal length, with one value for each of `count` lines, which grow and shrink together.

    Invariants: a line whose value was not set has the default value of the array. Lines keep their order when others
    are removed. The amortised cost of adding or removing a line does not depend on the number of lines.
    """

    def __init__(self) -> None:
        self.count = 0
        self._room = _LEAST
        self._arrays: dict[Hashable, tuple[npt.NDArray[Any], Any]] = {}

    def make(self, name: Hashable, dtype: type, fill: Any) -> None:
        """Create an array with the value `fill` in every line."""
        self._arrays[name] = np.full(self._room, fill, dtype), fill

    def drop(self, name: Hashable) -> None:
        self._arrays.pop(name, None)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._arrays

    def __getitem__(self, name: Hashable) -> npt.NDArray[Any]:
        """The values of all lines: a mutable view, which is invalid after lines are added or removed."""
        return self._arrays[name][0][: self.count]

    def add(self, lines: int) -> None:
        need = self.count + lines
        if need > self._room:
            room = max(need, 2 * self._room)
            for name, (array, fill) in self._arrays.items():
                larger = np.full(room, fill, array.dtype)
                larger[: self.count] = array[: self.count]
                self._arrays[name] = larger, fill
            self._room = room
        self.count = need

    def keep(self, which: npt.NDArray[np.bool_]) -> None:
        """Keep the flagged lines, and remove all others."""
        left = int(np.count_nonzero(which))
        room = max(_LEAST, left + left // 2)
        for name, (array, fill) in self._arrays.items():
            fewer = np.full(room, fill, array.dtype)
            fewer[:left] = array[: self.count][which]
            self._arrays[name] = fewer, fill
        self.count, self._room = left, room
