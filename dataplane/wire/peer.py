"""The control channel between nodes: requests and replies over ZeroMQ, encrypted and authenticated by CURVE.

A node answers on one ROUTER socket, and asks each other node over a DEALER of its own. No payload crosses here.

What always holds: nothing is decoded of who has not the cluster's key, where there is one; every request has a
deadline, after which it raises PeerUnavailable, whatever ZeroMQ still tries; queues are finite, and what does not fit
is dropped, to be asked again; what is no message is dropped, with a line in the log.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
import zmq.auth.asyncio

from dataplane.errors import DataplaneError, PeerUnavailable, ProtocolMismatch, describe, revive
from dataplane.wire.auth import Key
from dataplane.wire.messages import MAX_FRAME, Failure, Message
from dataplane.wire.peer_messages import PeerReply, PeerRequest

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)
Answer = Callable[[Any], Awaitable[Message]]

_QUEUE = 1000  # messages that wait on one socket
_AT_ONCE = 256  # requests that are being answered
_HANDSHAKE_MS = 5000
_TELL_S = 5.0
_DOMAIN = "dataplane"
_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(PeerRequest)
_replies = msgspec.msgpack.Decoder(PeerReply)


class Peers:
    """One node's end of all control channels. `start` it in the loop that it is used from."""

    def __init__(self, listen: str, key: Key | None, answer: Answer) -> None:
        """`listen`: tcp://HOST:PORT, 0 for any port. `answer(request)` gives the reply, or raises a DataplaneError."""
        self._listen = listen
        self._key = key
        self._answer = answer
        self._context = zmq.asyncio.Context()
        self._authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._links: dict[str, _Link] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None
        self.address = ""
        """Where it listens, once it has started."""

    def start(self) -> None:
        """Listen. Raises OSError where that can not be done."""
        router = self._router = self._context.socket(zmq.ROUTER)
        router.set(zmq.ROUTER_MANDATORY, 1)
        _limit(router)
        if self._key is not None:
            public = self._key.public
            self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(self._context, asyncio.get_running_loop())
            self._authenticator.start()
            self._authenticator.configure_curve_callback(_DOMAIN, _Members(public))
            router.zap_domain = _DOMAIN.encode()
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = public, self._key.secret
        try:
            router.bind(self._listen)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"can not listen at {self._listen}: {error.strerror}") from None
        self.address = router.get_string(zmq.LAST_ENDPOINT)
        self._serving = asyncio.get_running_loop().create_task(self._serve(router))

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
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        link.pending[request.id] = future
        silent = PeerUnavailable(f"the node at {address} has not answered for {timeout_s:.1f} s", address=address)
        try:
            async with asyncio.timeout(timeout_s):
                await link.socket.send(_encoder.encode(request))
                reply = await future
        except TimeoutError:
            raise silent from None
        finally:
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

        task = asyncio.get_running_loop().create_task(ask())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, address: str) -> None:
        """Nobody is there any more."""
        link = self._links.pop(address, None)
        if link is not None:
            link.close()

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            parts = await router.recv_multipart()
            try:
                who, payload = parts
                request = _requests.decode(payload)
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("a peer sent what is no message: %s", error)
                continue
            if len(self._tasks) >= _AT_ONCE:  # it asks again, or gives up at its deadline
                continue
            task = asyncio.get_running_loop().create_task(self._reply(router, who, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reply(self, router: zmq.asyncio.Socket, who: bytes, request: Any) -> None:
        try:
            reply = await self._answer(request)
        except DataplaneError as error:
            reply = Failure(request.id, *describe(error))
        except Exception:  # the boundary: a fault of ours in one peer's request is not the others' end
            log.exception("a request of a peer failed")
            reply = Failure(request.id, "Rejected", "the node failed on this request; its log says how", {})
        with suppress(zmq.ZMQError):  # it has gone, or takes nothing more
            await router.send_multipart([who, _encoder.encode(reply)], flags=zmq.NOBLOCK)

    async def aclose(self) -> None:
        """Stop. Who waits is told PeerUnavailable by his deadline. Idempotent."""
        router, self._router = self._router, None
        tasks = [*self._tasks, *([self._serving] if self._serving is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            link.close()
        await asyncio.gather(*(link.hearing for link in self._links.values()), return_exceptions=True)
        self._links.clear()
        if router is not None:
            router.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()


class _Link:
    """The way to one other node."""

    def __init__(self, context: zmq.asyncio.Context, address: str, key: Key | None) -> None:
        self.pending: dict[int, asyncio.Future[Message]] = {}
        self.socket = context.socket(zmq.DEALER)
        _limit(self.socket)
        if key is not None:
            self.socket.curve_serverkey = self.socket.curve_publickey = key.public
            self.socket.curve_secretkey = key.secret
        self.socket.connect(address)
        self.hearing = asyncio.get_running_loop().create_task(self._hear())

    async def _hear(self) -> None:
        while True:
            try:
                reply = _replies.decode(await self.socket.recv())
            except msgspec.MsgspecError as error:
                log.warning("a peer answered what is no message: %s", error)
                continue
            future = self.pending.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply)

    def close(self) -> None:
        self.hearing.cancel()
        self.socket.close(linger=0)


class _Members:
    """Says, when ZeroMQ asks, who may speak to this node: who has the cluster's key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key, in Z85, is the cluster's."""
        return domain == _DOMAIN and key == self._public


def _limit(socket: zmq.asyncio.Socket) -> None:
    socket.set(zmq.SNDHWM, _QUEUE)
    socket.set(zmq.RCVHWM, _QUEUE)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
