"""The members of the cluster: registers this node at the coordinator, and watches the registrations of others.

A member is a node with a registration at the coordinator. Each node needs one lease and one watch, independent of the
number of nodes. The coordinator and partitions name nodes in hex, references and shards by bytes: `current` has the
members by hex name, `members` by bytes.

Invariants:

- Silence is not death. A node is *away* when it is no member. It is *gone* once its process is known to have ended
  (`cluster.detector`), or after it was away for `LOST_S`; then all data of which it had the only copy is lost.
- The process of a member has ended when a node that was never seen before registers at its address: no two processes
  listen at one address.
- While the coordinator is away, members stay members. It counts as away from the first renewal or watch that fails
  until both have been answered again. A member whose registration is missing is removed only once its process has
  ended, or once the coordinator has answered for an entire lease without interruption. So each member has time to
  register again after an outage of the coordinator, or after the coordinator was wiped.
- An entry is accepted only with an authentication code, which requires the cluster's key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from dataplane.background_tasks import BackgroundTasks
from dataplane.clock import Clock, monotonic
from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Registration, Unavailable
from dataplane.wire import peer_messages as pm
from dataplane.wire.auth import Key
from dataplane.wire.peer import check_address

log = logging.getLogger(__name__)

MAX_MEMBERS = 4096

LEASE_S = 20.0
LOST_S = 120.0
"""Seconds after which the data of a node that is away counts as lost."""
KEPT_S = 24 * 3600.0
"""Seconds after which the data in durable partitions of a node that is away counts as lost. Longer than
`LOST_S`, because a restart may take long."""

_RENEWALS = 4  # renewals in the time of a lease
_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_LEAVE_S = 1.0


class Member(msgspec.Struct, frozen=True):
    """The published entry of a member. `life`: the incarnation of its process. `address`: of its control channel.
    `host`: equal for nodes that fail together. `transports`: their addresses, by name. `keeps`: whether it has a data
    directory: its data outlives its process, and a restarted node has the same name. `first`: the lowest number of a
    shard that this process has stored. `node`: its name, which `Membership` sets."""

    life: int
    address: str
    host: str = ""
    transports: dict[str, str] = {}
    keeps: bool = False
    major: int = pm.MAJOR
    first: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class Coordination:
    """A node's coordinator: its kind and address, and whether it answered last."""

    coordinator: str
    answers: bool


