"""Requests about stored rows: `retain`, which makes further references (links) to them, and `free`, each in as many
messages as needed.

Invariants: a `retain` that fails or is cancelled has retained nothing; each part of a `free` fits a message, however
many rows are named one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from dataplane.batch import locations
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import Rows
from dataplane.client.connection import Connection
from dataplane.client.releasing import unlink
from dataplane.errors import DataplaneError, LimitExceeded
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm

_BYTES = 2 << 20  # of encoded rows in a message, approximately
_PART = 64  # bytes beside the rows: of a shard, and of a column

Wanted = tuple[int, sm.Selection]
Placed = tuple[int, Wanted]
"""The position of a reference in the list, and the rows and columns of one shard that it refers to."""


async def retain(connection: Connection, refs: Sequence[BatchRef]) -> list[BatchRef]:
    """Retain each reference: the same rows under new links. Raises as `AsyncPlane.retain`; then nothing is retained."""
    by_node: defaultdict[bytes, list[Placed]] = defaultdict(list)
    for at, ref in enumerate(refs):
        for (node, number), selected in locations.footprint(ref).items():
            selection = [(list(ordinals), rows.encode()) for ordinals, rows in selected]
            by_node[node].append((at, (number, selection)))
    made: list[dict[ShardKey, int]] = [{} for _ in refs]
    try:
        for node, wanted in by_node.items():
            for some in _portions(wanted):
                request = sm.Retain(connection.next_id(), node, [each for _, each in some])
                retained = await connection.request(request, sm.Retained, 0.0)
                for (at, (number, _)), link in zip(some, retained.links, strict=True):
                    made[at][node, number] = link
    except BaseException:
        with suppress(DataplaneError):
            for (node, _), link in [item for links in made for item in links.items()]:
                unlink(connection, node, [link])
        raise
    return [locations.numbered(ref, links.__getitem__) for ref, links in zip(refs, made, strict=True)]


async def links(connection: Connection, node: bytes, rows: Sequence[tuple[int, int, int]]) -> list[int]:
    """A link to each of these rows: (number of a shard or link, ordinal, row). Raises as `AsyncPlane.retain`; then
    none is made."""
    made: list[int] = []
    try:
        for start in range(0, len(rows), sm.MAX_RETAINED):
            some = rows[start : start + sm.MAX_RETAINED]
            wanted = [(number, [([ordinal], (row, row + 1, b""))]) for number, ordinal, row in some]
            request = sm.Retain(connection.next_id(), node, wanted)
            made += (await connection.request(request, sm.Retained, 0.0)).links
    except BaseException:
        with suppress(DataplaneError):
            unlink(connection, node, made)
        raise
    return made


def _portions(wanted: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Split into messages. A shard's rows are never split, because they get one link."""
    portion: list[Placed] = []
    nbytes = 0
    for at, (number, selection) in wanted:
        size = _PART + sum(_PART * (1 + len(ordinals)) + len(packed) for ordinals, (_, _, packed) in selection)
        if size > _BYTES:
            what = "bytes that name rows of one shard"
            raise LimitExceeded(
                f"{size} {what}, more than a message may have: retain fewer rows, or rows that follow one another",
                what=what,
                asked=size,
                limit=_BYTES,
            )
        if portion and (nbytes + size > _BYTES or len(portion) == sm.MAX_RETAINED):
            yield portion
            portion, nbytes = [], 0
        portion.append((at, (number, selection)))
        nbytes += size
    if portion:
        yield portion


Part = tuple[int, list[int], tuple[int, int, bytes]]

_ROWS = 1 << 18  # at most so many rows are named one by one in a part: two mebibytes
_FREED = 32  # bytes of a part beside its rows
_ORDINAL = 2  # bytes of a column in a part


async def free(connection: Connection, ref: BatchRef | None, scope: str) -> None:
    """Free a reference, and the rows put under the scope (empty: no scope). Raises as `AsyncPlane.free`."""
    parts: defaultdict[bytes, list[tuple[int, Sequence[int], Rows]]] = defaultdict(list)
    for (owner, shard), selected in ({} if ref is None else locations.footprint(ref)).items():
        parts[owner] += [(shard, ordinals, rows) for ordinals, rows in selected]
    if scope:
        await connection.request(sm.Free(connection.next_id(), scope=scope), m.Done, 0.0)
    for part in portions(parts.pop(connection.welcome.node, [])):
        await connection.request(sm.Free(connection.next_id(), parts=part), m.Done, 0.0)
    for owner, others in parts.items():  # a node that has gone has nothing to free
        for part in portions(others):
            await connection.request(sm.Free(connection.next_id(), parts=part, node=owner), m.Done, 0.0)


def portions(selected: Iterable[tuple[int, Sequence[int], Rows]]) -> Iterator[list[Part]]:
    """Rows of columns of shards, as parts of messages."""
    portion: list[Part] = []
    nbytes = 0
    for shard, ordinals, rows in selected:
        for some in _split(rows):
            encoded = some.encode()
            size = _FREED + _ORDINAL * len(ordinals) + len(encoded[2])
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
