"""Divides what a reference refers to into messages that free it.

Invariant: each part fits a message, however many rows are named one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dataplane.batch.rows import Rows

Part = tuple[int, list[int], tuple[int, int, bytes]]

_ROWS = 1 << 18  # named one by one in a part: two mebibytes at most
_BYTES = 1 << 21  # of encoded rows in a message, about
_PART = 32  # bytes that a part takes beside them, and
_ORDINAL = 2  # for each column


def portions(selected: Iterable[tuple[int, Sequence[int], Rows]]) -> Iterator[list[Part]]:
    """Rows of columns of shards, as parts of messages."""
    portion: list[Part] = []
    nbytes = 0
    for shard, ordinals, rows in selected:
        for some in _split(rows):
            encoded = some.encode()
            size = _PART + _ORDINAL * len(ordinals) + len(encoded[2])
            if portion and nbytes + size > _BYTES:
                yield portion
                portion, nbytes = [], 0
            portion.append((shard, list(ordinals), encoded))
            nbytes += size
    if portion:
        yield portion


def _split(rows: Rows) -> Iterator[Rows]:
    if rows.slice is not None:
        yield rows
        return
    for start in range(0, len(rows), _ROWS):
        yield rows.take(Rows.range(start, min(start + _ROWS, len(rows))))
