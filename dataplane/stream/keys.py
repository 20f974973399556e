"""The keys of a stream's rows: those that users gave, and those that stand for the others.

A row that was appended without a key is called by its number, `~17`; such names cost nothing until somebody asks.
Keys that users give are texts that do not begin with `~`, each once among the rows that are there.

An append that is made again, because its answer was lost, has the keys, columns, sizes and versions of the first: it
is taken for the same, as long as all its rows are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse

Index = npt.NDArray[np.int64]

_UNNAMED = "~"


def unnamed(rows: Iterable[int]) -> list[str]:
    """What rows without a key are called."""
    return list(map("~{}".format, rows))


class Keys:
    """Which key each row has, and which row each key."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._keys: dict[int, str] = {}
        self._calls: dict[str, tuple[int, int, int, bytes]] = {}  # by first key: first row, rows, bytes, versions

    def check(self, keys: Sequence[str]) -> None:
        """Raises Misuse where these can not be the keys of new rows."""
        if len(set(keys)) != len(keys):
            twice = next(key for i, key in enumerate(keys) if key in keys[:i])
            raise Misuse(f"the key {twice!r} is given twice; each row has its own")
        if not self._rows.keys().isdisjoint(keys):
            there = next(key for key in keys if key in self._rows)
            raise Misuse(f"there is a row {there!r} already")
        if not all(keys):
            raise Misuse("a key is a text of one character or more")
        if any(map(str.startswith, keys, repeat(_UNNAMED))):
            raise Misuse(f"a key does not begin with {_UNNAMED!r}: that is how rows without one are called")

    def retried(self, keys: Sequence[str], ref: BatchRef, versions: Index) -> int | None:
        """The first row of the append that this is again, or None."""
        said = self._calls.get(keys[0]) if keys else None
        if said is None or said[1:] != (len(keys), ref.nbytes, versions.tobytes()):
            return None
        first = said[0]
        return first if list(map(self._rows.get, keys)) == list(range(first, first + len(keys))) else None

    def add(self, keys: Sequence[str], first: int, ref: BatchRef, versions: Index) -> None:
        """The keys of new rows, which have been checked; none: they are called by their numbers."""
        if keys:
            numbers = range(first, first + len(keys))
            self._rows.update(zip(keys, numbers, strict=True))
            self._keys.update(zip(numbers, keys, strict=True))
            self._calls[keys[0]] = (first, len(keys), ref.nbytes, versions.tobytes())

    def remove(self, rows: Index) -> None:
        """These rows are gone."""
        if self._keys:
            gone = [key for key in map(self._keys.pop, rows.tolist(), repeat("")) if key]
            for key in gone:
                del self._rows[key]
                self._calls.pop(key, None)

    @property
    def given(self) -> bool:
        """Whether any row has a key that a user gave."""
        return bool(self._keys)

    def names(self, rows: Index) -> list[str]:
        """The keys of these rows."""
        numbers = rows.tolist()
        if not self._keys:
            return unnamed(numbers)
        return [key or f"{_UNNAMED}{row}" for key, row in zip(map(self._keys.get, numbers), numbers, strict=True)]

    def numbers(self, keys: Sequence[str]) -> Index:
        """The rows of these keys; a number for one that was appended without. Raises Misuse for what is no key."""
        found = list(map(self._rows.get, keys))
        for i, (key, row) in enumerate(zip(keys, found, strict=True)):
            if row is None:
                number = key[1:] if key.startswith(_UNNAMED) else ""
                if not number.isascii() or not number.isdigit() or len(number) > 18 or int(number) in self._keys:
                    raise Misuse(f"there is no row {key!r}: it was never appended, or each task is done with it")
                found[i] = int(number)
        return np.array(found, np.int64)
