"""What one client asks of rows in progress, each of the partition that has it: see `stream.unfinished`.

A row in progress stays in its partition, so where it is is asked once. Pieces stay on the nodes that they were put on;
the partition retains each as what an append brings.
"""

from __future__ import annotations

from dataplane.batch.ref import BatchRef
from dataplane.errors import (
    DataplaneError,
    LeaseExpired,
    Misuse,
    OutcomeUnknown,
    PeerUnavailable,
    ProtocolMismatch,
)
from dataplane.node.clustered.asking import all_of
from dataplane.node.clustered.holders import Holders
from dataplane.node.clustered.row_router import RowRouter
from dataplane.node.clustered.session import Outcome, Session
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.node.streams import packed
from dataplane.node.streams.unfinished import MAX_LISTED, check_lease
from dataplane.stream import requests as r
from dataplane.stream.pieces import Listed, Piece
from dataplane.wire import messages as m

_PLACES = 1 << 14  # of rows that this client brings, which are remembered


class UnfinishedRows:
    """The rows in progress as one client uses them."""

    def __init__(self, session: Session, rows: RowRouter, holders: Holders) -> None:
        self._session = session
        self._rows = rows
        self._holders = holders
        self._places: dict[int, tuple[Partition, int]] = {}  # by token

    async def grow(self, request: m.Extend, piece: Piece, ref: BatchRef, stream: Stream) -> bool:
        """The next piece of a row; whether it is new. Raises as `Home.grow`; OwnerDied, PeerUnavailable,
        OutcomeUnknown."""
        if len(request.keys) != 1:
            raise ProtocolMismatch(f"a piece of {len(request.keys)} rows")
        partition, row = await self._place(stream, request.keys[0], piece.token)
        lengths, copies = packed.lengths(request.lengths, ref), tuple(request.spares)
        await stream.fit(ref)
        claim = await self._holders.claim(partition.key, [ref], copies)

        def settled(outcome: Outcome) -> None:
            if isinstance(outcome, r.Appended) and outcome.new:
                claim.taken()
            else:
                claim.release()

        asked = r.Grow(row=row, piece=piece, ref=ref, lengths=lengths, nodes=copies)
        return (await self._session.ask(partition, asked, r.Appended, settled=settled)).new

    async def answer(self, request: m.TendRow | m.ListUnfinished, stream: Stream) -> m.Reply:
        """Raises LeaseExpired, Misuse, ProtocolMismatch, PeerUnavailable, OutcomeUnknown."""
        if isinstance(request, m.ListUnfinished):
            listed = r.ListUnfinished(most=min(request.most, MAX_LISTED))
            partitions = self._session.partitions(stream)
            replies = await all_of([self._session.ask(each, listed, r.UnfinishedRows) for each in partitions])
            return m.UnfinishedRows(request.id, [row for reply in replies for row in reply.rows])
        if not request.key and request.what == "take":
            return m.UnfinishedRows(request.id, await self._take_any(request, stream))
        partition, row = await self._place(stream, request.key, request.token)
        match request.what:
            case "take":
                return m.UnfinishedRows(request.id, await self._take(partition, row, request))
            case "hear" | "release":
                hear = r.Hear(row=row, token=request.token, free=request.what == "release")
                await self._session.ask(partition, hear, r.Done)
            case "give-up":
                await self._session.ask(partition, r.GiveUp(row=row, token=request.token), r.Done)
            case what:
                raise ProtocolMismatch(f"nothing that is asked of a row in progress: {what!r}")
        return m.Done(request.id)

    async def _take_any(self, request: m.TendRow, stream: Stream) -> list[Listed]:
        """A row that nobody holds, of the first partition that has one; none where none has. Raises PeerUnavailable,
        OutcomeUnknown where a partition does not answer, and no other has one."""
        silent: DataplaneError | None = None
        for partition in self._session.partitions(stream):
            try:
                rows = await self._take(partition, -1, request)
            except LeaseExpired:  # another leads the partition meanwhile, and has given it to others
                continue
            except (PeerUnavailable, OutcomeUnknown) as error:
                silent = error
                continue
            if rows:
                self._places[request.token] = partition, rows[0].row
                return rows
        if silent is not None:
            raise silent
        return []

    async def _take(self, partition: Partition, row: int, request: m.TendRow) -> list[Listed]:
        """Take up a row. What the partition gives when nobody waits for it any more is free again."""
        check_lease(request.lease_s)
        waits = True

        def settled(outcome: Outcome) -> None:
            if not waits and isinstance(outcome, r.UnfinishedRows) and outcome.rows:
                self._session.soon(partition, r.Hear(row=outcome.rows[0].row, token=request.token, free=True))

        take = r.TakeUp(row=row, token=request.token, lease_s=request.lease_s)
        try:
            return (await self._session.ask(partition, take, r.UnfinishedRows, settled=settled)).rows
        finally:
            waits = False

    async def _place(self, stream: Stream, key: str, token: int) -> tuple[Partition, int]:
        """The partition of a row, and its offset there. Raises LeaseExpired for one that is gone."""
        place = self._places.get(token)
        if place is None:
            try:
                (found,) = await self._rows.find(stream, b"", [key], [])
            except Misuse as error:
                raise LeaseExpired(
                    f"the row {key!r} is in progress no more: it was dropped, or lost, or finished by another"
                ) from error
            place = self._places[token] = found.partition, int(found.rows[0])
            if len(self._places) > _PLACES:
                del self._places[next(iter(self._places))]
        return place
