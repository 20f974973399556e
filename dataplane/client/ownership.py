"""The ownership of stored rows and of the node's grants: `retain`, `free`, scopes that end with this process, and the
release of grants whose caller has stopped waiting.

Invariants: a `retain` that fails or is cancelled has retained nothing. Each part of a `free` fits a message, for any
number of rows. Messages that release a grant wait for no answer.
"""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from dataplane.batch import locations
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import RowIndices
from dataplane.errors import DataplaneError, LimitExceeded
from dataplane.stream import requests as r
from dataplane.table import requests as t
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.places import numbers

if TYPE_CHECKING:
    from dataplane.client.connection import Connection

T = TypeVar("T")

_TOKEN = secrets.token_hex(8)

_CHANGES = (
    {sm.Free, rm.OpenStream, rm.AppendRows, rm.ExtendRows, rm.DropStream, rm.TakeLostRows, rm.PublishRestored}
    | {r.ResumeRow, r.AbandonRow, r.RenewRow, r.Ack, r.Nack, r.Renew, r.Drop, r.Retry, r.Close}
    | {t.Upsert, t.ClearRows, t.Claim, t.Release, t.DropTable}
)
"""The requests with a lasting effect. A late answer to any other request has none, because `undo` releases its grant: a
put, a pin, a permit or a delivery."""


def ending_scope(what: str) -> str:
    """The scope of this process for `what`, a few letters. A node frees the rows under this scope when the client that
    put them closes or is killed. A forked child has another scope. Rows can also be freed earlier, as any others."""
    return f"{rm.STAGED}{what}-{os.getpid()}-{_TOKEN}"


def changes(request: Any) -> bool:
    """Whether a request has a lasting effect."""
    return type(asked_in(request)) in _CHANGES


def asked_in(request: Any) -> Any:
    """The request inside a message to a stream or table; any other message itself."""
    return request.asked if isinstance(request, rm.AskStream | rm.AskTable) else request


def undo(to: Connection, reply: m.Reply) -> None:
    """Release the grant of a reply whose caller has stopped waiting; keep a report of lost rows for the next caller."""
    match reply:
        case sm.Reserved():
            to.tell(sm.Abort([shard for shard, *_ in reply.extents]))
        case sm.Held():
            held = [] if reply.carried else numbers(reply.places)
            to.tell(sm.UnpinShards([*held, *(each[1] for each in reply.kept)]))
        case sm.Kept():
            to.tell(sm.Free(to.next_id(), reply.shards))
        case rm.StreamAnswer(result=r.Delivered() as given):
            nack = r.Nack(grant=given.grant, replica=given.replica, seen=False)
            to.tell(rm.AskStream(to.next_id(), reply.stream, nack))
        case rm.StreamAnswer(result=r.SnapshotTaken() as taken):
            to.tell(rm.AskStream(to.next_id(), reply.stream, r.ReleaseSnapshot(snapshot=taken.snapshot)))
        case rm.LostRowsTaken():
            to.lost_rows.append(reply)
        case rm.RowsAdmitted():
            to.tell(rm.ReturnPermit(reply.stream, reply.ticket))
        case sm.ShardStored():
            to.tell(sm.Free(to.next_id(), [reply.shard]))
        case sm.Retained():
            unlink(to, reply.node, reply.links)


def unlink(to: Connection, node: bytes, links: list[int]) -> None:
    """Free all cells that these links to shards of the node own. Does not wait."""
    if node == to.welcome.node:
        to.tell(sm.Free(to.next_id(), links))
    else:
        to.tell(sm.Free(to.next_id(), parts=[(link, [], (0, 0, b"")) for link in links], node=node))


def discard(to: Connection, shards: list[int]) -> None:
    """Free shards that this process has reserved, sealed or not. No other process may have references to them."""
    to.tell(sm.Abort(shards))
    to.tell(sm.UnpinShards(shards))
    to.tell(sm.Free(to.next_id(), shards))


def unstage(to: Connection, scope: str) -> None:
    """Free the rows of a scope that no stream or table has taken over. Does not wait. The end of the connection frees
    them too."""
    with suppress(DataplaneError):
        to.check()
        to.tell(sm.Free(to.next_id(), scope=scope))


_BYTES = 2 << 20  # the approximate most bytes of encoded rows in a message
_PART = 64  # bytes of a shard, and of a column, without the rows

Wanted = tuple[int, sm.Selection]


def portions(items: Iterable[T], nbytes: Callable[[T], int], most: int = _BYTES) -> Iterator[list[T]]:
    """Divide the items into messages of at most `most` bytes; a larger item is a message alone."""
    portion: list[T] = []
    left = most
    for item in items:
        size = nbytes(item)
        if portion and size > left:
            yield portion
            portion, left = [], most
        portion.append(item)
        left -= size
    if portion:
        yield portion


