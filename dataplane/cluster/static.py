"""A cluster by a fixed list of addresses: every node greets every address, again and again.

A node is a member from its first answer on, and no more when it has not answered for `DEAD_S`, or another answers at
its address. Who greets us without being on our list (it was started with us on its own) is greeted back, and so are the
members that others tell of: it is enough that each names one of the others.

What always holds: only answers count, so of a link that works one way neither end sees the other. The clock is the
loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from dataplane.cluster.membership import Member, Membership
from dataplane.errors import DataplaneError
from dataplane.wire import peer_messages as pm
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Seconds between greetings."""

DEAD_S = 3.5
"""Seconds without an answer after which a node is no member any more."""

MAX_MEMBERS = 4096

_ANSWER_S = 2.0


class StaticMembership(Membership):
    """See the module. `me` is this node; `addresses` are tcp://HOST:PORT, its own among them or not."""

    def __init__(self, peers: Peers, me: Member, addresses: Iterable[str], beat_s: float = BEAT_S) -> None:
        self._peers = peers
        self._me = me
        self._beat_s = beat_s
        self._dead_s = DEAD_S * beat_s / BEAT_S
        self._addresses = set(addresses) - {me.address}
        self._members: dict[bytes, Member] = {me.node: me}
        self._heard: dict[bytes, float] = {}
        self._epoch = 1
        self._watchers: list[Callable[[], None]] = []
        self._group: asyncio.TaskGroup | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def members(self) -> Mapping[bytes, Member]:
        return dict(self._members)

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            for address in self._addresses:
                self._group.create_task(self._greet_on(address))
            await asyncio.get_running_loop().create_future()  # until cancelled

    def greeted(self, greet: pm.Greet) -> pm.Greeted:
        """Somebody greets this node: what it is answered."""
        if greet.node != self._me.node:
            self._meet(greet.address)
        me, known = self._me, [member.address for member in self._members.values()]
        minor = min(pm.MINOR, greet.minor)
        return pm.Greeted(greet.id, pm.MAJOR, minor, me.node, me.address, dict(me.transports), known)

    def _meet(self, address: str) -> None:
        """Greet who may be there from now on."""
        new = address not in self._addresses and address != self._me.address
        if new and self._group is not None and len(self._addresses) < MAX_MEMBERS:
            self._addresses.add(address)
            self._group.create_task(self._greet_on(address))

    async def _greet_on(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            with suppress(DataplaneError):
                await self._greet(address, self._patience_s(address, began))
            self._bury(address, loop.time())
            await asyncio.sleep(max(0.0, began + self._beat_s - loop.time()))

    def _patience_s(self, address: str, now: float) -> float:
        """How long an answer is waited for: not beyond the moment at which who is there is taken to be gone."""
        most = min(_ANSWER_S, 2 * self._beat_s)
        heard = [self._heard.get(node, now) for node, member in self._members.items() if member.address == address]
        left = [since + self._dead_s - now for since in heard]
        return min(most, max(*left, 0.1 * self._beat_s)) if left else most

    async def _greet(self, address: str, timeout_s: float) -> None:
        me = self._me
        greet = pm.Greet(self._peers.next_id(), pm.MAJOR, pm.MINOR, me.node, me.address, dict(me.transports))
        answer = await self._peers.request(address, greet, pm.Greeted, timeout_s)
        if answer.major != pm.MAJOR or answer.node == me.node:
            return
        for known in answer.known:
            self._meet(known)
        there = self._members.get(answer.node)
        if there is not None and there.address != address:
            return  # another name of the same node
        found = Member(answer.node, address, answer.transports)
        for node, member in list(self._members.items()):
            if member.address == address and node != answer.node:
                self._remove(node, "another was started in its place")
        self._heard[answer.node] = asyncio.get_running_loop().time()
        if self._members.get(answer.node) != found:
            log.info("node %s at %s is a member", answer.node.hex(), address)
            self._members[answer.node] = found
            self._changed()

    def _bury(self, address: str, now: float) -> None:
        for node, member in list(self._members.items()):
            if member.address == address and now - self._heard.get(node, now) >= self._dead_s:
                self._remove(node, "it does not answer")

    def _remove(self, node: bytes, why: str) -> None:
        member = self._members.pop(node)
        self._heard.pop(node, None)
        log.warning("node %s at %s is no member any more: %s", node.hex(), member.address, why)
        self._changed()

    def _changed(self) -> None:
        self._epoch += 1
        for watcher in self._watchers:
            watcher()
