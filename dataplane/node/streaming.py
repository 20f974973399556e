"""What a client asks of streams: each request answered from a home, or made to wait there.

What always holds: what a request was granted and can not be told is given back; what a client staged and did not
append goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence, Sized
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, LimitExceeded, Misuse, NotReady, ProtocolMismatch
from dataplane.node.homes import Homes, Stream
from dataplane.store.store import Store
from dataplane.stream.home import Arrival, Demand, Entry, Home
from dataplane.stream.lease import Grant, Who
from dataplane.stream.sampler import Fifo, TokenBalanced
from dataplane.wire import messages as m

Index = npt.NDArray[np.int64]
T = TypeVar("T")
S = TypeVar("S", bound=Sized)

Waiting = Callable[[], Coroutine[Any, Any, m.Reply]]

MAX_LEASE_S = 7 * 86400.0
MAX_TAGS = 64
_MAX_LENGTH = 1 << 40  # of a row: what 65,536 of them add up to stays within 63 bits

StreamRequest = (
    m.Open
    | m.Admit
    | m.GiveBack
    | m.Append
    | m.Extend
    | m.Consume
    | m.Look
    | m.Ack
    | m.Renew
    | m.DropRows
    | m.End
    | m.Dead
    | m.Streams
)


class Streaming:
    """The streams as one client uses them, to whom `client` is the key."""

    def __init__(self, client: object, homes: Homes, store: Store) -> None:
        self._client = client
        self._homes = homes
        self._store = store
        self._staged: set[str] = set()
        self._tickets: set[tuple[bytes, int]] = set()  # by stream: what was admitted and has not come

    def staged(self, scope: str) -> None:
        """The client puts something under this scope."""
        if scope.startswith(m.STAGED):
            self._staged.add(scope)

    def unstaged(self, scope: str) -> None:
        """The client has freed the scope."""
        self._staged.discard(scope)

    def leave(self) -> None:
        """The client has gone."""
        self._homes.leave(self._client)
        for scope in self._staged:
            self._store.free_scope(scope)
        self._staged.clear()

    def answer(self, request: StreamRequest, deadline: Deadline) -> m.Reply | Waiting | None:
        """The reply, or what has to be called and awaited for it; None where there is none."""
        match request:
            case m.Open():
                _bound("the name of a stream", m.MAX_SCOPE, len(request.name))
                stream = self._homes.open(request.name, request.settings)
                return m.Opened(request.id, stream.token, stream.home.settings)
            case m.Streams():
                return m.Figures(request.id, self._homes.figures())
        stream = self._homes.find(request.stream)
        now = stream.clock()
        match request:
            case m.Admit():
                return partial(self._admit, request, stream, deadline)
            case m.GiveBack():
                if self._owns(stream, request.ticket):
                    stream.home.give_back(request.ticket)
                return None
            case m.Append():
                return self._append(request, stream)
            case m.Extend():
                return self._extend(request, stream)
            case m.Consume():
                return partial(self._consume, request, stream, deadline)
            case m.Look():
                return partial(self._look, request, stream, deadline)
            case m.Ack():
                if request.done:
                    stream.home.ack(request.grant, self._client, request.replica, now)
                else:
                    stream.home.nack(request.grant, self._client, request.replica, now, seen=request.seen)
            case m.Renew():
                stream.home.leases.renew(request.grant, self._client, request.replica, now)
                stream.schedule()
            case m.DropRows():
                stream.home.drop_rows(_rows(stream.home, request.rows, request.keys), now)
            case m.End():
                if request.drop:
                    self._homes.drop(stream)
                else:
                    stream.home.close(now)
            case m.Dead():
                home = stream.home
                rows = home.dead(home.task(request.task))
                columns = [name for name in home.rows.schema if len(rows)]
                has = [name for name in columns if home.rows.have(rows, name)]
                return _delivered(request.id, stream, 0, None, rows, has)
        return m.Done(request.id)

    # appending

    async def _admit(self, request: m.Admit, stream: Stream, deadline: Deadline) -> m.Reply:
        _bound("rows of an append", m.MAX_ROWS, request.rows)
        if request.rows < 1 or request.nbytes < 0:
            raise ProtocolMismatch(f"an append of {request.rows} rows and {request.nbytes} bytes")
        admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = Entry(
            self._client, request.rows, request.nbytes, request.version, admitted.set_result, admitted.set_exception
        )
        stream.home.admit(entry)
        try:
            async with asyncio.timeout(deadline.remaining_s):
                # Shielded, as below: the home may answer between a cancellation and the moment it is noticed here.
                ticket = await asyncio.shield(admitted)
            self._tickets.add((stream.token, ticket))
            return m.Admitted(request.id, stream.token, ticket)
        except BaseException as error:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                stream.home.give_back(admitted.result())
            why = stream.home.withdraw(entry)
            if isinstance(error, TimeoutError):
                raise Backpressure(
                    f"the stream {stream.name!r} is full ({why})",
                    needed=request.nbytes,
                    waited_s=deadline.waited_s,
                    holders=self._holders(stream),
                ) from None
            raise

    def _holders(self, stream: Stream) -> tuple[dict[str, Any], ...]:
        figures = stream.home.statistics(stream.clock())
        return tuple(
            {"holder": f"task {name!r} of stream {stream.name!r}", "bytes": figures["bytes"], "how": "not consumed"}
            for name in figures["behind"]
        )

    def _owns(self, stream: Stream, ticket: int) -> bool:
        """Whether the client was given the ticket, which it has used now."""
        owned = (stream.token, ticket) in self._tickets
        self._tickets.discard((stream.token, ticket))
        return owned

    def _append(self, request: m.Append, stream: Stream) -> m.Reply:
        home = stream.home
        ref, kept = BatchRef.decode(request.ref), False
        if not self._owns(stream, request.ticket):
            raise Misuse("this append was not admitted")
        staged = request.staged if request.staged in self._staged else ""
        try:
            arrival = Arrival(
                _one_a_row("groups", request.groups, len(ref)) or None,
                _numbers("versions", request.versions, len(ref)),
                _tags(request.tags, len(ref)),
                _lengths(request.lengths, ref),
            )
            _one_a_row("keys", request.keys, len(ref))
            self._homes.keep(ref)
            kept = True
            first, new = home.append(request.ticket, ref, request.keys, arrival, stream.clock())
        except BaseException:
            home.give_back(request.ticket)
            if kept:
                self._homes.forget(ref)
            raise
        if new:  # before it, `free(scope=...)` of whoever put the rows would have freed them
            self._store.unscope(number for _, number in ref.shards())
        else:
            self._homes.forget(ref)
            self._store.free_scope(staged)
        self.unstaged(staged)
        return m.Appended(request.id, first, new)

    def _extend(self, request: m.Extend, stream: Stream) -> m.Reply:
        ref = BatchRef.decode(request.ref)
        rows = _rows(stream.home, request.rows, request.keys)
        self._homes.keep(ref)
        try:
            lengths = _lengths(request.lengths, ref)
            stream.home.extend(rows, ref, lengths, stream.clock(), replace=request.replace)
        except BaseException:
            self._homes.forget(ref)
            raise
        self._store.unscope(number for _, number in ref.shards())
        self.unstaged(request.staged)
        return m.Done(request.id)

    # consuming

    def untold(self, request: m.Consume, reply: m.Reply) -> None:
        """The reply is larger than a message: what it granted is given back."""
        if isinstance(reply, m.Delivered):
            stream = self._homes.find(request.stream)
            stream.home.nack(reply.grant, self._client, request.replica, stream.clock(), seen=False)

    async def _consume(self, request: m.Consume, stream: Stream, deadline: Deadline) -> m.Reply:
        demand, served = self._demand(request, stream)
        now = stream.clock()
        if request.sampler is None:
            self._take(request, stream, demand, served)
        else:
            stream.home.consume(demand, now)
        stream.schedule()
        try:
            if not served.done():
                async with asyncio.timeout(deadline.remaining_s):
                    await asyncio.shield(served)
            grant = served.result()
            return _delivered(
                request.id, stream, grant.number, request.replica, grant.rows, grant.columns, _needs(request.sampler)
            )
        except BaseException as error:
            stream.home.forget(demand)
            if served.done() and not served.cancelled() and served.exception() is None:
                stream.home.nack(served.result().number, self._client, request.replica, stream.clock(), seen=False)
            if isinstance(error, TimeoutError):
                raise _not_ready(stream, request.task, deadline) from None
            raise

    def _demand(self, request: m.Consume, stream: Stream) -> tuple[Demand, asyncio.Future[Grant]]:
        _bound("rows of a delivery", m.MAX_ROWS, request.rows)
        if not 1 <= request.min_rows <= request.rows:
            raise Misuse(f"a delivery is of one row or more: rows={request.rows}, min_rows={request.min_rows}")
        if not 0 < request.lease_s <= MAX_LEASE_S:
            raise Misuse(f"a lease is of more than 0 and at most {MAX_LEASE_S:.0f} s, not {request.lease_s}")
        columns = tuple(request.columns)
        if not columns or len(set(columns)) != len(columns):
            raise Misuse("a task asks for at least one column, and each once")
        served: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        demand = Demand(
            task=stream.home.task(request.task),
            rows=request.rows,
            min_rows=request.min_rows,
            columns=columns,
            need=stream.home.rows.need(columns),
            sampler=request.sampler or Fifo(),
            who=Who(self._client, request.member, request.replica, request.replicas),
            lease_s=request.lease_s,
            serve=served.set_result,
            fail=served.set_exception,
        )
        return demand, served

    def _take(self, request: m.Consume, stream: Stream, demand: Demand, served: asyncio.Future[Grant]) -> None:
        """Grant rows that the client chose, as far as nobody else has taken them meanwhile."""
        home, now = stream.home, stream.clock()
        waiting = home.leases.waiting(demand.task, demand.who)
        if waiting is None:
            home.expire(demand.task, home.still_ready(demand, _int64("rows", request.expired)))
            chosen = home.still_ready(demand, _int64("rows", request.chosen))
            if len(chosen) < request.min_rows:
                raise NotReady("others have taken these rows", stream=stream.name, task=request.task)
            waiting = home.lease(demand, chosen[: request.rows], now)
        home.leases.hand(waiting, demand.who, now)
        served.set_result(waiting)

    async def _look(self, request: m.Look, stream: Stream, deadline: Deadline) -> m.Reply:
        home = stream.home
        task, need = home.task(request.task), home.rows.need(request.columns)
        most = min(request.most, m.MAX_ROWS)
        try:
            async with asyncio.timeout(deadline.remaining_s):
                while True:
                    rows = home.ready(task, need, most) if home.changes > request.seen else np.empty(0, np.int64)
                    if len(rows):
                        break
                    home.check_drained(task)
                    await stream.changed()
                    self._homes.find(stream.token)
        except TimeoutError:
            raise _not_ready(stream, request.task, deadline) from None
        wants = _Wants(tuple(request.lengths), tuple(request.tags))
        shown = home.candidates(rows, wants, stream.clock(), whole=len(rows) < most)
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
        )


class _Wants:
    """What somebody's sampler reads."""

    def __init__(self, needs: tuple[str, ...], tags_read: tuple[str, ...]) -> None:
        self.needs = needs
        self.tags_read = tags_read


