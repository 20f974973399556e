"""Requests that contain the bytes of their columns: a put, an append, an extend or a write of a table in one message.

The node stores the bytes as a new shard, to which the rows refer. If there is room in the stream and in memory, the
request is completed at once. Otherwise the message waits, and its bytes count against the bound for waiting requests
(`node.requests.waiting_bytes`).

Invariants: rows are admitted before their columns are stored. A stored shard whose rows were refused is freed, even if
the client disconnects or cancels in between. A request that has to wait has neither a permit nor a shard until its
coroutine runs, since it may be refused first.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Hashable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dataplane.batch.frame import ColumnPlace
from dataplane.batch.layout import Outline
from dataplane.batch.layout_check import check_layout
from dataplane.batch.locations import ref_to_shard
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import ProtocolMismatch
from dataplane.node.local.tables import LocalTableClient, checked
from dataplane.node.requests.stream_client import StreamClient
from dataplane.node.sessions import checks
from dataplane.node.sessions.interface import Waiting
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.store.budget import Purpose
from dataplane.store.reservations import rounded
from dataplane.store.store import Store
from dataplane.stream.page import Index
from dataplane.table import requests as r
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

if TYPE_CHECKING:
    from dataplane.node.clustered.tables import TableClient


class InlineRequests:
    """The requests of one client that carry columns."""

    def __init__(
        self,
        client: Hashable,
        node: bytes,
        store: Store,
        streams: StreamClient,
        tables: LocalTableClient | TableClient,
        staged: StagedColumns,
    ) -> None:
        self._client = client
        self._node = node
        self._store = store
        self._streams = streams
        self._tables = tables
        self._staged = staged
        self._scopes = f"{rm.STAGED}{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)

    def put(self, request: sm.PutShard, deadline: Deadline) -> m.Reply | Waiting:
        """Store columns. Returns the reply, or a function to call and await for it. Raises as `Store.put`. If a method
        of this class raises, the shards that the request has stored are freed."""
        _check(request)
        checks.bound("scope", sm.MAX_SCOPE, len(request.scope))
        self._staged.begin(request.scope)
        shard = self._put_now(request, request.purpose, request.scope)
        return partial(self._put, request, deadline) if shard is None else sm.ShardStored(request.id, shard)

    # storing

    def _put_now(self, columns: sm.PutShard | rm.Inline, purpose: Purpose, scope: str = "") -> int | None:
        """The number of the stored shard; None if the request has to wait for memory."""
        how: dict[str, Any] = {"scope": scope, "holder": str(self._client), "purpose": purpose}
        return self._store.put_now(self._client, columns.payload, columns.layout, **how)

    async def _put_soon(
        self, columns: sm.PutShard | rm.Inline, deadline: Deadline, purpose: Purpose, scope: str
    ) -> int:
        how: dict[str, Any] = {"scope": scope, "holder": str(self._client), "purpose": purpose}
        return await self._store.put(self._client, columns.payload, columns.layout, deadline, **how)

    async def _put(self, request: sm.PutShard, deadline: Deadline) -> m.Reply:
        return sm.ShardStored(request.id, await self._put_soon(request, deadline, request.purpose, request.scope))

    # appending

    def append(self, request: rm.AppendRows, columns: rm.Inline, deadline: Deadline) -> m.Reply | Waiting:
        """Append rows. Raises as `Store.put` and `StreamClient.append_stored`."""
        _check(columns)
        versions = checks.int64("versions", request.versions)
        nbytes = sum(columns.nbytes)
        admit = rm.AdmitRows(
            request.id,
            request.stream,
            len(versions),
            nbytes,
            int(versions.max(initial=0)),
            request.keys[0] if request.keys else "",
            request.digest,
            deadline.remaining_s,
        )
        ticket = self._streams.permits.admit_now(admit) if self._streams.alone else None
        if ticket == 0:
            return _repeated(request)
        reply = None if ticket is None else self._append_now(request, columns, versions, ticket)
        return partial(self._append_later, request, columns, admit, deadline) if reply is None else reply

    def _append_now(self, request: rm.AppendRows, columns: rm.Inline, versions: Index, ticket: int) -> m.Reply | None:
        """Append rows that were admitted. If there is no memory, give back their permit, and return None."""
        shard, reply = None, None
        try:
            shard = self._put_now(columns, "append")
            if shard is not None:
                ref = stored(self._node, columns, shard)
                reply = self._streams.append_stored(request, versions, ref, shard, sum(columns.nbytes), ticket)
            return reply
        finally:
            if reply is None:
                self._streams.permits.give_back(ticket)
            if shard is not None and (reply is None or not reply.new):
                self._store.free([shard])

    async def _append_later(
        self, request: rm.AppendRows, columns: rm.Inline, admit: rm.AdmitRows, deadline: Deadline
    ) -> m.Reply:
        """Append in three steps, each of which may wait: wait for the permit, put the columns, append the rows."""
        ticket = await self._streams.permits.admit(admit, deadline)
        if not ticket:
            return _repeated(request)
        scope = self._new_scope()
        try:
            shard = await self._put_soon(columns, deadline, "append", scope)
            ref = stored(self._node, columns, shard)
            return await self._streams.append_staged(request, ref, scope, ticket, deadline)
        except BaseException:
            self._staged.free(scope)
            self._streams.permits.give_back(ticket)
            raise

    # extending

    def extend(self, request: rm.ExtendRows, columns: rm.Inline, deadline: Deadline) -> m.Reply | Waiting:
        """Add columns to rows. Raises as `Store.put` and `StreamClient.extend_stored`."""
        _check(columns)
        shard = self._put_now(columns, "extend") if self._streams.alone else None
        if shard is None:
            return partial(self._extend_later, request, columns, deadline)
        new = False
        try:
            new = self._streams.extend_stored(request, stored(self._node, columns, shard))
        finally:
            if not new:
                self._store.free([shard])
        return m.Done(request.id)

    async def _extend_later(self, request: rm.ExtendRows, columns: rm.Inline, deadline: Deadline) -> m.Reply:
        """Wait for memory, and for the leader of the stream."""
        scope = self._new_scope()
        try:
            shard = await self._put_soon(columns, deadline, "extend", scope)
            return await self._streams.extend_staged(request, stored(self._node, columns, shard), scope)
        except BaseException:
            self._staged.free(scope)
            raise

    def _new_scope(self) -> str:
        """A scope for shards until a stream or table has taken them. It is freed when the client disconnects."""
        scope = f"{self._scopes}-{next(self._numbers)}"
        self._staged.begin(scope)
        return scope

    # writing tables

    def write(self, request: rm.AskTable, columns: rm.Inline, deadline: Deadline) -> m.Reply | Waiting:
        """Write rows. Raises as `Store.put` and `LocalTableClient.write`."""
        _check(columns)
        reply = self._write_now(request, columns, deadline) if self._streams.alone else None
        return partial(self._write_later, request, columns, deadline) if reply is None else reply

    def _write_now(self, request: rm.AskTable, columns: rm.Inline, deadline: Deadline) -> m.Reply | None:
        """Write to a table of this node; None if there is no memory."""
        scope = self._new_scope()
        try:
            shard = self._put_now(columns, "put", scope)
            if shard is not None:
                answer = self._written(request, columns, scope, shard, deadline)
                assert isinstance(answer, m.Message), "a table of this node answers a write at once"
                return answer
        except BaseException:
            self._staged.free(scope)
            raise
        self._staged.free(scope)
        return None

    async def _write_later(self, request: rm.AskTable, columns: rm.Inline, deadline: Deadline) -> m.Reply:
        """Wait for memory, and for the table's leader."""
        scope = self._new_scope()
        try:
            shard = await self._put_soon(columns, deadline, "put", scope)
            answer = self._written(request, columns, scope, shard, deadline)
            return answer if isinstance(answer, m.Message) else await answer()
        except BaseException:
            self._staged.free(scope)
            raise

    def _written(
        self, request: rm.AskTable, columns: rm.Inline, scope: str, shard: int, deadline: Deadline
    ) -> m.Reply | Waiting:
        ref, what = stored(self._node, columns, shard), checked(request)
        if not isinstance(what, r.Upsert):
            raise ProtocolMismatch(f"columns come with a {type(what).__name__}, which is no write")
        if what.ref:
            ref = ref.union(BatchRef.decode(what.ref))
        return self._tables.write(replace(request, columns=None, staged=scope), what, ref, deadline)


