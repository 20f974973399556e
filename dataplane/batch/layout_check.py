"""Checks layouts that come from other processes.

The rules of an outline are created once (`_rules`), and everything except the numbers is checked then. The numbers are
checked for one layout, or for many at once: the same expressions accept an integer, or an array of one for each layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch.field import MAX_COLUMNS, MAX_DEPTH, Field, check_field, most_items, refuse
from dataplane.batch.layout import (
    ALIGNMENT,
    Bytes,
    ColumnHeader,
    Numbers,
    Outline,
    ShardLayout,
    buffer_sizes,
    check_contents,
    decode,
)
from dataplane.errors import Corrupt

_MOST_ROWS = 1 << 48
"""The most rows of a column: every size that is computed here then fits into 63 bits."""

_REMEMBERED = 1024  # the most bytes of an encoded layout whose check is cached: small layouts recur
_FEW = 16  # the most layouts that are looked up in the cache one by one
_MANY = 8  # the least layouts of one outline for which one check of all is faster


class _Buffer(NamedTuple):
    """The position `at` of a buffer's numbers, and the rule for its size. With a `unit`, the size is any multiple of
    it; else it is `by_stored` bytes for each stored row, `by_row` for each row, and `more` bytes."""

    at: int
    by_stored: int
    by_row: int
    more: int
    unit: int


class _Rule(NamedTuple):
    """A column: its path, the position of its first number, the most stored rows, and the position of its parent's
    first number (-1: none)."""

    name: str
    field: Field
    start: int
    most: int
    parent: int
    indexed: bool
    buffers: tuple[_Buffer, ...]

    def fits(self, numbers: Any, nbytes: Any, first: int) -> Any:
        """Whether the numbers of one layout, or of each layout, are valid for this column in an extent of `nbytes`.
        `first`: the position of the first number of the shard's first column."""
        rows, stored = numbers[self.start], numbers[self.start + 1]
        fit = (rows >= 0) & (rows <= _MOST_ROWS) & (stored >= 0) & (stored <= self.most)
        if not self.indexed:
            fit &= stored == rows
        fit &= rows == numbers[first] if self.parent < 0 else rows <= numbers[self.parent + 1]
        for at, by_stored, by_row, more, unit in self.buffers:
            offset, size = numbers[at], numbers[at + 1]
            fit &= (offset >= 0) & (size >= 0) & (offset % ALIGNMENT == 0) & (offset <= nbytes - size)
            fit &= size % unit == 0 if unit else size == by_stored * stored + by_row * rows + more
        return fit


class _Rules:
    """The constraints on the numbers of an outline. Raises Corrupt if no numbers can satisfy them."""

    def __init__(self, outline: Outline) -> None:
        names = [name for name, _ in outline.columns]
        if not names or len(set(names)) != len(names) or not all(names):
            raise Corrupt(f"a shard with the columns {names[:20]}: names must be given, and differ")
        self._columns: list[_Rule] = []
        for (name, header), start in zip(outline.columns, outline.starts, strict=True):
            check_field(name, header.field)
            self._add(name, header, start, -1, 0)
        self._first = outline.starts[0]
        #: The positions of the numbers that are sizes of buffers.
        self.sizes = [buffer.at + 1 for rule in self._columns for buffer in rule.buffers]
        #: Whether a column has tables.
        self.tables = any(rule.field.kind != "dense" or rule.indexed for rule in self._columns)
        self._plain = not any(rule.indexed or rule.field.varying > 1 for rule in self._columns)

    def _add(self, name: str, header: ColumnHeader, start: int, parent: int, depth: int) -> int:
        """Add the column whose numbers begin at the position `start`. Returns the position after its last number."""
        field = header.field
        if depth > MAX_DEPTH or len(self._columns) >= MAX_COLUMNS:
            raise refuse(name, f"more than {MAX_COLUMNS} columns or {MAX_DEPTH} structs in each other")
        sizes = [buffer_sizes(field, *counts, header.indexed) for counts in ((0, 0), (0, 1), (1, 0))]
        if len(sizes[0]) != header.buffers:
            raise refuse(name, f"{header.buffers} buffers, {field.kind} has {len(sizes[0])}")
        if tuple([child.field for child in header.children]) != tuple([child for _, child in field.children]):
            raise refuse(name, f"its children are not those of {field!r}")
        buffers = []
        for at, (more, by_stored, by_row) in enumerate(zip(*sizes, strict=True)):
            place = start + 2 + 2 * at
            if more is None or by_stored is None or by_row is None:
                buffers.append(_Buffer(place, 0, 0, 0, field.item_nbytes))
            else:
                buffers.append(_Buffer(place, by_stored - more, by_row - more, more, 0))
        most = min(_MOST_ROWS, most_items(field)) if field.kind == "dense" else _MOST_ROWS
        self._columns.append(_Rule(name, field, start, most, parent, header.indexed, tuple(buffers)))
        end = start + 2 + 2 * header.buffers
        for (key, _), child in zip(field.children, header.children, strict=True):
            if child.indexed and child.field.kind != "object":
                raise refuse(name, f"child {key!r} has an index")
            end = self._add(f"{name}.{key}", child, end, start, depth + 1)
        return end

    def check(self, numbers: Sequence[int], nbytes: int) -> None:
        """Raises Corrupt if the numbers are invalid for a shard in an extent of `nbytes`."""
        for rule in self._columns:
            if not rule.fits(numbers, nbytes, self._first):
                rows, stored = numbers[rule.start : rule.start + 2]
                places = [tuple(numbers[buffer.at : buffer.at + 2]) for buffer in rule.buffers[:4]]
                where = f"{rows} rows, {stored} of them stored, in buffers at {places}"
                raise refuse(rule.name, f"{where} are not {rule.field!r} in an extent of {nbytes} bytes")

    def fit(self, table: Numbers, sizes: Numbers) -> npt.NDArray[np.bool_]:
        """Whether `check` would accept each row of the table (the numbers of a layout), in extents of these sizes."""
        numbers = np.ascontiguousarray(table.T)
        fit: npt.NDArray[np.bool_] = np.ones(len(table), np.bool_)
        for rule in self._columns:
            fit &= rule.fits(numbers, sizes, self._first)
        return fit

    def of_one_row(self, numbers: Sequence[int]) -> tuple[list[tuple[int, int, int, int]], list[int]] | None:
        """For each column with offsets: their start in words of 8 bytes, the most items, and the bytes of one item and
        of all. Then the start of each presence flag. None if a column has not one row, or has shapes or an index."""
        if not self._plain or any(numbers[rule.start + 1] != 1 for rule in self._columns):
            return None
        offsets: list[tuple[int, int, int, int]] = []
        flags: list[int] = []
        for _, field, start, *_ in self._columns:
            if field.kind == "struct":
                flags += numbers[start + 2 : start + 2 + 2 * len(field.children) : 2]
            elif field.kind != "dense":
                offsets.append((numbers[start + 2] >> 3, most_items(field), field.item_nbytes, numbers[start + 5]))
        return offsets, flags


