"""Streams that one client restores from a checkpoint. A partition is filled, and its stream gets a name once all is
restored.

The partition is replicated from its first row like any other. The record of the stream is written last, so an
incomplete stream cannot be opened.

Invariant: a stream that has no name yet is dropped when its client ends.
"""

from __future__ import annotations

from functools import partial

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse
from dataplane.node.sessions import checks
from dataplane.node.sessions.interface import RestoringStream, StreamService, StreamSession, happened
from dataplane.stream import requests as r
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm


class Restores:
    """The streams that one client restores."""

    def __init__(self, session: StreamSession, service: StreamService) -> None:
        self._session = session
        self._service = service
        self._streams: dict[bytes, RestoringStream] = {}

    def __contains__(self, token: bytes) -> bool:
        """Whether the client is restoring a stream with this token."""
        return token in self._streams

    async def begin(self, request: rm.RestoreStream) -> rm.Opened:
        """Begin to restore a stream. Raises Misuse if its name is taken, Corrupt, LimitExceeded, PeerUnavailable,
        OutcomeUnknown."""
        head = request.head
        restored = await self._service.prepare(request.name, head.settings, head.mark)
        token = restored.token
        self._streams[token] = restored
        try:
            await self._session.ask(restored.partition, r.Restore(head=head), r.Succeeded)
        except BaseException:
            self.drop(token)
            raise
        return rm.Opened(request.id, token, head.settings, restored.generation)

    async def restore_rows(self, request: rm.RestoreRows) -> m.Done:
        """Restore rows. Raises Misuse, Corrupt, LimitExceeded, OutcomeUnknown."""
        await self._session.ask(self._find(request.stream).partition, r.RestoreBlock(block=request.block), r.Succeeded)
        return m.Done(request.id)

    async def restore_columns(self, request: rm.RestoreColumns) -> BatchRef:
        """Restore columns of restored rows. Returns a reference to them. Raises Misuse, SchemaMismatch,
        LimitExceeded, Lost, OutcomeUnknown."""
        partition, ref = self._find(request.stream).partition, BatchRef.decode(request.ref)
        rows, spares = checks.int64("rows", request.rows), tuple(request.spares)
        asked = r.RestoreColumnBatch(rows=rows, ref=ref, task=request.task, nodes=spares)
        claim = await self._service.claim(partition, ref, spares)
        await self._session.ask(partition, asked, r.Succeeded, settled=partial(happened, (claim,)))
        return ref

    async def finish(self, request: rm.PublishRestored) -> m.Done:
        """Publish the stream. Raises Misuse if its name was taken meanwhile, PeerUnavailable, OutcomeUnknown."""
        restored = self._find(request.stream)
        await self._session.ask(restored.partition, r.FinishRestore(), r.Succeeded)
        await self._service.publish(restored)
        self._streams.pop(request.stream, None)  # the client may have ended meanwhile
        return m.Done(request.id)

    def drop(self, token: bytes) -> None:
        restored = self._streams.pop(token, None)
        if restored is not None:
            self._session.run_soon(lambda: self._service.discard(restored))

    def leave(self) -> None:
        """Give up all restorations, since the client has ended."""
        for token in list(self._streams):
            self.drop(token)

    def _find(self, token: bytes) -> RestoringStream:
        restored = self._streams.get(token)
        if restored is None:
            raise Misuse("no stream of this token is being restored by this client")
        return restored
