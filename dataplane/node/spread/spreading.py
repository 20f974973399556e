"""What a client asks of streams, where these are over several hosts: each request done by the homes that it concerns.

A request names a stream by a token: that of a part, which has one home and is asked there, or that of the whole, as its
node knows it, and then what is asked is split by rows and put together again: appends and extends in `bringing`,
deliveries in `gathering`, the rest here.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import Closed, LeaseExpired, Misuse, PeerUnavailable
from dataplane.node.spread.bringing import Bringing
from dataplane.node.spread.gathering import Gathering
from dataplane.node.spread.looking import Looking
from dataplane.node.spread.merging import merged, summed
from dataplane.node.spread.reach import Reach, all_of
from dataplane.node.spread.sharing import Sharing
from dataplane.node.spread.snapshotting import Snapshotting
from dataplane.node.spread.wholes import Part, Whole
from dataplane.node.streams import packed
from dataplane.node.streams.streaming import StreamRequest, Waiting
from dataplane.node.tables.homes import HomeTables, TableReach
from dataplane.node.tables.tables import TableRequest
from dataplane.wire import messages as m


class Spreading:
    """The streams over hosts as one client uses them. `streams` are the parts here as it does."""

    def __init__(self, reach: Reach, sharing: Sharing, tables: HomeTables | TableReach) -> None:
        self._streams = reach.streams
        self._tables = tables
        self._reach = reach
        self._sharing = sharing
        self._wholes = reach.wholes
        self._bringing = Bringing(self._reach)
        self._looking = Looking(reach)
        self._snapshotting = Snapshotting(reach)
        self._gathering = Gathering(reach, self._looking)

    # what is as on one host

    def staged(self, scope: str) -> None:
        """As `Streaming.staged`."""
        self._streams.staged(scope)

    def free_scope(self, scope: str) -> None:
        """As `Streaming.free_scope`."""
        self._streams.free_scope(scope)

    @property
    def expected(self) -> bool:
        """Whether something was admitted that has not come."""
        return self._streams.expected or self._bringing.expected

    def revoke(self) -> None:
        """As `Streaming.revoke`."""
        self._bringing.revoke()
        self._streams.revoke()

    def leave(self) -> None:
        """The client has gone."""
        self._gathering.leave()
        self._bringing.revoke()
        self._streams.leave()
        self._reach.leave()
        self._tables.leave()

    def untold(self, request: m.Consume | m.Admit, reply: m.Reply) -> None:
        """The reply can not be told: what it gave is given back."""
        if isinstance(reply, m.Delivered):
            replica = request.replica if isinstance(request, m.Consume) else None
            ack = m.Ack(0, reply.stream, reply.grant, replica, done=False, seen=False)
            self._reach.run_soon(self._take_back(ack))
        elif isinstance(reply, m.Admitted):
            self.answer(m.GiveBack(reply.stream, reply.ticket), Deadline.after(0.0))

    async def _take_back(self, ack: m.Ack) -> None:
        answer = self.answer(ack, Deadline.after(0.0))
        if answer is not None and not isinstance(answer, m.Message):
            await answer()

    # requests

    def answer(self, request: StreamRequest | TableRequest, deadline: Deadline) -> m.Reply | Waiting | None:
        """As `Streaming.answer`, and as `Tabling.answer`."""
        self._wholes.look()
        if isinstance(request, TableRequest):
            return self._tables.answer(request, deadline)
        match request:
            case m.Open():
                packed.bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                return partial(self._open, request)
            case m.ReadSnapshot(snapshot=number) if number < 0:
                return partial(self._snapshotting.read, request)
            case m.ReleaseSnapshot(snapshot=number) if number < 0:
                self._snapshotting.release(number)
                return None
            case m.Streams() | m.ReadSnapshot() | m.ReleaseSnapshot() | m.Restore():
                return self._streams.answer(request, deadline)
            case m.GiveBack():
                if self._wholes.is_part(request.stream):
                    return self._streams.answer(request, deadline)
                self._bringing.give_back(request.ticket, request.brought)
                return None
        whole = self._wholes.whole(request.stream)
        if whole is None and self._streams.restoring(request.stream):
            if isinstance(request, m.Restored):
                return partial(self._restored, request)
            return self._streams.answer(request, deadline)
        if whole is None:
            return partial(self._elsewhere, request, deadline)
        if request.stream == whole.stream.token:
            return self._streams.answer(request, deadline)
        return partial(self._spread, request, whole, deadline)

    async def _open(self, request: m.Open) -> m.Reply:
        whole = await self._wholes.open(request.name, request.settings)
        return m.Opened(request.id, whole.token, whole.settings, whole.here.mark, spread=True)

    async def _restored(self, request: m.Restored) -> m.Reply:
        """A stream is restored here: from now on it is one of all hosts, and its rows move to their homes."""
        await self._wholes.restored(request.stream, lambda: self._streams.answer(request, Deadline.after(0.0)))
        return m.Done(request.id)

    async def _elsewhere(self, request: Any, deadline: Deadline) -> m.Reply:
        """The request is about what is on another node alone."""
        waits = isinstance(request, m.Consume | m.Look | m.Watch | m.Admit)
        part: Part | None = None
        try:
            _, part = await self._wholes.route(request.stream)
            reply = await self._reach.ask(part, request, m.Message, deadline if waits else None)
        except (PeerUnavailable, Closed) as error:
            if isinstance(request, m.Ack | m.Renew) and part is None:  # else it may have been done there
                raise LeaseExpired(f"these rows go to others: {error}") from error
            raise
        return msgspec.structs.replace(reply, id=getattr(request, "id", 0))  # type: ignore[return-value]

    async def _spread(self, request: Any, whole: Whole, deadline: Deadline) -> m.Reply:
        match request:
            case m.Admit():
                return await self._bringing.admit(request, whole, deadline)
            case m.Append():
                return await self._bringing.append(request, whole)
            case m.Extend():
                await self._bringing.extend(request, whole)
            case m.Consume(replica=int()) | m.Look(replica=int()):
                return await self._shared(request, whole, deadline)
            case m.Consume():
                return await self._gathering.consume(request, whole, deadline)
            case m.Look():
                return await self._looking.look(request, whole, deadline)
            case m.Ack(replica=int()):
                await self._sharing.ack(self._reach, request, whole)
            case m.Ack():
                await self._gathering.ack(request)
            case m.Renew(replica=int()):
                await self._sharing.renew(self._reach, request, whole)
            case m.Renew():
                await self._gathering.renew(request)
            case m.DropRows():
                await self._drop_rows(request, whole)
            case m.End(drop=True):
                await self._wholes.drop(whole)
            case m.End():
                await self._reach.of_all(whole, lambda part: m.End(0, part.token, drop=False), m.Done)
            case m.Dead():
                return await self._dead(request, whole)
            case m.TakeSnapshot():
                return await self._snapshotting.take(request, whole)
            case m.TakeLost():
                return await self._lost(request, whole)
            case m.Measure():
                replies = await self._reach.of_all(whole, lambda part: m.Measure(0, part.token), m.Figures)
                return m.Figures(request.id, summed([reply.values for _, reply in replies]))
            case _:
                raise Misuse(f"{type(request).__name__} is not for a stream that is over several hosts")
        return m.Done(request.id)

    async def _shared(self, request: m.Consume | m.Look, whole: Whole, deadline: Deadline) -> m.Reply:
        """What replicas are given, their member's home decides."""
        home = self._sharing.home(whole, request.task, request.member)
        if home != self._wholes.node:
            part = await self._wholes.part(whole, home)
            asked = msgspec.structs.replace(request, id=0, stream=part.whole, timeout_s=deadline.remaining_s)
            reply = await self._reach.ask(part, asked, m.Message, deadline)
            return msgspec.structs.replace(reply, id=request.id)  # type: ignore[return-value]
        if isinstance(request, m.Consume):
            return await self._sharing.consume(self._reach, request, whole, deadline)
        return await self._sharing.look(self._reach, request, whole, deadline)

    async def _lost(self, request: m.TakeLost, whole: Whole) -> m.LostRows:
        """What homes tell of, they tell once: where one does not answer, what others have told is not lost again."""
        rows = []
        for part in await self._wholes.parts(whole):
            with suppress(PeerUnavailable):
                rows += (await self._reach.ask(part, m.TakeLost(0, part.token), m.LostRows)).rows
        return m.LostRows(request.id, rows)

    async def _drop_rows(self, request: m.DropRows, whole: Whole) -> None:
        numbers = packed.int64("rows", request.rows)
        count = len(request.keys) or len(numbers)
        asked: dict[Part, tuple[bytes, list[str | int]]] = {}
        for part, positions, keyed in await self._reach.rows_of(whole, count, request.origins, request.keys):
            asked[part] = (keyed if request.keys else numbers[positions]).tobytes(), []
        if request.groups:
            for node, positions in self._wholes.homes(whole, request.groups).items():
                part = await self._wholes.part(whole, node)
                rows, _ = asked.get(part, (b"", []))
                asked[part] = rows, [request.groups[at] for at in positions.tolist()]
        await all_of(
            [
                self._drop(whole, part, m.DropRows(0, part.token, rows, [], groups))
                for part, (rows, groups) in asked.items()
            ]
        )

    async def _drop(self, whole: Whole, part: Part, request: m.DropRows) -> None:
        reply = await self._reach.ask(part, request, m.Message)
        if isinstance(reply, m.Elsewhere):
            moved = msgspec.structs.replace(request, rows=reply.rows, origins=reply.origins)
            await self._drop_rows(moved, whole)

    async def _dead(self, request: m.Dead, whole: Whole) -> m.Reply:
        most, found = request.most, []
        for part in await self._wholes.parts(whole):
            reply = await self._reach.ask(part, m.Dead(0, part.token, request.task, max(most, 0)), m.Delivered)
            if reply.versions:
                found.append((part, reply))
            most -= len(reply.versions)
        if not found:
            return msgspec.structs.replace(reply, id=request.id)
        columns = set.intersection(*({*_columns(each)} for _, each in found))
        return merged(request.id, whole.token, found, 0, None, columns)


def _columns(reply: m.Delivered) -> tuple[str, ...]:
    return BatchRef.decode(reply.ref).columns if reply.ref else ()
