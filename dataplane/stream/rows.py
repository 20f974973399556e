"""The rows of a stream: their columns, by page (`page`) and by append or extend (`column_batch`).

A row has a number, in the order of arrival, which is never reused.

Invariants: a column of a row stays until the row is gone or the column is replaced. No method loops over rows in
Python. Costs depend on the rows that exist, not on those that are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import ne
from typing import TypeAlias

import numpy as np

from dataplane.batch.concat import concat
from dataplane.batch.field import Field, merge_fields
from dataplane.batch.ref import BatchRef
from dataplane.errors import LimitExceeded, Misuse
from dataplane.stream.column_batch import ColumnBatch, ColumnBatches, Hold, There
from dataplane.stream.page import NONE, PAGE, PAGE_BITS, Flags, Index, Page

_RUNS = 32  # runs of one column batch; if there are more, rows are sorted by column batch first


#: Rows by page: the page, the rows in the page, and their positions among the given rows. No page comes twice.
Places: TypeAlias = list[tuple[Page, Index, Index]]


class StreamRows:
    """All existing rows of a stream, by page. `tasks`: number of tasks."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self.pages: dict[int, Page] = {}
        self.next = 0
        """The number of the next row."""
        self.count = 0
        self.schema = StreamSchema()
        self.batches = ColumnBatches()

    # writing

    def append(self, ref: BatchRef, spares: Sequence[bytes] = ()) -> int:
        """Append rows with these columns; the nodes `spares` have copies. Returns the number of the first. Raises
        SchemaMismatch for another type, LimitExceeded for too many columns."""
        names, need = self.schema.append(ref)
        first, number = self.next, self.batches.add(ref, -1, spares)
        if len(ref) == 1:
            self._append_one(names, need, number)
            return first
        for page, inside, taken in self._ranges(first, len(ref)):
            layer = page.layer(names)
            layer.batch[inside] = number
            layer.index[inside] = np.arange(taken.start, taken.stop)
            page.columns[inside] = need
            page.count = inside.stop
            page.left += inside.stop - inside.start
            page.changes += 1
        self.next += len(ref)
        self.count += len(ref)
        return first

    def _append_one(self, names: tuple[str, ...], need: np.uint64, number: int) -> None:
        """Append a column batch of one row by index: NumPy takes longer for a slice of length one."""
        page, inside = self._page(self.next // PAGE), self.next % PAGE
        page.need(inside + 1)
        layer = page.layer(names)
        layer.batch[inside] = number
        layer.index[inside] = 0
        page.columns[inside] = need
        page.count = inside + 1
        page.left += 1
        page.changes += 1
        self.next += 1
        self.count += 1

    def extend(
        self,
        rows: Index,
        ref: BatchRef,
        *,
        replace: bool,
        hold: Hold = -1,
        keep: bool = False,
        spares: Sequence[bytes] = (),
    ) -> tuple[Index, list[ColumnBatch]]:
        """Add columns to these existing rows; no row is named twice. Returns the numbers of the replaced column batches
        that stay until they are released (none without `keep`), and the column batches that are no longer needed.

        Raises SchemaMismatch for another type, LimitExceeded for too many columns and, unless `replace`, Misuse for an
        existing column.
        """
        self.schema.fits(ref)
        if not len(rows):
            return NONE, []
        pages = self.places(rows)
        if not replace:
            bits = self.schema.bits
            known = np.uint64(sum(1 << bits[name] for name in ref.columns if name in bits))
            for page, inside, chosen in pages:
                there = page.columns[inside] & known
                if there.any():
                    at = int(np.flatnonzero(there)[0])
                    name = next(n for n in ref.columns if n in bits and int(there[at]) >> bits[n] & 1)
                    raise Misuse(
                        f"row {int(rows[chosen][at])} has a column {name!r} already; say replace=True to replace it"
                    )
        need = self.schema.add(ref)
        number, names = self.batches.add(ref, hold, spares), tuple(sorted(ref.columns))
        over: list[Index] = []
        for page, inside, chosen in pages:
            layer = page.layer(names)
            over.append(layer.batch[inside])
            layer.batch[inside] = number
            layer.index[inside] = chosen
            page.columns[inside] |= need
            page.changes += 1
        if not replace:
            return NONE, []
        before = np.concatenate(over)
        kept = np.unique(before[before >= 0]) if keep else NONE
        for number in kept.tolist():
            self.batches[number].left += 1
        return kept, self.batches.release(before)

    def holds(self, rows: Index, column: str) -> Index:
        """For each row the delivery number under which its column was added: -1 for none, -2 if it lacks the column."""
        batch, index = np.full(len(rows), -1), np.zeros(len(rows), np.int64)
        for page, inside, chosen in self.places(rows):
            for names, layer in page.layers.items():
                if column in names:  # several layers may have the column; the latest column batch counts
                    later = layer.batch[inside] > batch[chosen]
                    batch[chosen[later]], index[chosen[later]] = layer.batch[inside[later]], layer.index[inside[later]]
        found = np.full(len(rows), -2)
        for number in np.unique(batch[batch >= 0]).tolist():
            hold, of = self.batches[number].hold, batch == number
            found[of] = hold if isinstance(hold, int) else hold[index[of]]
        return found

    def _ranges(self, first: int, count: int) -> Iterator[tuple[Page, slice, slice]]:
        """New rows by page: the page, the rows in the page, and the positions among the new rows."""
        start = first
        while start < first + count:
            number, inside = divmod(start, PAGE)
            stop = min(first + count, (number + 1) * PAGE)
            page = self._page(number)
            page.need(inside + stop - start)
            yield page, slice(inside, inside + stop - start), slice(start - first, stop - first)
            start = stop

    def _page(self, number: int) -> Page:
        """The page of this number; created if it does not exist, with its rows before `next` as gone."""
        page = self.pages.get(number)
        if page is None:
            page = self.pages[number] = Page(number * PAGE, self._tasks)
            page.count = min(max(0, self.next - page.first), PAGE)
            page.need(page.count)
            page.gone[: page.count] = True
        return page

    # queries

    def place(self, row: int) -> tuple[Page, int]:
        """The page of an existing row, and the row in the page."""
        return self.pages[row // PAGE], row % PAGE

    def places(self, rows: Index) -> Places:
        """Existing rows by page."""
        numbers, inside, order = rows >> PAGE_BITS, rows & (PAGE - 1), None
        if len(rows) and (numbers == numbers[0]).all():  # the usual case
            return [(self.pages[int(numbers[0])], inside, np.arange(len(rows)))]
        edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        if len(edges) and (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            numbers = numbers[order]
            edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        found: Places = []
        for start, stop in pairwise([0, *edges.tolist(), len(rows)]):
            if start < stop:
                chosen = np.arange(start, stop) if order is None else order[start:stop]
                found.append((self.pages[int(numbers[start])], inside[chosen], chosen))
        return found

    def there(self, rows: Index) -> Flags:
        flags = np.zeros(len(rows), np.bool_)
        numbers = rows >> PAGE_BITS
        if len(rows) and numbers[0] == numbers[-1] and (numbers == numbers[0]).all():  # the usual case
            page = self.pages.get(int(numbers[0]))
            inside = rows & (PAGE - 1)
            return flags if page is None else (inside < page.count) & ~page.gone.take(inside, mode="clip")
        for number in np.unique(numbers).tolist():
            page = self.pages.get(number)
            if page is not None:
                chosen = numbers == number
                inside = rows[chosen] & (PAGE - 1)
                flags[chosen] = (inside < page.count) & ~page.gone.take(inside, mode="clip")
        return flags

    def ref(self, rows: Index, columns: Sequence[str]) -> BatchRef:
        """A reference to these columns of these rows, in this order. The rows must have the columns."""
        found: dict[tuple[str, ...], tuple[Index, Index]] = {}
        for page, inside, chosen in self.places(rows):
            for names, layer in page.layers.items():
                if not any(name in names for name in columns):
                    continue
                batch, index = found.setdefault(names, (np.full(len(rows), -1), np.zeros(len(rows), np.int64)))
                batch[chosen], index[chosen] = layer.batch[inside], layer.index[inside]
        together: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for name in columns:
            together.setdefault(tuple(names for names in found if name in names), []).append(name)
        made: BatchRef | None = None
        for layers, chosen_names in together.items():
            batch, index = found[layers[0]]
            for names in layers[1:]:  # several layers have the column; the latest column batch counts
                later = found[names][0] > batch
                batch, index = np.where(later, found[names][0], batch), np.where(later, found[names][1], index)
            part = assembled(lambda number: self.batches[number].ref, batch, index, chosen_names)
            made = part if made is None else made.union(part)
        if made is None:
            raise Misuse("a delivery has at least one column")
        return made if made.columns == tuple(columns) else made.select(*columns)

    def all(self) -> Index:
        found = [page.first + np.flatnonzero(page.present) for page in self.pages.values()]
        return np.concatenate(found) if found else NONE

    def dead(self, there: There) -> Index:
        """The rows that have lost a column. `there` tells whether a shard exists."""
        lost = {number: batch for number, batch in self.batches.items() if not batch.lives(there)}
        found, numbers = [NONE], np.array(list(lost), np.int64)
        for page in self.pages.values() if lost else ():
            for layer in page.layers.values():
                at = np.flatnonzero(np.isin(layer.batch[: page.count], numbers) & page.present)
                for number, of in _by_number(layer.batch[at]).items():
                    found.append(page.first + at[of[lost[number].lost(there, layer.index[at[of]])]])
        return np.unique(np.concatenate(found))

    # a copy, and from one

    def copy(self) -> StreamRows:
        copied = StreamRows(self._tasks)
        copied.pages = {number: page.copy() for number, page in self.pages.items()}
        copied.next, copied.count = self.next, self.count
        copied.schema, copied.batches = self.schema.copy(), ColumnBatches(self.batches)
        return copied

    def restore(self, rows: Index) -> None:
        """Restore these rows without columns. Their numbers are below `next`, and may be those of rows that are
        gone."""
        for number in np.unique(rows // PAGE).tolist():
            self._page(number)
        for page, inside, _ in self.places(rows):
            page.gone[inside] = False
            page.left += len(inside)
            page.columns[inside] = 0
            for layer in page.layers.values():
                layer.batch[inside] = -1
        self.count += len(rows)

    # as a replica's state

    def layers(self, rows: Index) -> list[tuple[tuple[str, ...], Index, Index]]:
        """The column batches of these rows, by layer (columns that were written together).

        Each layer has its column names, the number of each row's column batch, -1 if it has none, and the row's
        position in the column batch.
        """
        found: dict[tuple[str, ...], tuple[Index, Index]] = {}
        for page, inside, chosen in self.places(rows):
            for names, layer in page.layers.items():
                batch, index = found.setdefault(names, (np.full(len(rows), -1), np.zeros(len(rows), np.int64)))
                batch[chosen] = layer.batch[inside]
                index[chosen] = np.where(layer.batch[inside] < 0, 0, layer.index[inside])
        return [(names, *found[names]) for names in sorted(found) if (found[names][0] >= 0).any()]

    def restore_columns(
        self,
        rows: Index,
        schema: Mapping[str, Field],
        batches: ColumnBatches,
        layers: Iterable[tuple[tuple[str, ...], Index, Index]],
        kept: Iterable[Index] = (),
    ) -> None:
        """Restore the columns of all rows from these layers. `schema`: in the order of the columns' bits. `kept`:
        replaced column batches that still have readers. Raises ValueError, LookupError or LimitExceeded if column
        batches and layers contradict each other."""
        self.schema.give_bits(schema)
        self.schema.fields, self.batches = dict(schema), batches
        for names, of, index in layers:
            need = self.schema.give_bits(names)
            numbers, which, counts = np.unique(of[of >= 0], return_inverse=True, return_counts=True)
            several, inside = [batches[number] for number in numbers.tolist()], index[of >= 0]
            sizes = np.array([len(batch.ref) for batch in several], np.int64)
            if (names and any(set(batch.ref.columns) != set(names) for batch in several)) or not (
                (inside >= 0) & (inside < sizes[which])
            ).all():
                raise ValueError("a row of no batch")
            for batch, count in zip(several, counts.tolist(), strict=True):
                batch.left += count
            for page, inside, chosen in self.places(rows):
                layer = page.layer(names)
                layer.batch[inside], layer.index[inside] = of[chosen], index[chosen]
                page.columns[inside] |= np.where(of[chosen] >= 0, need, np.uint64(0))
                page.changes += 1
        for number in (number for numbers in kept for number in numbers.tolist()):
            batches[number].left += 1
        if not all(batch.left for batch in batches.values()):
            raise ValueError("a batch that no row needs")

    # going

    def remove(self, rows: Index) -> list[ColumnBatch]:
        """Remove these rows. Returns the column batches that no row needs any more."""
        over: list[Index] = []
        for page, inside, _ in self.places(rows):
            page.gone[inside] = True
            page.left -= len(inside)
            over.extend(layer.batch[inside] for layer in page.layers.values())
            if not page.left and page.first + PAGE <= self.next:
                del self.pages[page.first // PAGE]
        self.count -= len(rows)
        return self.batches.release(np.concatenate(over)) if over else []

    def clear(self) -> list[ColumnBatch]:
        """Remove all rows. Returns all column batches."""
        batches = list(self.batches.values())
        self.batches.clear()
        self.pages.clear()
        self.count = 0
        return batches


def assembled(of: Callable[[int], BatchRef], batch: Index, index: Index, names: Sequence[str]) -> BatchRef:
    """A reference with these columns: its row i is row `index[i]` of the reference `of(batch[i])`."""
    order = None
    steps = batch[1:] - batch[:-1]
    edges = np.flatnonzero(steps) + 1
    if len(edges) > _RUNS and (steps < 0).any():
        order = np.argsort(batch, kind="stable")
        batch, index = batch[order], index[order]
        edges = np.flatnonzero(np.diff(batch)) + 1
    bounds = [0, *edges.tolist(), len(batch)]
    several = []
    for start, stop in pairwise(bounds):
        ref = of(int(batch[start]))
        ref = ref if ref.columns == tuple(names) else ref.select(*names)
        several.append(ref if stop - start == len(ref) == 1 else ref[index[start:stop]])
    together = concat(several)
    if order is None:
        return together
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return together[back]


def _by_number(numbers: Index) -> dict[int, Index]:
    """The positions of each number that is not negative."""
    order = np.argsort(numbers, kind="stable")
    order = order[np.searchsorted(numbers[order], 0) :]
    if not len(order):
        return {}
    found, starts = np.unique(numbers[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, starts[1:]), strict=True))


MAX_COLUMNS = 64


class StreamSchema:
    """All columns that were ever added to a stream: the type of each, and its bit in the masks of pages (`page`).

    Invariants: a column gets a bit when its first column batch arrives, and keeps it; a column that tasks only request
    has none.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Field] = {}
        self.bits: dict[str, int] = {}
        """The bit of each column, ascending."""
        self._appended: dict[tuple[str, ...], tuple[tuple[str, ...], np.uint64]] = {}
        """By the columns of an append: their sorted names, and their bits."""

    def mask(self, columns: Iterable[str]) -> np.uint64 | None:
        """The bits of these columns; None if one of them was never added."""
        mask = 0
        for name in columns:
            bit = self.bits.get(name)
            if bit is None:
                return None
            mask |= 1 << bit
        return np.uint64(mask)

    def give_bits(self, columns: Iterable[str]) -> np.uint64:
        """The bits of these columns, some of which may be new. Raises LimitExceeded for too many."""
        new = [name for name in columns if name not in self.bits]
        if len(self.bits) + len(new) > MAX_COLUMNS:
            raise LimitExceeded(
                f"a stream has at most {MAX_COLUMNS} columns, and {new[MAX_COLUMNS - len(self.bits)]!r} is one more",
                what="columns of a stream",
                asked=len(self.bits) + len(new),
                limit=MAX_COLUMNS,
            )
        for name in new:
            self.bits[name] = len(self.bits)
        return np.uint64(sum(1 << self.bits[name] for name in columns))

    def fits(self, ref: BatchRef) -> None:
        """Raises SchemaMismatch if a column of `ref` has another type in the stream."""
        for name, found in ref.schema.items():
            known = self.fields.get(name)
            if known is not None and known != found:
                merge_fields(name, [known, found])

    def add(self, ref: BatchRef) -> np.uint64:
        """Add the columns of `ref`, after `fits`. Returns their bits. Raises LimitExceeded for too many columns."""
        bits = self.give_bits(ref.columns)
        for name, found in ref.schema.items():
            known = self.fields.get(name)
            if known is None or known != found:
                self.fields[name] = found if known is None else merge_fields(name, [known, found])
        return bits

    def append(self, ref: BatchRef) -> tuple[tuple[str, ...], np.uint64]:
        """As `fits` and `add`, faster for columns that were appended before. Returns their sorted names, and their
        bits. Raises SchemaMismatch for columns of other types than before, LimitExceeded for too many columns."""
        columns = ref.columns
        known = self._appended.get(columns)
        if known is None or any(map(ne, map(self.fields.__getitem__, columns), ref.schema.values())):
            self.fits(ref)
            known = tuple(sorted(columns)), self.add(ref)
            if len(self._appended) >= MAX_COLUMNS:
                self._appended.clear()
            self._appended[columns] = known
        return known

    def copy(self) -> StreamSchema:
        copied = StreamSchema()
        copied.fields, copied.bits = dict(self.fields), dict(self.bits)
        return copied
