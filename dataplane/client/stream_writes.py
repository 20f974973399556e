"""Writes rows and columns to a stream. Small columns are sent in the message; larger ones are put and then referred to.

Invariants: larger rows get a permit of the stream before their columns are put, so that a full stream does not fill
memory. Columns of rows that were refused are freed, also if this process dies meanwhile.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash

from dataplane.batch.dedupe import Each, digests
from dataplane.batch.field import MEASURED
from dataplane.batch.put_options import Narrow
from dataplane.batch.put_plan import PutPlan
from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import laid_out
from dataplane.client import arguments, events
from dataplane.client.appender import TIMEOUT_S
from dataplane.client.connection import Exchange
from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, Misuse, OwnerDied, PeerUnavailable, SchemaMismatch
from dataplane.observe.ring import CODE
from dataplane.store.budget import Purpose
from dataplane.stream.keys import unnamed
from dataplane.stream.pieces import RowPiece
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream

_APPEND = CODE["append"]
_HANDED = 1 << 12  # the most shards of a reference that the node frees if this process dies during its append

_Named: TypeAlias = tuple[bytes, bytes, list[str]]
"""Rows in the form of `ExtendRows`: their numbers and delivery numbers (int64), or their keys."""


class _Said(NamedTuple):
    """The metadata of an append, in the order and form of the fields of `AppendRows`."""

    keys: list[str]
    digest: bytes
    groups: list[Any]
    versions: bytes
    tags: dict[str, list[Any]]
    begin: tuple[int, float, str] | None = None

    @classmethod
    def of(cls, keys: list[str], group: Any, version: Any, tags: Any, rows: int) -> _Said:
        """The metadata of `rows` rows. Raises Misuse."""
        groups = arguments.groups_of(group, rows)
        versions = arguments.plain("version", version, rows, (int,))
        packed = struct.pack(f"<{rows}q", *versions)
        return cls(keys, b"", groups, packed, arguments.tagged(tags, rows) if tags is not None else {})


class StreamWrites:
    """The writes of this process to one stream."""

    def __init__(self, stream: AsyncStream) -> None:
        self._connection, self._writer, self._getter = stream._connection, stream._writer, stream._getter
        self._name, self._token, self._mark = stream.name, stream._token, stream._mark
        self._settings = stream.settings
        self._expect = stream._expect

    # appending

    def appending(
        self, columns: Any, keys: Any, group: Any, version: Any, tags: Any, timeout: Any
    ) -> Exchange[rm.RowsAppended, list[str]] | None:
        """The request of a small, simple append without keys; None for any other append. Raises as
        `AsyncStream.append`."""
        if keys is not None or self._settings.replicas > 1:
            return None
        laid = laid_out(columns, sm.MAX_INLINE)
        if laid is None:
            return None
        self._expect(columns)
        carried = rm.Inline(laid.payload, laid.layout, [nbytes for *_, nbytes in laid.columns])
        deadline = Deadline.after(arguments.seconds(timeout, TIMEOUT_S))
        said = _Said.of([], group, version, tags, laid.rows)
        return self._carrying(carried, laid.lengths, said, deadline)

    def _carrying(
        self, carried: rm.Inline, lengths: dict[str, bytes], said: _Said, deadline: Deadline
    ) -> Exchange[rm.RowsAppended, list[str]]:
        timeout_s = deadline.remaining_s
        number = self._connection.next_id()
        request = rm.AppendRows(number, self._token, *said, lengths, timeout_s, carried)

        def finish(reply: rm.RowsAppended) -> list[str]:
            events.appended(self._connection, self._mark, reply, said.keys, len(said.versions) // 8)
            return said.keys or self._names(reply, len(said.versions) // 8)

        return Exchange(self._connection, request, rm.RowsAppended, timeout_s, finish, admits=True)

    def _names(self, reply: rm.RowsAppended, rows: int) -> list[str]:
        return unnamed(self._mark, range(reply.first, reply.first + rows))

    async def append_block(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        narrow: Narrow = False,
        begin: tuple[int, float, str] | None = None,
    ) -> list[str]:
        """Append rows as `AsyncStream.append`, without merging concurrent appends. `begin`: begin an unfinished row
        with this token, lease in seconds, and column of tokens (`client.unfinished`)."""
        deadline, began = Deadline.after(arguments.seconds(timeout, TIMEOUT_S)), time.monotonic_ns()
        columns = await self._writer.optioned(columns, narrow)
        planned = None if isinstance(columns, BatchRef) else await self._writer.plan(columns, ())
        rows = len(columns) if planned is None else planned.rows
        if rows < 1:
            raise SchemaMismatch("an append has at least one row", expected="rows", found="none")
        said = _Said.of(arguments.keys_of(keys, rows), group, version, tags, rows)
        versions = np.frombuffer(said.versions, np.int64)
        described = [said.keys, said.groups, versions.tolist(), said.tags, *(begin or ())]
        digest = await self._digest(planned or columns, described) if said.keys else b""
        said = said._replace(digest=digest, begin=begin)
        carried = self._carried(planned)
        if planned is not None and carried is not None:
            if not said.keys and not narrow:
                self._expect(planned)
            return await self._connection.exchange(self._carrying(carried, _lengths(planned), said, deadline))
        admit = rm.AdmitRows(
            self._connection.next_id(),
            self._token,
            rows,
            columns.stored_nbytes if planned is None else sum(c.values.nbytes for c in planned.columns),
            int(versions.max()),
            said.keys[0] if said.keys else "",
            digest,
            deadline.remaining_s,
            self._own(columns) if planned is None else [],
        )
        try:
            return await self._append_admitted(admit, columns, planned, said, deadline, began)
        except (OwnerDied, PeerUnavailable):
            if planned is not None or not deadline.remaining_s:
                raise
        # Only the node that stores rows can share them: while it is away, write what a replica has.
        planned = await self._writer.plan(await self._getter.get(columns, deadline.remaining_s), ())
        admit = msgspec.structs.replace(admit, id=self._connection.next_id(), handing=[])
        return await self._append_admitted(admit, columns, planned, said, deadline, began)

    async def _append_admitted(
        self, admit: rm.AdmitRows, columns: Any, planned: PutPlan | None, said: _Said, deadline: Deadline, began: int
    ) -> list[str]:
        """Append rows whose columns do not fit a message. The columns are put once the stream admits the rows."""
        connection, ticket = self._connection, 0
        if admit.handing:
            connection.handing.add(admit.id)
        connection.heartbeat.due(+1)  # without heartbeats the permit is revoked
        try:
            ticket = (await connection.request(admit, rm.RowsAdmitted, deadline.remaining_s)).ticket
            if not ticket:  # the append is a repetition, and its rows are in the stream
                self._keep(admit)
                return said.keys
            async with self._stored(columns, planned, deadline, "append") as (staged, ref):
                request = rm.AppendRows(
                    connection.next_id(),
                    self._token,
                    *said,
                    await self._lengths_of(ref, planned),
                    deadline.remaining_s,
                    ticket=ticket,
                    staged=staged,
                    ref=ref.encode(),
                    spares=await self._spares(ref, deadline),
                    admitted=admit.id if admit.handing else 0,
                )
                reply = await connection.request(request, rm.RowsAppended, deadline.remaining_s)
            if connection.events is not None:
                connection.events.record(_APPEND, began, admit.nbytes)
                events.appended(connection, self._mark, reply, said.keys, admit.rows)
        except BaseException:
            self._keep(admit, ticket)
            raise
        finally:
            connection.handing.discard(admit.id)
            connection.heartbeat.due(-1)
        return said.keys or self._names(reply, admit.rows)

    def _keep(self, admit: rm.AdmitRows, ticket: int = 0) -> None:
        """Return the permit of an append that failed. The caller remains the owner of a reference's shards, so the node
        must not free them when this process ends."""
        with suppress(DataplaneError):
            self._connection.check()
            if ticket:
                self._connection.tell(rm.ReturnPermit(self._token, ticket))
            if admit.handing:
                self._connection.tell(m.Cancel(admit.id))

    def _own(self, ref: BatchRef) -> list[int]:
        """The shards of a reference that this plane's node frees if this process dies during the append: those that are
        on it. None if they are more than `_HANDED`, so that the message stays small."""
        own = [number for node, number in ref.shards() if node == self._connection.welcome.node]
        return own if len(own) <= _HANDED else []

    # extending

    async def extend(
        self,
        rows: BatchRef | Sequence[str],
        columns: Any,
        replace: bool,
        timeout: float | None,
        piece: Callable[[bytes], RowPiece] | None = None,
    ) -> dict[str, bytes]:
        """Add columns to rows. Returns the lengths of the rows in each ragged column, as int64. Raises as
        `AsyncStream.extend`. `piece`: append a piece to an unfinished row instead. The function is called with a digest
        of the columns, and returns the description of the piece."""
        asked = self.extending(rows, columns, replace, timeout, piece)
        if asked is not None:
            await self._connection.exchange(asked)
            lengths: dict[str, bytes] = asked.request.lengths
            return lengths
        deadline = Deadline.after(arguments.seconds(timeout, TIMEOUT_S))
        named = self.named(rows)
        planned = None if isinstance(columns, BatchRef) else await self._writer.plan(columns, ())
        made = None if piece is None else piece(await self._digest(planned or columns, []))
        if planned is not None:
            arguments.check_rows(planned.rows, len(rows), planned.columns[0].name, piece=piece is not None)
            if not planned.rows:
                return {}
            carried = self._carried(planned)
            if carried is not None:
                asked = self._bringing(carried, _lengths(planned), named, replace, deadline.remaining_s, made)
                await self._connection.exchange(asked)
                return _lengths(planned)
        async with self._stored(columns, planned, deadline, "extend") as (staged, ref):
            lengths = await self._lengths_of(ref, planned)
            request = rm.ExtendRows(
                self._connection.next_id(),
                self._token,
                *named,
                lengths,
                bool(replace),
                piece=made,
                staged=staged,
                ref=ref.encode(),
                spares=await self._spares(ref, deadline),
            )
            await self._connection.request(request, m.Done, 0.0)
        return lengths

    def extending(
        self,
        rows: BatchRef | Sequence[str],
        columns: Any,
        replace: Any,
        timeout: Any,
        piece: Callable[[bytes], RowPiece] | None = None,
    ) -> Exchange[m.Done, None] | None:
        """The request of a small, simple extend; None for any other extend. Raises as `extend`."""
        laid = None if self._settings.replicas > 1 else laid_out(columns, sm.MAX_INLINE)
        if laid is None:
            return None
        arguments.check_rows(laid.rows, len(rows), laid.columns[0][0], piece=piece is not None)
        timeout_s = Deadline.after(arguments.seconds(timeout, TIMEOUT_S)).remaining_s
        carried = rm.Inline(laid.payload, laid.layout, [nbytes for *_, nbytes in laid.columns])
        made = None if piece is None else piece(xxhash.xxh3_128_digest(bytes(laid.payload) + bytes(laid.layout)))
        return self._bringing(carried, laid.lengths, self.named(rows), replace, timeout_s, made)

    def _bringing(
        self,
        carried: rm.Inline,
        lengths: dict[str, bytes],
        named: _Named,
        replace: Any,
        timeout_s: float,
        piece: RowPiece | None = None,
    ) -> Exchange[m.Done, None]:
        number = self._connection.next_id()
        request = rm.ExtendRows(number, self._token, *named, lengths, bool(replace), timeout_s, piece, carried)
        return Exchange(self._connection, request, m.Done, timeout_s, lambda reply: None, admits=True)

    def named(self, rows: BatchRef | Sequence[str]) -> _Named:
        """The names of rows for a request: numbers with delivery numbers, or keys."""
        if isinstance(rows, BatchRef):
            origins = rows.origins()
            if not origins and len(rows):
                raise Misuse("these rows were not delivered by a stream; pass a delivery's ref, or keys")
            if any(token != self._token for token, _, _ in origins):
                raise Misuse(f"these rows were delivered by another stream than {self._name!r}")
            numbers = np.empty(len(rows), np.int64)
            for _, at, of in origins:
                numbers[at] = of
            return numbers.tobytes(), rows.holds().tobytes(), []
        keys = arguments.listed("rows", rows)
        return b"", b"", arguments.keys_of(keys, len(keys))

    # shared by both

    def _stored(
        self, columns: Any, planned: PutPlan | None, deadline: Deadline, purpose: Purpose
    ) -> AbstractAsyncContextManager[tuple[str, BatchRef]]:
        """Columns with their scope, as `ShardWriter.staged`. The scope of a reference is empty."""
        if planned is None:
            return nullcontext(("", columns))
        return self._writer.staged(planned, deadline.remaining_s, purpose)

    def _carried(self, planned: PutPlan | None) -> rm.Inline | None:
        """The columns in the form of a message; None if they must be put first."""
        return None if planned is None or self._settings.replicas > 1 else self._writer.inline(planned)

    async def _spares(self, ref: BatchRef, deadline: Deadline) -> list[bytes]:
        """Replicate the columns if the stream has replicas. Returns the nodes that have all of them."""
        if self._settings.replicas == 1:
            return []
        return await self._writer.replicate(ref, self._settings.replicas, deadline.remaining_s, staged=True)

    async def _digest(self, columns: PutPlan | BatchRef, said: list[Any]) -> bytes:
        """The digest that identifies repetitions of an append: xxh3-128 of its metadata and columns."""
        state = xxhash.xxh3_128(msgspec.msgpack.encode(said))
        if isinstance(columns, BatchRef):
            state.update(columns.encode())
        else:
            await self._writer.in_thread(columns.nbytes, _digest_columns, state, columns, self._writer.each)
        return state.digest()

    async def _lengths_of(self, ref: BatchRef, planned: PutPlan | None) -> dict[str, bytes]:
        if planned is not None:
            return _lengths(planned)
        measured = [name for name, field in ref.schema.items() if field.kind in MEASURED]
        if not measured:
            return {}
        batch = await self._getter.get(ref.select(*measured), TIMEOUT_S)
        return {name: np.asarray(batch[name].lengths()).tobytes() for name in measured}


def _lengths(planned: PutPlan) -> dict[str, bytes]:
    return {c.name: c.lengths.tobytes() for c in planned.columns if c.lengths is not None}


def _digest_columns(state: Any, planned: PutPlan, each: Each) -> None:
    for column in planned.columns:
        state.update(msgspec.msgpack.encode((column.name, column.field)))
        for digest in digests(column.values, each):
            state.update(digest)
