"""The control channel between nodes: requests and replies over ZeroMQ, encrypted and authenticated by CURVE.

A node answers on one ROUTER socket, and sends requests to each other node on a DEALER socket for that node. Bulk data
is not sent on this channel.

Every message names the node that it is for, in a part before it: another node may listen at the address of one that has
ended.

Invariants: nothing is decoded from peers without the cluster's key. A message for another node is never handled: a
request gets PeerUnavailable. Every request has a deadline, after which it raises PeerUnavailable, even if ZeroMQ still
tries to send it. Queues are bounded: a peer with too many pending requests, or too many bytes of them, gets
Backpressure and may repeat the request later; messages that do not fit into ZeroMQ's queues are dropped. A request
whose number can be read gets one answer, even if its decoding, execution or encoding raises (`wire.boundary`). An
answer that arrives after its caller gave up is passed to the `late` callback of the request, even if the caller was
cancelled but has not run since. A message without a readable number is dropped and counted, and a log line names its
sender. Connections are made only to tcp://HOST:PORT.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.auth.asyncio

from dataplane.background_tasks import BackgroundTasks
from dataplane.config import check_host_port
from dataplane.errors import Backpressure, DataplaneError, PeerUnavailable, ProtocolMismatch, revive
from dataplane.log_lines import clipped, error_line, log_line
from dataplane.wire.auth import Key
from dataplane.wire.boundary import Heads, InvalidMessageLog, answered, encoded, failure, refusal
from dataplane.wire.messages import MAX_FRAME, Failure, Message
from dataplane.wire.partition_messages import PartitionFrame
from dataplane.wire.peer_messages import PeerReply, PeerRequest

log = logging.getLogger(__name__)
_complaints = InvalidMessageLog(log)

R = TypeVar("R", bound=Message)
Answer = Callable[[Any], Message | Awaitable[Message]]

MAX_SOCKETS = 8192
"""The most sockets of a node: one for each other node, and one to answer on. ZeroMQ's own limit would be 1,023."""

_QUEUE = 1000  # the most messages that wait on one socket
_AT_ONCE, _AT_ONCE_EACH = 4096, 256  # the most pending requests of all nodes, and of one node
_AT_ONCE_BYTES = 256 << 20  # the most bytes of pending requests, encoded
_SMALL = 4096  # requests up to this size are admitted despite the bound on bytes
_MAX_LATE = 1 << 16  # the most requests to one node whose late answers are still recognised
_IN_A_TURN = 256  # the most messages that are taken from one socket before other work of the event loop runs
_ADDRESS = 300  # characters
_HANDSHAKE_MS = 5000
_NOW, _MORE, _IN = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.POLLIN)  # enumerations cost more
_TELL_S = 5.0
_DOMAIN = "dataplane"
_BETWEEN = "message between nodes"
_heads = Heads(PeerRequest)
_requests = msgspec.msgpack.Decoder(PeerRequest)
_replies = msgspec.msgpack.Decoder(PeerReply)


class Peer(Protocol):
    """A node, as others reach it."""

    @property
    def node(self) -> str:
        """Its name."""

    @property
    def address(self) -> str:
        """Where it listens: tcp://HOST:PORT."""


