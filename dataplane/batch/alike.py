"""The layouts of many shards, taken apart and checked together, as many as have one outline (`batch.form`).

The rules are those of `layout.check`, which alone refuses: of each outline it sees the first layout, and every other
one whose numbers do not keep to the rules as they stand here, for all at once. So nothing is believed that it would
refuse. Where few have one outline it sees each: NumPy's calls take as long as it needs for four.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dataplane.batch import form
from dataplane.batch.field import most_items
from dataplane.batch.form import Form, Numbers, Outline
from dataplane.batch.layout import ALIGNMENT, Bytes, ShardLayout, buffer_sizes, check, check_contents

_MOST = 1 << 40
"""Rows up to which no size that is computed here passes 63 bits. Of more, `check` decides, which has no such bound."""


class Laid:
    """One layout that was checked: an outline, and its numbers."""

    def __init__(self, outline: Outline, numbers: Numbers) -> None:
        self.outline = outline
        self.numbers = numbers

    @cached_property
    def rows(self) -> int:
        """How many rows each column has."""
        return int(self.numbers[0])

    @cached_property
    def claimed(self) -> int:
        """The bytes of all buffers, those twice that two columns have."""
        return int(self.numbers[_rules(self.outline).buffers + 1].sum())

    def check_contents(self, memory: Bytes) -> None:
        """`layout.check_contents`, for all columns at once where each has one row. Raises as that does."""
        if self._one_row is not None and not len(memory) % 8:
            words = memory.data.cast("B").cast(
                "q"
            )  # Python's own numbers: NumPy's calls take longer than the few checks
            if all(
                words[begin] == 0 and 0 <= words[begin + 1] <= most and words[begin + 1] * unit == nbytes
                for begin, most, unit, nbytes in self._one_row
            ):
                return
        rules = _rules(self.outline)
        if rules.tables and (len(memory) % 8 or not rules.one_row(self.numbers, memory)):
            check_contents(self.layout, memory)

    @cached_property
    def _one_row(self) -> list[tuple[int, int, int, int]] | None:
        """See `_Rules.of_one_row`."""
        return _rules(self.outline).of_one_row(self.numbers)

    @cached_property
    def layout(self) -> ShardLayout:
        """The layout itself."""
        return ShardLayout.of(self.outline, self.numbers)


def laid(encoded: Sequence[bytes], sizes: Sequence[int]) -> list[Laid]:
    """These layouts of shards in extents of so many bytes. A few small ones are remembered: what is put or read again
    and again lies alike. Raises as `ShardLayout.decode` and `layout.check` do."""
    if len(encoded) > _FEW:
        return _together(encoded, sizes)
    return [one(each, size) for each, size in zip(encoded, sizes, strict=True)]


def one(encoded: bytes, size: int) -> Laid:
    """As `laid`, one layout."""
    return _one_small(encoded, size) if len(encoded) <= _SMALL else _one(encoded, size)


def _one(encoded: bytes, size: int) -> Laid:
    return _together([encoded], [size])[0]


_FEW, _SMALL = 16, 1024  # layouts; bytes
_MANY = 4  # layouts of one outline from which on it is faster to check all at once
_one_small = lru_cache(maxsize=1024)(_one)


def _together(encoded: Sequence[bytes], sizes: Sequence[int]) -> list[Laid]:
    found = [Laid(*form.split(each)) for each in encoded]
    by_outline: defaultdict[Outline, list[int]] = defaultdict(list)
    for at, each in enumerate(found):
        by_outline[each.outline].append(at)
    for outline, places in by_outline.items():
        _check(outline, [found[at] for at in places], [sizes[at] for at in places])
    return found


def _check(outline: Outline, alike: Sequence[Laid], sizes: Sequence[int]) -> None:
    if len(alike) < _MANY:
        for each, size in zip(alike, sizes, strict=True):
            check(each.layout, size)
        return
    if not outline.sound:
        check(alike[0].layout, sizes[0])
        outline.sound = True
    kept = _rules(outline).kept(np.array([each.numbers for each in alike]), np.array(sizes, np.int64))
    for at in np.flatnonzero(~kept).tolist():
        check(alike[at].layout, sizes[at])


class _Rules:
    """What the numbers of a sound outline have to keep to. Lists are indexes of numbers, a column or buffer each."""

    def __init__(self, outline: Outline) -> None:
        self._rows: list[int] = []
        self._indexed: list[bool] = []
        self._most: list[int] = []
        self._inner: list[tuple[int, int]] = []  # of each child: its rows, and what its parent stores
        self._sizes: list[tuple[int, int, int, int, bool]] = []  # a buffer: size by stored row, by row, plus; unit; any
        self._offsets: list[int] = []
        self._of: list[int] = []  # of each buffer: its column's rows
        self._tables: list[tuple[int, int, int]] = []  # of each column that has offsets: its number, unit, most items
        self._flags: list[tuple[int, int]] = []  # of each key of a struct: where its flags are, and its rows
        self._plain = True  # no shapes, and no index
        for (_, each), start in zip(outline.columns, outline.starts, strict=True):
            self._add(each, start)
        self._top = np.array(outline.starts)
        self._columns, self.buffers = np.array(self._rows), np.array(self._offsets, np.int64)
        self._owners = np.array(self._of, np.int64)
        self._children, self._parents = np.array(self._inner, np.int64).reshape(-1, 2).T
        self._starts, self._units, self._items = np.array(self._tables, np.int64).reshape(-1, 3).T
        self._where, self._held = np.array(self._flags, np.int64).reshape(-1, 2).T
        self._bounds, self._index = np.array(self._most), np.array(self._indexed)
        #: Whether any bytes say how to read others.
        self.tables = bool(self._tables or self._flags or not self._plain)
        self._stored, self._row, self._plus, self._unit, self._any = np.array(self._sizes, np.int64).reshape(-1, 5).T

    def _add(self, each: Form, start: int) -> int:
        """Take in the column whose numbers begin at `start`; where they end."""
        own = each.field
        self._rows.append(start)
        self._indexed.append(each.indexed)
        self._most.append(min(_MOST, most_items(own)) if own.kind == "dense" else _MOST)
        sizes = [buffer_sizes(own, *counts, each.indexed) for counts in ((0, 0), (0, 1), (1, 0))]
        for at, (plus, by_stored, by_row) in enumerate(zip(*sizes, strict=True)):
            self._offsets.append(start + 2 + 2 * at)
            self._of.append(start)
            if plus is None or by_stored is None or by_row is None:
                unit = own.item_nbytes
                self._sizes.append((0, 0, 0, max(unit, 1), unit > 0))
            else:
                self._sizes.append((by_stored - plus, by_row - plus, plus, 1, False))
        end = start + 2 + 2 * each.buffers
        self._plain &= not each.indexed and own.varying < 2
        if own.kind not in ("dense", "struct"):
            self._tables.append((start, own.item_nbytes, most_items(own)))
        for at, child in enumerate(each.children):
            self._inner.append((end, start + 1))
            self._flags.append((start + 2 + 2 * at, end))
            end = self._add(child, end)
        return end

    def one_row(self, numbers: Numbers, memory: Bytes) -> bool:
        """Whether each column stores one row, and what the bytes say of it is true."""
        if not self._plain or not (numbers[self._columns + 1] == 1).all():
            return False
        words = memory.view(np.int64)
        begin = numbers[self._starts + 2] >> 3
        last = words[begin + 1]
        fit = (words[begin] == 0) & (last >= 0) & (last <= self._items)
        fit &= last * self._units == numbers[self._starts + 5]
        flags = memory[numbers[self._where]]
        return bool(fit.all() and (flags == 1).all() and (numbers[self._held] == 1).all())

    def of_one_row(self, numbers: Numbers) -> list[tuple[int, int, int, int]] | None:
        """Of each column that has offsets where they begin, in words, how many items it has at most, the bytes of each
        and of all; None where some column has not one row, or there are flags, shapes or an index."""
        if not self._plain or self._flags or not (numbers[self._columns + 1] == 1).all():
            return None
        begin, nbytes = numbers[self._starts + 2] >> 3, numbers[self._starts + 5]
        return list(zip(begin.tolist(), self._items.tolist(), self._units.tolist(), nbytes.tolist(), strict=True))

    def kept(self, table: Numbers, sizes: Numbers) -> npt.NDArray[np.bool_]:
        """Which rows of the table, the numbers of a layout each, keep to them in extents of these bytes."""
        rows, stored = table[:, self._columns], table[:, self._columns + 1]
        fit = (rows >= 0) & (rows <= _MOST) & (stored >= 0) & (stored <= self._bounds)
        fit &= (stored == rows) | self._index
        kept: npt.NDArray[np.bool_] = np.logical_and.reduce(fit, axis=1)
        kept &= (table[:, self._top] == table[:, self._top[:1]]).all(axis=1)
        kept &= (table[:, self._children] <= table[:, self._parents]).all(axis=1)
        offset, size = table[:, self.buffers], table[:, self.buffers + 1]
        lie = (offset >= 0) & (size >= 0) & (offset % ALIGNMENT == 0) & (offset <= sizes[:, None] - size)
        needed = self._stored * table[:, self._owners + 1] + self._row * table[:, self._owners] + self._plus
        lie &= np.where(self._any, size % self._unit == 0, size == needed)
        kept &= lie.all(axis=1)
        return kept


def _rules(outline: Outline) -> _Rules:
    return _remembered(outline) if outline.small else _Rules(outline)


_remembered = lru_cache(maxsize=256)(_Rules)
