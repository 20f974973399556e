"""Requests that carry their columns: a put, an append or an extend of a small shard in one message.

The node stores the bytes as a shard of its own, to which the rows of the stream refer. If there is room in the stream
and in memory, everything is done at once; else the request waits with its bytes, within the memory for waiting requests
(`node.request_bytes`).

Invariants: rows are admitted before their columns are stored; a stored shard whose rows were refused is freed, also
if the client goes or cancels in between.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Hashable
from functools import partial

from dataplane.clock import Deadline
from dataplane.errors import ProtocolMismatch
from dataplane.node.streams import request_checks
from dataplane.node.streams.client import StreamClient
from dataplane.node.streams.inline_shard import stored
from dataplane.node.streams.sessions import Waiting
from dataplane.node.streams.staged_columns import StagedColumns
from dataplane.store.store import Store
from dataplane.stream.page import Index
from dataplane.wire import messages as m

Carrying = m.Put | m.AppendInline | m.ExtendInline


class Inlining:
    """The requests of one client that carry columns."""

    def __init__(
        self, client: Hashable, node: bytes, store: Store, streams: StreamClient, staged: StagedColumns
    ) -> None:
        self._client = client
        self._node = node
        self._store = store
        self._streams = streams
        self._staged = staged
        self._scopes = f"{m.STAGED}{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)

    def answer(self, request: Carrying, deadline: Deadline) -> m.Reply | Waiting:
        """The reply, or a function to call and await for it. Raises as `Store.put`, `StreamClient.append_stored` and
        `extend_stored`; then nothing of the request stays."""
        match request:
            case m.Put():
                _check(request.payload, request.layout)
                request_checks.bound("scope", m.MAX_SCOPE, len(request.scope))
                self._staged.begin(request.scope)
                shard = self._put_now(request, request.scope)
                return partial(self._put, request, deadline) if shard is None else m.Stored(request.id, shard)
            case m.AppendInline():
                _check(request.columns.payload, request.columns.layout)
                return self._append(request, deadline)
            case m.ExtendInline():
                _check(request.columns.payload, request.columns.layout)
                return self._extend(request, deadline)

    # storing

    def _put_now(self, columns: m.Put | m.Inline, scope: str = "") -> int | None:
        """The stored shard; None if it has to wait for memory."""
        return self._store.put_now(self._client, columns.payload, columns.layout, scope=scope, holder=str(self._client))

    async def _put_soon(self, columns: m.Put | m.Inline, deadline: Deadline, scope: str = "") -> int:
        return await self._store.put(
            self._client, columns.payload, columns.layout, deadline, scope=scope, holder=str(self._client)
        )

    async def _put(self, request: m.Put, deadline: Deadline) -> m.Reply:
        return m.Stored(request.id, await self._put_soon(request, deadline, request.scope))

    # appending

    def _append(self, request: m.AppendInline, deadline: Deadline) -> m.Reply | Waiting:
        versions = request_checks.int64("versions", request.versions)
        if self._streams.permits.fits(request, versions):
            shard = self._put_now(request.columns)
            if shard is not None:
                return self._appended(request, versions, 0, shard)
        ticket = self._streams.permits.take_now(request, versions)
        if ticket is not None:
            return self._append_now(request, versions, ticket, deadline)
        admit = m.Admit(
            request.id,
            request.stream,
            len(versions),
            sum(request.columns.nbytes),
            int(versions.max(initial=0)),
            request.keys[0] if request.keys else "",
            request.digest,
            deadline.remaining_s,
        )
        admitted = self._streams.answer(admit, deadline)
        return partial(self._append_later, request, versions, admitted, deadline)

    def _append_now(
        self, request: m.AppendInline, versions: Index, ticket: int, deadline: Deadline
    ) -> m.Reply | Waiting:
        if not ticket:  # it was made before, by the very same call, whose answer was lost
            return m.Appended(request.id, 0, False)
        if not self._streams.alone:
            return partial(self._append_staged, request, ticket, deadline)
        try:
            shard = self._put_now(request.columns)
        except BaseException:
            self._give_back(request.stream, ticket)
            raise
        if shard is None:
            return partial(self._append_stored, request, versions, ticket, deadline)
        return self._appended(request, versions, ticket, shard)

    async def _append_stored(
        self, request: m.AppendInline, versions: Index, ticket: int, deadline: Deadline
    ) -> m.Reply:
        """There is room in the stream but not in memory."""
        try:
            shard = await self._put_soon(request.columns, deadline)
        except BaseException:
            self._give_back(request.stream, ticket)
            raise
        return self._appended(request, versions, ticket, shard)

    def _appended(self, request: m.AppendInline, versions: Index, ticket: int, shard: int) -> m.Reply:
        try:
            ref = stored(self._node, request.columns, shard)
            reply = self._streams.append_stored(request, versions, ref, shard, ticket)
        except BaseException:
            self._give_back(request.stream, ticket)
            self._store.free([shard])
            raise
        if not reply.new:
            self._store.free([shard])
        return reply

    async def _append_later(
        self, request: m.AppendInline, versions: Index, admitted: m.Reply | Waiting | None, deadline: Deadline
    ) -> m.Reply:
        """As three requests, each of which may wait."""
        reply = admitted if admitted is None or isinstance(admitted, m.Message) else await admitted()
        if not isinstance(reply, m.Admitted):
            raise ProtocolMismatch("nothing that can be appended to")
        answer = self._append_now(request, versions, reply.ticket, deadline)
        return answer if isinstance(answer, m.Message) else await answer()

    async def _append_staged(self, request: m.AppendInline, ticket: int, deadline: Deadline) -> m.Reply:
        """The leader of the stream may be another node."""
        scope = self._new_scope()
        try:
            shard = await self._put_soon(request.columns, deadline, scope)
            append = m.Append(
                request.id,
                request.stream,
                ticket,
                scope,
                stored(self._node, request.columns, shard).encode(),
                request.keys,
                request.digest,
                request.groups,
                request.versions,
                request.tags,
                request.lengths,
                begin=request.begin,
            )
            return await self._done(append, deadline)
        except BaseException:
            self._give_back(request.stream, ticket)
            self._staged.free(scope)
            raise

    def _give_back(self, stream: bytes, ticket: int) -> None:
        self._streams.answer(m.GiveBack(stream, ticket), Deadline.after(0.0))

    # extending

    def _extend(self, request: m.ExtendInline, deadline: Deadline) -> m.Reply | Waiting:
        shard = self._put_now(request.columns) if self._streams.alone else None
        if shard is None:
            return partial(self._extend_later, request, deadline)
        new = False
        try:
            new = self._streams.extend_stored(request, stored(self._node, request.columns, shard))
        finally:
            if not new:
                self._store.free([shard])
        return m.Done(request.id)

    async def _extend_later(self, request: m.ExtendInline, deadline: Deadline) -> m.Reply:
        """As two requests, each of which may wait."""
        scope = self._new_scope()
        try:
            shard = await self._put_soon(request.columns, deadline, scope)
            extend = m.Extend(
                request.id,
                request.stream,
                scope,
                stored(self._node, request.columns, shard).encode(),
                request.rows,
                request.holds,
                request.keys,
                request.lengths,
                request.replace,
                piece=request.piece,
            )
            return await self._done(extend, deadline)
        except BaseException:
            self._staged.free(scope)
            raise

    def _new_scope(self) -> str:
        """A scope for shards on their way to a stream; it is freed when the client goes."""
        scope = f"{self._scopes}-{next(self._numbers)}"
        self._staged.begin(scope)
        return scope

    async def _done(self, request: m.Append | m.Extend, deadline: Deadline) -> m.Reply:
        answer = self._streams.answer(request, deadline)
        if answer is None:
            raise ProtocolMismatch("a request without an answer")
        return answer if isinstance(answer, m.Message) else await answer()


def _check(payload: bytes, layout: bytes) -> None:
    request_checks.bound("payload in a message", m.MAX_INLINE, len(payload))
    request_checks.bound("layout", m.MAX_LAYOUT, len(layout))
