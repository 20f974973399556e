"""The control channel between nodes: requests and replies over ZeroMQ, encrypted and authenticated by CURVE.

A node answers on one ROUTER socket, and asks each other node over a DEALER of its own. No payload crosses here.

What always holds: nothing is decoded of who has not the cluster's key, where there is one; every request has a
deadline, after which it raises PeerUnavailable, whatever ZeroMQ still tries; queues are finite: who asks for more at a
time than is answered hears Backpressure, to ask again, and what does not even fit into ZeroMQ's queues is dropped; what
is no message is dropped, with a line in the log.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.auth.asyncio

from dataplane.errors import (
    Backpressure,
    DataplaneError,
    LimitExceeded,
    PeerUnavailable,
    ProtocolMismatch,
    describe,
    revive,
)
from dataplane.wire.auth import Key
from dataplane.wire.messages import MAX_FRAME, Failure, Message
from dataplane.wire.peer_messages import PeerReply, PeerRequest

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)
Answer = Callable[[Any], Message | Awaitable[Message]]

MAX_SOCKETS = 8192
"""Of a node: one for each other, and one to answer on. ZeroMQ's own limit would be 1,023."""

_QUEUE = 1000  # messages that wait on one socket
_AT_ONCE, _AT_ONCE_EACH = 4096, 256  # requests whose answers are waited for: in all, and of one node
_HANDSHAKE_MS = 5000
_TELL_S = 5.0
_DOMAIN = "dataplane"
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(PeerRequest)
_replies = msgspec.msgpack.Decoder(PeerReply)


@dataclass(frozen=True, slots=True)
class PeersStatistics:
    """Requests that went to other nodes, and requests of theirs that came here; each has one reply."""

    asked: int
    answered: int


class Peers:
    """One node's end of all control channels. `start` it in the loop that it is used from."""

    def __init__(self, listen: str, key: Key | None, answer: Answer) -> None:
        """`listen`: tcp://HOST:PORT, 0 for any port. `answer(request)` gives the reply, at once or to be awaited, or
        raises a DataplaneError."""
        self._listen = listen
        self._key = key
        self._answer = answer
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None
        self._router: _Socket | None = None
        self._links: dict[str, _Link] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: Counter[bytes] = Counter()
        self._asked_others = 0
        self._asked_here = 0
        self.address = ""
        """Where it listens, once it has started."""

    def start(self) -> None:
        """Listen. Raises OSError where that can not be done."""
        router = self._context.socket(zmq.ROUTER)
        try:
            _limit(router, self._listen)
            router.set(zmq.ROUTER_MANDATORY, 1)
            if self._key is not None:
                router.zap_domain = _DOMAIN.encode()
                router.curve_server = True
                router.curve_publickey, router.curve_secretkey = self._key.public, self._key.secret
                self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(zmq.asyncio.Context(self._context))
                self._authenticator.start()
                self._authenticator.configure_curve_callback(_DOMAIN, _Members(self._key.public))
            router.bind(self._listen)
        except BaseException as error:
            router.close(linger=0)
            if isinstance(error, zmq.ZMQError):
                raise OSError(error.errno, f"can not listen at {self._listen}: {error.strerror}") from None
            raise
        self.address = router.get_string(zmq.LAST_ENDPOINT)
        self._router = _Socket(router, self._asked)

    def next_id(self) -> int:
        """A number for a request."""
        return next(self._ids)

    async def request(self, address: str, request: Any, kind: type[R], timeout_s: float) -> R:
        """Ask the node that listens there. Raises PeerUnavailable at the deadline, and what the node answers."""
        if self._router is None:
            raise PeerUnavailable("this node has stopped", address=address)
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(self._context, address, self._key)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()
        link.pending[request.id] = future
        timer = loop.call_later(timeout_s, _late, future, address, timeout_s)
        try:
            link.socket.send([_encoder.encode(request)])
            self._asked_others += 1
            reply = await future
        finally:
            timer.cancel()
            link.pending.pop(request.id, None)
        if isinstance(reply, Failure):
            raise revive(reply.name, reply.message, reply.fields)
        if not isinstance(reply, kind):
            raise ProtocolMismatch(f"{address} answered {type(reply).__name__} where {kind.__name__} was due")
        return reply

    def tell(self, address: str, request: Any, kind: type[Message]) -> None:
        """As `request`, for somebody who does not wait for the answer and can do without."""

        async def ask() -> None:
            with suppress(DataplaneError):
                await self.request(address, request, kind, _TELL_S)

        self._keep(asyncio.get_running_loop().create_task(ask()))

    def forget(self, address: str) -> None:
        """Nobody is there any more: who waits for an answer is told so."""
        link = self._links.pop(address, None)
        if link is not None:
            link.close()

    def statistics(self) -> PeersStatistics:
        """What has crossed since the start."""
        return PeersStatistics(self._asked_others, self._asked_here)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # answering

    def _asked(self, parts: list[bytes]) -> None:
        try:
            who, payload = parts
            request = _requests.decode(payload)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("a peer sent what is no message: %s", error)
            return
        self._asked_here += 1
        try:
            answer = self._answer(request)
        except Exception as error:
            self._say(who, _failure(request, error))
            return
        if isinstance(answer, Message):
            self._say(who, answer)
        elif self._answering[who] < _AT_ONCE_EACH and self._answering.total() < _AT_ONCE:
            self._answering[who] += 1
            task = asyncio.get_running_loop().create_task(self._answer_later(who, request, answer))
            task.add_done_callback(lambda _: _close(answer))  # it may have been cancelled before it began
            self._keep(task)
        else:
            _close(answer)
            self._say(who, _failure(request, Backpressure("more is asked of this node at a time than it answers")))

    async def _answer_later(self, who: bytes, request: Any, answer: Awaitable[Message]) -> None:
        try:
            reply = await answer
        except Exception as error:
            reply = _failure(request, error)
        finally:
            self._answering[who] -= 1
            if not self._answering[who]:
                del self._answering[who]
        self._say(who, reply)

    def _say(self, who: bytes, reply: Message) -> None:
        if self._router is not None:
            self._router.send([who, _encoded(reply)])

    async def aclose(self) -> None:
        """Stop. Who waits is told PeerUnavailable. Idempotent."""
        router, self._router = self._router, None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
            await asyncio.sleep(0)  # its task ends, and lets go of a descriptor whose number others may get
        if router is not None:
            router.close()
        self._context.term()