class CheckedLayout:
    """A layout that was checked: an outline, and its numbers."""

    def __init__(self, outline: Outline, numbers: Numbers) -> None:
        self.outline = outline
        self.numbers = numbers

    @cached_property
    def rows(self) -> int:
        return int(self.numbers[0])

    @cached_property
    def claimed(self) -> int:
        """The bytes of all buffers; a buffer of two columns counts twice."""
        return int(self.numbers[_rules(self.outline).sizes].sum())

    @cached_property
    def layout(self) -> ShardLayout:
        return ShardLayout.of(self.outline, self.numbers)

    def check_contents(self, memory: Bytes) -> None:
        """Check the tables of all columns in the extent's bytes, without copies of them for a shard of one row. Raises
        Corrupt."""
        if _rules(self.outline).tables and not self._holds_one_row(memory):
            check_contents(self.layout, memory)

    def _holds_one_row(self, memory: Bytes) -> bool:
        """Whether each column stores one row, and all tables are valid."""
        if self._one_row is None or len(memory) % 8:
            return False
        offsets, flags = self._one_row
        data = memory.data.cast("B")
        words = data.cast("q")  # Python's own numbers: NumPy's calls take longer than the few checks
        return all(data[at] == 1 for at in flags) and all(
            words[begin] == 0 and 0 <= words[begin + 1] <= most and words[begin + 1] * unit == nbytes
            for begin, most, unit, nbytes in offsets
        )

    @cached_property
    def _one_row(self) -> tuple[list[tuple[int, int, int, int]], list[int]] | None:
        """See `_Rules.of_one_row`."""
        return _rules(self.outline).of_one_row(self.numbers.tolist())


def check_layout(encoded: bytes, size: int) -> CheckedLayout:
    """Check the encoded layout of a shard in an extent of `size` bytes. Raises ProtocolMismatch if `encoded` is no
    layout, Corrupt if the layout is invalid."""
    return _check_small(encoded, size) if len(encoded) <= _REMEMBERED else _check(encoded, size)


def check_layouts(encoded: Sequence[bytes], sizes: Sequence[int]) -> list[CheckedLayout]:
    """Check several layouts, of shards in extents of these sizes. Raises as `check_layout`."""
    if len(encoded) <= _FEW:
        return [check_layout(each, size) for each, size in zip(encoded, sizes, strict=True)]
    found = [CheckedLayout(*decode(each)) for each in encoded]
    by_outline: defaultdict[Outline, list[int]] = defaultdict(list)
    for at, each in enumerate(found):
        by_outline[each.outline].append(at)
    for outline, places in by_outline.items():
        _check_alike(outline, [found[at].numbers for at in places], [sizes[at] for at in places])
    return found


def _check(encoded: bytes, size: int) -> CheckedLayout:
    outline, numbers = decode(encoded)
    _check_alike(outline, [numbers], [size])
    return CheckedLayout(outline, numbers)


_check_small = lru_cache(maxsize=1024)(_check)


def _check_alike(outline: Outline, numbers: Sequence[Numbers], sizes: Sequence[int]) -> None:
    """Raises Corrupt if any of these layouts, which share an outline, is invalid."""
    rules = _rules(outline)
    suspects = list(range(len(numbers)))
    if len(numbers) >= _MANY:
        suspects = np.flatnonzero(~rules.fit(np.array(numbers), np.array(sizes, np.int64))).tolist()
    for at in suspects:
        rules.check(numbers[at].tolist(), sizes[at])


def _rules(outline: Outline) -> _Rules:
    if outline.rules is None:
        outline.rules = _Rules(outline)
    rules: _Rules = outline.rules
    return rules
