"""Frames between this node and the others: what gathers for one of them in a turn of the loop goes out together.

Also questions with a deadline, and the news that a peer's process has ended. A connection that closes is a reason to
look: who refuses connections where it listened has ended, as its host says. Everything else, silence too, may pass.

What always holds: a question ends by its deadline, or when who was asked has ended; nothing here waits for a peer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from dataplane.clock import monotonic
from dataplane.errors import DataplaneError, LimitExceeded, PeerUnavailable, describe, revive
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.members import Members
from dataplane.replication.errors import NotLeader
from dataplane.wire import partition_messages as m
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

_LOOKS_S = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0)  # between looks at whether a process has ended whose connection closed
_LOOK_S = 1.0  # that one of them takes at most

Heard = Callable[[str, m.Item], None]


class Channel:
    """One node's end. `heard(node, item)` is called for what is no answer; `ended(node, before_s)` when the process
    that a node was by then has ended."""

    def __init__(self, peers: Peers, members: Members, life: int) -> None:
        self.heard: Heard = lambda node, item: None
        self.ended: Callable[[str, float], None] = lambda node, before_s: None
        self._peers = peers
        self._members = members
        self._me = members.me
        self._life = life
        self._out: dict[str, list[bytes]] = {}
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._ended: set[str] = set()
        self._lives: dict[str, int] = {}  # of nodes that were heard
        self._watched: dict[str, tuple[int, str]] = {}  # node -> its life and address
        self._background = Background()
        members.watch(self._changed)

    # Saying

    def say(self, node: str, item: m.Item) -> None:
        """Send something to another node with what else there is for it in this turn; it may be lost."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.setdefault(node, []).append(m.encode_item(item))

    def _flush(self) -> None:
        out, self._out = self._out, {}
        for node, items in out.items():
            address = self._members.address(node)
            if address is None:
                continue
            try:
                self._watch(node, address)
                self._post(node, address, items)
            except PeerUnavailable as error:
                log.debug("nothing reaches node %s: %s", node, error)

    def _post(self, node: str, address: str, items: list[bytes]) -> None:
        """In as few frames as are not too large."""
        size, first = 0, 0
        for at, item in enumerate(items):
            if size + len(item) > m.FRAME_BYTES and at > first:
                self._peers.post(address, m.pack(self._me, self._life, node, items[first:at]))
                size, first = 0, at
            size += len(item) + 8
        self._peers.post(address, m.pack(self._me, self._life, node, items[first:]))

    async def ask(
        self, node: str, make: Callable[[int], m.Item], timeout_s: float, withdrawn: asyncio.Event | None = None
    ) -> Any:
        """Ask another node; `make(number)` is the question. What it answers: the result, or a replica's incarnation.
        Raises what it refuses with, and PeerUnavailable: then it may have done what was asked. Once `withdrawn` is
        set the other is told that it need not wait, and soon answers."""
        if node in self._ended:
            raise PeerUnavailable(f"node {node} has ended")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = node, future
        telling = None if withdrawn is None else self._background.spawn(self._withdraw(node, number, withdrawn))
        try:
            self.say(node, make(number))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            self.say(node, m.Withdrawn(number))
            raise PeerUnavailable(f"node {node} has not answered for {timeout_s:.1f} s") from None
        except asyncio.CancelledError:
            self.say(node, m.Withdrawn(number))
            raise
        finally:
            del self._pending[number]
            if telling is not None:
                telling.cancel()

    async def _withdraw(self, node: str, number: int, withdrawn: asyncio.Event) -> None:
        await withdrawn.wait()
        self.say(node, m.Withdrawn(number))

    def answer(self, node: str, number: int, outcome: bytes | DataplaneError) -> None:
        """Answer a question of another node."""
        if isinstance(outcome, bytes) and len(outcome) > m.FRAME_BYTES:
            outcome = LimitExceeded(
                f"an answer of {len(outcome)} bytes; ask for fewer rows at once",
                what="answer",
                asked=len(outcome),
                limit=m.FRAME_BYTES,
            )
        if isinstance(outcome, bytes):
            self.say(node, m.Answered(number, outcome))
        else:
            self.say(node, m.Refused(number, *describe(outcome)))

    # Hearing

    def receive(self, frame: m.Frame) -> None:
        """A frame has come."""
        if frame.to != self._me:
            return  # who listened here before was another
        node = frame.node
        if self._lives.get(node) != frame.life:
            self._lives[node] = frame.life
            self._ended.discard(node)  # it was started again
        for item in frame.items:
            match item:
                case m.Answered(number, result):
                    self._settle(node, number, result)
                case m.Hosted(number, incarnation):
                    self._settle(node, number, incarnation)
                case m.Refused(number, name, text, fields):
                    error = NotLeader(text, **fields) if name == "NotLeader" else revive(name, text, fields)
                    self._settle(node, number, error)
                case _:
                    self.heard(node, item)

    def _settle(self, node: str, number: int, outcome: Any) -> None:
        asked, future = self._pending.get(number, ("", None))
        if future is None or asked != node or future.done():
            return
        if isinstance(outcome, DataplaneError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    # Who has ended

    def _watch(self, node: str, address: str) -> None:
        life = self._members.current[node].life
        if self._watched.get(node) != (life, address):
            self._watched[node] = life, address

            def closed() -> None:
                self._background.spawn(self._closed(node, life, address))

            self._peers.watch(address, closed)

    async def _closed(self, node: str, life: int, address: str) -> None:
        """A connection to a node was closed: look whether its process has ended."""
        for pause_s in _LOOKS_S:
            await asyncio.sleep(pause_s)
            before_s = monotonic()
            if await refused(address):
                if self._lives.get(node, life) == life:
                    self._over(node)
                    self._members.ended(node)
                    self.ended(node, before_s)
                return

    def _over(self, node: str) -> None:
        self._ended.add(node)
        for asked, future in self._pending.values():
            if asked == node and not future.done():
                future.set_exception(PeerUnavailable(f"node {node} has ended"))

    def _changed(self) -> None:
        members = self._members.current
        for node, (life, address) in [*self._watched.items()]:
            now = members.get(node)
            if now is None or (now.life, now.address) != (life, address):
                del self._watched[node]
                self._peers.forget(address)
                self._over(node)
            if now is not None:
                self._ended.discard(node)

    async def aclose(self) -> None:
        """Say nothing more. The sockets are others' to close."""
        self._flush()
        await self._background.aclose()


async def refused(address: str) -> bool:
    """Whether the host at tcp://HOST:PORT says that nobody listens there."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(_LOOK_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return False