def _close(answer: Awaitable[Message]) -> None:
    """Nobody awaits it any more."""
    close = getattr(answer, "close", None)
    if close is not None:
        close()


def _failure(request: Any, error: Exception) -> Failure:
    """What is answered where an answer failed: the boundary, since our fault in one request is not the others' end."""
    if isinstance(error, DataplaneError):
        return Failure(request.id, *describe(error))
    log.error("a request of a peer failed", exc_info=error)
    return Failure(request.id, "Rejected", "the node failed on this request; its log says how", {})


def _encoded(reply: Message) -> bytes:
    """The reply or, where it is larger than a peer takes, that it is."""
    encoded = _encoder.encode(reply)
    if len(encoded) <= MAX_FRAME:
        return encoded
    what = "message between nodes"
    large = LimitExceeded(
        f"a {what} of {len(encoded)} bytes; ask for less at once", what=what, asked=len(encoded), limit=MAX_FRAME
    )
    return _encoder.encode(Failure(getattr(reply, "id", 0), *describe(large)))


def _late(future: asyncio.Future[Message], address: str, waited_s: float) -> None:
    if not future.done():
        silent = f"the node at {address} has not answered for {waited_s:.1f} s"
        future.set_exception(PeerUnavailable(silent, address=address))


class _Socket:
    """A ZeroMQ socket in an event loop: `heard(parts)` is called for each message.

    pyzmq's own asyncio sockets make several futures and callbacks for each message, about a third of a round trip. The
    socket's descriptor says only that something has changed, and once, so all that is there is taken each time, and it
    is looked at again after each send (http://api.zeromq.org/4-3:zmq-getsockopt, ZMQ_FD).
    """

    def __init__(self, socket: zmq.Socket[bytes], heard: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._take)
        self._loop.call_soon(self._take)

    def send(self, parts: list[bytes]) -> None:
        """Send a message, or drop it where nobody takes it: its sender has a deadline."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        self._loop.call_soon(self._take)

    def _take(self) -> None:
        while not self._socket.closed:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing more
                return
            self._heard(parts)

    def close(self) -> None:
        """Hear and say nothing more."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)


class _Link:
    """The way to one other node. Raises PeerUnavailable for what is no address, and where there are no more sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: Key | None) -> None:
        self.pending: dict[int, asyncio.Future[Message]] = {}
        self._address = address
        try:
            dealer = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise PeerUnavailable(f"no way to {address!r} can be opened: {error.strerror}", address=address) from None
        try:
            _limit(dealer, address)
            if key is not None:
                dealer.curve_serverkey = dealer.curve_publickey = key.public
                dealer.curve_secretkey = key.secret
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close(linger=0)
            raise PeerUnavailable(f"no node can be found at {address!r}: {error.strerror}", address=address) from None
        self.socket = _Socket(dealer, self._heard)

    def _heard(self, parts: list[bytes]) -> None:
        try:
            (payload,) = parts
            reply = _replies.decode(payload)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("a peer answered what is no message: %s", error)
            return
        future = self.pending.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def close(self) -> None:
        """Who waits is told so."""
        for future in list(self.pending.values()):
            _late(future, self._address, 0.0)
            if not future.cancelled():
                future.exception()  # its waiter may have gone
        self.socket.close()


class _Members:
    """Says, when ZeroMQ asks, who may speak to this node: who has the cluster's key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key, in Z85, is the cluster's."""
        return domain == _DOMAIN and key == self._public


def _limit(socket: zmq.Socket[bytes], address: str) -> None:
    socket.set(zmq.SNDHWM, _QUEUE)
    socket.set(zmq.RCVHWM, _QUEUE)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, int("[" in address))  # else an IPv4 address would be told as one of IPv6
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