def _needs(sampler: Any) -> tuple[str, ...]:
    return sampler.needs if isinstance(sampler, TokenBalanced) else ()


def _delivered(
    identifier: int,
    stream: Stream,
    grant: int,
    replica: int | None,
    rows: Index,
    columns: Sequence[str],
    lengths: Sequence[str] = (),
) -> m.Delivered:
    groups, versions, tags = stream.home.facts(rows)
    ref = stream.home.rows.ref(rows, columns).with_origin(stream.token, rows).encode() if len(columns) else b""
    measured = {name: stream.home.lengths(rows, name).tobytes() for name in lengths}
    keys = stream.home.keys.names(rows) if stream.home.keys.given else []
    return m.Delivered(identifier, stream.token, grant, replica, ref, keys, groups, versions, tags, measured)


def _not_ready(stream: Stream, task: str, deadline: Deadline) -> NotReady:
    return NotReady(
        f"no rows of stream {stream.name!r} became ready for task {task!r} in {deadline.waited_s:.1f} s",
        stream=stream.name,
        task=task,
        waited_s=deadline.waited_s,
    )


def _rows(home: Home, rows: bytes, keys: list[str]) -> Index:
    return home.keys.numbers(keys) if keys else _int64("rows", rows)


def _bound(what: str, limit: int, asked: int) -> None:
    if asked > limit:
        raise LimitExceeded(f"{asked} is more than {limit}: {what}", what=what, asked=asked, limit=limit)


