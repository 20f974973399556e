"""Which rows of a column are equal, by content.

A row is its dtype, shape and bytes; two are equal where the xxh3-128 of those is. Rows that are the same memory,
as the same image given for each of a prompt's responses, are one row; and what differs from all others in length, or
in a few bytes at three places, is not hashed. Hashing is bound by memory (45 GB/s in the caches, 11 from memory, where
a loop that only reads has 13), so what helps is to read less, and with more than one core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from dataplane.batch.buffers import RowSource
from dataplane.batch.layout import Index
from dataplane.batch.values import Values

Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]

_PIECE = 1 << 20  # bytes that are hashed at a time: little enough to share, and many for a call
_LARGE_ROW, _LOOK = 64 << 10, 256  # bytes: of a row from which on it is looked at before it is hashed, and at how many


def distinct(values: Values, each: Each = map) -> tuple[Values, Index]:
    """The distinct rows, in order of their first appearance, and for each row which of them it is."""
    known: dict[Hashable, int] = {}
    index = np.fromiter((known.setdefault(key, len(known)) for key in _keys(values, each)), np.int64, values.rows)
    if len(known) == values.rows:
        return values, index
    first = np.unique(index, return_index=True)[1]
    return values.take(first.astype(np.int64, copy=False)), index


def digests(values: Values, each: Each = map) -> Sequence[bytes]:
    """For each row, what equals that of another where the rows are equal. `each` applies a function that takes long to
    several arguments, as `map` does, perhaps in several threads."""
    if values.data is None:
        return _of_struct(values, each)
    rows, places = _memories(values.data, values.rows)
    found = _hashed(values, values.data, rows, each)
    return [found[place] for place in places]


def _keys(values: Values, each: Each) -> Sequence[Hashable]:
    """As `digests`; but rows of which a few bytes say that no other equals them are not hashed."""
    if values.data is None:
        return _of_struct(values, each)
    rows, places = _memories(values.data, values.rows)
    samples = [_sample(values.data, i) for i in rows] if _large(values) else [None] * len(rows)
    often = Counter(samples)
    alike = [i for i, sample in zip(rows, samples, strict=True) if often[sample] > 1]
    known = dict(zip(alike, _hashed(values, values.data, alike, each), strict=True))
    return [known.get(rows[place], place) for place in places]


def _memories(source: RowSource, count: int) -> tuple[list[int], list[int]]:
    """Of rows that are the same memory, the first; and for each row, which of these it is."""
    rows: list[int] = []
    places: list[int] = []
    seen: dict[Hashable, int] = {}
    for i in range(count):
        identity = source.identity(i)
        place = len(rows) if identity is None else seen.setdefault(identity, len(rows))
        places.append(place)
        if place == len(rows):
            rows.append(i)
    return rows, places


def _large(values: Values) -> bool:
    """Whether to look at a few bytes of a row takes much less time than to hash it."""
    source = values.data
    return source is not None and source.nbytes > _LARGE_ROW * values.rows and source.in_place


def _sample(source: RowSource, i: int) -> Hashable:
    row = memoryview(source.row(i))
    return len(row), *(bytes(row[at : at + _LOOK]) for at in (0, len(row) // 2, max(0, len(row) - _LOOK)))


def _hashed(values: Values, source: RowSource, rows: Sequence[int], each: Each) -> list[bytes]:
    """The digests of these rows."""
    marks = _marks(values)

    def some(rows: Sequence[int]) -> list[bytes]:
        found = [xxhash.xxh3_128_digest(source.row(i)) for i in rows]
        return found if marks is None else [digest + marks[i].tobytes() for i, digest in zip(rows, found, strict=True)]

    count = max(1, _PIECE * values.rows // max(1, source.nbytes))
    return list(chain.from_iterable(each(some, [rows[k : k + count] for k in range(0, len(rows), count)])))


def _marks(values: Values) -> Index | None:
    """What tells apart rows of equal bytes: their shapes, or the lengths of rows whose items have no bytes."""
    if values.offsets is not None and not values.field.item_nbytes:
        return np.diff(values.offsets)
    return values.shapes


def _of_struct(values: Values, each: Each) -> Sequence[bytes]:
    """A row's keys and what is under them, hashed together."""
    parts: list[list[bytes]] = [[] for _ in range(values.rows)]
    for k, (flags, child) in enumerate(zip(values.presence, values.children, strict=True)):
        own = digests(child, each)
        for i, digest in zip(np.flatnonzero(flags).tolist(), own, strict=True):
            parts[i] += [k.to_bytes(4, "little"), len(digest).to_bytes(4, "little"), digest]
    return [xxhash.xxh3_128_digest(b"".join(part)) for part in parts]
