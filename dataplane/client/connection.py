"""The connection of this process to its node: requests and replies, and the segments and pins that replies grant.

Invariants: a request ends with its reply or the node's typed error. If the node does not answer in time or has ended, a
request with a lasting effect ends with `OutcomeUnknown`. It ends with `PeerUnavailable` if it was not sent, or has no
lasting effect. If a cancelled request succeeds, its grant is released. While a reservation is open, heartbeats are sent
several times a lease. In a forked child every use raises `Forked`. The child's copy of the socket is closed, so that
the child neither keeps the parent's pins nor disturbs its messages.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from dataplane.client.events import code, ring_writer
from dataplane.client.memory import Mapping, NodeSegment
from dataplane.client.ownership import changes, undo
from dataplane.client.pins import ClientPins, let_go
from dataplane.config import program
from dataplane.diagnosis import recorder
from dataplane.errors import Closed, DataplaneError, Forked, OutcomeUnknown, PeerUnavailable, ProtocolMismatch, revive
from dataplane.observe import _writer
from dataplane.observe.ring import CODE
from dataplane.waiting import BITS
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.client_messages import AnyReply, decoder
from dataplane.wire.framing import frame
from dataplane.wire.local import LocalChannel, connect, parse_address

log = logging.getLogger(__name__)

R = TypeVar("R", bound=m.Reply)
T = TypeVar("T")
Soon = Callable[[Callable[[], object]], object]

_decoder = decoder(AnyReply)
_ANSWER_S = 5.0
"""Seconds after a request's timeout at which the wait for the node's answer ends."""

_PREWARM_STEP = 4 << 20

_PUT = CODE["put"]
_clock = time.monotonic_ns


class _Unanswered(PeerUnavailable):
    """Ends the wait for a reply. `Connection._unanswered` turns it into the caller's error."""


class Exchange(NamedTuple, Generic[R, T]):
    """A request with one reply of type `kind`, due within `timeout_s` seconds. `finish` turns the reply into the
    caller's result, a coroutine for it, or the next exchange. `admits`: whether heartbeats are sent while the request
    waits for room; without them its permit to append is revoked. `undo` is called if the exchange fails or is cancelled
    before its reply."""

    connection: Connection
    request: Any
    kind: type[R]
    timeout_s: float
    finish: Callable[[R], T | Exchange[Any, T] | Coroutine[Any, Any, T]]
    admits: bool = False
    undo: Callable[[], None] = lambda: None


