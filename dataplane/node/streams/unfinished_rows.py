"""The requests about rows in progress of a stream: renew, release, give up, take over, and which row a key is."""

from __future__ import annotations

from typing import Any

from dataplane.errors import LeaseExpired, Misuse, ProtocolMismatch
from dataplane.node.streams.sessions import Outcome, Session, Stream
from dataplane.stream import requests as r
from dataplane.wire import messages as m

ENDED = -2
"""In place of a row's number: the holder of the token has finished the row, or given it up."""


async def tend(session: Session, request: m.TendRow, stream: Stream, partition: Any) -> m.Reply:
    """Raises LeaseExpired, Misuse, ProtocolMismatch, PeerUnavailable, OutcomeUnknown."""
    if request.what == "take":
        row = await row_of(session, partition, [request.key]) if request.key else -1
        return m.StreamAnswer(request.id, stream.token, await _take_up(session, request, partition, row))
    if request.what not in ("hear", "release", "give-up"):
        raise ProtocolMismatch(f"nothing that is asked of a row in progress: {request.what!r}")
    row = await row_of(session, partition, [request.key], request.token)
    if row == ENDED:
        pass
    elif request.what == "give-up":
        await session.ask(partition, r.GiveUp(row=row, token=request.token), r.Done)
    else:
        hear = r.Hear(row=row, token=request.token, free=request.what == "release")
        await session.ask(partition, hear, r.Done)
    return m.Done(request.id)


async def _take_up(session: Session, request: m.TendRow, partition: Any, row: int) -> r.UnfinishedRows:
    """Take over a row in progress, or the first free one. If the request was cancelled meanwhile, release the
    row."""
    if not 0 < request.lease_s < float("inf"):
        raise Misuse(f"a row is held for more than 0 s, not {request.lease_s}")
    waits = True

    def settled(outcome: Outcome) -> None:
        if not waits and isinstance(outcome, r.UnfinishedRows) and outcome.rows:
            session.soon(partition, r.Hear(row=outcome.rows[0].row, token=request.token, free=True))

    take = r.TakeUp(row=row, token=request.token, lease_s=request.lease_s)
    try:
        return await session.ask(partition, take, r.UnfinishedRows, settled=settled)
    finally:
        waits = False


async def row_of(session: Session, partition: Any, keys: list[str], token: int = 0) -> int:
    """The number of a row in progress; `ENDED` if the holder of the token finished it or gave it up. Raises
    LeaseExpired if it is gone."""
    if len(keys) != 1:
        raise ProtocolMismatch(f"a piece of {len(keys)} rows")
    found = await session.ask(partition, r.Find(keys=keys, token=token), r.FoundRows)
    row = int(found.rows[0])
    if row == -1:
        raise LeaseExpired(
            f"the row {keys[0]!r} is in progress no more: it was dropped, or lost, or finished by another"
        )
    return row
