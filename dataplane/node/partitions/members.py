"""Who is a member: this node's registration at the coordinator, and the others'.

What always holds: while the coordinator is away, those who were members stay so. A member is *gone* only once it has
been missing for as long as a lease, as the coordinator says it: one that was wiped has everybody back before that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

import msgspec

from dataplane.clock import Clock, monotonic
from dataplane.coordinator.base import Coordinator, Registration, Unavailable
from dataplane.errors import OutcomeUnknown

log = logging.getLogger(__name__)

LEASE_S = 10.0
_AGAIN_S = 0.5


class Member(msgspec.Struct, frozen=True, array_like=True):
    """What others read of a member. `life`: of its process. `host`: the same for nodes that fail together."""

    life: int
    address: str
    host: str
    transports: dict[str, str] = {}


_decoder = msgspec.msgpack.Decoder(Member)


class Members:
    """The members, by name. To be used from one loop."""

    def __init__(
        self, coordinator: Coordinator, me: str, member: Member, *, lease_s: float = LEASE_S, clock: Clock = monotonic
    ) -> None:
        self.me = me
        self.current: Mapping[str, Member] = {me: member}
        self._coordinator = coordinator
        self._member = member
        self._lease_s = lease_s
        self._clock = clock
        self._missing: dict[str, float] = {}  # since when
        self._joined_s = math.inf
        self._seen = asyncio.Event()
        self._changed: list[Callable[[], None]] = []
        self._registration: Registration | None = None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change."""
        self._changed.append(changed)

    def gone(self, node: str) -> bool:
        """Whether this node is no member, for so long that it will not be one again with what it had."""
        since = self._missing.get(node, self._joined_s)
        return node not in self.current and self._clock() - since >= self._lease_s

    def address(self, node: str) -> str | None:
        """Where a node's control channel listens."""
        member = self.current.get(node)
        return None if member is None else member.address

    async def joined(self) -> None:
        """When this returns, this node is a member, and knows the others."""
        await self._seen.wait()

    async def run(self) -> None:
        """Be a member, and keep watch over the others, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep())
            group.create_task(self._look())

    async def _keep(self) -> None:
        while True:
            try:
                if self._registration is None or not await self._registration.renew():
                    value = msgspec.msgpack.encode(self._member)
                    self._registration = await self._coordinator.register(self.me, value, self._lease_s)
            except (Unavailable, OutcomeUnknown) as error:
                log.debug("the coordinator does not answer: %s", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            await asyncio.sleep(self._lease_s / 4)

    async def _look(self) -> None:
        while True:
            try:
                async for members in self._coordinator.watch_members():
                    self._took(members)
            except Unavailable as error:
                log.debug("the coordinator does not answer: %s", error)
            await asyncio.sleep(_AGAIN_S)

    def _took(self, members: Mapping[str, bytes]) -> None:
        found = {}
        for name, value in members.items():
            try:
                found[name] = _decoder.decode(value)
            except msgspec.MsgspecError:
                log.error("member %r of the coordinator has a value that is no node's", name)
        now = self._clock()
        for name in self.current.keys() - found.keys():
            self._missing[name] = now
        for name in found:
            self._missing.pop(name, None)
        if self.me not in found:  # wiped, or late: it is registered again soon
            found[self.me] = self._member
        elif not self._seen.is_set():
            self._joined_s = now
            self._seen.set()
        if found != self.current:
            self.current = found
            for changed in self._changed:
                changed()

    async def leave(self) -> None:
        """Be no member any more."""
        registration, self._registration = self._registration, None
        if registration is not None:
            try:
                await registration.leave()
            except Unavailable:
                log.warning("the coordinator does not answer: this node stays a member for %s s", self._lease_s)