async def retain(connection: Connection, refs: Sequence[BatchRef]) -> list[BatchRef]:
    """Retain the references, all or none. Returns references to the same rows by new links. Raises as
    `AsyncPlane.retain`."""
    by_node: defaultdict[bytes, list[tuple[int, Wanted]]] = defaultdict(list)  # with the index in `refs`
    for at, ref in enumerate(refs):
        for (node, number), selected in locations.footprint(ref).items():
            selection = [(list(ordinals), rows.encode()) for ordinals, rows in selected]
            by_node[node].append((at, (number, selection)))
    made: list[dict[ShardKey, int]] = [{} for _ in refs]
    linked: list[tuple[bytes, list[int]]] = []
    try:
        for node, placed in by_node.items():
            found = await _linked(connection, node, [wanted for _, wanted in placed])
            linked.append((node, found))
            for (at, (number, _)), link in zip(placed, found, strict=True):
                made[at][node, number] = link
    except BaseException:
        with suppress(DataplaneError):
            for node, found in linked:
                unlink(connection, node, found)
        raise
    return [locations.numbered(ref, links.__getitem__) for ref, links in zip(refs, made, strict=True)]


async def _linked(connection: Connection, node: bytes, wanted: Sequence[Wanted]) -> list[int]:
    """Retain these rows of shards of the node. Returns the number of a link for each shard. All wanted rows of a shard
    are in one message, because they share a link."""
    made: list[int] = []
    try:
        for some in portions(wanted, _nbytes):
            request = sm.Retain(connection.next_id(), node, some)
            made += (await connection.request(request, sm.Retained, 0.0)).links
    except BaseException:
        if made:
            with suppress(DataplaneError):
                unlink(connection, node, made)
        raise
    return made


def _nbytes(wanted: Wanted) -> int:
    """The bytes of a shard's rows in a request, at least `_BYTES / MAX_RETAINED`, so that no request names more than
    `MAX_RETAINED` shards. Raises LimitExceeded if the rows do not fit a request."""
    _, selection = wanted
    size = _PART + sum(_PART * (1 + len(ordinals)) + len(packed) for ordinals, (_, _, packed) in selection)
    if size > _BYTES:
        what = "bytes that name rows of one shard"
        raise LimitExceeded(
            f"{size} {what}, more than a message may have: retain fewer rows, or rows that follow one another",
            what=what,
            asked=size,
            limit=_BYTES,
        )
    return max(size, _BYTES // sm.MAX_RETAINED)


Part = tuple[int, list[int], tuple[int, int, bytes]]

_ROWS = 1 << 18  # the most rows that a part names one by one: two mebibytes
_FREED = 32  # bytes of a part without its rows
_ORDINAL = 2  # bytes of a column in a part


async def free(connection: Connection, ref: BatchRef | None, scope: str) -> None:
    """Free a reference, and the rows put under the scope (empty: no scope). Raises as `AsyncPlane.free`."""
    parts: defaultdict[bytes, list[Part]] = defaultdict(list)
    for (owner, shard), selected in ({} if ref is None else locations.footprint(ref)).items():
        parts[owner] += [part for ordinals, rows in selected for part in parts_of(shard, ordinals, rows)]
    if scope:
        await connection.request(sm.Free(connection.next_id(), scope=scope), m.Done, 0.0)
    own = connection.welcome.node
    failed: DataplaneError | None = None
    for owner in sorted(parts, key=lambda owner: owner != own):  # other nodes last, because they may not answer
        try:
            for some in portions(parts[owner], part_nbytes):
                request = sm.Free(connection.next_id(), parts=some, node=b"" if owner == own else owner)
                await connection.request(request, m.Done, 0.0)
        except DataplaneError as error:
            failed = failed or error  # the other nodes' rows are freed all the same
    if failed is not None:
        raise failed


def parts_of(shard: int, ordinals: Sequence[int], rows: RowIndices) -> Iterator[Part]:
    """Divide these rows of columns of a shard into parts of messages."""
    step = _ROWS if rows.slice is None else max(1, len(rows))
    for start in range(0, len(rows), step):
        yield shard, list(ordinals), rows.take(RowIndices.range(start, min(start + step, len(rows)))).encode()


def part_nbytes(part: Part) -> int:
    """The bytes of a part in a message, at least `_BYTES / MAX_RETAINED`: a node frees the parts of a message without
    answering others meanwhile."""
    return max(_FREED + _ORDINAL * len(part[1]) + len(part[2][2]), _BYTES // sm.MAX_RETAINED)
