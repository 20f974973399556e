"""What a client asks of streams: each request answered from a home, or made to wait there.

What always holds: what a client staged and did not append, what it was admitted to bring, and streams that it was
restoring, go with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from dataplane import waiting
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, Closed, LeaseExpired, ProtocolMismatch
from dataplane.node.streams import packed, unfinished
from dataplane.node.streams.delivering import Delivering, Room, dead_letters, no_wait
from dataplane.node.streams.homes import Homes, Stream
from dataplane.node.streams.snapshots import Snapshots
from dataplane.stream.admission import Entry
from dataplane.stream.facts import Arrival
from dataplane.stream.figures import figures
from dataplane.stream.page import Index
from dataplane.stream.pieces import Begin
from dataplane.wire import messages as m

Waiting = Callable[[], Coroutine[Any, Any, m.Reply]]

_HOLDERS = 64  # that an error names
_LOST = 4096  # lost rows that one message tells of
_STREAMS = 50  # whose figures one message has

StreamRequest = (
    m.Open
    | m.Admit
    | m.GiveBack
    | m.Append
    | m.Extend
    | m.TendRow
    | m.ListUnfinished
    | m.Consume
    | m.Look
    | m.Ack
    | m.Renew
    | m.DropRows
    | m.End
    | m.Dead
    | m.TakeLost
    | m.Measure
    | m.Streams
    | m.TakeSnapshot
    | m.ReadSnapshot
    | m.ReleaseSnapshot
    | m.Restore
    | m.PutBack
    | m.PutColumns
    | m.Restored
)


class Streaming:
    """The streams as one client uses them, to whom `client` is the key."""

    def __init__(self, client: object, homes: Homes, room: Room = no_wait) -> None:
        """`room()` is awaited before a large reply is made that was waited for; see `wire.local.Channel.room`."""
        self._client = client
        self._homes = homes
        self._staged: set[str] = set()
        self._tickets: set[tuple[bytes, int]] = set()  # by stream: what was admitted and has not come
        self._delivering = Delivering(client, homes, room)
        self._snapshots = Snapshots(homes)

    def staged(self, scope: str) -> None:
        """The client puts something under this scope."""
        if scope.startswith(m.STAGED):
            self._staged.add(scope)

    def free_scope(self, scope: str) -> None:
        """The client frees the scope."""
        self._homes.free_scope(scope)
        self._staged.discard(scope)

    def untold(self, request: m.Consume | m.Admit, reply: m.Reply) -> None:
        """The reply can not be told: what it gave is given back."""
        if isinstance(request, m.Consume):
            self._delivering.untold(request, reply)
        elif isinstance(reply, m.Admitted):
            self._give_back(reply.stream, reply.ticket)

    def leave(self) -> None:
        """The client has gone."""
        self._homes.leave(self._client)
        self._snapshots.leave()
        for scope in self._staged:
            self._homes.free_scope(scope)
        self._staged.clear()

    def restoring(self, token: bytes) -> bool:
        """Whether the client restores a stream of this token."""
        return self._snapshots.restoring(token)

    def answer(self, request: StreamRequest, deadline: Deadline) -> m.Reply | Waiting | None:
        """The reply, or what has to be called and awaited for it; None where there is none."""
        match request:
            case m.Open():
                packed.bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                stream = self._homes.open(request.name, request.settings)
                return m.Opened(request.id, stream.token, stream.home.settings, stream.home.books.keys.mark)
            case m.Streams():
                return m.Figures(request.id, self._homes.figures(request.after, _STREAMS))
            case m.Restore():
                packed.bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                return self._snapshots.begin(request)
            case m.ReadSnapshot():
                return self._snapshots.read(request)
            case m.ReleaseSnapshot():
                self._snapshots.release(request.snapshot)
                return None
            case m.GiveBack():
                self._give_back(request.stream, request.ticket)
                return None
        stream = self._homes.find(request.stream)
        now = stream.clock()
        match request:
            case m.Admit():
                return self._admit_now(request, stream) or partial(self._admit, request, stream, deadline)
            case m.Append():
                return self._append(request, stream)
            case m.Extend():
                return self._extend(request, stream)
            case m.TendRow() | m.ListUnfinished():
                return unfinished.answer(request, stream, self._client)
            case m.Consume():
                return partial(self._delivering.consume, request, stream, deadline)
            case m.Look():
                return partial(self._delivering.look, request, stream, deadline)
            case m.Ack():
                if request.done:
                    stream.home.ack(request.grant, self._client, request.replica, now)
                else:
                    stream.home.nack(request.grant, self._client, request.replica, now, seen=request.seen)
            case m.Renew():
                stream.home.leases.renew(request.grant, self._client, request.replica, now)
                stream.schedule()
            case m.DropRows():
                return self._drop_rows(request, stream)
            case m.End():
                if request.drop:
                    self._snapshots.drop(stream)
                else:
                    stream.home.close(now)
            case m.Dead():
                return dead_letters(request, stream)
            case m.TakeLost():
                return m.LostRows(request.id, stream.home.take_lost(_LOST))
            case m.Measure():
                return m.Figures(request.id, figures(stream.home, now))
            case m.TakeSnapshot():
                return self._snapshots.take(request, stream)
            case m.PutBack():
                self._snapshots.put_back(request, stream)
            case m.PutColumns():
                self.kept(request.staged, self._snapshots.put_columns(request, stream))
            case m.Restored():
                self._snapshots.finish(stream)
        return m.Done(request.id)

    def _drop_rows(self, request: m.DropRows, stream: Stream) -> m.Reply:
        rows = packed.rows_named(stream.home, request.rows, request.keys)
        of_groups = stream.home.books.in_groups(request.groups)
        stream.home.drop_rows(np.concatenate((rows, of_groups)), stream.clock())
        return m.Done(request.id)

    # appending

    def _admit_now(self, request: m.Admit, stream: Stream) -> m.Admitted | None:
        """Leave to append, or None where it has to be waited for."""
        asked = request.rows, request.nbytes, request.version, request.key, request.digest
        ticket = self._ticket_now(*asked, stream)
        return None if ticket is None else m.Admitted(request.id, stream.token, ticket)

    def ticket_now(self, request: m.AppendInline, version: int, rows: int) -> int | None:
        """A ticket for the rows of this request, 0 where they came before by the very same call; None where one has to
        be waited for. Raises Closed, LimitExceeded, ProtocolMismatch."""
        key, nbytes = request.keys[0] if request.keys else "", sum(request.columns.nbytes)
        return self._ticket_now(rows, nbytes, version, key, request.digest, self._homes.find(request.stream))

    def fits(self, request: m.AppendInline, version: int, rows: int) -> bool:
        """Whether rows without keys, which come in the same moment, need no ticket. Raises as `ticket_now`."""
        nbytes = sum(request.columns.nbytes)
        _check_amount(rows, nbytes)
        entry = Entry(self._client, rows, nbytes, version, _nobody, _nobody)
        return not request.keys and self._homes.find(request.stream).home.fits(entry)

    def append_new(self, request: m.AppendInline, versions: Index, ref: BatchRef, shard: int) -> m.Appended:
        """Rows come that `fits` let in, of which `ref` means all of a shard that was stored just now. Raises as
        `Home.append`; no row needs the shard then."""
        stream = self._homes.find(request.stream)
        packed.exactly("versions", versions, len(ref))
        arrival = _arrival(request, versions, ref, ())
        self._homes.keep_stored(shard, sum(request.columns.nbytes))
        try:
            first, _ = stream.home.appended(ref, (), b"", arrival, stream.clock())
            unfinished.begun(request, stream, first, self._client)
        except BaseException:
            self._homes.forget(ref)
            raise
        return m.Appended(request.id, first, True)

    def _ticket_now(self, rows: int, nbytes: int, version: int, key: str, digest: bytes, stream: Stream) -> int | None:
        _check_amount(rows, nbytes)
        if key and stream.home.books.keys.known(key, digest) is not None:
            return 0
        return self._ticket(rows, nbytes, version, stream)[0] or None

    def _ticket(self, rows: int, nbytes: int, version: int, stream: Stream) -> tuple[int, str]:
        """A ticket for an append that no limit holds back; else 0, and what does. It does not wait."""
        tickets: list[int] = []
        entry = Entry(self._client, rows, nbytes, version, tickets.append, lambda error: None)
        stream.home.admit(entry)
        if not tickets:
            return 0, stream.home.withdraw(entry)
        self._tickets.add((stream.token, tickets[0]))
        return tickets[0], ""

    async def _admit(self, request: m.Admit, stream: Stream, deadline: Deadline) -> m.Reply:
        admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        wait = waiting.turn("permits", stream.name)
        admit = wait.noting(admitted.set_result)
        entry = Entry(self._client, request.rows, request.nbytes, request.version, admit, admitted.set_exception)
        stream.home.admit(entry)
        if not admitted.done():
            wait.turn(stream.home.admission.full(entry) or "permits", stream.name)
        try:
            if not admitted.done():
                async with asyncio.timeout(deadline.remaining_s):
                    # The home may answer between a cancellation and the moment it is noticed here.
                    await asyncio.shield(admitted)
            ticket = admitted.result()
            wait.turn("")
            self._tickets.add((stream.token, ticket))
            return m.Admitted(request.id, stream.token, ticket)
        except BaseException as error:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                stream.home.admission.give_back(admitted.result())
            why = stream.home.withdraw(entry)
            if isinstance(error, TimeoutError):
                raise Backpressure(
                    f"the stream {stream.name!r} is full ({why})",
                    needed=request.nbytes,
                    waited_s=deadline.waited_s,
                    holders=self._holders(stream),
                ) from None
            raise

    def _holders(self, stream: Stream) -> tuple[dict[str, Any], ...]:
        home = stream.home
        behind = [(name, "not consumed") for name in home.books.behind()] or [
            (name, "dead letters") for name in home.books.dead_letters()
        ]
        holders = [
            {"holder": f"task {name!r} of stream {stream.name!r}", "bytes": home.books.nbytes, "how": how}
            for name, how in behind
        ]
        coming = home.admission.coming()
        holders += [{"holder": str(client), "bytes": nbytes, "how": "admitted"} for client, nbytes in coming.items()]
        return tuple(holders[:_HOLDERS])

    @property
    def expected(self) -> bool:
        """Whether something was admitted that has not come."""
        return bool(self._tickets)

    def revoke(self) -> None:
        """The client gives no sign of life: what it was admitted to bring is given up."""
        for token, ticket in list(self._tickets):
            self._give_back(token, ticket)

    def _give_back(self, token: bytes, ticket: int) -> None:
        if self._owns(token, ticket):
            with suppress(Closed):  # the stream was dropped
                self._homes.find(token).home.admission.give_back(ticket)

    def _owns(self, token: bytes, ticket: int) -> bool:
        """Whether the client was given the ticket, which it has used now."""
        owned = (token, ticket) in self._tickets
        self._tickets.discard((token, ticket))
        return owned

    def _append(self, request: m.Append, stream: Stream) -> m.Reply:
        ref = BatchRef.decode(request.ref)
        staged = request.staged if request.staged in self._staged else ""
        reply = self._come(request, ref, request.ticket, stream, request.spares)
        if not reply.new:
            self._homes.free_scope(staged)
        self.kept(staged, ref)
        return reply

    def append_stored(self, request: m.AppendInline, ref: BatchRef, ticket: int, shard: int) -> m.Appended:
        """The rows of the request come, which `ref` means all of a shard of, stored just now, by a ticket of the
        client's. Where they do not, or are not new, no row needs that. Raises as `Home.append`, LeaseExpired."""
        return self._come(request, ref, ticket, self._homes.find(request.stream), (), shard)

    def _come(
        self,
        request: m.Append | m.AppendInline,
        ref: BatchRef,
        ticket: int,
        stream: Stream,
        spares: Sequence[bytes],
        stored: int | None = None,
    ) -> m.Appended:
        home, kept = stream.home, False
        if not self._owns(stream.token, ticket):
            raise LeaseExpired("this append was not admitted, or was given up since its process was silent for long")
        try:
            arrival = _arrival(request, packed.numbers("versions", request.versions, len(ref)), ref, spares)
            packed.one_a_row("keys", request.keys, len(ref))
            if stored is not None and isinstance(request, m.AppendInline):
                self._homes.keep_stored(stored, sum(request.columns.nbytes))
            else:
                self._homes.keep(ref)
            kept = True
            first, new = home.append(ticket, ref, request.keys, request.digest, arrival, stream.clock())
            unfinished.begun(request, stream, first, self._client)
        except BaseException:
            home.admission.give_back(ticket)
            if kept:
                self._homes.forget(ref)
            raise
        if not new:
            self._homes.forget(ref)
        return m.Appended(request.id, first, new)

    def _extend(self, request: m.Extend, stream: Stream) -> m.Reply:
        ref = BatchRef.decode(request.ref)
        self._more(request, ref, stream, request.spares)
        self.kept(request.staged, ref)
        return m.Done(request.id)

    def extend_stored(self, request: m.ExtendInline, ref: BatchRef) -> None:
        """The columns of the request come, of which `ref` says where they were stored. Where they do not, no row needs
        what `ref` means. Raises as `Home.extend`."""
        self._more(request, ref, self._homes.find(request.stream), ())

    def _more(self, request: m.Extend | m.ExtendInline, ref: BatchRef, stream: Stream, spares: Sequence[bytes]) -> None:
        if request.piece is not None:
            unfinished.grow(self._homes, request, request.piece, ref, stream, spares)
            return
        rows = packed.rows_named(stream.home, request.rows, request.keys)
        self._homes.keep(ref)
        try:
            lengths, holds = packed.lengths(request.lengths, ref), packed.int64("holds", request.holds)
            packed.one_a_row("holds", holds, len(rows))
            stream.home.extend(rows, ref, lengths, stream.clock(), replace=request.replace, holds=holds, spares=spares)
        except BaseException:
            self._homes.forget(ref)
            raise

    def kept(self, staged: str, ref: BatchRef, again: Sequence[Index] = ()) -> None:
        """What was staged is a stream's; what it does not mean goes, and rows of it that came `again`."""
        if staged in self._staged:
            self._homes.unscope(ref)
            self.free_scope(staged)
            for rows in again:
                self._homes.free(ref[rows])


def _check_amount(rows: int, nbytes: int) -> None:
    """Raises LimitExceeded, ProtocolMismatch where no append has so many rows or bytes."""
    packed.bound("rows of an append", m.MAX_ROWS, rows)
    if rows < 1 or nbytes < 0:
        raise ProtocolMismatch(f"an append of {rows} rows and {nbytes} bytes")


def _arrival(request: m.Append | m.AppendInline, versions: Index, ref: BatchRef, spares: Sequence[bytes]) -> Arrival:
    """What a request says of the rows of `ref`. Raises ProtocolMismatch, LimitExceeded."""
    return Arrival(
        packed.one_a_row("groups", request.groups, len(ref)) or None,
        versions,
        packed.tags(request.tags, len(ref)),
        packed.lengths(request.lengths, ref),
        spares,
        None if request.begin is None else Begin(*request.begin),
    )


def _nobody(answer: object) -> None:
    """Nobody waits for it."""
