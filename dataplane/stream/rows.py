"""The rows of a stream: which columns each has and where they are, in pages of NumPy arrays.

A row has a number, given in the order of arrival and never given again. Rows lie in pages of `PAGE` by their number,
whatever the sizes of the appends that brought them: an agent loop appends a row at a time, and a block for each would
cost more than the row. A page goes when all its rows are gone.

Columns come in patches: one append or extend, a reference whose rows are rows of the stream. A page knows, for each
set of columns that came together (a layer), of which patch and which of its rows each row's columns are.

What always holds: a row's columns, once there, stay until the row is gone or they are replaced; a patch is handed
out to be freed once, when no row needs it any more. Nothing here loops over rows in Python, and nothing costs more
because the stream is long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.batch.schema import merge_fields
from dataplane.errors import LimitExceeded, Misuse

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

PAGE = 4096
MAX_COLUMNS = 64
_RUNS = 32  # stretches of one patch from which on rows are put in order afterwards


@dataclass(slots=True, eq=False)
class Patch:
    """What one append or extend brought. `left` rows of the stream still need it."""

    ref: BatchRef
    left: int


@dataclass(slots=True, eq=False)
class Layer:
    """Of each row of a page: which patch its columns of this layer are in, and in which row. -1: it has none."""

    patch: Index = field(default_factory=lambda: np.full(PAGE, -1, np.int64))
    index: Index = field(default_factory=lambda: np.zeros(PAGE, np.int64))


class Page:
    """`PAGE` rows by number from `first`, of which `count` were appended and `left` are not gone."""

    __slots__ = ("changes", "columns", "count", "first", "gone", "layers", "left")

    def __init__(self, first: int) -> None:
        self.first = first
        self.count = 0
        self.left = 0
        self.changes = 0
        """Goes up whenever a row may have become ready."""
        self.columns = np.zeros(PAGE, np.uint64)
        """Of each row, a bit a column that it has."""
        self.gone = np.zeros(PAGE, np.bool_)
        self.layers: dict[tuple[str, ...], Layer] = {}


class Rows:
    """All rows of a stream that are not gone, by page."""

    def __init__(self) -> None:
        self.pages: dict[int, Page] = {}
        self.next = 0
        """The number of the next row."""
        self.count = 0
        self.schema: dict[str, Field] = {}
        self._bits: dict[str, int] = {}
        self._patches: dict[int, Patch] = {}
        self._next_patch = 0

    # columns

    def need(self, columns: Iterable[str]) -> np.uint64:
        """The bits of these columns, known or still to come. Raises LimitExceeded for too many."""
        mask = 0
        for name in columns:
            if name not in self._bits:
                if len(self._bits) >= MAX_COLUMNS:
                    raise LimitExceeded(
                        f"a stream has at most {MAX_COLUMNS} columns, those that somebody waits for included;"
                        f" {name!r} is one more",
                        what="columns of a stream",
                        asked=MAX_COLUMNS + 1,
                        limit=MAX_COLUMNS,
                    )
                self._bits[name] = len(self._bits)
            mask |= 1 << self._bits[name]
        return np.uint64(mask)

    def fits(self, ref: BatchRef) -> None:
        """Raises SchemaMismatch where the columns of `ref` can not be those of this stream."""
        for name, found in ref.schema.items():
            if name in self.schema:
                merge_fields(name, [self.schema[name], found])

    def _learn(self, ref: BatchRef) -> None:
        for name, found in ref.schema.items():
            known = self.schema.get(name)
            if known is None or known != found:
                self.schema[name] = found if known is None else merge_fields(name, [known, found])

    # writing

    def append(self, ref: BatchRef) -> int:
        """New rows with these columns; the number of the first. Raises SchemaMismatch, LimitExceeded."""
        self.fits(ref)
        need = self.need(ref.columns)
        self._learn(ref)
        first, names = self.next, ref.columns
        number = self._patch(ref)
        for page, inside, taken in self._stretches(first, len(ref)):
            layer = page.layers.setdefault(names, Layer())
            layer.patch[inside] = number
            layer.index[inside] = np.arange(taken.start, taken.stop)
            page.columns[inside] = need
            page.count = inside.stop
            page.left += inside.stop - inside.start
            page.changes += 1
        self.next += len(ref)
        self.count += len(ref)
        return first

    def extend(self, rows: Index, ref: BatchRef, *, replace: bool) -> list[Patch]:
        """More columns for these rows, each once and none gone; patches that nothing needs any more.

        Raises SchemaMismatch, LimitExceeded and, where a row has such a column and `replace` is not said, Misuse.
        """
        self.fits(ref)
        need = self.need(ref.columns)
        if not len(rows):
            return []
        pages = list(self.by_page(rows))
        if not replace:
            for page, inside, chosen in pages:
                there = page.columns[inside] & need
                if there.any():
                    at = int(np.flatnonzero(there)[0])
                    name = next(name for name in ref.columns if int(there[at]) >> self._bits[name] & 1)
                    raise Misuse(
                        f"row {int(rows[chosen][at])} has a column {name!r} already; say replace=True to replace it"
                    )
        self._learn(ref)
        number = self._patch(ref)
        over: list[Index] = []
        for page, inside, chosen in pages:
            layer = page.layers.setdefault(ref.columns, Layer())
            over.append(layer.patch[inside])
            layer.patch[inside] = number
            layer.index[inside] = chosen
            page.columns[inside] |= need
            page.changes += 1
        return self._unneeded(np.concatenate(over)) if replace else []

    def _patch(self, ref: BatchRef) -> int:
        number = self._next_patch
        self._next_patch += 1
        self._patches[number] = Patch(ref, len(ref))
        return number

    def _stretches(self, first: int, count: int) -> Iterator[tuple[Page, slice, slice]]:
        """New rows by page: the page, which of its rows, and which of these rows they are."""
        start = first
        while start < first + count:
            number, inside = divmod(start, PAGE)
            stop = min(first + count, (number + 1) * PAGE)
            if number not in self.pages:
                self.pages[number] = Page(number * PAGE)
            yield self.pages[number], slice(inside, inside + stop - start), slice(start - first, stop - first)
            start = stop

    # finding

    def by_page(self, rows: Index) -> Iterator[tuple[Page, Index, Index]]:
        """Rows, none of them gone, by page: the page, which of its rows, and which of these rows they are."""
        numbers, order = rows // PAGE, None
        edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        if len(edges) and (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            numbers = numbers[order]
            edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        for start, stop in pairwise([0, *edges.tolist(), len(rows)]):
            if start < stop:
                chosen = np.arange(start, stop) if order is None else order[start:stop]
                yield self.pages[int(numbers[start])], rows[chosen] % PAGE, chosen

    def there(self, rows: Index) -> Flags:
        """Which of these rows were appended and are not gone."""
        flags = np.zeros(len(rows), np.bool_)
        numbers = rows // PAGE
        for number in np.unique(numbers).tolist():
            page = self.pages.get(number)
            if page is not None:
                chosen = numbers == number
                inside = rows[chosen] % PAGE
                flags[chosen] = (inside < page.count) & ~page.gone[inside]
        return flags

    def ref(self, rows: Index, columns: Sequence[str]) -> BatchRef:
        """These rows, which have these columns, in this order."""
        found: dict[tuple[str, ...], tuple[Index, Index]] = {}
        for page, inside, chosen in self.by_page(rows):
            for names, layer in page.layers.items():
                if not any(name in names for name in columns):
                    continue
                patch, index = found.setdefault(names, (np.full(len(rows), -1), np.zeros(len(rows), np.int64)))
                patch[chosen], index[chosen] = layer.patch[inside], layer.index[inside]
        together: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for name in columns:
            together.setdefault(tuple(names for names in found if name in names), []).append(name)
        made: BatchRef | None = None
        for layers, chosen_names in together.items():
            patch, index = found[layers[0]]
            for names in layers[1:]:  # the column came in several ways; the latest counts
                later = found[names][0] > patch
                patch, index = np.where(later, found[names][0], patch), np.where(later, found[names][1], index)
            part = self._assembled(patch, index, chosen_names)
            made = part if made is None else made.union(part)
        if made is None:
            raise Misuse("a delivery has at least one column")
        return made if made.columns == tuple(columns) else made.select(*columns)

    def _assembled(self, patch: Index, index: Index, names: Sequence[str]) -> BatchRef:
        """Rows `index` of the patches `patch`, in this order, of these columns."""
        order = None
        edges = np.flatnonzero(np.diff(patch)) + 1
        if len(edges) > _RUNS:
            order = np.argsort(patch, kind="stable")
            patch, index = patch[order], index[order]
            edges = np.flatnonzero(np.diff(patch)) + 1
        bounds = [0, *edges.tolist(), len(patch)]
        several = []
        for start, stop in pairwise(bounds):
            ref = self._patches[int(patch[start])].ref
            several.append((ref if ref.columns == tuple(names) else ref.select(*names))[index[start:stop]])
        together = concat(several)
        if order is None:
            return together
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return together[back]

    def have(self, rows: Index, column: str) -> bool:
        """Whether each of these rows has the column."""
        need = self.need([column])
        return all(bool((page.columns[inside] & need).all()) for page, inside, _ in self.by_page(rows))

    # going

    def remove(self, rows: Index) -> list[Patch]:
        """These rows are gone; the patches that no row needs any more."""
        over: list[Index] = []
        for page, inside, _ in list(self.by_page(rows)):
            page.gone[inside] = True
            page.left -= len(inside)
            over.extend(layer.patch[inside] for layer in page.layers.values())
            if not page.left and page.count == PAGE:
                del self.pages[page.first // PAGE]
        self.count -= len(rows)
        return self._unneeded(np.concatenate(over)) if over else []

    def _unneeded(self, patches: Index) -> list[Patch]:
        """One row less for each of these patches (-1: none); those that are done."""
        done = []
        numbers, counts = np.unique(patches, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                self._patches[number].left -= count
                if not self._patches[number].left:
                    done.append(self._patches.pop(number))
        return done

    def clear(self) -> list[Patch]:
        """All rows are gone; all patches."""
        patches = list(self._patches.values())
        self._patches.clear()
        self.pages.clear()
        self.count = 0
        return patches