def _int64(what: str, packed: bytes) -> Index:
    if len(packed) % 8:
        raise ProtocolMismatch(f"{what} that are no 64-bit integers")
    return np.frombuffer(packed, "<i8").astype(np.int64, copy=False)


def _numbers(what: str, packed: bytes, count: int) -> Index:
    return _exactly(what, _int64(what, packed), count)


def _lengths(packed: Mapping[str, bytes], ref: BatchRef) -> dict[str, Index]:
    lengths = {name: _numbers(f"lengths of {name!r}", values, len(ref)) for name, values in packed.items()}
    for name, values in lengths.items():
        if name not in ref.columns or (len(values) and not 0 <= values.min() <= values.max() < _MAX_LENGTH):
            raise ProtocolMismatch(f"lengths of {name!r}, which no column has")
    return lengths


def _tags(tags: Mapping[str, list[T]], count: int) -> dict[str, list[T]]:
    _bound("tags of an append", MAX_TAGS, len(tags))
    return {name: _exactly(f"values of the tag {name!r}", values, count) for name, values in tags.items()}


def _one_a_row(what: str, values: S, count: int) -> S:
    """Raises ProtocolMismatch where there are some, and not one a row."""
    return _exactly(what, values, count) if len(values) else values


def _exactly(what: str, values: S, count: int) -> S:
    if len(values) != count:
        raise ProtocolMismatch(f"{len(values)} {what} for {count} rows")
    return values
