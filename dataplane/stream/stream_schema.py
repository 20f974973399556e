"""The columns of a stream: the type of each, and its bit in the masks of pages (`page`).

Invariants: a column gets a bit when its first column batch arrives, and keeps it; a column that tasks only request
has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import ne

import numpy as np

from dataplane.batch.field import Field, merge_fields
from dataplane.batch.ref import BatchRef
from dataplane.errors import LimitExceeded

MAX_COLUMNS = 64


class StreamSchema:
    """All columns that were ever added to a stream."""

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
        """Raises SchemaMismatch if the columns of `ref` have other types here."""
        for name, found in ref.schema.items():
            known = self.fields.get(name)
            if known is not None and known != found:
                merge_fields(name, [known, found])

    def add(self, ref: BatchRef) -> np.uint64:
        """Add the columns of `ref`, after `fits`. Returns their bits. Raises LimitExceeded."""
        bits = self.give_bits(ref.columns)
        for name, found in ref.schema.items():
            known = self.fields.get(name)
            if known is None or known != found:
                self.fields[name] = found if known is None else merge_fields(name, [known, found])
        return bits

    def append(self, ref: BatchRef) -> tuple[tuple[str, ...], np.uint64]:
        """As `fits` and `add`, faster for columns that were appended before. Returns their sorted names, and their
        bits."""
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
        """A copy."""
        copied = StreamSchema()
        copied.fields, copied.bits = dict(self.fields), dict(self.bits)
        return copied
