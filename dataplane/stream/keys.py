"""The keys of the rows of a stream: given by users, or generated.

The key of a row that was appended without one is its number after a prefix of the stream, as in `~3f9a.17`, so that no
two streams generate the same key. Generated keys are not stored. Keys of users do not begin with `~` and are unique
among the rows that exist; a key is free again once its row is gone.

A repeated append is recognised by the keys and the digest of the first one, as long as all of its rows exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from dataplane.errors import KeyExists, Misuse
from dataplane.stream.page import Index

_UNNAMED = "~"


def unnamed(mark: str, rows: Iterable[int]) -> list[str]:
    """The generated keys of rows, with the prefix of the stream."""
    return list(map(f"{_UNNAMED}{mark}.{{}}".format, rows))


class Keys:
    """The key of each row, and the row of each key."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._rows: dict[str, int] = {}
        self._keys: dict[int, str] = {}
        self._calls: dict[str, tuple[int, int, bytes]] = {}  # by first key: first row, rows, digest

    def check(self, keys: Sequence[str]) -> None:
        """Raise KeyExists for a key that exists, Misuse for one that is empty, begins with `~` or is given twice."""
        if len(set(keys)) != len(keys):
            twice = Counter(keys).most_common(1)[0][0]
            raise Misuse(f"the key {twice!r} is given twice; each row has its own")
        if not self._rows.keys().isdisjoint(keys):
            there = next(key for key in keys if key in self._rows)
            raise KeyExists(
                f"there is a row with the key {there!r} already, and this append does not repeat one whose rows are all"
                " there: take another key, drop that row first, extend() it, or resume() it if it is in progress; if"
                " you repeat an append of which some rows are done, or what an appender sent, it was done before",
                key=there,
            )
        if not all(keys):
            raise Misuse("a key is a text of one character or more")
        if any(map(str.startswith, keys, repeat(_UNNAMED))):
            raise Misuse(f"a key does not begin with {_UNNAMED!r}: rows without keys are named so; append them without")

    def known(self, key: str, digest: bytes) -> int | None:
        """The first row of the append with this first key and digest; None if there is none, or one of its rows is
        gone."""
        said = self._calls.get(key)
        if said is None or said[2] != digest:
            return None
        first, count, _ = said
        return first if all(row in self._keys for row in range(first, first + count)) else None

    def retried(self, keys: Sequence[str], digest: bytes) -> int | None:
        """The first row of the append that this one repeats; None if it repeats none."""
        first = self.known(keys[0], digest) if keys else None
        if first is None or self._calls[keys[0]][1] != len(keys):
            return None
        return first if all(self._rows.get(key) == row for row, key in enumerate(keys, first)) else None

    def add(self, keys: Sequence[str], first: int, digest: bytes) -> None:
        """Add the checked keys of new rows. An empty list means generated keys."""
        if keys:
            numbers = range(first, first + len(keys))
            self._rows.update(zip(keys, numbers, strict=True))
            self._keys.update(zip(numbers, keys, strict=True))
            self._calls[keys[0]] = (first, len(keys), digest)

    def remove(self, rows: Index) -> None:
        """Forget the keys of rows that are gone."""
        if self._keys:
            gone = [key for key in map(self._keys.pop, rows.tolist(), repeat("")) if key]
            for key in gone:
                del self._rows[key]
                self._calls.pop(key, None)

    @property
    def given(self) -> bool:
        """Whether any row has a key of a user."""
        return bool(self._keys)

    def names(self, rows: Index) -> list[str]:
        numbers = rows.tolist()
        if not self._keys:
            return unnamed(self.mark, numbers)
        made = unnamed(self.mark, numbers)
        return [key or other for key, other in zip(map(self._keys.get, numbers), made, strict=True)]

    def numbers(self, keys: Sequence[str]) -> Index:
        """The row of each key. Raises Misuse for an unknown key. The row of a generated key need not exist."""
        found = self.known_rows(keys)
        if (found < 0).any():
            key = keys[int(np.flatnonzero(found < 0)[0])]
            raise Misuse(f"there is no row {key!r}: it was never appended here, or each task is done with it")
        return found

    def known_rows(self, keys: Sequence[str]) -> Index:
        """The result of `numbers`, with -1 for an unknown key."""
        found = [row if (row := self._rows.get(key)) is not None else self._unnamed(key) for key in keys]
        return np.array(found, np.int64)

    def _unnamed(self, key: str) -> int:
        own = f"{_UNNAMED}{self.mark}."
        number = key[len(own) :] if key.startswith(own) else ""
        if not number.isascii() or not number.isdigit() or len(number) > 18 or int(number) in self._keys:
            return -1
        return int(number)

    # a copy, and from one

    def copy(self) -> Keys:
        copied = Keys(self.mark)
        copied._rows, copied._keys, copied._calls = dict(self._rows), dict(self._keys), dict(self._calls)
        return copied

    def state(self, rows: Index) -> tuple[Index, list[str], list[tuple[str, int, int, bytes]]]:
        """The positions of the rows with keys of users, these keys, and the appends that begin with one of these
        rows: first key, first row, number of rows, digest."""
        found = [
            (at, self._keys[row]) for at, row in enumerate(rows.tolist() if self._keys else ()) if row in self._keys
        ]
        keys = [key for _, key in found]
        calls = [(key, *self._calls[key]) for key in keys if key in self._calls]
        return np.array([at for at, _ in found], np.int64), keys, calls

    def restore(self, rows: Index, keys: Sequence[str], calls: Iterable[tuple[str, int, int, bytes]]) -> None:
        """Restore the checked keys of these rows, and their appends."""
        self._keys.update(zip(rows.tolist(), keys, strict=True))
        self._rows.update(zip(keys, rows.tolist(), strict=True))
        self._calls.update((key, (first, count, digest)) for key, first, count, digest in calls)