class Heartbeat:
    """Messages that show that this process is alive. They are sent every `interval_s` seconds while it has reserved
    memory or a permit to append, or waits for a permit."""

    def __init__(self, channel: LocalChannel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()  # kept, because `due` may be called while the loop does not run
        self._open, self.interval_s = 0, 1.0
        self._timer: asyncio.TimerHandle | None = None

    def due(self, change: int) -> None:
        """Add `change` to the number of open reservations and permits."""
        self._open += change
        if self._open and self._timer is None:
            self._beat()

    @property
    def beats(self) -> bool:
        """Whether heartbeats are due."""
        return bool(self._open) and self._channel.open

    def _beat(self) -> None:
        self._timer = None
        if self.beats:
            self._channel.send(m.Alive())
            self._timer = self._loop.call_later(self.interval_s, self._beat)

    def stop(self) -> None:
        """Send no further heartbeats."""
        if self._timer is not None:
            self._timer.cancel()


class Connection:
    """An established connection. Made by `open`. Used from its event loop only, except where stated."""

    def __init__(self, address: str, soon: Soon) -> None:
        self.address = address
        self._soon = soon
        self.segments: dict[int, NodeSegment] = {}
        self.pins = ClientPins(self._flush_soon)
        self.welcome = m.Welcome(0, 0, 0, b"", 0, 0.0, [], 0)
        self._process = os.getpid()
        self.in_child = False
        """Whether this is a forked child. Set by a hook of the fork, to save a call of os.getpid for each use."""
        self._loop = asyncio.get_running_loop()
        self._requests = itertools.count(1)
        self._pending: dict[int, asyncio.Future[m.Reply] | None] = {}  # None: the caller has stopped waiting
        self._unsent: set[int] = set()  # requests that were not sent, because the node had ended
        self.lost_rows: list[rm.LostRowsTaken] = []  # reports whose caller had stopped waiting
        self._gone: DataplaneError | None = None
        self._closing = False
        self._settling: asyncio.Future[None] | None = None
        self._detached = False
        self.unsealed: weakref.WeakKeyDictionary[Mapping, tuple[NodeSegment, int]] = weakref.WeakKeyDictionary()
        """The mappings of drafts, with their segments and offsets. They are made private when the connection closes."""
        self.appenders: weakref.WeakSet[Any] = weakref.WeakSet()
        self.handing: set[int] = set()
        """The ids of `AdmitRows` for references whose append is in progress."""
        self.keeping: Callable[[sm.Keeping], None] = lambda told: None
        """Called with the node's messages about shards that this client keeps."""
        self._prewarm: list[Mapping] = []
        self.events: _writer.Writer | None = None
        """Records the events of this connection; None if none are recorded."""
        self._socket = connected = connect(parse_address(address))
        self._channel = LocalChannel(connected, _decoder, self._received, self._closed, descriptors=True, paced=False)
        self.heartbeat = Heartbeat(self._channel)
        _connections.add(self)

    @classmethod
    async def open(cls, address: str, soon: Soon, *, writes: bool = True, name: str | None = None) -> Connection:
        """Connect to the node at the address. Returns the connection. `soon` schedules work in the event loop from any
        thread, as `loop.call_soon_threadsafe`. `name`: as for `connect`.

        Raises PeerUnavailable, Unauthenticated, ProtocolMismatch, ValueError (an invalid address).
        """
        connection = cls(address, soon)
        hello = m.Hello(connection.next_id(), m.MAJOR, m.MINOR, name or program(), writes)
        try:
            connection.welcome = await connection.request(hello, m.Welcome, 0.0)
            connection.heartbeat.interval_s = connection.welcome.lease_s / 5
            if connection.welcome.reports_s:
                recorder.attach(connection, connection.welcome.reports_s)
            connection.pins.source = (address, connection.welcome.token) if connection.welcome.token else None
            granted = connection.welcome.grants
            connection._prewarm = [connection.segments[grant.segment].mapping(writable=True) for grant in granted]
        except BaseException:
            connection.close()
            raise
        return connection

    def check(self) -> None:
        """Raise Forked, Closed, or the error with which the connection ended. May be called from any thread."""
        if self.in_child:
            raise Forked(
                f"this plane was connected in process {self._process}; after a fork, connect again in the child",
                connected_in=self._process,
            )
        if self._closing:
            raise Closed("the plane is closed")
        if self._gone is not None:
            raise type(self._gone)(str(self._gone), **self._gone.fields)

    def next_id(self) -> int:
        """The number of a new request. It includes the number of the calling line of the user's source."""
        return next(self._requests) << BITS | recorder.place()

    async def request(self, request: Any, kind: type[R], timeout_s: float) -> R:
        """Send a request. Returns its reply. Raises the node's error, PeerUnavailable, OutcomeUnknown."""
        return await self._answered(request, kind, timeout_s, self._ask(request))

    def _ask(self, request: Any) -> asyncio.Future[m.Reply]:
        """Send a request. Returns the future of its reply."""
        self.check()
        if self.pins.dropped:
            self._flush()
        future: asyncio.Future[m.Reply] = self._loop.create_future()
        self._pending[request.id] = future
        if len(self._pending) > 1:  # send the requests of this step of the loop together
            self._channel.gather()
        try:
            self._channel.send(request)
        except BaseException:  # no message was sent
            self._pending.pop(request.id, None)
            raise
        if self._channel.broken:
            self._unsent.add(request.id)
        return future

    async def _answered(self, request: Any, kind: type[R], timeout_s: float, future: asyncio.Future[m.Reply]) -> R:
        began = _clock() if self.events is not None else 0
        wait_s = timeout_s + (self.welcome.shared_s if isinstance(request, m.SharedRequest) else _ANSWER_S)
        timer = self._loop.call_later(wait_s, self._late, future, wait_s)
        waits = recorder.awaits()
        try:
            reply = await future
        except BaseException as error:
            self._abandon(request.id, future)
            if isinstance(error, _Unanswered):
                raise self._unanswered(request, error) from None
            raise
        finally:
            timer.cancel()
            recorder.awaited(request.id, waits)
            del future  # break the cycle of error and future, which would keep the put's values alive
        if began and self.events is not None and kind is not m.Welcome:
            self.events.record(code(request), began)
        return self._checked(reply, kind)

    def _checked(self, reply: m.Reply, kind: type[R]) -> R:
        if self._detached:  # closed after the reply came, so that its grant has ended
            self.check()
        if not isinstance(reply, kind):
            raise ProtocolMismatch(f"the node answered {type(reply).__name__} where {kind.__name__} was due")
        return reply

    # One request, without the loop

    async def exchange(self, exchange: Exchange[Any, T], begun: int = 0) -> T:
        """Send the request of an exchange and of those that follow. Returns the result. `begun`: as for `_finish`."""
        return await self._finish(exchange, self._begin(exchange), begun)

    def _begin(self, exchange: Exchange[Any, Any]) -> asyncio.Future[m.Reply]:
        try:
            return self._ask(exchange.request)
        except BaseException:
            exchange.undo()
            raise

    async def _finish(self, exchange: Exchange[Any, T], future: asyncio.Future[m.Reply], begun: int = 0) -> T:
        """Complete an exchange after its first request, which was sent at `begun` (0: just now)."""
        events = self.events
        began = begun or _clock()
        while True:
            self.heartbeat.due(+exchange.admits)
            try:
                reply = await self._answered(exchange.request, exchange.kind, exchange.timeout_s, future)
            except BaseException:
                exchange.undo()
                raise
            finally:
                self.heartbeat.due(-exchange.admits)
                del future  # as in `_answered`
            made = exchange.finish(reply)
            if not isinstance(made, Exchange):
                if events is not None and type(exchange.request) is sm.SealShards:
                    events.record(_PUT, began)
                return await made if isinstance(made, Coroutine) else made
            exchange, future = made, self._begin(made)

    def exchange_now(
        self, exchange: Exchange[Any, T], wait: Callable[[int], bool], began: int
    ) -> tuple[T | None, Coroutine[Any, Any, T] | None]:
        """Do an exchange in a thread while the event loop does not run. Returns the result and None, or None and a
        coroutine that completes the exchange in the loop. `wait(descriptor)` waits a short time, and returns whether
        only that socket is readable. `began`: the start of the call, in nanoseconds of the monotonic clock."""
        events, begun = self.events, 0
        while not self._pending and self._channel.quiet:
            began = _clock() if begun and events is not None else began
            future = self._begin(exchange)
            try:
                while not future.done() and wait(self._socket.fileno()):
                    self._channel.read()
                if not future.done():
                    return None, self._finish(exchange, future, begun or began)
                reply = self._checked(future.result(), exchange.kind)
            except BaseException as error:
                self._abandon(exchange.request.id, future)
                exchange.undo()
                if isinstance(error, _Unanswered):
                    raise self._unanswered(exchange.request, error) from None
                raise
            finally:
                del future  # as in `_answered`
            if events is None:
                made = exchange.finish(reply)
            else:
                events.last = began
                made = exchange.finish(reply)
                events.record(code(exchange.request), began)
                if type(exchange.request) is sm.SealShards:
                    events.record(_PUT, begun)
                begun = began
            if not isinstance(made, Exchange):
                return (None, made) if isinstance(made, Coroutine) else (made, None)
            exchange = made
        return None, self.exchange(exchange, begun)

    def _late(self, future: asyncio.Future[m.Reply], waited_s: float) -> None:
        if not future.done():
            silent = f"the node at {self.address} has not answered for {waited_s:.0f} s"
            future.set_exception(_Unanswered(silent, address=self.address))

    def _unanswered(self, request: Any, error: _Unanswered) -> DataplaneError:
        if changes(request) and request.id not in self._unsent:
            return OutcomeUnknown(f"{error}; it is not known whether this call was done")
        return PeerUnavailable(str(error), **error.fields)

    def _abandon(self, identifier: int, future: asyncio.Future[m.Reply]) -> None:
        if identifier in self._pending:
            self._pending[identifier] = None
            self._channel.send(m.Cancel(identifier))
        elif future.done() and not future.cancelled() and future.exception() is None:
            undo(self, future.result())

    def tell(self, message: m.Message) -> None:
        """Send a message without waiting for an answer. Raises LimitExceeded if the message is too large."""
        self._channel.send(message)
        identifier = getattr(message, "id", 0)
        if identifier and self._channel.open:
            self._pending[identifier] = None

    def _received(self, reply: m.Reply) -> None:
        for number in getattr(reply, "gone", ()):
            self.segments.pop(number, None)  # its mapping stays as long as a view of it exists
        for grant in getattr(reply, "grants", ()):
            (fd,) = self._channel.take_descriptors(1)
            segment = self.segments.setdefault(grant.segment, NodeSegment(grant.segment, grant.size, self.pins.access))
            segment.grant(fd, writable=grant.writable)
        if isinstance(reply, m.Welcome) and reply.ring:
            self.events = ring_writer(reply.ring, *self._channel.take_descriptors(1))
        if isinstance(reply, m.Failure) and reply.id == 0:
            self._gone = revive(reply.name, reply.message, reply.fields)
            return
        if isinstance(reply, sm.Keeping):
            self.keeping(reply)
            return
        if reply.id not in self._pending:
            raise ProtocolMismatch(f"the node answered request {reply.id}, which was not sent")
        future = self._pending.pop(reply.id)
        self._settle()
        if future is None or future.done():
            undo(self, reply)
        elif isinstance(reply, m.Failure):
            future.set_exception(revive(reply.name, reply.message, reply.fields))
        else:
            future.set_result(reply)

    def _closed(self, error: DataplaneError | None) -> bool:
        """Called when the node has ended, or accepts no more messages but keeps the pins of views. Returns whether the
        socket must stay open. `pins` then owns it until the last view is dropped."""
        self._end(error)
        if not self.pins.live:
            return False
        self.pins.inherit(self._socket, b"")
        return True

    def _end(self, error: DataplaneError | None) -> None:
        if error is None or isinstance(error, PeerUnavailable):
            error = PeerUnavailable(
                f"the node at {self.address} has gone, with its data unless they are durable or have replicas: close"
                " this plane, and connect to the node that runs now"
                " (an integration connects at its next init() or call)",
                address=self.address,
            )
        self._gone = gone = self._gone or error
        kind = _Unanswered if isinstance(gone, PeerUnavailable) else type(gone)
        pending, self._pending = self._pending, {}
        self._settle()
        for future in pending.values():
            if future is not None and not future.done():
                future.set_exception(kind(str(gone), **gone.fields))

    @property
    def owed(self) -> bool:
        """Whether a reply is pending whose caller has stopped waiting. Its grant must be released."""
        return None in self._pending.values() and self._channel.open

    def report(self, graph: bytes) -> None:
        """Send this process's performance graph, and the pins dropped so far. May be called from any thread."""

        def send() -> None:
            if self.pins.dropped:
                self._flush()
            if self._channel.open and not self._detached and len(graph) <= m.MAX_REPORT:
                self._channel.send(m.Report(graph))

        with suppress(RuntimeError):  # as in `_flush_soon`
            self._soon(send)

    # Pins

    def _flush_soon(self) -> None:
        """Send the dropped pins in the next step of the event loop. May be called from any thread."""
        with suppress(RuntimeError):  # the loop was closed before the plane; the end of the process drops all pins
            self._soon(self._flush)

    def _flush(self) -> None:
        dropped = self.pins.take()
        if dropped:
            self._channel.send(sm.UnpinShards(dropped))

    def abandoned(self, shard: int) -> None:
        """Give back a reservation whose memory this process can write no more. May be called from any thread."""

        def give_back() -> None:
            if not self._detached:
                self._channel.send(sm.Abort([shard]))
                self.heartbeat.due(-1)

        if not self.in_child:
            with suppress(RuntimeError):  # as in `_flush_soon`
                self._soon(give_back)

    # Warm pages

    def prewarm(self) -> None:
        """Populate the pages that the node's welcome asks for. Blocks, so it must run in a thread. Stops when the
        connection is closed."""
        for mapping in self._prewarm:
            for start in range(0, self.welcome.prewarm, _PREWARM_STEP):
                size = min(_PREWARM_STEP, self.welcome.prewarm - start)
                if self._closing or not self._channel.open or not mapping.populate(start, size):
                    break
        self._prewarm.clear()

    # The end

    def refuse(self) -> None:
        """Let every further use raise Closed, and stop populating pages."""
        self._closing = True

    async def settle(self) -> None:
        """End pending requests with Closed, before `close`. Waits until the node has answered them and received all
        messages, so that their grants are released, but at most `_ANSWER_S`."""
        self.refuse()
        for future in self._pending.values():
            if future is not None and not future.done():
                future.set_exception(Closed("the plane is closed"))
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                while self._pending:
                    self._settling = self._loop.create_future()
                    await self._settling
                await self._channel.drain()

    def _settle(self) -> None:
        """Wake `settle` if no request is pending any more."""
        if self._settling is not None and not self._pending and not self._settling.done():
            self._settling.set_result(None)

    def close(self) -> None:
        """Close the connection. Pins of existing views stay until the views are dropped. Idempotent; never
        blocks. Drops unsent messages: see `settle`."""
        if self._detached:
            return
        self._closing = self._detached = True
        recorder.detach(self)
        self.heartbeat.stop()
        for mapping, (segment, offset) in list(self.unsealed.items()):
            segment.unshare(mapping, offset)
        kept = [m.Cancel(request) for request in self.handing]  # keeps the node from freeing their shards
        if self._channel.open and self.pins.live:
            connected, rest = self._channel.detach()
            self._end(Closed("the plane is closed"))
            self.pins.inherit(connected, rest + b"".join(map(frame, [*kept, m.Disconnect()])))
        else:
            self._gone = self._gone or Closed("the plane is closed")
            for message in kept:
                self._channel.send(message)
            self._channel.close()
        self._prewarm.clear()
        self.events = None  # the ring is unmapped when the last recording thread drops it
        self.segments.clear()  # views keep their own mappings

    def forked(self) -> None:
        """In a forked child, close the copy of the parent's socket, and make drafts private, so that writes in the
        child do not reach the parent."""
        let_go(self._socket)
        for mapping, (segment, offset) in list(self.unsealed.items()):
            with suppress(DataplaneError):  # if this fails, accesses to the mapping fail too
                segment.unshare(mapping, offset)


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    connections = list(_connections)
    _connections.clear()
    for connection in connections:
        connection.in_child = connection._detached = True
    for connection in connections:
        connection.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
