"""What a client asks of a stream's rows: to be given some, or to be shown what a sampler of its own may choose from.

What always holds: what a request was granted and can not be told is given back; what a delivery says is put together
when its client can take it, and its lease begins then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np

from dataplane import waiting
from dataplane.clock import Deadline
from dataplane.errors import LeaseExpired, Misuse, NotReady
from dataplane.node.streams.homes import Homes, Stream
from dataplane.node.streams.packed import bound, int64
from dataplane.stream.choosing import Demand, Wants, candidates, needed
from dataplane.stream.lease import Grant, Who
from dataplane.stream.progress import DEAD
from dataplane.stream.sampler import TokenBalanced
from dataplane.wire import messages as m

Room = Callable[[], Awaitable[bool]]
"""Waits until a client can take a large reply; whether that took time."""

MAX_LEASE_S = 7 * 86400.0
_BYTES, _ROW, _TAG = m.MAX_FRAME // 2, 48, 64  # what is shown of rows, and about how much of it a row and a tag are


async def no_wait() -> bool:
    """There is room for whatever is said."""
    return False


class Delivering:
    """Deliveries to one client, to whom `client` is the key."""

    def __init__(self, client: object, homes: Homes, room: Room) -> None:
        self._client = client
        self._homes = homes
        self._room = room

    def untold(self, request: m.Consume, reply: m.Reply) -> None:
        """The reply is larger than a message: what it granted is given back."""
        if isinstance(reply, m.Delivered):
            self._unseen(request, self._homes.find(request.stream), reply.grant)

    def _unseen(self, request: m.Consume, stream: Stream, grant: int) -> None:
        with suppress(LeaseExpired):  # it may have ended meanwhile
            stream.home.nack(grant, self._client, request.replica, stream.clock(), seen=False)

    async def consume(self, request: m.Consume, stream: Stream, deadline: Deadline) -> m.Reply:
        """Rows of a task, once there are enough. Raises NotReady, Closed, Misuse."""
        demand, served = self._demand(request, stream)
        if request.sampler is None:
            chosen, expired = int64("rows", request.chosen), int64("rows", request.expired)
            grant = stream.home.take(demand, chosen, expired, stream.clock())
            if grant is None:
                raise NotReady("others have taken these rows", stream=stream.name, task=request.task)
            served.set_result(grant)
        else:
            stream.home.consume(demand, stream.clock())
        stream.schedule()
        try:
            if not served.done():
                async with asyncio.timeout(deadline.remaining_s):
                    await asyncio.shield(served)  # the home may answer between a cancellation and its being noticed
            grant = served.result()
            if await self._room():
                self._hand(grant, demand, stream, deadline)
            return _granted(request, stream, grant)
        except BaseException as error:
            stream.home.forget(demand)
            if served.done() and not served.cancelled() and served.exception() is None:
                self._unseen(request, stream, served.result().number)
            if isinstance(error, TimeoutError):
                raise not_ready(stream.name, request.task, deadline) from None
            raise

    def _hand(self, grant: Grant, demand: Demand, stream: Stream, deadline: Deadline) -> None:
        """The lease begins as the delivery can be told. Raises NotReady where it has ended before: the client took
        nothing for as long as that."""
        if stream.home.leases.live(grant.number) is not grant:
            raise not_ready(stream.name, stream.home.settings.tasks[demand.task], deadline)
        stream.home.leases.hand(grant, demand.who, stream.clock())

    def _demand(self, request: m.Consume, stream: Stream) -> tuple[Demand, asyncio.Future[Grant]]:
        bound("rows of a delivery", m.MAX_ROWS, request.rows)
        if not 1 <= request.min_rows <= request.rows:
            raise Misuse(f"a delivery is of one row or more: rows={request.rows}, min_rows={request.min_rows}")
        if not 0 < request.lease_s <= MAX_LEASE_S:
            raise Misuse(f"a lease is of more than 0 and at most {MAX_LEASE_S:.0f} s, not {request.lease_s}")
        columns = tuple(request.columns)
        if not columns or len(set(columns)) != len(columns):
            raise Misuse("a task asks for at least one column, and each once")
        served: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        demand = Demand(
            task=stream.home.settings.task(request.task),
            rows=request.rows,
            min_rows=request.min_rows,
            columns=columns,
            sampler=request.sampler,
            who=Who(self._client, request.member, request.replica, request.replicas),
            lease_s=request.lease_s,
            serve=waiting.turn("rows", stream.name).noting(served.set_result),
            fail=served.set_exception,
        )
        return demand, served

    async def look(self, request: m.Look, stream: Stream, deadline: Deadline) -> m.Reply:
        """What there is to choose from, once there is something new. Raises NotReady, Closed, Misuse."""
        home, wants = stream.home, Wants(tuple(request.lengths), tuple(request.tags))
        task, columns = home.settings.task(request.task), tuple(request.columns)
        who = Who(self._client, request.member, request.replica, request.replicas)
        most = min(request.most, _BYTES // (_ROW + 8 * len(wants.needs) + _TAG * len(wants.tags_read)))
        rows = np.empty(0, np.int64)
        try:
            async with asyncio.timeout(deadline.remaining_s):
                while home.leases.waiting(task, who) is None:
                    if home.changes > request.seen:
                        rows = home.books.progress.ready(task, needed(columns, wants), most)
                    if len(rows):
                        break
                    home.check_drained(task)
                    await stream.changed()
                    self._homes.find(stream.token)
        except TimeoutError:
            raise not_ready(stream.name, request.task, deadline) from None
        shown = candidates(home.books, task, rows, wants, stream.clock(), closed=home.closed, whole=len(rows) < most)
        return m.Shown(
            id=request.id,
            changes=home.changes,
            rows=rows.tobytes(),
            group=shown.group.tobytes(),
            version=shown.version.tobytes(),
            age_s=shown.age_s.tobytes(),
            group_rows=shown.group_rows.tobytes(),
            group_dropped=shown.group_dropped.tobytes(),
            lengths={name: values.tobytes() for name, values in shown.lengths.items()},
            tags={name: values.tolist() for name, values in shown.tags.items()},
            latest=shown.latest,
            closed=shown.closed,
            whole=shown.whole,
            left=home.books.progress.is_left(task),
        )


def dead_letters(request: m.Dead, stream: Stream) -> m.Delivered:
    """The first rows that were given back too often, with the columns that all of them have. Raises Misuse."""
    home = stream.home
    rows = home.books.progress.in_state(home.settings.task(request.task), DEAD)[: max(0, request.most)]
    columns = [name for name in home.books.rows.schema if len(rows) and home.books.rows.have(rows, name)]
    ref = home.books.rows.ref(rows, columns).with_origin(stream.token, rows).encode() if columns else b""
    return m.Delivered(request.id, stream.token, 0, None, ref, home.books.keys.names(rows), *home.books.told(rows), {})


def _granted(request: m.Consume, stream: Stream, grant: Grant) -> m.Delivered:
    home, rows = stream.home, grant.rows
    ref = home.books.rows.ref(rows, grant.columns).with_origin(stream.token, rows, home.hold(grant)).encode()
    measured = request.sampler.needs if isinstance(request.sampler, TokenBalanced) else ()
    lengths = {name: home.books.lengths(rows, name).tobytes() for name in measured}
    keys = home.books.keys.names(rows) if home.books.keys.given else []
    return m.Delivered(
        request.id, stream.token, grant.number, request.replica, ref, keys, *home.books.told(rows), lengths
    )


def not_ready(stream: str, task: str, deadline: Deadline) -> NotReady:
    """What a task is told for which no rows of the stream of this name became ready in time."""
    return NotReady(
        f"no rows of stream {stream!r} became ready for task {task!r} in {deadline.waited_s:.1f} s",
        stream=stream,
        task=task,
        waited_s=deadline.waited_s,
    )
