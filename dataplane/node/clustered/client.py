"""What one client asks of the cluster's streams, each message answered by what it concerns.

What always holds: what a client staged and did not append, what it was admitted to bring, and what it holds goes with
it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import Closed, LeaseExpired, Lost, Misuse
from dataplane.node.clustered.asking import patiently
from dataplane.node.clustered.measuring import measured
from dataplane.node.clustered.producer_router import Arriving, ProducerRouter
from dataplane.node.clustered.reads import ClientReads
from dataplane.node.clustered.restores import Restores
from dataplane.node.clustered.row_router import RowRouter
from dataplane.node.clustered.session import asked_until
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.node.clustered.unfinished import UnfinishedRows
from dataplane.node.streams import packed
from dataplane.node.streams.streaming import Streaming, StreamRequest, Waiting
from dataplane.stream import requests as r
from dataplane.wire import messages as m

if TYPE_CHECKING:
    from dataplane.node.clustered.service import ClusteredStreams

_STREAMS = 50  # whose figures one message has


class ClusteredClient:
    """The streams of the cluster as one client uses them. `here` are those of this node alone: what it stages, and a
    stream that it restores."""

    def __init__(self, service: ClusteredStreams, here: Streaming) -> None:
        self._service = service
        self._here = here
        self._session = service.session()
        self._producers = ProducerRouter(self._session, service.placing, service.holders)
        self._rows = RowRouter(self._session, service.streams, service.holders)
        self._unfinished = UnfinishedRows(self._session, self._rows, service.holders)
        self._reads = ClientReads(self._session, service.turns, service.replicas(self._session))
        self._restores = Restores(self._session, service.partitions.directory, service.holders)

    def staged(self, scope: str) -> None:
        """As `Streaming.staged`."""
        self._here.staged(scope)

    def free_scope(self, scope: str) -> None:
        """As `Streaming.free_scope`."""
        self._here.free_scope(scope)

    @property
    def expected(self) -> bool:
        """Whether something was admitted that has not come."""
        return self._producers.expected or self._here.expected

    def revoke(self) -> None:
        """As `Streaming.revoke`."""
        self._producers.revoke()
        self._here.revoke()

    def leave(self) -> None:
        """The client has gone."""
        self._producers.revoke()
        self._here.leave()
        self._reads.leave()
        self._restores.leave()
        self._session.leave()

    def untold(self, request: m.Consume | m.Admit, reply: m.Reply) -> None:
        """The reply can not be told: what it gave is given back."""
        if isinstance(reply, m.Delivered):
            replica = request.replica if isinstance(request, m.Consume) else None
            ack = m.Ack(0, reply.stream, reply.grant, replica, done=False, seen=False)
            answer = self.answer(ack, Deadline.after(0.0))
            if answer is not None and not isinstance(answer, m.Message):
                self._session.run_soon(answer())
        elif isinstance(reply, m.Admitted):
            self._producers.give_back(reply.ticket)

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
                self._producers.give_back(request.ticket)
                return None
            case m.ReadSnapshot():
                return partial(self._reads.snapshots.read, request)
            case m.ReleaseSnapshot():
                self._reads.snapshots.release(request.snapshot)
                return None
            case m.Restore():
                packed.bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                return partial(self._restores.begin, request)
        if request.stream in self._restores:
            return partial(self._restored, request)
        try:
            stream, partition = self._service.streams.find(request.stream)
        except Closed as error:
            if isinstance(request, m.Ack | m.Renew):
                raise LeaseExpired(f"these rows go to others, or are done: {error}") from error
            raise
        if isinstance(request, m.Admit) and not stream.settings.limited:
            return m.Admitted(request.id, stream.token, self._producers.unlimited(stream))
        return partial(self._answer, request, stream, partition, deadline)

    async def _open(self, request: m.Open) -> m.Reply:
        stream = await patiently(lambda: self._service.streams.open(request.name, request.settings))
        return m.Opened(request.id, stream.token, stream.settings, "", clustered=True)

    async def _answer(self, request: Any, stream: Stream, partition: Partition | None, deadline: Deadline) -> m.Reply:
        try:
            return await self._answered(request, stream, partition, deadline)
        except Lost as error:
            if await self._service.dropped(stream):
                raise Closed("the stream was dropped") from error
            raise

    async def _answered(self, request: Any, stream: Stream, partition: Partition | None, deadline: Deadline) -> m.Reply:
        match request:
            case m.Admit():
                ticket = await self._producers.admit(request, stream, deadline)
                return m.Admitted(request.id, stream.token, ticket)
            case m.Append():
                return await self._append(request, stream, deadline)
            case m.Extend(piece=piece) if piece is not None:
                ref = BatchRef.decode(request.ref)
                new = await self._unfinished.grow(request, piece, ref, stream)
                self._here.kept(request.staged, ref, [] if new else [np.arange(len(ref))])
            case m.TendRow() | m.ListUnfinished():
                return await self._unfinished.answer(request, stream)
            case m.Extend():
                ref = BatchRef.decode(request.ref)
                await self._rows.extend(request, ref, stream)
                self._here.kept(request.staged, ref)
            case m.Ack() if partition is not None:
                await self._settle(request, partition)
            case m.Renew() if partition is not None:
                await self._session.ask(partition, r.Renew(grant=request.grant, replica=request.replica), r.Done)
            case m.DropRows():
                await self._rows.drop(request, stream)
            case m.End(drop=True):
                await self._service.drop(stream)
            case m.End():
                await self._service.close(stream)
            case m.TakeLost():
                return m.LostRows(request.id, await self._service.take_lost(stream, self._session))
            case m.Measure():
                return m.Figures(request.id, await measured(self._session, stream))
            case m.Consume() | m.Look() | m.Ack() | m.Renew() | m.Dead() | m.TakeSnapshot():
                return await self._reads.answer(request, stream, deadline)
            case _:
                raise Misuse(f"{type(request).__name__} is not for a stream of a cluster")
        return m.Done(request.id)

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

    async def _append(self, request: m.Append, stream: Stream, deadline: Deadline) -> m.Appended:
        ref = BatchRef.decode(request.ref)
        arriving = Arriving.of(request, ref, request.spares)
        until = asked_until(deadline)
        reply, again = await self._producers.append(request.ticket, stream, arriving, request.id, until)
        self._here.kept(request.staged, ref, again)
        return reply

    async def _settle(self, request: m.Ack, partition: Partition) -> None:
        if request.done:
            await self._reads.acks.ack(partition, request.grant, request.replica)
        else:
            asked = r.Nack(grant=request.grant, replica=request.replica, seen=request.seen)
            await self._session.ask(partition, asked, r.Done)
