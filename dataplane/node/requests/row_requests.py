"""The requests of one client about rows of streams and tables, and the puts whose message contains the columns.

A request is answered at once if possible. If it has to wait, a coroutine is returned that sends the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, get_args

from dataplane.clock import Deadline
from dataplane.errors import LimitExceeded
from dataplane.node.local.tables import LocalTableClient, TableRequest
from dataplane.node.requests.inline_columns import InlineRequests
from dataplane.node.requests.stream_client import StreamClient, StreamRequest
from dataplane.node.sessions.checks import deadline_of
from dataplane.node.sessions.interface import Waiting
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.local import LocalChannel

if TYPE_CHECKING:
    from dataplane.node.clients import Client, NodeServices
    from dataplane.node.clustered.tables import TableClient

RowRequest = StreamRequest | TableRequest | sm.PutShard
ROW_REQUESTS = frozenset(get_args(RowRequest))


class RowRequests:
    """See the module. The client's leases and permits are released when it leaves."""

    def __init__(self, client: Client, services: NodeServices, staged: StagedColumns, channel: LocalChannel) -> None:
        self._client = client
        self._staged = staged
        self._channel = channel
        node, store, clustered = services.node, services.store, services.clustered
        service = services.streams if clustered is None else clustered.streams
        shared = None if clustered is None else clustered.tables
        self._streams = StreamClient(service, staged, channel.room, owner=client)
        self._tables: LocalTableClient | TableClient
        self._tables = LocalTableClient(services.tables, staged) if shared is None else shared.client(staged)
        self.pending = PendingShards(lambda shards: services.needed.free_unhanded(shards, client.label))
        self._inline = InlineRequests(client, node, store, self._streams, self._tables, staged)

    def answer(self, request: RowRequest) -> Coroutine[Any, Any, None] | None:
        """Execute the request and send its reply. If it has to wait, return a coroutine that does so."""
        deadline = deadline_of(getattr(request, "timeout_s", 0.0))
        answer: m.Reply | Waiting | None
        carries = True
        match request:
            case sm.PutShard():
                answer = self._inline.put(request, deadline)
            case rm.AppendRows(columns=rm.Inline() as columns):
                answer = self._inline.append(request, columns, deadline)
            case rm.ExtendRows(columns=rm.Inline() as columns):
                answer = self._inline.extend(request, columns, deadline)
            case rm.AskTable(columns=rm.Inline() as columns):
                answer = self._inline.write(request, columns, deadline)
            case rm.AskTable() | rm.ListTables():
                carries, answer = False, self._tables.answer(request, deadline)
            case _:
                carries, answer = False, self._about_stream(request, deadline)
        if isinstance(answer, m.Message):
            self._channel.send(answer)
        elif answer is not None:
            return self._answer_soon(answer) if carries else self._answer_later(request, answer)
        return None

    def _about_stream(self, request: StreamRequest, deadline: Deadline) -> m.Reply | Waiting | None:
        """The answer to a request about a stream whose message contains no columns."""
        if isinstance(request, rm.AdmitRows):
            self.pending.begin(request.id, request.handing)
        elif isinstance(request, rm.AppendRows):
            self.pending.end(request.admitted)
        return self._streams.answer(request, deadline)

    async def _answer_soon(self, answer: Waiting) -> None:
        """Send a small reply. This does not wait until the client can receive it, since the request cannot be
        undone."""
        self._channel.send(await answer())

    async def _answer_later(self, request: RowRequest, answer: Waiting) -> None:
        reply = await answer()
        try:
            if self._channel.full:
                await self._client.send_later(reply)
            else:
                self._channel.send(reply)
        except BaseException:  # the reply is too large, or was cancelled while it waited to be sent
            self._streams.undo(request, reply)
            raise

    # The end

    def revoke(self) -> None:
        self._streams.permits.revoke()

    def leave(self) -> None:
        """Release the client's leases, permits and staged columns, since it has ended. Its leased rows are delivered
        to other consumers."""
        self._streams.leave()
        self._tables.leave()
        self._staged.leave()


_MOST = 1 << 16  # shards of a client


class PendingShards:
    """Shards that a client has put and is about to append to a stream. They are freed if the client ends first.

    Shards outlive the process that put them. Without this class, shards would never be freed if their process is killed
    while its `append` of a reference waits for room.

    Invariant: only shards that the client itself put without a scope, and that no row of a stream needs, are freed
    here.

    The request for a permit lists the shards that it is for. `free(shards)` frees those that the client may free.
    """

    def __init__(self, free: Callable[[Sequence[int]], None]) -> None:
        self._free = free
        self._shards: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

    def begin(self, request: int, shards: list[int]) -> None:
        """Note shards that are to be appended once the request with this id has a permit (`stream.admission`). Raises
        LimitExceeded."""
        if shards:
            asked = len(self) + len(shards)
            if asked > _MOST:
                what = "shards that a client is about to append"
                raise LimitExceeded(f"{asked} {what}", what=what, asked=asked, limit=_MOST)
            self._shards[request] = shards

    def end(self, request: int) -> None:
        """Forget the shards of this request: they were appended, or remain the client's."""
        self._shards.pop(request, None)

    def leave(self) -> None:
        """Free all noted shards: the client has ended."""
        shards, self._shards = self._shards, {}
        for each in shards.values():
            self._free(each)
