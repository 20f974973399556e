"""The streams as one client uses them: turns its messages into requests to partitions, of this node alone or of the
cluster.

Invariants: columns are retained before the partition is asked to take them, until it is known that it did not. An
append with unknown outcome is repeated under its sequence until it is known, and raises OutcomeUnknown meanwhile.
When a client goes, its staged columns, permits and leases go too. Rows that were granted but cannot be sent to the
client are given back; their lease begins when the client can receive them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import (
    Backpressure,
    DataplaneError,
    LeaseExpired,
    Misuse,
    NotReady,
    OutcomeUnknown,
    ProtocolMismatch,
)
from dataplane.node.streams import request_checks
from dataplane.node.streams.local import LocalStreams
from dataplane.node.streams.restores import Restores
from dataplane.node.streams.sessions import (
    ColumnClaim,
    Outcome,
    Service,
    Stream,
    Waiting,
    asked_until,
    at_once,
    happened,
)
from dataplane.node.streams.staged_columns import StagedColumns
from dataplane.stream import requests as r
from dataplane.stream.admission import LET_IN
from dataplane.stream.pieces import Piece
from dataplane.wire import messages as m

T = TypeVar("T")

Room = Callable[[], Awaitable[bool]]
"""Waits until the client can receive a large reply. Returns whether it had to wait."""

_STREAMS = 50  # whose figures one message has
_WAIT_S = 30.0  # for which rows that were let in wait to be let in again, where another leads now
_MEASURE_S = 3.0  # as long as a leader that has just died may be waited for
_REASON = 400  # characters that the log has of why rows were given back
_MAX_LEASE_S = 7 * 86400.0
_MAX_LISTED = 4096  # rows in progress that one message tells of
_BYTES, _ROW, _TAG = m.MAX_FRAME // 2, 48, 64  # what is shown of rows, and about how much of it a row and a tag are
_ENDED = -2  # in place of a row's number: who has the token has finished the row, or given it up

StreamRequest = (
    m.Open
    | m.Admit
    | m.GiveBack
    | m.Append
    | m.Extend
    | m.TendRow
    | m.AskStream
    | m.DropStream
    | m.TakeLost
    | m.Streams
    | m.Restore
    | m.PutBack
    | m.PutColumns
    | m.Restored
)


async def no_wait() -> bool:
    """Always room."""
    return False


class _Ticket(NamedTuple):
    """A permit to append and the partition that gave it; no partition if no limit applies."""

    stream: Stream
    partition: Any = None
    number: int = 0


_Member = tuple[bytes, str, str, int | None]
"""A replica of a member: stream, task, member, number of the replica."""


@dataclass(slots=True)
class _LastGrant:
    """The last grant that a replica received. Its requests run one at a time, so a lost answer is repeated."""

    last: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class StreamClient:
    """The streams of one service as one client uses them."""

    def __init__(self, service: Service, staged: StagedColumns, room: Room = no_wait, *, owner: object = "") -> None:
        """`owner` names the client in messages. `room()` is awaited before a large reply that had to wait; see
        `wire.local.Channel.room`."""
        self._service = service
        self._local = service if isinstance(service, LocalStreams) else None
        self._staged = staged
        self._room = room
        self._session = service.session(owner)
        self._restores = Restores(self._session, service)
        self._members: dict[_Member, _LastGrant] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)

    @property
    def alone(self) -> bool:
        """Whether the streams are of this node, so that requests that do not wait are answered at once."""
        return self._local is not None

    @property
    def expected(self) -> bool:
        """Whether the client has unused permits."""
        return bool(self._tickets)

    def revoke(self) -> None:
        """The client is silent: its permits are void."""
        for number in list(self._tickets):
            self._give_back(number)

    def leave(self) -> None:
        """The client has gone."""
        self.revoke()
        self._restores.leave()
        self._session.leave()
        self._service.forget(self._session.client)

    def restoring(self, token: bytes) -> bool:
        """Whether the client is restoring a stream with this token."""
        return token in self._restores

    def untold(self, request: m.AskStream | m.Admit, reply: m.Reply) -> None:
        """The reply cannot be sent: give back what it grants."""
        if isinstance(reply, m.StreamAnswer) and isinstance(reply.result, r.Delivered):
            stream, given = self._service.named(reply.stream), reply.result
            if given.replica is not None:
                received = self._received(request)
                received.last = min(received.last, given.grant - 1)
            elif stream is not None and stream.partition is not None:
                self._session.give_back_soon(stream.partition, given.grant)
        elif isinstance(reply, m.Admitted):
            self._give_back(reply.ticket)

    # requests

    def answer(self, request: StreamRequest, deadline: Deadline) -> m.Reply | Waiting | None:
        """The reply, or a function to call and await for it; None for a message without a reply."""
        match request:
            case m.Open():
                request_checks.bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                return self._soon(partial(self._open, request))
            case m.Streams():
                return m.Figures(request.id, self._service.figures(request.after, _STREAMS))
            case m.GiveBack():
                self._give_back(request.ticket)
                return None
            case m.Restore():
                request_checks.bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                return self._soon(partial(self._restores.begin, request))
        if request.stream in self._restores:
            return self._soon(partial(self._restored, request))
        stream = self._service.find(request.stream)
        match request:
            case m.AskStream():
                return self._forward(request, stream, deadline)
            case m.Admit():
                ticket = self._ticket_now(request, stream)
                if ticket is not None:
                    return m.Admitted(request.id, stream.token, ticket)
                return partial(self._answer, request, stream, deadline)
        return self._soon(partial(self._answer, request, stream, deadline))

    def _forward(self, request: m.AskStream, stream: Stream, deadline: Deadline) -> m.Reply | Waiting:
        """As `answer`, for a request that the partition decides."""
        match request.asked:
            case r.Consume() as asked:
                return partial(self._consume, request, asked, stream, deadline)
            case r.Look() as asked:
                return partial(self._look, request, asked, stream, deadline)
        bounds: dict[str, Any] = {"client": self._session.client, "sequence": 0}
        match request.asked:
            case r.Nack(reason=reason):
                bounds["reason"] = reason[:_REASON]
            case r.ListUnfinished(most=most):
                bounds["most"] = min(most, _MAX_LISTED)
        own = msgspec.structs.replace(request.asked, **bounds)
        if self._local is not None:
            return m.StreamAnswer(request.id, stream.token, self._local.find(stream.token).run(own))
        return partial(self._asked, request.id, own, stream)

    async def _asked(self, identifier: int, asked: r.FromClient, stream: Stream) -> m.StreamAnswer:
        result: Any = r.Done()
        if isinstance(asked, r.Ack):
            await self._on(stream, lambda at: self._session.ack(at, asked.grant, asked.replica))
        else:
            deadline = Deadline.after(_MEASURE_S) if isinstance(asked, r.Measure) else None
            result = await self._ask(stream, asked, r.Result, deadline)
        return m.StreamAnswer(identifier, stream.token, result)

    def _soon(self, answer: Waiting) -> m.Reply | Waiting:
        """For streams of this node, the reply; else `answer` itself."""
        return at_once(answer()) if self._local is not None else answer

    async def _open(self, request: m.Open) -> m.Reply:
        stream = await self._service.open(request.name, request.settings)
        return m.Opened(request.id, stream.token, stream.settings, stream.generation)

    async def _answer(self, request: Any, stream: Stream, deadline: Deadline) -> m.Reply:
        match request:
            case m.Admit():
                return m.Admitted(request.id, stream.token, await self._admit(request, stream, deadline))
            case m.Append():
                return await self._append(request, stream, deadline)
            case m.Extend():
                await self._more(request, stream)
            case m.TendRow():
                return await self._on(stream, lambda at: self._tend(request, stream, at))
            case m.DropStream():
                await self._service.drop(stream)
            case m.TakeLost():
                return await self._service.take_lost(request, stream, self._session)
            case _:
                raise Misuse(f"{type(request).__name__} is for a stream that this client restores")
        return m.Done(request.id)

    def _on(self, stream: Stream, work: Callable[[Any], Awaitable[T]]) -> Awaitable[T]:
        """Do `work` with the partition of the stream or, if that is lost, with its successor. Raises Closed."""
        return work(stream) if self._local is not None else self._service.on(stream, work)

    async def _ask(self, stream: Stream, asked: r.Request, kind: type[T], deadline: Deadline | None = None) -> T:
        return await self._on(stream, lambda at: self._session.ask(at, asked, kind, deadline))  # type: ignore[type-var]

    async def _restored(self, request: Any) -> m.Reply:
        """Answer a request about a stream that the client restores."""
        match request:
            case m.PutBack():
                return await self._restores.put_back(request)
            case m.PutColumns():
                self._staged.kept(request.staged, await self._restores.put_columns(request))
            case m.Restored():
                return await self._restores.finish(request)
            case m.DropStream():
                self._restores.drop(request.stream)
            case _:
                raise Misuse("this stream is being restored: it takes the rows of its checkpoint alone")
        return m.Done(request.id)

    # being let in

    def fits(self, request: m.AppendInline, versions: request_checks.Index) -> bool:
        """Whether these rows go to a stream of this node, have no keys, and fit within the limits now, so that no
        permit is needed. Raises Closed, LimitExceeded, ProtocolMismatch."""
        if self._local is None or request.keys:
            return False
        stream, rows, nbytes = self._local.find(request.stream), len(versions), sum(request.columns.nbytes)
        _check_amount(rows, nbytes)
        return not stream.settings.limited or stream.fits(rows, nbytes, int(versions.max()))

    def ticket_now(self, request: m.AppendInline, versions: request_checks.Index) -> int | None:
        """A permit to append these rows; 0 if the same append was made before, None if it has to wait. Raises
        Closed, LimitExceeded, ProtocolMismatch."""
        key, version = request.keys[0] if request.keys else "", int(versions.max(initial=0))
        rows, nbytes, timeout_s = len(versions), sum(request.columns.nbytes), request.timeout_s
        wanted = m.Admit(request.id, request.stream, rows, nbytes, version, key, request.digest, timeout_s)
        return self._ticket_now(wanted, self._service.find(request.stream))

    def _ticket_now(self, request: m.Admit, stream: Stream) -> int | None:
        _check_amount(request.rows, request.nbytes)
        if not stream.settings.limited and not (request.key and self._local is not None):
            return self._keep(_Ticket(stream))
        if self._local is None:
            return None
        local, client = self._local.find(stream.token), self._session.client
        if request.key and (local.run(r.Find(keys=[request.key], digest=request.digest)).rows >= 0).all():
            return 0
        if not stream.settings.limited:
            return self._keep(_Ticket(stream))
        wanted = r.Admit(client=client, rows=request.rows, nbytes=request.nbytes, version=request.version)
        with suppress(Backpressure):
            return self._keep(_Ticket(stream, local, local.run(wanted).ticket))
        return None

    async def _admit(self, request: m.Admit, stream: Stream, deadline: Deadline) -> int:
        """A permit to append; 0 if the same append was made before. Raises Backpressure, Closed, LimitExceeded,
        OutcomeUnknown."""
        if request.key:
            found = await self._ask(stream, r.Find(keys=[request.key], digest=request.digest), r.FoundRows)
            if (found.rows >= 0).all():
                return 0
        if not stream.settings.limited:
            return self._keep(_Ticket(stream))
        wanted = r.Admit(rows=request.rows, nbytes=request.nbytes, version=request.version)
        return self._keep(await self._on(stream, lambda at: self._let_in(stream, at, wanted, deadline)))

    async def _let_in(self, stream: Stream, partition: Any, wanted: r.Admit, deadline: Deadline) -> _Ticket:
        def late(admitted: r.Admitted) -> None:
            self._session.soon(partition, r.GiveBack(ticket=admitted.ticket))

        def queue() -> str:  # older versions may pass
            return f"append {wanted.version}" if stream.settings.max_lag >= 0 else "append"

        try:
            try:
                admitted = await self._session.ask(partition, wanted, r.Admitted, deadline, waits=queue, late=late)
            except Backpressure:  # who does not wait is told which limit is in the way
                admitted = await self._session.ask(partition, wanted, r.Admitted, late=late)
        except Backpressure as error:
            holders = tuple(self._holder(stream, each) for each in error.holders)
            told = {**error.fields, "needed": wanted.nbytes, "waited_s": deadline.waited_s, "holders": holders}
            raise Backpressure(f"the stream {stream.name!r} {str(error).removeprefix('the stream ')}", **told) from None
        return _Ticket(stream, partition, admitted.ticket)

    def _holder(self, stream: Stream, holder: dict[str, Any]) -> dict[str, Any]:
        name = str(holder["holder"])
        admitted = holder["how"] == "admitted"
        return {**holder, "holder": self._service.label(name) if admitted else f"{name} of stream {stream.name!r}"}

    def _returned(self, ticket: _Ticket) -> None:
        if ticket.partition is not None:
            self._session.soon(ticket.partition, r.GiveBack(ticket=ticket.number))

    def _keep(self, ticket: _Ticket) -> int:
        number = next(self._numbers)
        self._tickets[number] = ticket
        return number

    def _give_back(self, number: int) -> None:
        """Return a permit that is not used. Idempotent."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self._returned(ticket)

    # bringing rows and columns

    async def _append(self, request: m.Append, stream: Stream, deadline: Deadline) -> m.Appended:
        """Append admitted rows. Raises LeaseExpired, Misuse, SchemaMismatch, LimitExceeded, Closed, OwnerDied,
        PeerUnavailable, OutcomeUnknown."""
        ticket = self._used(request.ticket, stream)
        try:
            ref = BatchRef.decode(request.ref)
            versions = request_checks.int64("versions", request.versions)
            asked = _append_of(request, versions, ref, tuple(request.spares))
        except BaseException:
            self._returned(ticket)
            raise
        until = asked_until(deadline)
        reply = await self._on(stream, lambda at: self._append_to(stream, at, asked, ticket, until))
        self._staged.kept(request.staged, ref, [] if reply.new else [np.arange(len(ref))])
        return m.Appended(request.id, reply.first, reply.new)

    def append_stored(
        self, request: m.AppendInline, versions: request_checks.Index, ref: BatchRef, shard: int, number: int
    ) -> m.Appended:
        """Append rows to a stream of this node; their columns are this whole shard, stored just now. If they are
        refused or not new, the shard is not needed. `number`: their permit, 0 if they fit without. Raises as
        `_append`."""
        assert self._local is not None, "it is of this node"
        stream = self._local.find(request.stream)
        ticket = self._used(number, stream) if number else _Ticket(stream, number=LET_IN)
        try:
            asked = _append_of(request, versions, ref, client=self._session.client, ticket=ticket.number)
            reply = self._local.append(stream, asked, shard, sum(request.columns.nbytes))
        except BaseException:
            self._returned(ticket)
            raise
        return m.Appended(request.id, reply.first, reply.new)

    def extend_stored(self, request: m.ExtendInline, ref: BatchRef) -> bool:
        """As `append_stored`, for more columns of rows. Returns whether they are new. Raises as `_extend` and
        `_grow`."""
        stream = self._service.find(request.stream)
        if request.piece is not None:
            return at_once(self._grow(request, ref, request.piece, stream))
        at_once(self._extend(request, ref, stream))
        return True

    def _used(self, number: int, stream: Stream) -> _Ticket:
        ticket = self._tickets.pop(number, None)
        if ticket is None or ticket.stream is not stream:
            raise LeaseExpired("this append was not admitted, or was given up since its process was silent for long")
        return ticket

    async def _append_to(
        self, stream: Stream, partition: Any, asked: r.Append, ticket: _Ticket, until: Deadline
    ) -> r.Appended:
        """Append to a partition. With a permit of an earlier leader, ask for another first."""
        waiting = Deadline.after(_WAIT_S)
        while True:
            number = ticket.number if ticket.partition == partition else 0
            try:
                claim = await self._claim(partition, asked.ref, asked.nodes, until, rows=len(asked.ref))
                settled = partial(happened, (claim,))
                request = msgspec.structs.replace(asked, ticket=number)
                return await self._session.ask(partition, request, r.Appended, until, settled=settled)
            except Backpressure as error:
                if not waiting.remaining_s or error.spill_error:  # or it is a disk that is full
                    self._returned(ticket)
                    raise
                version = int(asked.versions.max(initial=0))
                wanted = r.Admit(rows=len(asked.ref), nbytes=asked.ref.stored_nbytes, version=version)
                ticket = await self._let_in(stream, partition, wanted, waiting)
            except DataplaneError as error:
                if not isinstance(error, OutcomeUnknown):  # it is asked on, with the ticket
                    self._returned(ticket)
                raise

    async def _claim(
        self,
        partition: Any,
        ref: BatchRef,
        nodes: tuple[bytes, ...],
        until: Deadline | None = None,
        *,
        rows: int = 0,
    ) -> ColumnClaim:
        return await self._service.claim(partition, ref, nodes, until, rows=rows)

    async def _more(self, request: m.Extend, stream: Stream) -> None:
        ref, again = BatchRef.decode(request.ref), False
        if request.piece is None:
            await self._extend(request, ref, stream)
        else:
            again = not await self._grow(request, ref, request.piece, stream)
        self._staged.kept(request.staged, ref, [np.arange(len(ref))] if again else [])

    async def _extend(self, request: m.Extend | m.ExtendInline, ref: BatchRef, stream: Stream) -> None:
        """Add columns to rows. Raises LeaseExpired, Misuse, SchemaMismatch, LimitExceeded, OwnerDied,
        PeerUnavailable, OutcomeUnknown."""
        rows, holds = request_checks.int64("rows", request.rows), request_checks.int64("holds", request.holds)
        count = len(request.keys) or len(rows)
        if count != len(ref):
            raise Misuse(f"{len(ref)} rows of new columns for {count} rows")
        request_checks.one_a_row("holds", holds, count)
        asked = r.Extend(
            ref=ref,
            rows=rows,
            keys=request.keys,
            lengths=request_checks.lengths(request.lengths, ref),
            holds=holds,
            replace=request.replace,
            nodes=_nodes(request),
        )

        async def extend(partition: Any) -> None:
            claim = await self._claim(partition, ref, asked.nodes)
            await self._session.ask(partition, asked, r.Done, settled=partial(happened, (claim,)))

        await self._on(stream, extend)

    async def _grow(self, request: m.Extend | m.ExtendInline, ref: BatchRef, piece: Piece, stream: Stream) -> bool:
        """Add the next piece to a row in progress. Returns whether it is new. Raises LeaseExpired, Misuse,
        SchemaMismatch, LimitExceeded, OwnerDied, PeerUnavailable, OutcomeUnknown."""
        nodes, lengths = _nodes(request), request_checks.lengths(request.lengths, ref)

        async def grow(partition: Any) -> bool:
            row = await self._row(partition, request.keys, piece.token)
            if row == _ENDED:
                return False
            claim = await self._claim(partition, ref, nodes)
            asked = r.Grow(row=row, piece=piece, ref=ref, lengths=lengths, nodes=nodes)
            settled = partial(happened, (claim,))
            return (await self._session.ask(partition, asked, r.Appended, settled=settled)).new

        return await self._on(stream, grow)

    # rows in progress

    async def _tend(self, request: m.TendRow, stream: Stream, partition: Any) -> m.Reply:
        """Raises LeaseExpired, Misuse, ProtocolMismatch, PeerUnavailable, OutcomeUnknown."""
        if request.what == "take":
            row = await self._row(partition, [request.key]) if request.key else -1
            return m.StreamAnswer(request.id, stream.token, await self._take_up(request, partition, row))
        if request.what not in ("hear", "release", "give-up"):
            raise ProtocolMismatch(f"nothing that is asked of a row in progress: {request.what!r}")
        row = await self._row(partition, [request.key], request.token)
        if row == _ENDED:
            pass
        elif request.what == "give-up":
            await self._session.ask(partition, r.GiveUp(row=row, token=request.token), r.Done)
        else:
            hear = r.Hear(row=row, token=request.token, free=request.what == "release")
            await self._session.ask(partition, hear, r.Done)
        return m.Done(request.id)

    async def _take_up(self, request: m.TendRow, partition: Any, row: int) -> r.UnfinishedRows:
        """Take over a row in progress, or the first free one. If the request was cancelled meanwhile, release the
        row."""
        if not 0 < request.lease_s < float("inf"):
            raise Misuse(f"a row is held for more than 0 s, not {request.lease_s}")
        waits = True

        def settled(outcome: Outcome) -> None:
            if not waits and isinstance(outcome, r.UnfinishedRows) and outcome.rows:
                self._session.soon(partition, r.Hear(row=outcome.rows[0].row, token=request.token, free=True))

        take = r.TakeUp(row=row, token=request.token, lease_s=request.lease_s)
        try:
            return await self._session.ask(partition, take, r.UnfinishedRows, settled=settled)
        finally:
            waits = False

    async def _row(self, partition: Any, keys: list[str], token: int = 0) -> int:
        """The number of a row in progress; `_ENDED` if the holder of the token finished it or gave it up. Raises
        LeaseExpired if it is gone."""
        if len(keys) != 1:
            raise ProtocolMismatch(f"a piece of {len(keys)} rows")
        found = await self._session.ask(partition, r.Find(keys=keys, token=token), r.FoundRows)
        row = int(found.rows[0])
        if row == -1:
            raise LeaseExpired(
                f"the row {keys[0]!r} is in progress no more: it was dropped, or lost, or finished by another"
            )
        return row

    # taking rows

    async def _consume(
        self, request: m.AskStream, asked: r.Consume, stream: Stream, deadline: Deadline
    ) -> m.StreamAnswer:
        """Lease rows to a task once enough are ready. Raises NotReady, Closed, Misuse."""
        _check_consume(asked, stream)
        if asked.replica is None:
            return m.StreamAnswer(request.id, stream.token, await self._take(asked, stream, deadline, None))
        received = self._received(request)
        try:
            async with asyncio.timeout(deadline.remaining_s) as waiting, received.lock:
                waiting.reschedule(None)
                given = await self._take(asked, stream, deadline, received.last)
                received.last = given.grant
                return m.StreamAnswer(request.id, stream.token, given)
        except TimeoutError:
            raise not_ready(stream.name, asked.task, deadline) from None

    def _received(self, request: Any) -> _LastGrant:
        asked = request.asked
        return self._members.setdefault((request.stream, asked.task, asked.member, asked.replica), _LastGrant())

    async def _take(self, wanted: r.Consume, stream: Stream, deadline: Deadline, after: int | None) -> r.Delivered:
        """`after`: the last grant that the replica received."""
        asked = msgspec.structs.replace(wanted, client=self._session.client, sequence=0, after=after)
        waits = partial(_queue, asked) if asked.sampler is not None else None

        async def consume(partition: Any) -> r.Delivered:
            def late(given: r.Delivered) -> None:
                if after is None:  # else the replica asks for it again
                    self._session.give_back_soon(partition, given.grant)

            until = deadline if waits else None
            given = await self._session.ask(partition, asked, r.Delivered, until, waits=waits, late=late)
            try:
                if await self._room():  # its lease begins as it can be told
                    await self._session.ask(partition, r.Renew(grant=given.grant, replica=asked.replica), r.Done)
            except BaseException as error:
                late(given)
                if isinstance(error, LeaseExpired):  # the client took nothing for as long as that
                    raise NotReady("", stream=stream.name, task=asked.task) from None
                raise
            return given

        try:
            return await self._on(stream, consume)
        except NotReady:
            if not waits:
                raise NotReady("others have taken these rows", stream=stream.name, task=asked.task) from None
            raise not_ready(stream.name, asked.task, deadline) from None

    async def _look(self, request: m.AskStream, wanted: r.Look, stream: Stream, deadline: Deadline) -> m.StreamAnswer:
        """The candidates of a sampler, once something changed. Raises NotReady, Closed, Misuse."""
        asked = msgspec.structs.replace(
            wanted,
            client=self._session.client,
            sequence=0,
            most=min(wanted.most, _BYTES // (_ROW + 8 * len(wanted.lengths) + _TAG * len(wanted.tags))),
            after=None if wanted.replica is None else self._received(request).last,
        )

        def queue() -> str:  # of its own: each waits for other changes
            return f"{self._session.client} {_queue(asked)}"

        try:
            shown = await self._on(
                stream, lambda at: self._session.ask(at, asked, r.CandidateRows, deadline, waits=queue)
            )
        except NotReady:
            raise not_ready(stream.name, wanted.task, deadline) from None
        return m.StreamAnswer(request.id, stream.token, shown)


def _append_of(
    request: m.Append | m.AppendInline,
    versions: request_checks.Index,
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
        versions=request_checks.exactly("versions", versions, rows),
        groups=request_checks.one_a_row("groups", request.groups, rows) or None,
        keys=request_checks.one_a_row("keys", request.keys, rows),
        digest=request.digest,
        tags=request_checks.tags(request.tags, rows),
        lengths=request_checks.lengths(request.lengths, ref),
        nodes=nodes,
        begin=request.begin,
    )


def _nodes(request: m.Extend | m.ExtendInline) -> tuple[bytes, ...]:
    """The nodes that have copies of the columns."""
    return tuple(request.spares) if isinstance(request, m.Extend) else ()


def _check_amount(rows: int, nbytes: int) -> None:
    """Raises LimitExceeded, ProtocolMismatch if no append can have so many rows or bytes."""
    request_checks.bound("rows of an append", m.MAX_ROWS, rows)
    if rows < 1 or nbytes < 0:
        raise ProtocolMismatch(f"an append of {rows} rows and {nbytes} bytes")


def _check_consume(request: r.Consume, stream: Stream) -> None:
    """Raises Misuse for a request that every partition would refuse."""
    request_checks.bound("rows of a delivery", m.MAX_ROWS, request.rows)
    stream.settings.task(request.task)
    if not 1 <= request.min_rows <= request.rows:
        raise Misuse(f"a delivery is of one row or more: rows={request.rows}, min_rows={request.min_rows}")
    if not 0 < request.lease_s <= _MAX_LEASE_S:
        raise Misuse(f"a lease is of more than 0 and at most {_MAX_LEASE_S:.0f} s, not {request.lease_s}")
    if not request.columns or len(set(request.columns)) != len(request.columns):
        raise Misuse("a task asks for at least one column, and each once")


def _queue(asked: r.Consume | r.Look) -> str:
    """The queue of a waiting request: equal requests share one; each replica of a member has its own."""
    what = asked.task, asked.columns, asked.member, asked.replica
    if isinstance(asked, r.Consume):
        return msgspec.json.encode((*what, asked.rows, asked.min_rows, asked.sampler)).decode()
    return msgspec.json.encode(what).decode()


def not_ready(stream: str, task: str, deadline: Deadline) -> NotReady:
    """The error of a consumer for which no rows became ready in time."""
    return NotReady(
        f"no rows of stream {stream!r} became ready for task {task!r} in {deadline.waited_s:.1f} s",
        stream=stream,
        task=task,
        waited_s=deadline.waited_s,
    )
