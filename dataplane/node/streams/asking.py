"""What the clients of this node ask of streams' homes on other nodes, each done once.

A question that is not answered soon is asked again under the same number, and who is asked does it once
(`node.spread.far`). So an answer that was lost with a connection is told again, and nothing is appended twice.

What always holds: a question ends when its deadline passes, when who was asked is no member any more, or when its
asker is cancelled, and then the other side is told that nobody waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from typing import Any, TypeVar

import msgspec

from dataplane.cluster.membership import Membership
from dataplane.errors import Backpressure, PeerUnavailable, ProtocolMismatch, revive
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire.boundary import encoded as bytes_of
from dataplane.wire.peer import Peers

R = TypeVar("R", bound=m.Message)

CONTROL_S = 10.0
"""Seconds in which everything is answered that has not to wait."""

_AGAIN_S = 3.0
_BUSY_S = 0.1
_ANSWERED = 256  # numbers that one question tells of

_ANEW = "this node has begun anew meanwhile: others had taken it for dead"

_replies = msgspec.msgpack.Decoder(m.Reply)


class Asking:
    """The questions of one node to the others."""

    def __init__(self, node: bytes, peers: Peers, membership: Membership) -> None:
        self._node = node
        self._peers = peers
        self._membership = membership
        self._numbers = itertools.count(1)
        self._answered: defaultdict[bytes, list[int]] = defaultdict(list)
        self._first = 0  # number of a message since this node last began anew

    def next_id(self) -> int:
        """A number for a message to a node."""
        return self._peers.next_id()

    def knows(self, node: bytes) -> bool:
        """Whether the node is a member."""
        return node in self._membership.members

    def stores(self, node: bytes, shard: int) -> bool:
        """Whether the node is a member, and streams may count on this shard of it."""
        member = self._membership.members.get(node)
        return member is not None and member.stores(shard)

    def awaits(self, node: bytes) -> bool:
        """Whether the node may come to be a member: this one has not heard of it, as when it has just joined."""
        return not self.knows(node) and not self._membership.fences(node, 0)

    def check(self, message: pm.Fenced) -> None:
        """Raises PeerUnavailable for a message of a node that was taken for dead, or to this one from before it began
        anew: what it is about is over. Who has begun anew, and says so here first, is taken for that at once: what it
        says now is not to be taken for what it has said before."""
        self._membership.met(message.node, message.since)
        if self._membership.fences(message.node, message.since):
            raise PeerUnavailable(f"node {message.node.hex()} was taken for dead, and does not know it yet")
        if message.told < self._membership.members[self._node].since:
            raise PeerUnavailable(f"node {self._node.hex()} has begun anew")

    async def ask(self, node: bytes, client: int, request: Any, kind: type[R], wait_s: float = 0.0) -> R:
        """Ask that node on behalf of a client of this one. `wait_s`: how long the answer may have to wait for
        something. Raises what is answered, and PeerUnavailable."""
        loop, number, encoded = asyncio.get_running_loop(), next(self._numbers), bytes(bytes_of(request))
        until, answered = loop.time() + wait_s + CONTROL_S, self._answered[node]
        since = self._since
        try:
            while True:
                if self._since != since:  # what was answered there is forgotten
                    raise PeerUnavailable(_ANEW)
                told = answered[-_ANSWERED:]
                del answered[-_ANSWERED:]
                asked = pm.Ask(self._peers.next_id(), client=client, number=number, answered=told, request=encoded)
                left = until - loop.time()
                try:
                    answer = await self.tell(node, asked, m.Message, min(_AGAIN_S, max(left, 0.0)))
                except (PeerUnavailable, Backpressure):
                    if left <= _AGAIN_S or not self.knows(node):
                        raise
                    await asyncio.sleep(_BUSY_S)
                    continue
                if isinstance(answer, pm.Answer):
                    break
                if not isinstance(answer, pm.Waits):
                    raise ProtocolMismatch(f"node {node.hex()} answered {type(answer).__name__} to a question")
                if left <= 0:
                    raise PeerUnavailable(f"node {node.hex()} has not answered for {wait_s + CONTROL_S:.1f} s")
                if answer.busy:
                    await asyncio.sleep(_BUSY_S)
        except BaseException:
            self._let_go(node, number)
            raise
        answered.append(number)
        try:
            reply = _replies.decode(answer.reply)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolMismatch(f"node {node.hex()} answered what is no message: {error}") from None
        if isinstance(reply, m.Failure):
            raise revive(reply.name, reply.message, reply.fields)
        if not isinstance(reply, kind):
            raise ProtocolMismatch(f"{type(reply).__name__} was answered where {kind.__name__} was due")
        return reply

    async def tell(self, node: bytes, message: Any, kind: type[R], timeout_s: float = CONTROL_S) -> R:
        """Send a message between nodes, once. Raises PeerUnavailable, also for one that was made before this node began
        anew, and what is answered."""
        self._membership.look()
        if message.id < self._first:
            raise PeerUnavailable(_ANEW)
        member = self._membership.members.get(node)
        if member is None:
            raise PeerUnavailable(f"node {node.hex()} is not in the cluster: it has died, or was never")
        if isinstance(message, pm.Fenced):
            message = msgspec.structs.replace(message, node=self._node, since=self._since, told=member.since)
        return await self._peers.request(member.address, message, kind, timeout_s)

    @property
    def _since(self) -> int:
        return self._membership.members[self._node].since

    def begin_anew(self) -> None:
        """What was to be told is over."""
        self._first = self._peers.next_id()

    def tell_soon(self, node: bytes, message: Any) -> None:
        """As `tell`, of what is answered by `Done`, for somebody who does not wait."""
        member = self._membership.members.get(node)
        if member is not None:
            self._peers.tell(member.address, message, m.Done)

    def _let_go(self, node: bytes, number: int) -> None:
        if self.knows(node):
            self.tell_soon(node, pm.NotAsked(self._peers.next_id(), self._node, number))
        else:
            self._answered.pop(node, None)
