"""What a client asks of rows in progress of a stream of one node: see `stream.unfinished`.

What always holds: columns of a piece that came before are freed; a row whose client goes is free at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import LeaseExpired, Misuse, ProtocolMismatch
from dataplane.node.streams import packed
from dataplane.node.streams.homes import Homes, Stream
from dataplane.stream.patch import Patch
from dataplane.stream.pieces import Piece
from dataplane.wire import messages as m

MAX_LISTED = 4096
"""Rows in progress that one message tells of."""


def begun(request: m.Append | m.AppendInline, stream: Stream, row: int, client: object) -> None:
    """The row, which may be in progress, came from this client."""
    if request.begin is not None and stream.home.books.unfinished.is_of(row, request.begin[0]):
        stream.home.books.unfinished.held_by(row, client)


def grow(
    homes: Homes,
    request: m.Extend | m.ExtendInline,
    piece: Piece,
    ref: BatchRef,
    stream: Stream,
    spares: Sequence[bytes],
) -> None:
    """A piece of a row comes. Raises as `Home.grow`."""
    home, now = stream.home, stream.clock()
    homes.keep(ref)
    try:
        lengths = packed.lengths(request.lengths, ref)
        row = _row(stream, request.keys, piece.token)
        new = row is not None and home.grow(row, piece, ref, lengths, now, spares)
        if new and row is not None and not piece.last:
            home.books.unfinished.heard(row, piece.token, now)
    except BaseException:
        homes.forget(ref)
        raise
    if not new:
        homes.released([Patch(ref, len(ref))])


def answer(request: m.TendRow | m.ListUnfinished, stream: Stream, client: object) -> m.Reply:
    """Raises LeaseExpired, Misuse, ProtocolMismatch."""
    home, now = stream.home, stream.clock()
    if isinstance(request, m.ListUnfinished):
        return m.UnfinishedRows(request.id, home.unfinished(min(request.most, MAX_LISTED), now))
    taking, unfinished = request.what == "take", home.books.unfinished
    row = unfinished.first_free(now) if taking and not request.key else _row(stream, [request.key], request.token)
    if taking:
        check_lease(request.lease_s)
        if row is None and not request.key:
            return m.UnfinishedRows(request.id, [])
        if row is None:
            raise LeaseExpired("the row is in progress no more: who brought it has finished it, or dropped it")
        unfinished.require_free(row, request.token, now)
        taken = home.take_up(row, request.token, "", request.lease_s, now)
        unfinished.held_by(row, client)
        return m.UnfinishedRows(request.id, [taken])
    if request.what == "hear" and row is not None:
        unfinished.heard(row, request.token, now)
    elif request.what == "give-up" and row is not None:
        home.give_up(row, request.token, now)
    elif request.what == "release" and row is not None:
        unfinished.release(row, request.token)
    elif request.what not in ("hear", "give-up", "release"):
        raise ProtocolMismatch(f"nothing that is asked of a row in progress: {request.what!r}")
    return m.Done(request.id)


def check_lease(lease_s: float) -> None:
    """Raises Misuse where nobody holds a row for so many seconds."""
    if not 0 < lease_s < float("inf"):
        raise Misuse(f"a row is held for more than 0 s, not {lease_s}")


def _row(stream: Stream, keys: Sequence[str], token: int) -> int | None:
    """The row of this key; None where who has the token has finished it, or given it up. Raises LeaseExpired for one
    that is gone."""
    books = stream.home.books
    if token in books.unfinished.ended:
        return None
    if len(keys) != 1:
        raise ProtocolMismatch(f"a piece of {len(keys)} rows")
    found: int = books.keys.known_rows(list(keys))[0]
    if not books.rows.there(np.array([found])).all():
        raise LeaseExpired(
            f"the row {keys[0]!r} is in progress no more: it was dropped, or lost, or finished by another"
        )
    return found
