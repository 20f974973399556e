"""Who is a member: this node's registration at the coordinator, and the others'.

What always holds: while the coordinator is away, those who were members stay so. Not to be a member is not to have
died: a host that was cut off comes back with all it has, and a coordinator that was wiped has everybody back soon. A
node is *gone*, and with it what it alone had, once its process is known to have ended, or it was away for `LOST_S`.
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
LOST_S = 120.0
"""After which a node that is away is taken to come back with nothing, whatever became of it."""

_AGAIN_S = 0.5


class Member(msgspec.Struct, frozen=True, array_like=True):
    """What others read of a member. `life`: of its process. `host`: the same for nodes that fail together. `keeps`:
    what it has survives its process, which is started again under the same name."""

    life: int
    address: str
    host: str
    transports: dict[str, str] = {}
    keeps: bool = False


_decoder = msgspec.msgpack.Decoder(Member)


class Members:
    """The members, by name. To be used from one loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        me: str,
        member: Member,
        *,
        lease_s: float = LEASE_S,
        lost_s: float = LOST_S,
        clock: Clock = monotonic,
    ) -> None:
        self.me = me
        self.current: Mapping[str, Member] = {me: member}
        self._coordinator = coordinator
        self._member = member
        self._lease_s = lease_s
        self._lost_s = lost_s
        self._clock = clock
        self._missing: dict[str, float] = {}  # since when
        self._joined_s = math.inf
        self._ended: set[str] = set()
        self._seen = asyncio.Event()
        self._changed: list[Callable[[], None]] = []
        self._registration: Registration | None = None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change."""
        self._changed.append(changed)

    def gone(self, node: str) -> bool:
        """Whether what only this node had is lost."""
        if node in self._ended:
            return True
        since = self._missing.get(node, self._joined_s)
        return node not in self.current and self._clock() - since >= self._lost_s

    def away(self, node: str) -> bool:
        """Whether this node is no member, or has ended."""
        return node not in self.current or node in self._ended

    def ended(self, node: str) -> None:
        """The process of a member has ended."""
        member = self.current.get(node)
        if member is not None and not member.keeps:
            self._ended.add(node)

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
        for name, member in found.items():
            self._missing.pop(name, None)
            if name in self.current and self.current[name].life != member.life:
                self._ended.discard(name)
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
