"""Turns the messages of one client about streams into requests to partitions, on this node alone or in a cluster.

Invariants: columns are retained before the partition is asked to take them, and released only if it is known that the
partition did not take them. An append with an unknown outcome raises OutcomeUnknown, and is repeated in the background
under its sequence until the outcome is known. When a client ends, its staged columns, permits and leases end too.
Leased rows that cannot be sent are given back (`deliveries`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, DataplaneError, Misuse, ProtocolMismatch
from dataplane.node.local.streams import LocalStreams
from dataplane.node.requests.deliveries import Deliveries, Room
from dataplane.node.requests.permits import Permits, Ticket
from dataplane.node.requests.restores import Restores
from dataplane.node.sessions import checks
from dataplane.node.sessions.interface import (
    ColumnClaim,
    OpenedStream,
    Outcome,
    StreamService,
    Waiting,
    asked_until,
    at_once,
    happened,
)
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.stream import requests as r
from dataplane.stream.pieces import RowPiece
from dataplane.stream.statistics import labelled
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

T = TypeVar("T")


_STREAMS = 50  # the most streams whose statistics are in one message
_WAIT_S = 30.0  # the longest wait of admitted rows to be admitted again by a new leader
_MEASURE_S = 3.0  # the longest wait of a `Measure` for a new leader after the old one has died
_REASON = 400  # the most characters of a nack's reason that are written to the log
_MAX_LISTED = 4096  # the most rows in progress that one message lists

StreamRequest = (
    rm.OpenStream
    | rm.AdmitRows
    | rm.ReturnPermit
    | rm.AppendRows
    | rm.ExtendRows
    | rm.AskStream
    | rm.DropStream
    | rm.TakeLostRows
    | rm.ListStreams
    | rm.RestoreStream
    | rm.RestoreRows
    | rm.RestoreColumns
    | rm.PublishRestored
)


class StreamClient:
    """The streams of one service as one client uses them."""

    def __init__(self, service: StreamService, staged: StagedColumns, room: Room, *, owner: object) -> None:
        """`owner` names the client in messages. `room()` (`LocalChannel.room`) is awaited before rows are delivered."""
        self._service = service
        self._local = service if isinstance(service, LocalStreams) else None
        self._staged = staged
        self._session = service.session(owner)
        self._on = service.on
        self._restores = Restores(self._session, service)
        self.permits = Permits(service, self._session)
        self._deliveries = Deliveries(service, self._session, room)

    @property
    def alone(self) -> bool:
        """Whether this node is in no cluster. Its streams then answer at once each request that does not wait."""
        return self._local is not None

    def leave(self) -> None:
        """Release the leases, permits and restorations of the client, since it has ended."""
        self.permits.revoke()
        self._restores.leave()
        self._session.leave()
        self._service.forget(self._session.client)

    def undo(self, request: Any, reply: m.Reply) -> None:
        """Give back the lease, snapshot, report or permit in a reply that cannot be sent."""
        match reply:
            case rm.StreamAnswer(stream=stream, result=r.Delivered() as given):
                self._deliveries.undelivered(request, stream, given)
            case rm.StreamAnswer(stream=stream, result=r.SnapshotTaken() as taken):
                found = self._service.named(stream)
                if found is not None and found.partition is not None:
                    self._release_snapshot(found.partition, taken)
            case rm.LostRowsTaken():
                self._service.report_again(reply)
            case rm.RowsAdmitted(ticket=ticket):
                self.permits.give_back(ticket)

    # requests

    def answer(self, request: StreamRequest, deadline: Deadline) -> m.Reply | Waiting | None:
        """The reply; a function to call and await for it; or None for a message without a reply."""
        match request:
            case rm.OpenStream():
                checks.bound("the name of a stream", sm.MAX_SCOPE, len(request.name))
                return self._soon(partial(self._open, request))
            case rm.ListStreams():
                return m.Figures(request.id, self._service.figures(request.after, _STREAMS))
            case rm.ReturnPermit():
                self.permits.give_back(request.ticket)
                return None
            case rm.RestoreStream():
                checks.bound("the name of a stream", sm.MAX_SCOPE, len(request.name))
                return self._soon(partial(self._restores.begin, request))
        if request.stream in self._restores:
            return self._soon(partial(self._restored, request))
        stream = self._service.find(request.stream)
        match request:
            case rm.AskStream():
                return self._forward(request, stream, deadline)
            case rm.AdmitRows():
                ticket = self.permits.admit_now(request)
                if ticket is not None:
                    return rm.RowsAdmitted(request.id, stream.token, ticket)
                return partial(self._answer, request, stream, deadline)
        return self._soon(partial(self._answer, request, stream, deadline))

    def _forward(self, request: rm.AskStream, stream: OpenedStream, deadline: Deadline) -> m.Reply | Waiting:
        """The reply to a request to the partition, or a function to call and await for it."""
        match request.asked:
            case r.Consume() as asked:
                return partial(self._deliveries.consume, request, asked, stream, deadline)
            case r.Look() as asked:
                return partial(self._deliveries.look, request, asked, stream, deadline)
        bounds: dict[str, Any] = {"client": self._session.client, "sequence": 0}
        match request.asked:
            case r.Nack(reason=reason):
                bounds["reason"] = reason[:_REASON]
            case r.ListUnfinished(most=most):
                bounds["most"] = min(most, _MAX_LISTED)
        own = msgspec.structs.replace(request.asked, **bounds)
        if self._local is not None:
            return self._answered(request.id, stream, self._local.find(stream.token).run(own))
        return partial(self._asked, request.id, own, stream)

    async def _asked(self, identifier: int, asked: r.FromClient, stream: OpenedStream) -> rm.StreamAnswer:
        result: Any = r.Succeeded()
        if isinstance(asked, r.Ack):
            await self._on(stream, lambda at: self._session.ack(at, asked.grant, asked.replica))
        elif isinstance(asked, r.ResumeRow):
            result = await self._on(stream, lambda at: self._resume_row(at, asked))
        elif isinstance(asked, r.TakeSnapshot):
            result = await self._on(
                stream,
                lambda at: self._session.ask(at, asked, r.SnapshotTaken, late=partial(self._release_snapshot, at)),
            )
        else:
            deadline = Deadline.after(_MEASURE_S) if isinstance(asked, r.Measure) else None
            result = await self._on(stream, lambda at: self._session.ask(at, asked, r.StreamResult, deadline))
        return self._answered(identifier, stream, result)

    def _answered(self, identifier: int, stream: OpenedStream, result: Any) -> rm.StreamAnswer:
        if isinstance(result, r.PartitionFigures):
            result = r.PartitionFigures(labelled(result.values, self._service.label))
        return rm.StreamAnswer(identifier, stream.token, result)

    def _release_snapshot(self, partition: Any, taken: r.SnapshotTaken) -> None:
        self._session.soon(partition, r.ReleaseSnapshot(snapshot=taken.snapshot))

    async def _resume_row(self, partition: Any, asked: r.ResumeRow) -> r.UnfinishedRows:
        """Take over a row in progress. If the request was cancelled meanwhile, release the row."""
        waits = True

        def settled(outcome: Outcome) -> None:
            if not waits and isinstance(outcome, r.UnfinishedRows) and outcome.rows:
                self._session.soon(partition, r.RenewRow(row=outcome.rows[0].row, token=asked.token, free=True))

        try:
            return await self._session.ask(partition, asked, r.UnfinishedRows, settled=settled)
        finally:
            waits = False

    def _soon(self, answer: Waiting) -> m.Reply | Waiting:
        """The reply if the streams answer at once (`alone`), else `answer` itself."""
        return at_once(answer()) if self._local is not None else answer

    async def _open(self, request: rm.OpenStream) -> m.Reply:
        stream = await self._service.open(request.name, request.settings)
        return rm.Opened(request.id, stream.token, stream.settings, stream.generation)

    async def _answer(self, request: Any, stream: OpenedStream, deadline: Deadline) -> m.Reply:
        match request:
            case rm.AdmitRows():
                return rm.RowsAdmitted(request.id, stream.token, await self.permits.admit(request, deadline))
            case rm.AppendRows():
                ref = BatchRef.decode(request.ref)
                return await self.append_staged(request, ref, request.staged, request.ticket, deadline)
            case rm.ExtendRows():
                return await self.extend_staged(request, BatchRef.decode(request.ref), request.staged)
            case rm.DropStream():
                await self._service.drop(stream)
            case rm.TakeLostRows():
                return await self._service.take_lost(request, stream, self._session)
            case _:
                raise Misuse(f"{type(request).__name__} is for a stream that this client restores")
        return m.Done(request.id)

    async def _restored(self, request: Any) -> m.Reply:
        """Answer a request about a stream that the client restores."""
        match request:
            case rm.RestoreRows():
                return await self._restores.restore_rows(request)
            case rm.RestoreColumns():
                self._staged.kept(request.staged, await self._restores.restore_columns(request))
            case rm.PublishRestored():
                return await self._restores.finish(request)
            case rm.DropStream():
                self._restores.drop(request.stream)
            case _:
                raise Misuse("this stream is being restored: it takes the rows of its checkpoint alone")
        return m.Done(request.id)

    # appending and extending

    async def append_staged(
        self, request: rm.AppendRows, ref: BatchRef, scope: str, number: int, deadline: Deadline
    ) -> rm.RowsAppended:
        """Append rows with the columns `ref`, staged under `scope` if that is not empty. `number`: the permit. Raises
        LeaseExpired, Misuse, SchemaMismatch, LimitExceeded, Closed, OwnerDied, PeerUnavailable, OutcomeUnknown."""
        stream = self._service.find(request.stream)
        ticket = self.permits.use(number, stream)
        try:
            versions = checks.int64("versions", request.versions)
            asked = _append_of(request, versions, ref, tuple(request.spares))
        except BaseException:
            self.permits.put_back(ticket)
            raise
        until = asked_until(deadline)
        reply = await self._on(stream, lambda at: self._append_to(stream, at, asked, ticket, until))
        self._staged.kept(scope, ref, [] if reply.new else [np.arange(len(ref))])
        return rm.RowsAppended(request.id, reply.first, reply.new)

    def append_stored(
        self, request: rm.AppendRows, versions: checks.Index, ref: BatchRef, shard: int, nbytes: int, number: int
    ) -> rm.RowsAppended:
        """Append rows to a stream of a node outside a cluster. `ref`: all of `shard`, which was just stored and has
        `nbytes` bytes of values. If the rows are refused or not new, no need of the shard is added. `number`: the
        permit of the rows. Raises as `append_staged`."""
        assert self._local is not None, "it is of this node"
        stream = self._local.find(request.stream)
        ticket = self.permits.use(number, stream)
        try:
            asked = _append_of(request, versions, ref, client=self._session.client, ticket=ticket.number)
            reply = self._local.append(stream, asked, shard, nbytes)
        except BaseException:
            self.permits.put_back(ticket)
            raise
        return rm.RowsAppended(request.id, reply.first, reply.new)

    def extend_stored(self, request: rm.ExtendRows, ref: BatchRef) -> bool:
        """Add columns to rows, on a node outside a cluster. `ref`: all of a shard that was just stored. Returns whether
        the columns are new. Raises as `_extend`."""
        stream = self._service.find(request.stream)
        if request.piece is not None:
            return at_once(self._extend_row(request, ref, request.piece, stream))
        at_once(self._extend(request, ref, stream))
        return True

    async def _append_to(
        self, stream: OpenedStream, partition: Any, asked: r.Append, ticket: Ticket, until: Deadline
    ) -> r.AppendResult:
        """Append to a partition. If a limit refuses the append, since an earlier leader gave the permit, request
        another permit and repeat. A permit that the append has not used is given back once that is known."""

        def ended(claim: ColumnClaim, permit: Ticket, outcome: Outcome) -> None:
            happened((claim,), outcome)
            if isinstance(outcome, DataplaneError):
                self.permits.put_back(permit)

        waiting = Deadline.after(_WAIT_S)
        while True:
            number = ticket.number if ticket.partition == partition else 0
            try:
                claim = await self._service.claim(partition, asked.ref, asked.nodes, until, rows=len(asked.ref))
            except BaseException:
                self.permits.put_back(ticket)
                raise
            request, settled = msgspec.structs.replace(asked, ticket=number), partial(ended, claim, ticket)
            try:
                return await self._session.ask(partition, request, r.AppendResult, until, settled=settled)
            except Backpressure as error:
                if not waiting.remaining_s or error.spill_error:  # too late, or a disk is full
                    raise
            version = int(asked.versions.max(initial=0))
            wanted = r.Admit(rows=len(asked.ref), nbytes=asked.ref.stored_nbytes, version=version)
            ticket = await self.permits.let_in(stream, partition, wanted, waiting)

    async def extend_staged(self, request: rm.ExtendRows, ref: BatchRef, scope: str) -> m.Done:
        """Add the columns `ref` to rows, staged under `scope` if that is not empty. Raises as `_extend`."""
        stream, again = self._service.find(request.stream), False
        if request.piece is None:
            await self._extend(request, ref, stream)
        else:
            again = not await self._extend_row(request, ref, request.piece, stream)
        self._staged.kept(scope, ref, [np.arange(len(ref))] if again else [])
        return m.Done(request.id)

    async def _extend(self, request: rm.ExtendRows, ref: BatchRef, stream: OpenedStream) -> None:
        """Add columns to rows. Raises LeaseExpired, Misuse, SchemaMismatch, LimitExceeded, OwnerDied,
        PeerUnavailable, OutcomeUnknown."""
        rows, holds = checks.int64("rows", request.rows), checks.int64("holds", request.holds)
        count = len(request.keys) or len(rows)
        if count != len(ref):
            raise Misuse(f"{len(ref)} rows of new columns for {count} rows")
        checks.one_a_row("holds", holds, count)
        asked = r.Extend(
            ref=ref,
            rows=rows,
            keys=request.keys,
            lengths=checks.lengths(request.lengths, ref),
            holds=holds,
            replace=request.replace,
            nodes=tuple(request.spares),
        )

        async def extend(partition: Any) -> None:
            claim = await self._service.claim(partition, ref, asked.nodes)
            await self._session.ask(partition, asked, r.Succeeded, settled=partial(happened, (claim,)))

        await self._on(stream, extend)

    async def _extend_row(self, request: rm.ExtendRows, ref: BatchRef, piece: RowPiece, stream: OpenedStream) -> bool:
        """Add the next piece to a row in progress. Returns whether it is new. Raises LeaseExpired, Misuse,
        SchemaMismatch, LimitExceeded, OwnerDied, PeerUnavailable, OutcomeUnknown."""
        nodes, lengths = tuple(request.spares), checks.lengths(request.lengths, ref)

        if len(request.keys) != 1:
            raise ProtocolMismatch(f"a piece of {len(request.keys)} rows")
        asked = r.ExtendRow(key=request.keys[0], piece=piece, ref=ref, lengths=lengths, nodes=nodes)

        async def grow(partition: Any) -> bool:
            claim = await self._service.claim(partition, ref, nodes)
            settled = partial(happened, (claim,))
            return (await self._session.ask(partition, asked, r.AppendResult, settled=settled)).new

        return await self._on(stream, grow)


def _append_of(
    request: rm.AppendRows,
    versions: checks.Index,
    ref: BatchRef,
    nodes: tuple[bytes, ...] = (),
    *,
    client: str = "",
    ticket: int = 0,
) -> r.Append:
    """The request to append these rows, validated. Raises ProtocolMismatch, LimitExceeded, Misuse."""
    rows = len(ref)
    if not rows:
        raise Misuse("an append has at least one row")
    return r.Append(
        client=client,
        ticket=ticket,
        ref=ref,
        versions=checks.exactly("versions", versions, rows),
        groups=checks.one_a_row("groups", request.groups, rows) or None,
        keys=checks.one_a_row("keys", request.keys, rows),
        digest=request.digest,
        tags=checks.tags(request.tags, rows),
        lengths=checks.lengths(request.lengths, ref),
        nodes=nodes,
        begin=request.begin,
    )
