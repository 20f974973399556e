"""A cluster by a fixed list of addresses: every node greets every address, again and again.

A node is a member from its first answer on, and no more when it has not answered for `DEAD_S`, or another answers at
its address. Who greets us without being on our list (it was started with us on its own) is greeted back, and so are the
members that others tell of: it is enough that each names one of the others. Who was only heard of, and has not answered
for `FORGET_S`, is not greeted any more. Of addresses that were only heard of and never answered, the last
`MAX_UNPROVEN` are greeted: who is there is heard of again.

What always holds: only answers count, so of a link that works one way neither end sees the other. When one of two has
taken the other for dead, one of them begins anew before they are members of each other again: who was taken for dead
and did not notice; if both did, who is answered by fewer, so that a host that was cut off begins anew and not all
others; of two with as many, the one with the higher number. A node that was stopped for `DEAD_S` begins anew when it
goes on, before it does anything for others, who have removed it meanwhile. The clock is the loop's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from dataplane.cluster.membership import MAX_MEMBERS, Member, Membership
from dataplane.errors import DataplaneError, ProtocolMismatch
from dataplane.wire import peer_messages as pm
from dataplane.wire.peer import Peers, check_address

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Seconds between greetings."""

DEAD_S = 3.5
"""Seconds without an answer after which a node is no member any more."""

FORGET_S = 600.0
"""Seconds without an answer after which an address is given up that nobody named: of a host that has gone for good."""

MAX_UNPROVEN = 256
"""Addresses that others told of and that have not answered yet: a node connects to no more for what others say."""

_ANSWER_S = 2.0


