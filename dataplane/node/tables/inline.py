"""Writes that carry their columns: a put and a write of a small shard in one message.

The node stores the bytes as a shard of its own, to which the rows refer. If there is room in memory and the table is on
this node, everything is done at once; else the request waits with its bytes, within the memory for waiting requests
(`node.request_bytes`).

Invariant: a stored shard whose rows were not written is freed, also if the client goes or cancels in between.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Hashable
from functools import partial
from typing import Protocol

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import ProtocolMismatch
from dataplane.node.streams import request_checks
from dataplane.node.streams.inline_shard import stored
from dataplane.node.streams.sessions import Waiting
from dataplane.node.streams.staged_columns import StagedColumns
from dataplane.node.tables.tables import checked
from dataplane.store.store import Store
from dataplane.table import requests as r
from dataplane.wire import messages as m


class _Writes(Protocol):
    """The tables as one client uses them."""

    def write(self, request: m.AskTable, what: r.Upsert, ref: BatchRef | None, deadline: Deadline) -> m.Reply | Waiting:
        """As `Tabling.write`."""


class WritingInline:
    """The writes of one client that carry columns."""

    def __init__(self, client: Hashable, node: bytes, store: Store, staged: StagedColumns, tables: _Writes) -> None:
        self._client = client
        self._node = node
        self._store = store
        self._staged = staged
        self._tables = tables
        self._scopes = f"{m.STAGED}{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)

    def answer(self, request: m.WriteInline, deadline: Deadline) -> m.Reply | Waiting:
        """The reply, or a function to call and await for it. Raises as `Store.put` and `Tabling.write`; then nothing
        of the request stays."""
        columns = request.columns
        request_checks.bound("payload in a message", m.MAX_INLINE, len(columns.payload))
        request_checks.bound("layout", m.MAX_LAYOUT, len(columns.layout))
        scope = f"{self._scopes}-{next(self._numbers)}"
        self._staged.begin(scope)
        shard = self._store.put_now(
            self._client, columns.payload, columns.layout, scope=scope, holder=str(self._client)
        )
        if shard is None:
            return partial(self._put, request, scope, deadline)
        try:
            answer = self._write(request, scope, shard, deadline)
        except BaseException:
            self._staged.free(scope)
            raise
        return answer if isinstance(answer, m.Message) else partial(self._written, answer, scope)

    async def _put(self, request: m.WriteInline, scope: str, deadline: Deadline) -> m.Reply:
        """There is no room in memory yet."""
        columns, holder = request.columns, str(self._client)
        try:
            shard = await self._store.put(
                self._client, columns.payload, columns.layout, deadline, scope=scope, holder=holder
            )
            answer = self._write(request, scope, shard, deadline)
            return answer if isinstance(answer, m.Message) else await answer()
        except BaseException:
            self._staged.free(scope)
            raise

    async def _written(self, answer: Waiting, scope: str) -> m.Reply:
        try:
            return await answer()
        except BaseException:
            self._staged.free(scope)
            raise

    def _write(self, request: m.WriteInline, scope: str, shard: int, deadline: Deadline) -> m.Reply | Waiting:
        ref, what = stored(self._node, request.columns, shard), checked(request.write)
        if not isinstance(what, r.Upsert):
            raise ProtocolMismatch(f"columns come with a {type(what).__name__}, which is no write")
        if what.ref:
            ref = ref.union(BatchRef.decode(what.ref))
        write = msgspec.structs.replace(request.write, id=request.id, staged=scope)
        return self._tables.write(write, what, ref, deadline)