def _repeated(request: rm.AppendRows) -> rm.RowsAppended:
    """The answer to an append that was executed before, and whose answer was lost."""
    return rm.RowsAppended(request.id, 0, False)


def stored(node: bytes, columns: rm.Inline, shard: int) -> BatchRef:
    """A reference to a whole shard of this node. Raises ProtocolMismatch if the columns differ from the declaration in
    the request."""
    laid = check_layout(columns.layout, rounded(len(columns.payload)))
    named = _named(laid.outline)
    if len(columns.nbytes) != len(named) or min(columns.nbytes) < 0 or not laid.rows:
        raise ProtocolMismatch(f"{laid.rows} rows of {len(named)} columns, and the bytes of {len(columns.nbytes)}")
    return ref_to_shard(node, laid.rows, named, columns.nbytes, shard)


@lru_cache(maxsize=256)
def _named(outline: Outline) -> dict[str, ColumnPlace]:
    """The columns of a shard with this outline, for a reference to all of it."""
    return {name: ColumnPlace(form.field.declared, 0, slot) for slot, (name, form) in enumerate(outline.columns)}


def _check(columns: sm.PutShard | rm.Inline) -> None:
    checks.bound("payload in a message", sm.MAX_INLINE, len(columns.payload))
    checks.bound("layout", sm.MAX_LAYOUT, len(columns.layout))
