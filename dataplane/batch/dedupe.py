"""Finds the equal rows of a column, by content.

Rows are equal if their dtype, shape and bytes are. Rows in the same memory, such as one image that is given for each
response of a prompt, are recognised without reading them. Other rows count as equal if their xxh3-128 digests are.
Reading large rows takes most of the time, so a large row is hashed only if three samples of its bytes equal those of
another row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from dataplane.batch.layout import Index
from dataplane.batch.values import RowSource, Values

Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]

_CHUNK = 1 << 20  # bytes of rows that a thread hashes in one call: few enough to share, and enough to pay for a call
_LARGE_ROW = 64 << 10  # bytes: for smaller rows, sampling is not much faster than hashing all
_LOOK = 256  # bytes of each sample


def distinct(values: Values, each: Each = map) -> tuple[Values, Index]:
    """The distinct rows, in order of their first appearance, and the position of each row among them. `each` as for
    `digests`."""
    known: dict[Hashable, int] = {}
    index = np.fromiter((known.setdefault(key, len(known)) for key in _keys(values, each)), np.int64, values.rows)
    if len(known) == values.rows:
        return values, index
    first = np.unique(index, return_index=True)[1]
    return values.take(first.astype(np.int64, copy=False)), index


def digests(values: Values, each: Each = map) -> Sequence[bytes]:
    """A digest of each row. Equal rows have equal digests, also in different `Values`; rows of indexed `Values` only if
    all stored rows are equal too. `each`: `map`, or an equivalent that uses several threads."""
    if values.index is not None:
        return _of_indexed(values, each)
    if values.data is None:
        return _of_struct(values, each)
    rows, places = _memories(values.data, values.rows)
    found = _hashed(values, values.data, rows, each)
    return [found[place] for place in places]


def _keys(values: Values, each: Each) -> Sequence[Hashable]:
    """A key for each row, equal for equal rows. Large rows whose samples are unique are not hashed."""
    source = values.data
    if source is None or source.nbytes < _LARGE_ROW * values.rows or not source.in_place:
        return digests(values, each)
    rows, places = _memories(source, values.rows)
    several = [i for group in _alike(values, source, rows) if len(group) > 1 for i in group]
    known = dict(zip(several, _hashed(values, source, several, each), strict=True))
    return [known.get(rows[place], rows[place]) for place in places]


def _alike(values: Values, source: RowSource, rows: Sequence[int]) -> Iterable[list[int]]:
    """Groups of these rows with the same shape and the same bytes at three places."""
    marks = _marks(values)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i in rows:
        row = memoryview(source.row(i))
        look = [bytes(row[at : at + _LOOK]) for at in (0, len(row) // 2, max(0, len(row) - _LOOK))]
        groups[(len(row), b"" if marks is None else marks[i].tobytes(), *look)].append(i)
    return groups.values()


def _memories(source: RowSource, count: int) -> tuple[list[int], list[int]]:
    """The first row of each piece of memory, and the place of each row's memory among these."""
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


def _hashed(values: Values, source: RowSource, rows: Sequence[int], each: Each) -> list[bytes]:
    marks = _marks(values)

    def some(rows: Sequence[int]) -> list[bytes]:
        found = [xxhash.xxh3_128_digest(source.row(i)) for i in rows]
        return found if marks is None else [digest + marks[i].tobytes() for i, digest in zip(rows, found, strict=True)]

    count = max(1, _CHUNK * values.rows // max(1, source.nbytes))
    return list(chain.from_iterable(each(some, [rows[k : k + count] for k in range(0, len(rows), count)])))


def _marks(values: Values) -> Index | None:
    """The numbers that distinguish rows of equal bytes: their shapes, or their lengths if items have no bytes. None if
    equal bytes are equal rows."""
    if values.offsets is not None and not values.field.item_nbytes:
        return np.diff(values.offsets)
    return values.shapes


def _of_indexed(values: Values, each: Each) -> Sequence[bytes]:
    """The digests of rows of an indexed column. The stored rows are distinct, but one may refer to parts in others. So
    a digest is the position of the stored row, with a digest of all stored rows."""
    assert values.data is not None
    assert values.offsets is not None
    assert values.index is not None
    stored = _hashed(values, values.data, range(len(values.offsets) - 1), each)
    content = xxhash.xxh3_128_digest(b"".join(stored))
    return [place.to_bytes(8, "little") + content for place in values.index.tolist()]


def _of_struct(values: Values, each: Each) -> Sequence[bytes]:
    """A digest of each row's keys and their values together."""
    parts: list[list[bytes]] = [[] for _ in range(values.rows)]
    for k, (flags, child) in enumerate(zip(values.presence, values.children, strict=True)):
        own = digests(child, each)
        for i, digest in zip(np.flatnonzero(flags).tolist(), own, strict=True):
            parts[i] += [k.to_bytes(4, "little"), len(digest).to_bytes(4, "little"), digest]
    return [xxhash.xxh3_128_digest(b"".join(part)) for part in parts]
