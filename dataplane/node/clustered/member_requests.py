"""One client's requests as a replica of a task member, to the node that gives rows to the member.

A request waits there for a short while only, and is then sent again: so an answer that is lost costs no more than that,
and nobody waits for a node that has died. It keeps its number, and is answered as it was (`task_members`).

What always holds: a delivery has a number of the client's own, under which it is acked at the node that gave it.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TypeVar

import msgspec

from dataplane.clock import Deadline
from dataplane.cluster.membership import Membership
from dataplane.errors import Backpressure, DataplaneError, LeaseExpired, NotReady, OutcomeUnknown, PeerUnavailable
from dataplane.node.clustered import session as sessions
from dataplane.node.clustered.streams import Stream, Streams
from dataplane.node.clustered.task_members import TaskMembers, member_node
from dataplane.node.streams.delivering import not_ready
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire.peer import Peers

R = TypeVar("R", bound=m.Message)

_WAIT_S = 2.0  # for which a request waits at another node
_ANSWER_S = 5.0  # for which its answer may take then
_AGAIN_S = 0.2


class MemberRequests:
    """The replicas of one client."""

    def __init__(self, client: str, here: TaskMembers, peers: Peers, members: Membership) -> None:
        self._client = client
        self._here = here
        self._peers = peers
        self._members = members
        self._numbers = itertools.count(1)
        self._given: dict[int, tuple[str, int]] = {}  # -> the node that gave it, and its number there

    async def consume(self, request: m.Consume, stream: Stream, deadline: Deadline) -> m.Delivered:
        """What this replica is to be given next. Raises NotReady, Closed, Misuse."""
        number = next(self._numbers)
        node, reply = await self._wait(request, stream, deadline, number, m.Delivered)
        self._given[number] = node, reply.grant
        return msgspec.structs.replace(reply, id=request.id, grant=number)

    async def look(self, request: m.Look, stream: Stream, deadline: Deadline) -> m.Shown:
        """Candidates for the member, or none where the replica is to be given what others were. Raises as `consume`."""
        _, reply = await self._wait(request, stream, deadline, 0, m.Shown)
        return msgspec.structs.replace(reply, id=request.id)

    async def _wait(
        self, request: m.Consume | m.Look, stream: Stream, deadline: Deadline, number: int, kind: type[R]
    ) -> tuple[str, R]:
        while True:
            node = member_node(stream.table, request.task, request.member)
            if node == self._members.me:
                asked = pm.ForMember(0, self._client, number, stream.name, stream.generation, request)
                return node, await answer(self._here, stream, asked, deadline, kind)
            wait = Deadline.after(min(_WAIT_S, deadline.remaining_s))
            try:
                timed = msgspec.structs.replace(request, timeout_s=wait.remaining_s)
                return node, await self._ask(node, timed, stream, number, kind, wait.remaining_s)
            except NotReady:
                if not deadline.remaining_s:
                    raise not_ready(stream.name, request.task, deadline) from None
            except (PeerUnavailable, Backpressure):
                if deadline.remaining_s < _AGAIN_S:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def _ask(
        self,
        node: str,
        request: m.Consume | m.Look | m.Ack | m.Renew,
        stream: Stream,
        number: int,
        kind: type[R],
        wait_s: float = 0.0,
    ) -> R:
        address = self._members.address(node)
        if address is None:
            raise PeerUnavailable(f"node {node}, which gives rows to this member, is no member of the cluster")
        asked = pm.ForMember(self._peers.next_id(), self._client, number, stream.name, stream.generation, request)
        return await self._peers.request(address, asked, kind, wait_s + _ANSWER_S)

    async def ack(self, request: m.Ack, stream: Stream) -> None:
        """The replica is done with a delivery, or gives it back. Raises LeaseExpired, OutcomeUnknown."""
        try:
            await self._settle(request, stream)
        except (PeerUnavailable, OutcomeUnknown, Backpressure):
            raise  # it may be repeated
        except DataplaneError:
            self._given.pop(request.grant, None)
            raise
        self._given.pop(request.grant, None)

    async def renew(self, request: m.Renew, stream: Stream) -> None:
        """The lease begins again. Raises LeaseExpired, PeerUnavailable."""
        await self._settle(request, stream)

    async def _settle(self, request: m.Ack | m.Renew, stream: Stream) -> None:
        node, grant = self._given.get(request.grant, ("", 0))
        if not node or self._members.gone(node):
            raise LeaseExpired("these rows go to others: they were given back, or the node that gave them has died")
        theirs = msgspec.structs.replace(request, grant=grant)
        if node == self._members.me:
            asked = pm.ForMember(0, self._client, 0, stream.name, stream.generation, theirs)
            await answer(self._here, stream, asked, Deadline.after(0.0), m.Done)
            return
        deadline = Deadline.after(sessions.ASK_S if isinstance(request, m.Ack) and request.done else 0.0)
        while True:
            try:
                await self._ask(node, theirs, stream, 0, m.Done)
                return
            except PeerUnavailable as error:
                if self._members.gone(node):
                    raise LeaseExpired(f"these rows go to others: the node that gave them has died: {error}") from error
                if deadline.remaining_s < _AGAIN_S:
                    if isinstance(request, m.Ack):
                        raise OutcomeUnknown(f"it is not known whether these rows are done: {error}") from error
                    raise
            await asyncio.sleep(_AGAIN_S)

    def leave(self) -> None:
        """The client has gone. What its replicas hold stays theirs: they may be restarting."""
        self._given.clear()


async def answer(here: TaskMembers, stream: Stream, asked: pm.ForMember, deadline: Deadline, kind: type[R]) -> R:
    """What this node answers a replica. Raises NotReady, Closed, Misuse, LeaseExpired, OutcomeUnknown."""
    reply: m.Message = m.Done(asked.id)
    match asked.request:
        case m.Consume() as request:
            reply = await here.consume(asked.client, asked.number, request, stream, deadline)
        case m.Look() as request:
            reply = await here.look(asked.client, request, stream, deadline)
        case m.Ack() as request:
            await here.ack(asked.client, request, stream)
        case m.Renew() as request:
            await here.renew(asked.client, request, stream)
    assert isinstance(reply, kind), "a request here is answered as it should"
    return msgspec.structs.replace(reply, id=asked.id)


async def answer_peer(here: TaskMembers, streams: Streams, asked: pm.ForMember) -> m.Message:
    """What this node answers another, for a replica there. Raises as `answer`."""
    stream = await streams.open(asked.stream, None)
    if stream.generation != asked.generation:
        from dataplane.errors import Closed

        raise Closed("the stream was dropped")
    deadline = Deadline.after(min(getattr(asked.request, "timeout_s", 0.0), _WAIT_S))
    return await answer(here, stream, asked, deadline, m.Message)
