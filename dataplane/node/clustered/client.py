"""What one client asks of the cluster's streams: each message is a request to the leader of the stream's partition.

What always holds: columns are retained before the partition is asked to take them, and until it is known that it has
not; an append whose outcome is not known is asked on under its sequence, and raises OutcomeUnknown meanwhile. What a
client staged and did not append, what it was admitted to bring, and what it holds goes with it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import (
    Backpressure,
    Closed,
    DataplaneError,
    LeaseExpired,
    Misuse,
    NotReady,
    ProtocolMismatch,
)
from dataplane.node.clustered.acks import Acks
from dataplane.node.clustered.asking import patiently
from dataplane.node.clustered.holders import Claim
from dataplane.node.clustered.restores import Restores
from dataplane.node.clustered.session import Outcome, asked_until
from dataplane.node.clustered.snapshots import ClusteredSnapshots
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.node.streams import packed
from dataplane.node.streams.delivering import MAX_LEASE_S, not_ready
from dataplane.node.streams.streaming import Streaming, StreamRequest, Waiting
from dataplane.node.streams.unfinished import MAX_LISTED, check_lease
from dataplane.stream import requests as r
from dataplane.stream.pieces import Piece
from dataplane.wire import messages as m

if TYPE_CHECKING:
    from dataplane.node.clustered.service import ClusteredStreams

T = TypeVar("T")

_STREAMS = 50  # whose figures one message has
_WAIT_S = 30.0  # for which rows that were let in wait to be let in again, where another leads now
_MEASURE_S = 3.0  # as long as a leader that has just died may be waited for


class _Ticket(NamedTuple):
    """Leave to append, by the partition that gave it; none, where no limit holds rows back."""

    stream: Stream
    partition: Partition | None = None
    number: int = 0


_Member = tuple[bytes, str, str, int | None]
"""A replica of a member: its stream, task, member and number."""


@dataclass(slots=True)
class _Received:
    """The last grant that a replica has received, one request at a time: so an answer that is lost is given again."""

    last: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ClusteredClient:
    """The streams of the cluster as one client uses them. `here` are those of this node alone: what it stages."""

    def __init__(self, service: ClusteredStreams, here: Streaming) -> None:
        self._service = service
        self._here = here
        self._session = service.session()
        self._acks = Acks(self._session)
        self._snapshots = ClusteredSnapshots(self._session, service.dropped)
        self._restores = Restores(self._session, service.partitions.directory, service.holders)
        self._members: dict[_Member, _Received] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)

    def staged(self, scope: str) -> None:
        """As `Streaming.staged`."""
        self._here.staged(scope)

    def free_scope(self, scope: str) -> None:
        """As `Streaming.free_scope`."""
        self._here.free_scope(scope)

    @property
    def expected(self) -> bool:
        """Whether something was admitted that has not come."""
        return bool(self._tickets) or self._here.expected

    def revoke(self) -> None:
        """As `Streaming.revoke`."""
        for number in list(self._tickets):
            self._give_back(number)
        self._here.revoke()

    def leave(self) -> None:
        """The client has gone."""
        self.revoke()
        self._here.leave()
        self._acks.leave()
        self._snapshots.leave()
        self._restores.leave()
        self._session.leave()

    def untold(self, request: m.Consume | m.Admit, reply: m.Reply) -> None:
        """The reply can not be told: what it gave is given back."""
        if isinstance(request, m.Consume) and isinstance(reply, m.Delivered):
            stream = self._service.streams.named(reply.stream)
            if request.replica is not None:
                received = self._received(request)
                received.last = min(received.last, reply.grant - 1)
            elif stream is not None and stream.partition is not None:
                self._session.give_back_soon(stream.partition, reply.grant)
        elif isinstance(reply, m.Admitted):
            self._give_back(reply.ticket)

    # requests

    def answer(self, request: StreamRequest, deadline: Deadline) -> m.Reply | Waiting | None:
        """As `Streaming.answer`."""
        match request:
            case m.Open():
                packed.bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                return partial(self._open, request)
            case m.Streams():
                return m.Figures(request.id, self._service.figures(request.after, _STREAMS))
            case m.GiveBack():
                self._give_back(request.ticket)
                return None
            case m.ReadSnapshot():
                return partial(self._snapshots.read, request)
            case m.ReleaseSnapshot():
                self._snapshots.release(request.snapshot)
                return None
            case m.Restore():
                packed.bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                return partial(self._restores.begin, request)
        if request.stream in self._restores:
            return partial(self._restored, request)
        try:
            stream = self._service.streams.find(request.stream)
        except Closed as error:
            if isinstance(request, m.Ack | m.Renew):
                raise LeaseExpired(f"these rows go to others, or are done: {error}") from error
            raise
        if isinstance(request, m.Admit):
            _check_amount(request)
            if not stream.settings.limited:
                return m.Admitted(request.id, stream.token, self._keep(_Ticket(stream)))
        return partial(self._answer, request, stream, deadline)

    async def _open(self, request: m.Open) -> m.Reply:
        stream = await patiently(lambda: self._service.streams.open(request.name, request.settings))
        return m.Opened(request.id, stream.token, stream.settings, stream.generation)

    async def _answer(self, request: Any, stream: Stream, deadline: Deadline) -> m.Reply:
        match request:
            case m.Admit():
                return m.Admitted(request.id, stream.token, await self._admit(request, stream, deadline))
            case m.Append():
                return await self._append(request, stream, deadline)
            case m.Extend(piece=piece) if piece is not None:
                await self._grow(request, piece, stream)
            case m.Extend():
                await self._extend(request, stream)
            case m.TendRow() | m.ListUnfinished():
                return await self._unfinished(request, stream)
            case m.Consume():
                return await self._consume(request, stream, deadline)
            case m.Look():
                return await self._look(request, stream, deadline)
            case m.Ack(done=True):
                await self._on(stream, lambda at: self._acks.ack(at, request.grant, request.replica))
            case m.Ack():
                await self._ask(stream, r.Nack(grant=request.grant, replica=request.replica, seen=request.seen), r.Done)
            case m.Renew():
                await self._ask(stream, r.Renew(grant=request.grant, replica=request.replica), r.Done)
            case m.DropRows():
                rows = packed.int64("rows", request.rows)
                await self._ask(stream, r.Drop(rows=rows, keys=request.keys, groups=request.groups), r.Done)
            case m.End(drop=True):
                await self._service.drop(stream)
            case m.End():
                await self._ask(stream, r.Close(), r.Done)
            case m.Dead():
                return await self._dead(request, stream)
            case m.TakeLost():
                return await self._service.take_lost(request, stream, self._session)
            case m.Measure():
                asked = await self._ask(stream, r.Measure(), r.Figures, Deadline.after(_MEASURE_S))
                return m.Figures(request.id, asked.values)
            case m.TakeSnapshot():
                return await self._on(stream, lambda at: self._snapshots.take(request, stream, at))
            case _:
                raise Misuse(f"{type(request).__name__} is not for a stream of a cluster")
        return m.Done(request.id)

    async def _on(self, stream: Stream, work: Callable[[Partition], Awaitable[T]]) -> T:
        """Do this with the stream's partition or, where that is lost, with the next. Raises Closed."""
        return await self._service.on(stream, work)

    async def _ask(self, stream: Stream, asked: r.Request, kind: type[T], deadline: Deadline | None = None) -> T:
        return await self._on(stream, lambda at: self._session.ask(at, asked, kind, deadline))  # type: ignore[type-var]

    async def _restored(self, request: Any) -> m.Reply:
        """About a stream that the client restores, and nobody else sees."""
        match request:
            case m.PutBack():
                return await self._restores.put_back(request)
            case m.PutColumns():
                self._here.kept(request.staged, await self._restores.put_columns(request))
            case m.Restored():
                return await self._restores.finish(request)
            case m.End(drop=True):
                self._restores.drop(request.stream)
            case _:
                raise Misuse("this stream is being restored: it takes the rows of its checkpoint alone")
        return m.Done(request.id)

    # being let in

    async def _admit(self, request: m.Admit, stream: Stream, deadline: Deadline) -> int:
        """A ticket for an append, 0 for one that was made before by the very same call. Raises Backpressure, Closed,
        LimitExceeded, OutcomeUnknown."""
        if request.key:
            found = await self._ask(stream, r.Find(keys=[request.key], digest=request.digest), r.Found)
            if (found.rows >= 0).all():
                return 0
        wanted = r.Admit(rows=request.rows, nbytes=request.nbytes, version=request.version)
        return self._keep(await self._on(stream, lambda at: self._let_in(stream, at, wanted, deadline)))

    async def _let_in(self, stream: Stream, partition: Partition, wanted: r.Admit, deadline: Deadline) -> _Ticket:
        def late(admitted: r.Admitted) -> None:
            self._session.soon(partition, r.GiveBack(ticket=admitted.ticket))

        waits = f"append {wanted.version}" if stream.settings.max_lag >= 0 else "append"  # older ones may pass
        try:
            try:
                admitted = await self._session.ask(partition, wanted, r.Admitted, deadline, waits=waits, late=late)
            except Backpressure:  # who does not wait is told which limit is in the way
                admitted = await self._session.ask(partition, wanted, r.Admitted, late=late)
        except Backpressure as error:
            told = {**error.fields, "needed": wanted.nbytes, "waited_s": deadline.waited_s}
            raise Backpressure(f"the stream {stream.name!r} is full: {error}", **told) from None
        return _Ticket(stream, partition, admitted.ticket)

    def _keep(self, ticket: _Ticket) -> int:
        number = next(self._numbers)
        self._tickets[number] = ticket
        return number

    def _give_back(self, number: int) -> None:
        """What was admitted does not come. Idempotent."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None and ticket.partition is not None:
            self._session.soon(ticket.partition, r.GiveBack(ticket=ticket.number))

    # bringing rows and columns

    async def _append(self, request: m.Append, stream: Stream, deadline: Deadline) -> m.Appended:
        """Bring rows that were admitted. Raises as `Home.append`; LeaseExpired, OwnerDied, PeerUnavailable,
        OutcomeUnknown."""
        ticket = self._tickets.pop(request.ticket, None)
        if ticket is None or ticket.stream is not stream:
            raise LeaseExpired("this append was not admitted, or was given up since its process was silent for long")
        ref = BatchRef.decode(request.ref)
        asked = _append_of(request, ref)
        until = asked_until(deadline)
        reply = await self._on(stream, lambda at: self._append_to(stream, at, asked, ticket, until))
        self._here.kept(request.staged, ref, [] if reply.new else [np.arange(len(ref))])
        return m.Appended(request.id, reply.first, reply.new)

    async def _append_to(
        self, stream: Stream, partition: Partition, asked: r.Append, ticket: _Ticket, until: Deadline
    ) -> r.Appended:
        """Ask a partition. What was let in by a leader before this one is let in again."""
        waiting = Deadline.after(_WAIT_S)
        while True:
            number = ticket.number if ticket.partition == partition else 0
            claim = await self._claim(partition, asked.ref, asked.nodes, len(asked.ref), until)
            settled = partial(_settled, claim)
            try:
                request = msgspec.structs.replace(asked, ticket=number)
                return await self._session.ask(partition, request, r.Appended, until, settled=settled)
            except Backpressure as error:
                if not waiting.remaining_s or error.spill_error:  # or it is a disk that is full
                    raise
                version = int(asked.versions.max(initial=0))
                wanted = r.Admit(rows=len(asked.ref), nbytes=asked.ref.stored_nbytes, version=version)
                ticket = await self._let_in(stream, partition, wanted, waiting)

    async def _claim(
        self,
        partition: Partition,
        ref: BatchRef,
        nodes: tuple[bytes, ...],
        rows: int = 0,
        until: Deadline | None = None,
    ) -> Claim:
        return await self._service.holders.claim(partition.key, [ref], nodes, until, rows=rows)

    async def _extend(self, request: m.Extend, stream: Stream) -> None:
        """More columns for rows. Raises as `Home.extend`; OwnerDied, PeerUnavailable, OutcomeUnknown."""
        ref = BatchRef.decode(request.ref)
        rows, holds = packed.int64("rows", request.rows), packed.int64("holds", request.holds)
        count = len(request.keys) or len(rows)
        if count != len(ref):
            raise Misuse(f"{len(ref)} rows of new columns for {count} rows")
        packed.one_a_row("holds", holds, 0 if request.keys else count)
        asked = r.Extend(
            ref=ref,
            rows=rows,
            keys=request.keys,
            lengths=packed.lengths(request.lengths, ref),
            holds=holds,
            replace=request.replace,
            nodes=tuple(request.spares),
        )

        async def extend(partition: Partition) -> None:
            claim = await self._claim(partition, ref, asked.nodes)
            await self._session.ask(partition, asked, r.Done, settled=partial(_settled, claim))

        await self._on(stream, extend)
        self._here.kept(request.staged, ref)

    async def _grow(self, request: m.Extend, piece: Piece, stream: Stream) -> None:
        """The next piece of a row in progress. Raises as `Home.grow`; OwnerDied, PeerUnavailable, OutcomeUnknown."""
        if len(request.keys) != 1:
            raise ProtocolMismatch(f"a piece of {len(request.keys)} rows")
        ref, nodes = BatchRef.decode(request.ref), tuple(request.spares)
        lengths = packed.lengths(request.lengths, ref)

        async def grow(partition: Partition) -> bool:
            row = await self._row(partition, request.keys[0])
            claim = await self._claim(partition, ref, nodes)
            asked = r.Grow(row=row, piece=piece, ref=ref, lengths=lengths, nodes=nodes)
            return (await self._session.ask(partition, asked, r.Appended, settled=partial(_settled, claim))).new

        new = await self._on(stream, grow)
        self._here.kept(request.staged, ref, [] if new else [np.arange(len(ref))])

    # rows in progress

    async def _unfinished(self, request: m.TendRow | m.ListUnfinished, stream: Stream) -> m.Reply:
        """Raises LeaseExpired, Misuse, ProtocolMismatch, PeerUnavailable, OutcomeUnknown."""
        if isinstance(request, m.ListUnfinished):
            listed = await self._ask(stream, r.ListUnfinished(most=min(request.most, MAX_LISTED)), r.UnfinishedRows)
            return m.UnfinishedRows(request.id, listed.rows)
        return await self._on(stream, lambda at: self._tend(request, at))

    async def _tend(self, request: m.TendRow, partition: Partition) -> m.Reply:
        row = await self._row(partition, request.key) if request.key else -1
        match request.what:
            case "take":
                return await self._take_up(request, partition, row)
            case "hear" | "release":
                hear = r.Hear(row=row, token=request.token, free=request.what == "release")
                await self._session.ask(partition, hear, r.Done)
            case "give-up":
                await self._session.ask(partition, r.GiveUp(row=row, token=request.token), r.Done)
            case what:
                raise ProtocolMismatch(f"nothing that is asked of a row in progress: {what!r}")
        return m.Done(request.id)

    async def _take_up(self, request: m.TendRow, partition: Partition, row: int) -> m.Reply:
        """Take up a row, or the first that is free. What the partition gives when nobody waits for it any more is free
        again."""
        check_lease(request.lease_s)
        waits = True

        def settled(outcome: Outcome) -> None:
            if not waits and isinstance(outcome, r.UnfinishedRows) and outcome.rows:
                self._session.soon(partition, r.Hear(row=outcome.rows[0].row, token=request.token, free=True))

        take = r.TakeUp(row=row, token=request.token, lease_s=request.lease_s)
        try:
            taken = await self._session.ask(partition, take, r.UnfinishedRows, settled=settled)
        finally:
            waits = False
        return m.UnfinishedRows(request.id, taken.rows)

    async def _row(self, partition: Partition, key: str) -> int:
        """The number of a row in progress. Raises LeaseExpired for one that is gone."""
        found = await self._session.ask(partition, r.Find(keys=[key]), r.Found)
        row = int(found.rows[0])
        if row < 0:
            raise LeaseExpired(
                f"the row {key!r} is in progress no more: it was dropped, or lost, or finished by another"
            )
        return row

    # taking rows

    async def _consume(self, request: m.Consume, stream: Stream, deadline: Deadline) -> m.Delivered:
        """Rows of a task, once there are enough. Raises NotReady, Closed, Misuse."""
        _check_consume(request, stream)
        if request.replica is None:
            return await self._take(request, stream, deadline, None)
        received = self._received(request)
        try:
            async with asyncio.timeout(deadline.remaining_s) as waiting, received.lock:
                waiting.reschedule(None)
                reply = await self._take(request, stream, deadline, received.last)
                received.last = reply.grant
                return reply
        except TimeoutError:
            raise not_ready(stream.name, request.task, deadline) from None

    def _received(self, request: m.Consume | m.Look) -> _Received:
        key = request.stream, request.task, request.member, request.replica
        return self._members.setdefault(key, _Received())

    async def _take(self, request: m.Consume, stream: Stream, deadline: Deadline, after: int | None) -> m.Delivered:
        """`after`: the last grant that the replica has received."""
        asked = r.Consume(
            task=request.task,
            columns=tuple(request.columns),
            rows=request.rows,
            min_rows=request.min_rows,
            sampler=request.sampler,
            chosen=packed.int64("rows", request.chosen),
            expired=packed.int64("rows", request.expired),
            lease_s=request.lease_s,
            member=request.member,
            replica=request.replica,
            replicas=request.replicas,
            after=after,
        )
        waits = _queue(asked) if request.sampler is not None else ""

        async def consume(partition: Partition) -> r.Delivered:
            def late(given: r.Delivered) -> None:
                if after is None:  # else the replica asks for it again
                    self._session.give_back_soon(partition, given.grant)

            until = deadline if waits else None
            return await self._session.ask(partition, asked, r.Delivered, until, waits=waits, late=late)

        try:
            given = await self._on(stream, consume)
        except NotReady:
            if not waits:
                raise NotReady("others have taken these rows", stream=stream.name, task=request.task) from None
            raise not_ready(stream.name, request.task, deadline) from None
        ref = given.ref.with_origin(stream.token, given.rows, given.holds).encode()
        lengths = {name: values.tobytes() for name, values in given.lengths.items()}
        return m.Delivered(
            request.id,
            stream.token,
            given.grant,
            request.replica,
            ref,
            given.keys,
            given.groups,
            given.versions,
            given.tags,
            lengths,
        )

    async def _look(self, request: m.Look, stream: Stream, deadline: Deadline) -> m.Shown:
        """What there is to choose from, once there is something new. Raises NotReady, Closed, Misuse."""
        asked = r.Look(
            task=request.task,
            columns=tuple(request.columns),
            lengths=tuple(request.lengths),
            tags=tuple(request.tags),
            most=request.most,
            seen=request.seen,
            member=request.member,
            replica=request.replica,
            replicas=request.replicas,
            after=None if request.replica is None else self._received(request).last,
        )
        waits = f"{self._session.client} {_queue(asked)}"  # a queue of its own: each waits for other changes
        try:
            shown = await self._on(stream, lambda at: self._session.ask(at, asked, r.Shown, deadline, waits=waits))
        except NotReady:
            raise not_ready(stream.name, request.task, deadline) from None
        return m.Shown(
            id=request.id,
            changes=shown.changes,
            rows=shown.rows.tobytes(),
            group=shown.group.tobytes(),
            version=shown.version.tobytes(),
            age_s=shown.age_s,
            group_rows=shown.group_rows.tobytes(),
            group_dropped=shown.group_dropped.tobytes(),
            lengths={name: values.tobytes() for name, values in shown.lengths.items()},
            tags=shown.tags,
            latest=shown.latest,
            closed=shown.closed,
            whole=shown.whole,
            left=shown.left,
        )

    async def _dead(self, request: m.Dead, stream: Stream) -> m.Delivered:
        """The first rows that were given back too often, with the columns that all of them have. Raises Misuse."""
        found = await self._ask(stream, r.DeadLetters(task=request.task, most=max(0, request.most)), r.Letters)
        ref = b"" if found.ref is None else found.ref.with_origin(stream.token, found.rows).encode()
        told = found.groups, found.versions, found.tags
        return m.Delivered(request.id, stream.token, 0, None, ref, found.keys, *told, {})


def _settled(claim: Claim, outcome: Outcome) -> None:
    """What was claimed is the partition's, or is not needed."""
    refused = isinstance(outcome, DataplaneError) or (isinstance(outcome, r.Appended) and not outcome.new)
    (claim.release if refused else claim.taken)()


