"""Which rows of a column are equal, by content.

A row is its dtype, shape and bytes; two are equal where the xxh3-128 of those is. Rows that are the same memory,
as the same image given for each of a prompt's responses, are hashed once.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import xxhash

from dataplane.batch.layout import Index
from dataplane.batch.values import Values


def distinct(values: Values) -> tuple[Values, Index]:
    """The distinct rows, in order of their first appearance, and for each row which of them it is."""
    known: dict[bytes, int] = {}
    index = np.fromiter((known.setdefault(digest, len(known)) for digest in digests(values)), np.int64, values.rows)
    if len(known) == values.rows:
        return values, index
    first = np.unique(index, return_index=True)[1]
    return values.take(first.astype(np.int64, copy=False)), index


def digests(values: Values) -> list[bytes]:
    """For each row, what equals that of another where the rows are equal."""
    if values.data is None:
        return _of_struct(values)
    source, marks = values.data, _marks(values)
    seen: dict[Hashable, bytes] = {}
    result = []
    for i in range(values.rows):
        identity = source.identity(i)
        digest = None if identity is None else seen.get(identity)
        if digest is None:
            digest = xxhash.xxh3_128_digest(source.row(i))
            if marks is not None:
                digest += marks[i].tobytes()
            if identity is not None:
                seen[identity] = digest
        result.append(digest)
    return result


def _marks(values: Values) -> Index | None:
    """What tells apart rows of equal bytes: their shapes, or the lengths of rows whose items have no bytes."""
    if values.offsets is not None and not values.field.item_nbytes:
        return np.diff(values.offsets)
    return values.shapes


def _of_struct(values: Values) -> list[bytes]:
    """A row's keys and what is under them, hashed together."""
    parts: list[list[bytes]] = [[] for _ in range(values.rows)]
    for k, (flags, child) in enumerate(zip(values.presence, values.children, strict=True)):
        own = digests(child)
        for i, digest in zip(np.flatnonzero(flags).tolist(), own, strict=True):
            parts[i] += [k.to_bytes(4, "little"), len(digest).to_bytes(4, "little"), digest]
    return [xxhash.xxh3_128_digest(b"".join(part)) for part in parts]
