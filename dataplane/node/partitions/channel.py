"""Messages and requests between this node and others. The messages to one node within one iteration of the event loop
share frames.

Invariants: a request ends at its deadline, or when the other process has ended. Sending never waits for a peer. An
answer that its caller cannot return, because of a timeout or a cancellation, is passed to the `late` callback of the
request. The sender of a lost answer learns of the loss (`unconfirmed_grants`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataplane.cluster.membership import Member, Membership
from dataplane.errors import DataplaneError, LimitExceeded, PeerUnavailable, describe, revive
from dataplane.replication.replica import NotLeader
from dataplane.wire import partition_messages as m
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

Heard = Callable[[str, m.Item], None]

Late = Callable[[bytes], None]
"""Called with the result of a request whose caller was cancelled or has timed out."""

_NOT_LEADER = NotLeader.__name__
_MAX_ABANDONED = 1 << 16  # the most abandoned requests whose answers are still recognised


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A request without an answer yet. `late`: see `Late`."""

    node: str
    future: asyncio.Future[Any]
    late: Late | None


class PartitionChannel:
    """One node's end of the connections to other nodes. `heard(node, item)` is called for every message that is neither
    an answer nor `Given`."""

    def __init__(self, peers: Peers, members: Membership, life: int) -> None:
        self.heard: Heard = lambda node, item: None
        self._peers = peers
        self._members = members
        self._me = members.me
        self._life = life
        self._out: dict[str, list[bytes]] = {}
        self._numbers = itertools.count(secrets.randbits(48))
        self._questions: dict[int, _Question] = {}
        """The requests without an answer, by number."""
        self._abandoned: OrderedDict[int, None] = OrderedDict()  # requests whose callers gave up, by number
        self._ended: set[str] = set()
        self._lives: dict[str, int] = {}  # incarnations of nodes that sent a frame
        self._known = members.current
        members.watch(self._changed)
        members.watch_ended(self._over)

    # Sending

    def say(self, node: str, item: m.Item) -> None:
        """Send a message to another node. Messages to one node in one iteration of the event loop share a frame. The
        message may be lost."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.setdefault(node, []).append(m.encode_item(item))
        self._peers.asked += m.is_request(item)

    def _flush(self) -> None:
        out, self._out = self._out, {}
        for node, items in out.items():
            member = self._members.current.get(node)
            if member is None:
                continue
            try:
                self._post(member, items)
            except PeerUnavailable as error:
                log.debug("sending to node %s failed: %s", node, error)

    def _post(self, member: Member, items: list[bytes]) -> None:
        """Send the items in as few frames as the maximum size of a frame permits."""
        size, first = 0, 0
        for at, item in enumerate(items):
            if size + len(item) > m.FRAME_BYTES and at > first:
                self._peers.post(member, m.pack(self._me, self._life, items[first:at]))
                size, first = 0, at
            size += len(item) + 8
        self._peers.post(member, m.pack(self._me, self._life, items[first:]))

    async def ask(self, node: str, make: Callable[[int], m.Item], timeout_s: float, late: Late | None = None) -> Any:
        """Send a request, `make(number)`, to another node. Returns the answer: a result, or the incarnation of a
        replica. Raises the error with which the node answers. Raises PeerUnavailable without an answer; the request may
        have been executed. `late` is called with a result that arrives after a timeout or a cancellation."""
        if node in self._ended:
            raise PeerUnavailable(f"node {node} has ended")
        number = next(self._numbers)
        question = self._questions[number] = _Question(node, asyncio.get_running_loop().create_future(), late)
        returned = False
        try:
            self.say(node, make(number))
            async with asyncio.timeout(timeout_s):
                result = await question.future
            returned = True
            return result
        except TimeoutError:
            self.say(node, m.Withdrawn(number))
            raise PeerUnavailable(f"node {node} has not answered for {timeout_s:.1f} s") from None
        except asyncio.CancelledError:
            self.say(node, m.Withdrawn(number))
            raise
        finally:
            if not returned:
                self._abandon(number, question)

    def _abandon(self, number: int, question: _Question) -> None:
        """Note that the caller gave up. An answer that arrives later, or has arrived already, goes to `late`."""
        future, late = question.future, question.late
        if number in self._questions and late is None:
            del self._questions[number]
        elif number in self._questions:
            self._abandoned[number] = None
            if len(self._abandoned) > _MAX_ABANDONED:
                del self._questions[self._abandoned.popitem(last=False)[0]]
        elif late is not None and future.done() and not future.cancelled() and future.exception() is None:
            late(future.result())

    @staticmethod
    def check(result: bytes) -> None:
        """Raise LimitExceeded if the result is larger than a frame may be."""
        if len(result) > m.FRAME_BYTES:
            what = f"an answer of {len(result)} bytes; ask for fewer rows at once"
            raise LimitExceeded(what, what="answer", asked=len(result), limit=m.FRAME_BYTES)

    def answer(self, node: str, number: int, outcome: bytes | DataplaneError) -> None:
        if isinstance(outcome, bytes):
            self.say(node, m.Answered(number, outcome))
        else:
            name, text, fields = describe(outcome)
            self.say(
                node, m.PartitionRefused(number, _NOT_LEADER if isinstance(outcome, NotLeader) else name, text, fields)
            )

    # Receiving

    def receive(self, frame: m.PartitionFrame) -> None:
        """Handle the messages of a frame that has arrived."""
        node = frame.node
        if self._lives.get(node) != frame.life:
            self._lives[node] = frame.life
            self._ended.discard(node)  # it was started again
        for item in frame.items:
            self._peers.answered += m.is_request(item)
            match item:
                case m.Answered(number, result):
                    self._settle(node, number, result)
                case m.ReplicaHosted(number, incarnation):
                    self._settle(node, number, incarnation)
                case m.PartitionRefused(number, name, text, fields):
                    error = NotLeader(text, **fields) if name == _NOT_LEADER else revive(name, text, fields)
                    self._settle(node, number, error)
                case m.Given(numbers):
                    self._confirm(node, numbers)
                case _:
                    self.heard(node, item)

    def _settle(self, node: str, number: int, outcome: Any) -> None:
        question = self._questions.get(number)
        if question is None or question.node != node:
            return
        self._forget(number)
        if question.future.done():  # the caller was cancelled, or has timed out
            if question.late is not None and isinstance(outcome, bytes):
                question.late(outcome)
        elif isinstance(outcome, DataplaneError):
            question.future.set_exception(outcome)
        else:
            question.future.set_result(outcome)

    def _forget(self, number: int) -> _Question:
        self._abandoned.pop(number, None)
        return self._questions.pop(number)

    def _confirm(self, node: str, numbers: tuple[int, ...]) -> None:
        """Report to a node which of its answers have arrived. Answers arrive in order, so an answer that has not
        arrived before this message is lost. The request of a lost answer fails with PeerUnavailable."""
        missing = tuple(number for number in numbers if number in self._questions)
        for number in missing:
            question = self._forget(number)
            if not question.future.done():
                question.future.set_exception(PeerUnavailable(f"an answer of node {node} was lost"))
        self.say(node, m.Received(tuple(number for number in numbers if number not in missing), missing))

    # Nodes that have ended

    def _over(self, node: str, before_s: float) -> None:
        """Fail and forget the requests to a node whose process has ended."""
        self._fail(node)
        for number in [number for number, question in self._questions.items() if question.node == node]:
            self._forget(number)

    def _fail(self, node: str) -> None:
        """Fail the requests to this node now. Their answers may still arrive."""
        self._ended.add(node)
        for question in self._questions.values():
            if question.node == node and not question.future.done():
                question.future.set_exception(PeerUnavailable(f"node {node} has ended"))

    def _changed(self) -> None:
        before, self._known = self._known, self._members.current
        for node, member in before.items():
            now = self._known.get(node)
            if now is None:
                self._fail(node)
            elif now.life != member.life:
                self._over(node, 0.0)
        self._ended -= self._known.keys()

    async def aclose(self) -> None:
        """Send the messages of this iteration of the event loop. The sockets belong to `peers`, and stay open."""
        self._flush()