class Peers:
    """One node's end of all control channels. `start` is called in the event loop from which this is used."""

    def __init__(
        self, node: str, listen: str, key: Key, answer: Answer, *, freed: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        """`node`: the name of this node. `listen`: tcp://HOST:PORT, 0 for any port. `answer(request)` returns the reply
        or an awaitable of it, or raises a DataplaneError. `freed` is called with the size of a large message that was
        received."""
        self.node = node
        self._listen = listen
        self._key = key
        self._answer = answer
        self._freed = freed
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None
        self._router: _Socket | None = None
        self._links: dict[str, _Link] = {}
        self._ids = itertools.count(1)
        self._background = BackgroundTasks()
        self._answering: Counter[bytes] = Counter()
        self._answering_bytes = 0
        self.asked = self.answered = 0
        """Counts of requests to other nodes and of requests from them."""
        self.dropped = 0
        """Count of received messages that were invalid and had no readable number."""
        self.address = ""
        """The address on which it listens, once it has started."""
        self.closed: Callable[[str], None] = lambda address: None
        """Called with the address of a node when a connection to it has closed."""

    def start(self) -> None:
        """Listen. Raises OSError if that is not possible."""
        router = self._context.socket(zmq.ROUTER)
        try:
            _limit(router, self._listen)
            router.set(zmq.ROUTER_MANDATORY, 1)
            router.zap_domain = _DOMAIN.encode()
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = self._key.public, self._key.secret
            self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(zmq.asyncio.Context(self._context))
            self._authenticator.start()
            self._authenticator.configure_curve_callback(_DOMAIN, _Members(self._key.public))
            router.bind(self._listen)
            self.address = router.get_string(zmq.LAST_ENDPOINT)
            self._router = _Socket(router, self._asked)
        except BaseException as error:
            router.close(linger=0)
            if isinstance(error, zmq.ZMQError):
                raise OSError(error.errno, f"can not listen at {self._listen}: {error.strerror}") from None
            raise

    def next_id(self) -> int:
        return next(self._ids)

    async def request(
        self, to: Peer, request: Any, kind: type[R], timeout_s: float, late: Callable[[R], object] | None = None
    ) -> R:
        """Send a request to that node. Returns its answer. Raises PeerUnavailable at the deadline or if another node
        listens at its address, and the error with which the node answers. `late` is called with an answer that arrives
        after a timeout or a cancellation."""
        address = to.address
        if self._router is None:
            raise PeerUnavailable("this node has stopped", address=address)
        link = self._link(address)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()
        link.pending[request.id] = future
        timer = loop.call_later(timeout_s, _late, future, address, timeout_s)
        if late is not None:
            link.expect_late(request.id, lambda reply: late(reply) if isinstance(reply, kind) else None)
        try:
            link.socket.send([to.node.encode(), bytes(encoded(request, _BETWEEN))])
            self.asked += 1
            reply = await future
            link.late.pop(request.id, None)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                link.pass_late(future.result())
            raise
        finally:
            timer.cancel()
            link.pending.pop(request.id, None)
        if isinstance(reply, Failure):
            raise revive(reply.name, reply.message, reply.fields)
        if not isinstance(reply, kind):
            raise ProtocolMismatch(f"{address} answered {type(reply).__name__} where {kind.__name__} was due")
        return reply

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(self._context, address, self._key, lambda address: self.closed(address))
        return link

    def post(self, to: Peer, frame: bytes) -> None:
        """Send an encoded `PartitionFrame` to that node; it may be lost. Raises PeerUnavailable if nothing can be sent
        there."""
        if self._router is None:
            raise PeerUnavailable("this node has stopped", address=to.address)
        self._link(to.address).socket.send([to.node.encode(), frame])

    def connect(self, address: str) -> None:
        """Stay connected to that address until it is forgotten. Raises PeerUnavailable as `post`."""
        if self._router is None:
            raise PeerUnavailable("this node has stopped", address=address)
        self._link(address)

    def tell(self, to: Peer, request: Any, kind: type[Message]) -> None:
        """As `request`, but do not wait for the answer, and ignore it."""

        async def ask() -> None:
            with suppress(DataplaneError):
                await self.request(to, request, kind, _TELL_S)

        self._background.spawn(ask())

    def forget(self, address: str) -> None:
        """Close the connection to this address, since its node has ended. Pending requests to it fail."""
        link = self._links.pop(address, None)
        if link is not None:
            link.close()

    # answering

    def _asked(self, parts: list[bytes]) -> None:
        who, to, payload = parts if len(parts) == 3 else (parts[0], self.node.encode(), b"")
        if len(payload) > _SMALL:
            self._freed(len(payload))  # its memory is released soon, at the latest once it was answered
        if to != self.node.encode():
            self._refuse_astray(who, payload)
            return
        try:
            request = _requests.decode(payload)
        except Exception as error:  # the boundary: the sender's values may fail any check
            self._refuse(who, _heads.number(payload), error)
            return
        if isinstance(request, PartitionFrame):
            self._answer(request)  # its errors are logged, as those of all messages
            return
        self.answered += 1
        try:
            answer = self._answer(request)
        except Exception as error:
            self._say(who, failure(request.id, error, self._sender(who)))
            return
        if isinstance(answer, Message):
            self._say(who, answer)
        elif self._may_wait(who, len(payload)):
            self._answering[who] += 1
            self._answering_bytes += len(payload)
            task = self._background.spawn(self._answer_later(who, request.id, answer))
            task.add_done_callback(lambda _: self._ended(who, len(payload), answer))
        else:
            _close(answer)
            busy = Backpressure("this node has too many pending requests")
            self._say(who, failure(request.id, busy, self._sender(who)))

    def _refuse(self, who: bytes, number: int | None, error: Exception) -> None:
        """Handle received data that is no valid message: answer it if its number can be read."""
        said = refusal(error)
        sender = self._sender(who)
        _complaints.log(logging.WARNING, sender, "%s sent what is no message: %s", sender, log_line(error))
        if number is None:
            self.dropped += 1
        else:
            self._say(who, failure(number, said, self._sender(who)))

    def _refuse_astray(self, who: bytes, payload: bytes) -> None:
        """Answer a message for another node, if it is a request. A frame is dropped."""
        number = _heads.number(payload)
        if number is not None:
            other = PeerUnavailable("another node listens at this address now", address=self.address)
            self._say(who, failure(number, other, self._sender(who)))

    def _may_wait(self, who: bytes, nbytes: int) -> bool:
        """Whether one more request of this peer, with this number of bytes, may be pending."""
        room = nbytes <= _SMALL or self._answering_bytes + nbytes <= _AT_ONCE_BYTES
        return room and self._answering[who] < _AT_ONCE_EACH and self._answering.total() < _AT_ONCE

    def _ended(self, who: bytes, nbytes: int, answer: Awaitable[Message]) -> None:
        """Note that a request is no longer pending."""
        _close(answer)  # its task may have been cancelled before it began
        self._answering_bytes -= nbytes
        self._answering[who] -= 1
        if not self._answering[who]:
            del self._answering[who]

    async def _answer_later(self, who: bytes, number: int, answer: Awaitable[Message]) -> None:
        try:
            reply = await answer
        except Exception as error:
            reply = failure(number, error, self._sender(who))
        self._say(who, reply)

    def _say(self, who: bytes, reply: Message) -> None:
        if self._router is not None:
            self._router.send([who, answered(reply, self._sender(who), _BETWEEN)])

    def _sender(self, who: bytes) -> str:
        """The name of a peer in log lines, from ZeroMQ's identity of its connection."""
        return f"peer {who[:16].hex()}"

    async def aclose(self) -> None:
        """Stop. Waiting requests raise PeerUnavailable. Idempotent."""
        router, self._router = self._router, None
        await self._background.aclose()
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
            await asyncio.sleep(0)  # its task ends, and releases a descriptor whose number may be reused
        if router is not None:
            router.close()
        self._context.term()


def _close(answer: Awaitable[Message]) -> None:
    """Close an answer that will not be awaited."""
    close = getattr(answer, "close", None)
    if close is not None:
        close()


def _late(future: asyncio.Future[Message], address: str, waited_s: float) -> None:
    if not future.done():
        silent = f"the node at {address} has not answered for {waited_s:.1f} s"
        future.set_exception(PeerUnavailable(silent, address=address))


class _Socket:
    """A ZeroMQ socket in an event loop: `heard(parts)` is called for each message.

    pyzmq's own asyncio sockets create several futures and callbacks for each message, which takes about a third of a
    round trip; its `recv_multipart` and `send_multipart` take three times as long as single parts do. The socket's
    descriptor reports only that something has changed, and reports it once. So all messages are taken each time, and
    the socket is checked again after each send (http://api.zeromq.org/4-3:zmq-getsockopt, ZMQ_FD).
    """

    def __init__(self, socket: zmq.Socket[bytes], heard: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._checking = False  # a check after a send is scheduled
        self._loop.add_reader(self._descriptor, self._take)
        self._loop.call_soon(self._take)

    def send(self, parts: list[bytes]) -> None:
        """Send a message, or drop it if it cannot be queued: its sender has a deadline."""
        with suppress(zmq.ZMQError):
            for part in parts[:-1]:
                self._socket.send(part, _MORE)
            self._socket.send(parts[-1], _NOW)
        if not self._checking:
            self._checking = True
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        self._checking = False
        if not self._socket.closed and int(self._socket.get(zmq.EVENTS)) & _IN:
            self._take()

    def _take(self) -> None:
        for _ in range(_IN_A_TURN):
            if self._socket.closed:
                return
            try:
                part = self._socket.recv(_NOW, copy=False)
                parts = [part.bytes]
                while part.more:
                    part = self._socket.recv(_NOW, copy=False)
                    parts.append(part.bytes)
            except zmq.ZMQError:  # nothing more
                return
            try:
                self._heard(parts)
            except Exception as error:  # the boundary: handlers of other modules run behind it
                _complaints.log(
                    logging.ERROR, "a peer", "a message between nodes could not be dealt with: %s", error_line(error)
                )
        self._loop.call_soon(self._take)

    def close(self) -> None:
        """Receive and send nothing more."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)


def check_address(address: str) -> None:
    """Raises ValueError for anything but tcp://HOST:PORT of one host. Addresses come from other nodes. ZeroMQ would
    also accept those of sockets in the file system or within this process, and those that name a source address."""
    if len(address) > _ADDRESS or not address.startswith("tcp://") or not address.isprintable() or ";" in address:
        raise ValueError(f"a node is found at tcp://HOST:PORT, not at {clipped(address, _ADDRESS)!r}")
    check_host_port(address.removeprefix("tcp://"))


def _on_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


class _Link:
    """The connection to one other node. Raises PeerUnavailable for an invalid address, and if no more sockets can be
    made."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: Key, closed: Callable[[str], None]
    ) -> None:
        self.pending: dict[int, asyncio.Future[Message]] = {}
        self.late: dict[int, Callable[[Message], object]] = {}
        """The `late` callbacks of requests without an answer, by number."""
        self._address = address
        try:
            check_address(address)
        except ValueError as error:
            raise PeerUnavailable(str(error), address=clipped(address, _ADDRESS)) from None
        try:
            dealer = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise PeerUnavailable(f"no way to {address!r} can be opened: {error.strerror}", address=address) from None
        try:
            with ExitStack() as undo:
                undo.callback(dealer.close, linger=0)
                _limit(dealer, address)
                # ZeroMQ reports on another socket when a connection ends (zmq_socket_monitor). For an address on this
                # host, a refused connection is reported too, since the peer has ended then.
                events = zmq.EVENT_DISCONNECTED | (zmq.EVENT_CONNECT_RETRIED if _on_loopback(address) else 0)
                monitor = dealer.get_monitor_socket(events)
                undo.callback(monitor.close, linger=0)
                undo.callback(dealer.disable_monitor)
                self._monitor = _Socket(monitor, lambda parts: closed(address))
                undo.callback(self._monitor.close)
                dealer.curve_serverkey = dealer.curve_publickey = key.public
                dealer.curve_secretkey = key.secret
                dealer.connect(address)
                self._dealer = dealer
                self.socket = _Socket(dealer, self._heard)
                undo.pop_all()
        except (zmq.ZMQError, OSError) as error:
            raise PeerUnavailable(f"no node can be found at {address!r}: {error.strerror}", address=address) from None

    def _heard(self, parts: list[bytes]) -> None:
        try:
            (payload,) = parts
            reply = _replies.decode(payload)
        except Exception as error:  # the boundary, as in `_asked`
            text = "%s answered what is no message: %s"
            _complaints.log(logging.WARNING, self._address, text, self._address, log_line(error))
            return
        future = self.pending.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)
        else:
            self.pass_late(reply)

    def expect_late(self, number: int, late: Callable[[Message], object]) -> None:
        """Call `late` with the answer to this request if its caller has given up."""
        self.late[number] = late
        if len(self.late) > _MAX_LATE:
            del self.late[next(iter(self.late))]

    def pass_late(self, reply: Any) -> None:
        """Handle an answer whose caller has given up."""
        late = self.late.pop(reply.id, None)
        if late is not None:
            late(reply)

    def close(self) -> None:
        """Fail the requests that wait."""
        self._dealer.disable_monitor()
        self._monitor.close()
        gone = f"the node at {self._address} has gone, or this one stops: its answer is not waited for"
        for future in list(self.pending.values()):
            if not future.done():
                future.set_exception(PeerUnavailable(gone, address=self._address))
            if not future.cancelled():
                future.exception()  # its waiter may have gone
        self.socket.close()


class _Members:
    """Tells ZeroMQ which peers may connect to this node: those with the cluster's key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key, in Z85, is the cluster's."""
        return domain == _DOMAIN and key == self._public


def _limit(socket: zmq.Socket[bytes], address: str) -> None:
    socket.set(zmq.SNDHWM, _QUEUE)
    socket.set(zmq.RCVHWM, _QUEUE)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, int("[" in address))  # else an IPv4 address would be reported as one of IPv6
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
