"""Frees what a reference refers to, or a scope, in as many messages as that takes.

Invariant: each part fits a message, however many rows are named one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dataplane.batch.ref import BatchRef
from dataplane.batch.rows import Rows
from dataplane.client.connection import Connection
from dataplane.wire import messages as m

Part = tuple[int, list[int], tuple[int, int, bytes]]

_ROWS = 1 << 18  # named one by one in a part: two mebibytes at most
_BYTES = 1 << 21  # of encoded rows in a message, about
_PART = 32  # bytes that a part takes beside them, and
_ORDINAL = 2  # for each column


async def free(connection: Connection, ref: BatchRef | None, scope: str) -> None:
    """Free a reference, and what was put under the scope (empty: none). Raises as `AsyncPlane.free`."""
    parts: defaultdict[bytes, list[tuple[int, Sequence[int], Rows]]] = defaultdict(list)
    for (owner, shard), selected in ({} if ref is None else ref.footprint()).items():
        parts[owner] += [(shard, ordinals, rows) for ordinals, rows in selected]
    if scope:
        await connection.request(m.Free(connection.next_id(), [], [], scope), m.Done, 0.0)
    for part in portions(parts.pop(connection.welcome.node, [])):
        await connection.request(m.Free(connection.next_id(), [], part, ""), m.Done, 0.0)
    for owner, others in parts.items():  # a node that has gone has nothing to free
        for part in portions(others):
            await connection.request(m.FreeElsewhere(connection.next_id(), owner, part), m.Done, 0.0)


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