class Membership:
    """The membership of one node. Used from one event loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        me: str,
        member: Member,
        *,
        key: Key | None = None,
        lease_s: float = LEASE_S,
        lost_s: float = LOST_S,
        kept_s: float = KEPT_S,
        clock: Clock = monotonic,
    ) -> None:
        self.me = me
        member = msgspec.structs.replace(member, node=me)
        self.current: Mapping[str, Member] = MappingProxyType({me: member})  # a new mapping at every change
        self.epoch = 1
        """A counter of the changes of the members that this node sees; not comparable between nodes."""
        self._coordinator = coordinator
        self._member = member
        self._seal = EntrySeal(key)
        self._lease_s = lease_s
        self.lost_s = lost_s
        self._kept_s = kept_s
        self._clock = clock
        self._registered: dict[str, tuple[Member, bytes]] = {}  # other members, and their values
        self._missing: dict[str, tuple[Member, float]] = {}  # members without a registration -> since this time
        self._ended: dict[str, tuple[Member, float]] = {}  # members whose processes have ended, since this time
        self._decoded: dict[str, tuple[bytes, Member | None]] = {}
        self._joined_s = math.inf
        self._seen = asyncio.Event()
        self._again = asyncio.Event()
        self._renewed = self._watched = False
        self._answers_since: float | None = None
        self._changed: list[Callable[[], None]] = []
        self._over: list[Callable[[str, float], None]] = []
        self._registration: Registration | None = None
        self._registered_once = False
        self._evictions = BackgroundTasks()
        self._bytes: tuple[Mapping[str, Member], Mapping[bytes, Member]] | None = None

    # The members

    @property
    def members(self) -> Mapping[bytes, Member]:
        """`current`, by the nodes' names as bytes."""
        if self._bytes is None or self._bytes[0] is not self.current:
            named = MappingProxyType({bytes.fromhex(name): member for name, member in self.current.items()})
            self._bytes = self.current, named
        return self._bytes[1]

    @property
    def missing(self) -> Mapping[str, Member]:
        """Nodes that are no longer registered but may be alive, and are not `gone`."""
        there = {name: member for name, (member, _) in self._missing.items() if name not in self._ended}
        return {name: member for name, member in there.items() if not self.gone(name)}

    @property
    def coordination(self) -> Coordination:
        """The coordinator, and whether it answers."""
        return Coordination(self._coordinator.address, self._answers_since is not None)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` after every change."""
        self._changed.append(changed)

    def watch_ended(self, ended: Callable[[str, float], None]) -> None:
        """Call `ended(node, before_s)` when the process that a member had at `before_s` has ended."""
        self._over.append(ended)

    def gone(self, node: str, *, durable: bool = False) -> bool:
        """Whether the data that only `node` had counts as lost. `durable`: its data of durable partitions."""
        ended = self._ended.get(node)
        if ended is not None and not ended[0].keeps:
            return True
        since = self._missing.get(node, ended or (None, self._joined_s))[1]
        return node not in self.current and self._clock() - since >= (self._kept_s if durable else self.lost_s)

    def keeps(self, node: str) -> bool:
        """Whether this node can store data of durable partitions."""
        member = self.current.get(node)
        return member is not None and member.keeps

    def away(self, node: str) -> bool:
        """Whether this node is no member."""
        return node not in self.current

    def may_return(self, node: str) -> bool:
        """Whether the node is a member, or may return with its data: for `lost_s`, or for `kept_s` if it has a data
        directory. A node that was never seen here ended before this node joined, so it does not return, unless it has
        a data directory; that is assumed if this node has one."""
        if not self._seen.is_set():
            return True
        known = self._missing.get(node, self._ended.get(node))
        keeps = (self._member if known is None else known[0]).keeps
        if known is None and not keeps:
            return node in self.current
        return not self.gone(node, durable=keeps)

    def ended(self, node: str, life: int, before_s: float) -> None:
        """Note that the process of a node with this life, seen at `before_s`, has ended."""
        known = self._registered.get(node, self._missing.get(node))
        if known is None or known[0].life != life or node in self._ended:
            return
        self._ended[node] = known[0], self._clock()
        while len(self._ended) > MAX_MEMBERS:
            del self._ended[next(iter(self._ended))]
        log.warning("node %s at %s was removed from the cluster: its process has ended", node, known[0].address)
        self._evict(node)
        self._settle()
        for over in self._over:
            over(node, before_s)

    # This node's registration

    async def joined(self) -> None:
        """Return once this node is a member, and knows the others."""
        await self._seen.wait()

    async def run(self) -> None:
        """Keep this node registered, and watch the other registrations, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep())
                group.create_task(self._look())
                group.create_task(self._sweep())
        finally:
            await self._evictions.aclose()

    async def _keep(self) -> None:
        pause_s = _PAUSE_S
        while True:
            self._again.clear()
            try:
                async with asyncio.timeout(self._lease_s / 2):
                    if self._registration is None or not await self._registration.renew():
                        await self._register()
            except (Unavailable, OutcomeUnknown, TimeoutError) as error:
                self._contact(renewed=False, why=error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S, self._lease_s / _RENEWALS)
                continue
            self._contact(renewed=True)
            pause_s = _PAUSE_S
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / _RENEWALS):
                    await self._again.wait()

    async def _register(self) -> None:
        """Register, unless another process has registered this node's name meanwhile."""
        self._registration = None
        if self._registered_once:
            found = (await self._coordinator.members()).get(self.me)
            entry = None if found is None else self._entry(self.me, found)
            if entry is not None and entry.life != self._member.life:
                log.error(
                    "another node has this node's number, at %s: two must not run on one data directory, nor on copies"
                    " of one; end one of them",
                    entry.address,
                )
                return
        value = self._seal.sealed(self.me, msgspec.json.encode(self._member))
        self._registration = await self._coordinator.register(self.me, value, self._lease_s)
        self._registered_once = True

    def _contact(
        self, *, renewed: bool | None = None, watched: bool | None = None, why: BaseException | None = None
    ) -> None:
        """Note whether the coordinator answered a renewal or a watch."""
        before = self._renewed and self._watched
        self._renewed = self._renewed if renewed is None else renewed
        self._watched = self._watched if watched is None else watched
        now = self._renewed and self._watched
        if now and not before:
            self._answers_since = self._clock()
            log.info("the coordinator answers")
        elif before and not now:
            self._answers_since = None
            log.warning(
                "the coordinator does not answer; the list of members stays as it is until it does: %s",
                str(why) or repr(why),
            )

    async def leave(self) -> None:
        """Remove this node's registration, after `run` has ended."""
        registration, self._registration = self._registration, None
        if registration is not None:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await registration.leave()
            except (Unavailable, OutcomeUnknown, TimeoutError):
                log.warning(
                    "the coordinator does not answer; the registration of this node expires in %s s", self._lease_s
                )

    # The others

    async def _look(self) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                async with aclosing(self._coordinator.watch_members()) as watch:
                    async for members in watch:
                        self._contact(watched=True)
                        pause_s = _PAUSE_S
                        self._took(members)
            except Unavailable as error:
                self._contact(watched=False, why=error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S, self._lease_s / _RENEWALS)

    async def _sweep(self) -> None:
        """Periodically remove members whose registration is missing for long enough; see the module."""
        pause_s = self._lease_s / (2 * _RENEWALS)
        awake_s = self._clock()
        while True:
            await asyncio.sleep(pause_s)
            before_s, awake_s = awake_s, self._clock()
            if awake_s - before_s > self._lease_s / 2:  # this process was suspended: its view may be outdated
                self._contact(renewed=False, why=TimeoutError(f"this node was away for {awake_s - before_s:.1f} s"))
                self._again.set()
            self._settle()

    def _took(self, values: Mapping[str, bytes]) -> None:
        """Adopt the registrations that the coordinator reports."""
        now, before = self._clock(), self._registered
        seen = {name: member for name, (member, _) in (*self._missing.items(), *before.items())}
        decoded, self._decoded, self._registered = self._decoded, {}, {}
        for name, value in values.items():
            if name == self.me or len(self._registered) >= MAX_MEMBERS:
                continue
            known = decoded.get(name)
            member = known[1] if known is not None and known[0] == value else self._entry(name, value)
            self._decoded[name] = value, member
            if member is not None:
                self._registered[name] = member, value
        for name in before.keys() - self._registered.keys():
            self._missing[name] = before[name][0], now
        for name, (member, _) in self._registered.items():
            back = self._missing.pop(name, None) is not None
            ended = self._ended.get(name)
            if ended is not None and (back or ended[0].life != member.life):
                del self._ended[name]  # the node was started again, or has registered again
            elif ended is not None:
                self._evict(name)
        while len(self._missing) > MAX_MEMBERS:
            del self._missing[next(iter(self._missing))]
        if self.me in values and not self._seen.is_set():
            self._joined_s = now
            self._seen.set()
        elif self.me not in values:
            self._again.set()
        self._settle()
        taken = {member.address for name, (member, _) in self._registered.items() if name not in seen}
        for name, member in seen.items() if taken else ():
            if member.address in taken:
                self.ended(name, member.life, now)

    def _entry(self, name: str, value: bytes) -> Member | None:
        """The decoded entry of a node; None for an invalid value."""
        try:
            member = msgspec.json.decode(self._seal.opened(name, value), type=Member)
            member = msgspec.structs.replace(member, node=name)
            check_address(member.address)
            if len(name) != len(self.me) or not name.isalnum():
                raise ValueError("it is under no node's name")
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("the coordinator has an invalid entry for member %r: %s", name[:100], error)
            return None
        if member.major != pm.MAJOR:
            log.warning("node %s is ignored: it has protocol version %d, this node %d", name, member.major, pm.MAJOR)
            return None
        if member.address == self._member.address and name != self.me:
            log.warning("node %s is registered with the address of this node, %s", name, member.address)
        return member

    def _settle(self) -> None:
        """Determine the current members."""
        steady = self._answers_since is not None and self._clock() >= self._answers_since + self._lease_s
        found = {self.me: self._member}
        found |= {name: member for name, (member, _) in self._registered.items() if name not in self._ended}
        if not steady:
            kept = self._missing.keys() & self.current.keys()
            found |= {name: self._missing[name][0] for name in kept if name not in self._ended}
        if found == self.current:
            return
        for name in self.current.keys() - found.keys() - self._ended.keys():
            log.warning("node %s at %s was removed from the cluster", name, self.current[name].address)
        self.current = MappingProxyType(found)
        self.epoch += 1
        for changed in self._changed:
            changed()

    def _evict(self, name: str) -> None:
        """Remove the registration of a process that has ended."""
        if name in self._registered:
            self._evictions.spawn(self._evict_now(name, self._registered[name][1]))

    async def _evict_now(self, name: str, value: bytes) -> None:
        with suppress(Unavailable, OutcomeUnknown):  # tried again when the registration is seen again
            await self._coordinator.evict(name, value)


class EntrySeal:
    """Adds an authentication code to entries at a coordinator, and checks it: HMAC-SHA256 with a key derived from the
    cluster's key.

    The entries of a cluster without a key, which uses only loopback, have no code.
    """

    def __init__(self, key: Key | None) -> None:
        self._key = None if key is None else hashlib.blake2b(key.secret, person=b"dataplane member").digest()

    def sealed(self, name: str, entry: bytes) -> bytes:
        """The value to register under this name."""
        return entry if self._key is None else self._code(self._key, name, entry) + entry

    def opened(self, name: str, value: bytes) -> bytes:
        """The entry in a value under this name. Raises ValueError if the code is wrong."""
        if self._key is None:
            return value
        code, entry = value[:64], value[64:]
        if not hmac.compare_digest(code, self._code(self._key, name, entry)):
            raise ValueError("it was not written with the cluster's key")
        return entry

    @staticmethod
    def _code(key: bytes, name: str, entry: bytes) -> bytes:
        return hmac.new(key, name.encode() + b"\0" + entry, "sha256").hexdigest().encode()