def _append_of(request: m.Append, ref: BatchRef) -> r.Append:
    """The rows of an append, checked. Raises ProtocolMismatch, LimitExceeded, Misuse."""
    rows = len(ref)
    if not rows:
        raise Misuse("an append has at least one row")
    return r.Append(
        ref=ref,
        versions=packed.numbers("versions", request.versions, rows),
        groups=packed.one_a_row("groups", request.groups, rows) or None,
        keys=packed.one_a_row("keys", request.keys, rows),
        digest=request.digest,
        tags=packed.tags(request.tags, rows),
        lengths=packed.lengths(request.lengths, ref),
        nodes=tuple(request.spares),
        begin=request.begin,
    )


def _check_amount(request: m.Admit) -> None:
    """Raises LimitExceeded, ProtocolMismatch where no append has so many rows or bytes."""
    packed.bound("rows of an append", m.MAX_ROWS, request.rows)
    if request.rows < 1 or request.nbytes < 0:
        raise ProtocolMismatch(f"an append of {request.rows} rows and {request.nbytes} bytes")


def _check_consume(request: m.Consume, stream: Stream) -> None:
    """Raises Misuse for what no partition would give, before it is asked."""
    packed.bound("rows of a delivery", m.MAX_ROWS, request.rows)
    stream.settings.task(request.task)
    if not 1 <= request.min_rows <= request.rows:
        raise Misuse(f"a delivery is of one row or more: rows={request.rows}, min_rows={request.min_rows}")
    if not 0 < request.lease_s <= MAX_LEASE_S:
        raise Misuse(f"a lease is of more than 0 and at most {MAX_LEASE_S:.0f} s, not {request.lease_s}")
    if not request.columns or len(set(request.columns)) != len(request.columns):
        raise Misuse("a task asks for at least one column, and each once")


def _queue(asked: r.Consume | r.Look) -> str:
    """Who asks for the same waits in one queue; each replica of a member in one of its own."""
    what = asked.task, asked.columns, asked.member, asked.replica
    if isinstance(asked, r.Consume):
        return msgspec.json.encode((*what, asked.rows, asked.min_rows, asked.sampler)).decode()
    return msgspec.json.encode(what).decode()
