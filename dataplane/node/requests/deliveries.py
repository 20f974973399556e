"""The deliveries of one client: its `consume` calls, and the candidates for samplers that run in the client.

Invariants: leased rows that cannot be sent to the client are given back. The lease of a delivery begins when the client
can receive the rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from dataplane.clock import Deadline
from dataplane.errors import Closed, LeaseExpired, Misuse, NotReady
from dataplane.node.sessions import checks
from dataplane.node.sessions.interface import OpenedStream, StreamService, StreamSession
from dataplane.stream import requests as r
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm

Room = Callable[[], Awaitable[bool]]
"""Waits until the client can receive a large reply. Returns whether it had to wait."""

_MAX_LEASE_S = 7 * 86400.0
_BYTES, _ROW, _TAG = (
    m.MAX_FRAME // 2,
    48,
    64,
)  # the most bytes of candidates in a message; roughly the bytes of a row of them, and of a tag of a row

_Member = tuple[bytes, str, str, int | None]
"""One of the replicas of a member of a task: stream, task, member, number of the replica."""


@dataclass(slots=True)
class _LastGrant:
    """The last grant that a replica received. The requests of a replica run one at a time. Each names the grant that
    was received last, so that a grant whose answer was lost is sent again."""

    last: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Deliveries:
    """See the module. `room`: see `StreamClient`."""

    def __init__(self, service: StreamService, session: StreamSession, room: Room) -> None:
        self._service = service
        self._session = session
        self._room = room
        self._members: dict[_Member, _LastGrant] = {}

    def undelivered(self, request: Any, stream: bytes, given: r.Delivered) -> None:
        """Give back rows that were leased for a request and cannot be sent. A replica of a member asks for the rows
        again instead."""
        if given.replica is not None:
            received = self._received(request)
            received.last = min(received.last, given.grant - 1)
            return
        found = self._service.named(stream)
        if found is not None and found.partition is not None:
            self._session.give_back_soon(found.partition, given.grant)

    async def consume(
        self, request: rm.AskStream, asked: r.Consume, stream: OpenedStream, deadline: Deadline
    ) -> rm.StreamAnswer:
        """Lease rows to a task once enough are ready. Raises NotReady, Closed, Misuse."""
        _check_consume(asked, stream)
        if asked.replica is None:
            return rm.StreamAnswer(request.id, stream.token, await self._take(asked, stream, deadline, None))
        received = self._received(request)
        try:
            async with asyncio.timeout(deadline.remaining_s) as waiting, received.lock:
                waiting.reschedule(None)
                given = await self._take(asked, stream, deadline, received.last)
                received.last = max(received.last, given.grant)  # a grant that was given back may follow later ones
                return rm.StreamAnswer(request.id, stream.token, given)
        except TimeoutError:
            raise not_ready(stream.name, asked.task, deadline) from None

    async def look(
        self, request: rm.AskStream, wanted: r.Look, stream: OpenedStream, deadline: Deadline
    ) -> rm.StreamAnswer:
        """Return the candidate rows for a sampler of the client, once they have changed. Raises NotReady, Closed,
        Misuse."""
        asked = msgspec.structs.replace(
            wanted,
            client=self._session.client,
            sequence=0,
            most=min(wanted.most, _BYTES // (_ROW + 8 * len(wanted.lengths) + _TAG * len(wanted.tags))),
            after=None if wanted.replica is None else self._received(request).last,
        )

        def queue() -> str:  # one for each client, since each waits for other changes
            return f"{self._session.client} {_queue(asked)}"

        try:
            shown = await self._service.on(
                stream, lambda at: self._session.ask(at, asked, r.CandidateRows, deadline, waits=queue)
            )
        except NotReady:
            raise not_ready(stream.name, wanted.task, deadline) from None
        return rm.StreamAnswer(request.id, stream.token, shown)

    async def _take(
        self, wanted: r.Consume, stream: OpenedStream, deadline: Deadline, after: int | None
    ) -> r.Delivered:
        """Lease rows. `after`: the last grant that the replica received; None if the member has no replicas."""
        asked = msgspec.structs.replace(wanted, client=self._session.client, sequence=0, after=after)
        waits = partial(_queue, asked) if asked.sampler is not None else None

        async def consume(partition: Any) -> r.Delivered:
            def late(given: r.Delivered) -> None:
                if after is None:  # a replica asks for its grant again
                    self._session.give_back_soon(partition, given.grant)

            until = deadline if waits else None
            given = await self._session.ask(partition, asked, r.Delivered, until, waits=waits, late=late)
            try:
                if await self._room():  # the lease begins once the delivery can be sent
                    await self._session.ask(partition, r.Renew(grant=given.grant, replica=asked.replica), r.Succeeded)
            except BaseException as error:
                late(given)
                if isinstance(error, LeaseExpired):  # the client received nothing for the time of a lease
                    raise NotReady("", stream=stream.name, task=asked.task) from None
                raise
            return given

        try:
            return await self._service.on(stream, consume)
        except NotReady:
            if not waits:
                raise NotReady("others have taken these rows", stream=stream.name, task=asked.task) from None
            raise not_ready(stream.name, asked.task, deadline) from None

    def _received(self, request: Any) -> _LastGrant:
        asked = request.asked
        member = request.stream, asked.task, asked.member, asked.replica
        if member not in self._members:
            self._members = {each: last for each, last in self._members.items() if self._is_open(each[0])}
        return self._members.setdefault(member, _LastGrant())

    def _is_open(self, stream: bytes) -> bool:
        with suppress(Closed):
            return bool(self._service.find(stream))
        return False


def _check_consume(request: r.Consume, stream: OpenedStream) -> None:
    """Validate a request without its partition. Raises Misuse, LimitExceeded."""
    checks.bound("rows of a delivery", rm.MAX_ROWS, request.rows)
    stream.settings.task(request.task)
    if not 1 <= request.min_rows <= request.rows:
        raise Misuse(f"rows is 1 or more, and min_rows 1 to rows: not rows={request.rows}, min_rows={request.min_rows}")
    if not 0 < request.lease_s <= _MAX_LEASE_S:
        raise Misuse(f"a lease is of more than 0 and at most {_MAX_LEASE_S:.0f} s, not {request.lease_s}")
    groups_of, most = getattr(request.sampler, "group_size", None), stream.settings.group_size
    if groups_of and most and groups_of > most:
        raise Misuse(f"the sampler waits for groups of {groups_of} rows, and the stream's group_size is {most}")
    if not request.columns or len(set(request.columns)) != len(request.columns):
        raise Misuse(f"columns are one name or more, each once; not {list(request.columns)}")


def _queue(asked: r.Consume | r.Look) -> str:
    """The queue of a waiting request. Equal requests share one. Each replica of a member has its own."""
    what = asked.task, asked.columns, asked.member, asked.replica
    if isinstance(asked, r.Consume):
        return msgspec.json.encode((*what, asked.rows, asked.min_rows, asked.sampler)).decode()
    return msgspec.json.encode(what).decode()


def not_ready(stream: str, task: str, deadline: Deadline) -> NotReady:
    """The error of a consumer for which no rows became ready in time."""
    return NotReady(
        f"no rows of stream {stream!r} became ready for task {task!r} in {deadline.waited_s:.1f} s",
        stream=stream,
        task=task,
        waited_s=deadline.waited_s,
    )
