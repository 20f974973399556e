"""Global indexes: small numbers for the rows of all partitions of a job, from 0 upwards.

What always holds: an index means one row of one partition in every process of the job, and is never given to another. A
partition's rows have their indexes in blocks of 256, in the order of their numbers; which block that is, is the number
of a row of one more table, which the table's leader gives to the first that asks. A process asks once a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dataplane.client.sync import Plane
from dataplane.errors import Misuse

Index = npt.NDArray[np.int64]

_BITS = 8
_BELOW = (1 << _BITS) - 1


class Indexes:
    """Those of one partition. Any thread may use them."""

    def __init__(self, plane: Plane, table: str, partition: str) -> None:
        """table: the table of the job's blocks, by its name."""
        self._table = plane.table(table)
        self._prefix = f"{partition}/"
        self._blocks: dict[int, int] = {}  # by the part of a row's number above the block
        self._parts: dict[int, int] = {}  # and back

    def of(self, numbers: Iterable[int] | Index) -> list[int]:
        """The global indexes of the rows with these numbers."""
        rows = np.asarray(numbers, np.int64)
        parts = np.unique(rows >> _BITS).tolist()
        unknown = [part for part in parts if part not in self._blocks]
        if unknown:
            given = self._table.numbers([f"{self._prefix}{part}" for part in unknown], create=True)
            self._learn(zip(unknown, given.tolist(), strict=True))
        found: list[int] = (_looked_up(self._blocks, parts, rows >> _BITS) << _BITS | rows & _BELOW).tolist()
        return found

    def numbers(self, global_indexes: Sequence[int]) -> Index:
        """The numbers of the rows with these indexes; -1, which no row has, for those of other partitions."""
        indexes = np.asarray(global_indexes, np.int64)
        blocks = np.unique(indexes >> _BITS).tolist()
        unknown = [block for block in blocks if block not in self._parts]
        if unknown:
            self._learn(self._asked(unknown))
        parts = _looked_up({block: self._parts.get(block, -1) for block in blocks}, blocks, indexes >> _BITS)
        return np.where(parts < 0, -1, parts << _BITS | indexes & _BELOW)

    def _asked(self, blocks: Sequence[int]) -> Iterable[tuple[int, int]]:
        for block in blocks:
            try:
                (key,) = self._table.keys([block])
            except Misuse:  # no such block was given
                continue
            if key.startswith(self._prefix) and key.removeprefix(self._prefix).isdigit():
                yield int(key.removeprefix(self._prefix)), block

    def _learn(self, found: Iterable[tuple[int, int]]) -> None:
        for part, block in found:
            self._blocks[part] = block
            self._parts[block] = part


def _looked_up(by: dict[int, int], keys: Sequence[int], wanted: Index) -> Index:
    """Of each that is wanted, the value; keys are sorted, and all that are wanted."""
    if not len(keys):
        return np.empty(0, np.int64)
    values = np.array([by[key] for key in keys], np.int64)
    found: Index = values[np.searchsorted(np.array(keys, np.int64), wanted)]
    return found