class StaticMembership(Membership):
    """See the module. `me` is this node; `addresses` are tcp://HOST:PORT, its own among them or not."""

    def __init__(self, peers: Peers, me: Member, addresses: Iterable[str], beat_s: float = BEAT_S) -> None:
        self._peers = peers
        self._me = me
        self._beat_s = beat_s
        self._named = set(addresses) - {me.address}
        self._greeted: dict[str, asyncio.Task[None]] = {}
        self._unproven: dict[str, None] = {}  # of those, the ones that have never answered, the oldest first
        self._members: Mapping[bytes, Member] = MappingProxyType({me.node: me})  # another with every change
        self._heard: dict[bytes, float] = {}
        self._fallen: dict[bytes, int] = {}  # by node that was taken for dead: since when it had begun then
        self._begin: Callable[[], int] = lambda: self._me.since + 1
        self._epoch = 1
        self._least = 0
        self._awake: float | None = None
        self._watchers: list[Callable[[], None]] = []
        self._group: asyncio.TaskGroup | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def _dead_s(self) -> float:
        return DEAD_S * self._beat_s / BEAT_S

    @property
    def members(self) -> Mapping[bytes, Member]:
        return self._members

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    async def run(self) -> None:
        self._awake = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as self._group:
            for address in self._named:
                self._meet(address)
            while True:
                await asyncio.sleep(self._beat_s)
                self.look()

    def seek(self, addresses: Iterable[str]) -> None:
        """Nodes may be found at these addresses: they are named now, and those that were before are no more. Who
        answers stays a member."""
        self._named = set(addresses) - {self._me.address}
        if self._group is not None:
            for address in self._named:
                self._unproven.pop(address, None)
                self._meet(address)

    def outnumber(self, epoch: int) -> None:
        """The next epoch is at least this."""
        self._least = max(self._least, epoch)

    def greeted(self, greet: pm.Greet) -> pm.Greeted:
        """Somebody greets this node: what it is answered."""
        if greet.node != self._me.node:
            try:
                check_address(greet.address)
            except ValueError as error:
                raise ProtocolMismatch(str(error)) from None
            self._meet(greet.address)
        self.look()
        me, known = self._me, [member.address for member in self._members.values()]
        minor, fallen = min(pm.MINOR, greet.minor), self._fallen.get(greet.node, -1)
        return pm.Greeted(
            greet.id,
            pm.MAJOR,
            minor,
            me.node,
            me.address,
            dict(me.transports),
            known,
            me.since,
            fallen,
            self._answering,
        )

    # who was taken for dead

    def look(self) -> None:
        """As `Membership.look`. Who is to answer this node has as long for that as if it had not been away."""
        if self._awake is None:
            return
        loop = asyncio.get_running_loop()
        before, self._awake = self._awake, loop.time()
        away = self._awake - before
        if away > 2 * self._beat_s:  # that nothing was heard meanwhile says nothing of others
            self._heard = {node: min(heard + away, self._awake) for node, heard in self._heard.items()}
        if away > self._dead_s:
            if len(self._members) > 1:
                self._begin_anew(f"it was away for {away:.1f} s")
            else:
                self._changed()

    def begin_anew_by(self, begin: Callable[[], int]) -> None:
        self._begin = begin

    def fences(self, node: bytes, since: int) -> bool:
        member = self._members.get(node)
        return since <= self._fallen.get(node, -1) or (member is not None and since < member.since)

    def met(self, node: bytes, since: int) -> None:
        known = self._members.get(node)
        if known is not None and known.since < since and node != self._me.node:
            self._remove(node, "it has begun anew")
            self._heard[node] = asyncio.get_running_loop().time()
            self._put(replace(known, since=since))
            self._changed()

    def _fits(self, answer: pm.Greeted) -> bool:
        """Whether who answers may be a member: neither has taken the other for dead since they began."""
        if answer.fallen >= self._me.since:
            both = self._fallen.get(answer.node, -1) >= answer.since
            mine, its = (self._answering, answer.node), (answer.members, self._me.node)
            if not both or mine < its:
                self._begin_anew(f"node {answer.node.hex()} took it for dead")
            return False
        if self.fences(answer.node, answer.since):
            return False  # it does not know yet
        self._fallen.pop(answer.node, None)
        self.met(answer.node, answer.since)
        return True

    @property
    def _answering(self) -> int:
        """How many members have answered lately, this node among them."""
        since = asyncio.get_running_loop().time() - (self._dead_s - self._beat_s)
        return 1 + sum(heard > since for heard in self._heard.values())

    def _begin_anew(self, why: str) -> None:
        log.warning("this node begins anew: %s", why)
        self._fallen.clear()
        self._heard = dict.fromkeys(self._heard, asyncio.get_running_loop().time())
        self._me = replace(self._me, since=self._begin())
        self._put(self._me)
        self._changed()

    def _meet(self, address: str) -> None:
        """Greet who may be there from now on."""
        new = address not in self._greeted and address != self._me.address
        if new and self._group is not None and len(self._greeted) < MAX_MEMBERS:
            if address not in self._named:
                while len(self._unproven) >= MAX_UNPROVEN:
                    self._leave_alone(next(iter(self._unproven))).cancel()
                self._unproven[address] = None
            self._greeted[address] = self._group.create_task(self._greet_on(address))

    async def _greet_on(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while address in self._named or loop.time() - answered < FORGET_S * self._beat_s / BEAT_S:
            began = loop.time()
            with suppress(DataplaneError):
                await self._greet(address)
                answered = loop.time()
            self._bury(address, loop.time())
            await asyncio.sleep(max(0.0, began + self._beat_s - loop.time()))
        self._leave_alone(address)

    def _leave_alone(self, address: str) -> asyncio.Task[None]:
        """Forget the address. What greeted it is the caller's to end."""
        self._unproven.pop(address, None)
        self._peers.forget(address)
        return self._greeted.pop(address)

    async def _greet(self, address: str) -> None:
        me = self._me
        asked = asyncio.get_running_loop().time()
        greet = pm.Greet(self._peers.next_id(), pm.MAJOR, pm.MINOR, me.node, me.address, dict(me.transports))
        answer = await self._peers.request(address, greet, pm.Greeted, self._patience_s(address))
        if answer.major != pm.MAJOR or answer.node == me.node:
            return
        self._unproven.pop(address, None)
        for known in answer.known[:MAX_MEMBERS]:
            with suppress(ValueError):
                check_address(known)
                self._meet(known)
        known_as = self._members.get(answer.node)
        if known_as is not None and known_as.address != address:
            return  # another name of the same node
        found = Member(answer.node, address, answer.transports, answer.since)
        for node, member in self._members.items():
            if member.address == address and node != answer.node:
                self._remove(node, "another was started in its place")
        if not self._fits(answer):
            return
        self._heard[answer.node] = max(asked, self._heard.get(answer.node, asked))  # it may have been long under way
        if self._members.get(answer.node) != found:
            log.info("node %s at %s is a member", answer.node.hex(), address)
            self._put(found)
            self._changed()

    def _patience_s(self, address: str) -> float:
        """How long to wait for an answer from there: no longer than who has answered before is a member without."""
        now = asyncio.get_running_loop().time()
        left = [self._heard[m.node] + self._dead_s - now for m in self._members.values() if m.address == address]
        return min([_ANSWER_S, 2 * self._beat_s, *(max(0.0, each) + 0.01 for each in left)])

    def _bury(self, address: str, now: float) -> None:
        self.look()
        for node, member in self._members.items():
            if member.address == address and now - self._heard.get(node, now) >= self._dead_s:
                self._fallen[node] = member.since
                while len(self._fallen) > MAX_MEMBERS:
                    del self._fallen[next(iter(self._fallen))]
                self._remove(node, "it does not answer")

    def _put(self, member: Member) -> None:
        self._members = MappingProxyType({**self._members, member.node: member})

    def _remove(self, node: bytes, why: str) -> None:
        member = self._members[node]
        self._members = MappingProxyType({n: m for n, m in self._members.items() if n != node})
        self._heard.pop(node, None)
        log.warning("node %s at %s is no member any more: %s", node.hex(), member.address, why)
        self._changed()

    def _changed(self) -> None:
        self._epoch = max(self._epoch + 1, self._least)
        self._tell()

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher()
