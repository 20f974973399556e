"""What clients of other nodes ask of the streams here: done as for a client of this node, each once.

What always holds: a question that comes again is not done again, and is answered as it was; what a client was granted
and admitted is given back when it or its node goes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, LimitExceeded, ProtocolMismatch
from dataplane.node.spread.spreading import Spreading
from dataplane.node.streams.streaming import StreamRequest, Waiting
from dataplane.node.tables.tables import TableRequest
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire.boundary import encoded, failure, refusal

MAX_CLIENTS = 4096
"""Clients of other nodes at a time."""

_MOST_S = 3600.0  # that a question waits before it is asked again
_WAITING = 128  # questions of one node whose answers are waited for here: others, acks for one, are to get through
_ANSWER_S = 2.0  # until a node is told to ask again
_ANSWERS = 1 << 14  # of one node that are remembered
_ROOM = m.MAX_FRAME - 1024

_BETWEEN = "message between nodes"
_requests = msgspec.msgpack.Decoder(StreamRequest | TableRequest)


@dataclass(frozen=True, slots=True)
class _Told:
    """An answer, and how to take back what it gave, should nobody hear it."""

    reply: bytes
    take_back: Callable[[], None] | None = None


Said = _Told | asyncio.Task[_Told]


@dataclass(frozen=True, slots=True)
class FarClient:
    """A client of another node, as one to whom things are granted."""

    node: bytes
    number: int

    def __str__(self) -> str:
        return f"client {self.number} of node {self.node.hex()}"


class Far:
    """The clients of other nodes."""

    def __init__(self, serve: Callable[[FarClient], Spreading], knows: Callable[[bytes], bool]) -> None:
        """`serve(client)` makes what answers one; `knows(node)`: whether it is a member."""
        self._serve = serve
        self._knows = knows
        self._clients: dict[FarClient, Spreading] = {}
        self._waiting: Counter[bytes] = Counter()
        self._said: defaultdict[bytes, dict[int, Said]] = defaultdict(dict)

    def asked(self, request: pm.Ask) -> pm.Answer | pm.Waits | Awaitable[pm.Answer | pm.Waits]:
        """What the request is answered. Raises Backpressure for who is no member, yet: that it has gone would not be
        heard, and what its clients were granted never be given back."""
        if not self._knows(request.node):
            raise Backpressure(f"node {request.node.hex()} is no member here, yet")
        said = self._said[request.node]
        for number in request.answered:
            if isinstance(said.get(number), _Told):
                del said[number]
        known = said.get(request.number)
        if known is None:
            known = said[request.number] = self._begin(request)
            if len(said) > _ANSWERS:  # what was answered, long ago
                said.pop(next((number for number, known in said.items() if isinstance(known, _Told)), -1), None)
        if isinstance(known, _Told):
            return pm.Answer(request.id, known.reply)
        if self._waiting[request.node] >= _WAITING:
            return pm.Waits(request.id, busy=True)
        return self._later(request, known)

    async def _later(self, request: pm.Ask, task: asyncio.Task[_Told]) -> pm.Answer | pm.Waits:
        self._waiting[request.node] += 1
        try:
            done, _ = await asyncio.wait([task], timeout=_ANSWER_S)
        finally:
            self._waiting[request.node] -= 1
            if not self._waiting[request.node]:
                del self._waiting[request.node]
        if not done:
            return pm.Waits(request.id, busy=False)
        told = task.result()
        said = self._said.get(request.node)
        if said is not None and said.get(request.number) is task:
            said[request.number] = told
        return pm.Answer(request.id, told.reply)

    def _begin(self, asked: pm.Ask) -> Said:
        who, identifier = FarClient(asked.node, asked.client), 0
        try:
            client = self._client(who)
            request = _decoded(asked.request)
            identifier = getattr(request, "id", 0)
            timeout_s = getattr(request, "timeout_s", 0.0)
            if not timeout_s >= 0:  # NaN too
                raise ProtocolMismatch(f"a timeout is seconds, not {timeout_s}")
            answer = client.answer(request, Deadline.after(min(timeout_s, _MOST_S)))
            if answer is None:
                return _Told(bytes(encoded(m.Done(identifier))))
            if isinstance(answer, m.Message):
                return _fitting(client, request, answer)
            return asyncio.get_running_loop().create_task(_finish(who, client, request, answer))
        except Exception as error:
            return _failed(who, identifier, error)

    def _client(self, who: FarClient) -> Spreading:
        client = self._clients.get(who)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                what = "clients of other nodes at a time"
                raise LimitExceeded(f"{MAX_CLIENTS} {what}", what=what, asked=MAX_CLIENTS + 1, limit=MAX_CLIENTS)
            client = self._clients[who] = self._serve(who)
        return client

    def not_asked(self, node: bytes, number: int) -> None:
        """Nobody waits for the answer to this question."""
        said = self._said.get(node)
        if said is not None and number in said:
            self._forget(said, number)

    def _forget(self, said: dict[int, Said], number: int) -> None:
        known = said.pop(number)
        if isinstance(known, asyncio.Task):
            known.cancel()
            if known.done() and not known.cancelled():
                known = known.result()
        if isinstance(known, _Told) and known.take_back is not None:
            known.take_back()

    def leave(self, who: FarClient) -> None:
        """The client has gone."""
        client = self._clients.pop(who, None)
        if client is not None:
            client.leave()

    def gone(self, node: bytes) -> None:
        """The node is no member any more, and so neither are its clients."""
        for number in list(said := self._said.pop(node, {})):
            self._forget(said, number)
        for who in [who for who in self._clients if who.node == node]:
            self.leave(who)

    def begin_anew(self) -> None:
        """Other nodes have given up what their clients had asked here."""
        for node in {*self._said, *(who.node for who in self._clients)}:
            self.gone(node)

    async def aclose(self) -> None:
        """Nobody is answered any more."""
        tasks = [known for said in self._said.values() for known in said.values() if isinstance(known, asyncio.Task)]
        for node in [*self._said]:
            self.gone(node)
        for who in list(self._clients):
            self.leave(who)
        await asyncio.gather(*tasks, return_exceptions=True)


def _decoded(body: bytes) -> Any:
    try:
        return _requests.decode(body)
    except Exception as error:  # the boundary: whatever values a sender made up, and whoever checks them
        raise refusal(error) from None


async def _finish(who: FarClient, client: Spreading, request: StreamRequest | TableRequest, waiting: Waiting) -> _Told:
    try:
        return _fitting(client, request, await waiting())
    except Exception as error:  # the boundary: it is told to who asked
        return _failed(who, getattr(request, "id", 0), error)


def _fitting(client: Spreading, request: StreamRequest | TableRequest, reply: m.Reply) -> _Told:
    take_back = partial(client.untold, request, reply) if isinstance(request, m.Consume | m.Admit) else None
    try:
        reply_bytes = bytes(encoded(reply, _BETWEEN))
        if len(reply_bytes) > _ROOM:
            text = f"a {_BETWEEN} of {len(reply_bytes)} bytes; ask for less at once"
            raise LimitExceeded(text, what=_BETWEEN, asked=len(reply_bytes), limit=_ROOM)
    except BaseException:
        if take_back is not None:
            take_back()
        raise
    return _Told(reply_bytes, take_back)


def _failed(who: FarClient, identifier: int, error: Exception) -> _Told:
    return _Told(bytes(encoded(failure(identifier, error, who))))
