"""A cluster by a coordinator: each node registers there on a lease, and watches who else has.

A member is a node whose registration the coordinator has. One lease renewal and one watch a node are all the cost,
whatever the number of nodes. A node whose process ends is found by the kernel's word, not by a deadline
(`cluster.neighbour`), and evicted; one whose host falls silent goes with its lease, after tens of seconds: a node that
is starved is not dead.

What always holds:

- While the coordinator is away, members stay members. It is away from the first renewal or watch that fails until both
  have been answered again; a member that is absent is removed only once the coordinator has answered for a whole lease
  without a break, so that after an outage, or in an etcd that lost its data, each has had the time to register again.
- A node that was removed here is no member again under the same incarnation (`Member.since`): it is fenced, and its
  registration is evicted until it comes with another. A node whose registration was taken away while the coordinator
  answered it, or that was itself stopped for a whole lease, begins a new incarnation; one that only was away from the
  coordinator registers again as the same, and learns from an eviction if somebody has removed it meanwhile.
- An entry is believed if it carries the code that only a holder of the cluster's key can compute; what else somebody
  writes there is passed over, with a line in the log.

The clock is the loop's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from types import MappingProxyType

import msgspec

from dataplane.cluster.membership import MAX_MEMBERS, Coordination, Member, Membership
from dataplane.cluster.neighbour import Neighbour
from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Registration, Unavailable
from dataplane.wire import peer_messages as pm
from dataplane.wire.auth import Key
from dataplane.wire.peer import check_address

log = logging.getLogger(__name__)

LEASE_S = 20.0
"""Seconds after which a silent node is no member any more."""

_RENEWALS = 4  # in a lease
_PAUSE_S, _MAX_PAUSE_S = 0.1, 3.0
_LEAVE_S = 1.0


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What a node registers: who it is, where it listens, its incarnation, and where its end can be seen."""

    node: str
    address: str
    transports: dict[str, str] = {}
    since: int = 0
    pulse: str = ""
    major: int = pm.MAJOR


class LeaseMembership(Membership):
    """See the module."""

    def __init__(
        self,
        coordinator: Coordinator,
        me: Member,
        key: Key | None = None,
        host: str = "127.0.0.1",
        lease_s: float = LEASE_S,
    ) -> None:
        """`host`: the address to listen on for the neighbour; empty is every address. The coordinator is this one's to
        close. Raises OSError."""
        self._coordinator = coordinator
        self._me = me
        self._seal = _Seal(key)
        self._lease_s = lease_s
        self._members: Mapping[bytes, Member] = MappingProxyType({me.node: me})  # another with every change
        self._entries: dict[bytes, tuple[Member, bytes]] = {}  # the others that are registered, and their values
        self._decoded: dict[str, tuple[bytes, Entry | None]] = {}  # by name, of the values that were there last
        self._fallen: dict[bytes, int] = {}  # by node that was removed: its incarnation then
        self._renewed = self._watched = False
        self._answers_since: float | None = None
        self._begin: Callable[[], int] = lambda: self._me.since + 1
        self._anew = asyncio.Event()
        self._epoch = 1
        self._awake: float | None = None
        self._watchers: list[Callable[[], None]] = []
        self._neighbour = Neighbour(host, me, self._ended)
        self._evicting: set[asyncio.Task[None]] = set()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def members(self) -> Mapping[bytes, Member]:
        return self._members

    @property
    def coordination(self) -> Coordination:
        return Coordination(self._coordinator.address, self._answers_since is not None)

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    async def run(self) -> None:
        self._awake = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._neighbour.run())
                group.create_task(self._keep_registered())
                group.create_task(self._follow())
                while True:
                    await asyncio.sleep(self._lease_s / (2 * _RENEWALS))
                    self.look()
                    self._sweep()
        finally:
            for task in self._evicting:
                task.cancel()
            await asyncio.gather(*self._evicting, return_exceptions=True)

    # this node's own place

    async def _keep_registered(self) -> None:
        """Register, and renew that, for as long as this runs."""
        loop = asyncio.get_running_loop()
        registration: Registration | None = None
        pause_s, renewed = _PAUSE_S, 0.0
        try:
            while True:
                try:
                    async with asyncio.timeout(self._lease_s / 2):
                        if registration is None or self._anew.is_set():
                            self._anew.clear()
                            registration = await self._coordinator.register(self._name, self._value, self._lease_s)
                        elif not await registration.renew():
                            registration = None
                    if registration is None:
                        await self._lost_since(renewed)
                        continue
                    renewed, pause_s = loop.time(), _PAUSE_S
                    self._contact(renewed=True)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._lease_s / _RENEWALS):
                            await self._anew.wait()
                except (Unavailable, OutcomeUnknown, TimeoutError) as error:
                    self._contact(renewed=False, why=error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S, self._lease_s / _RENEWALS)
        finally:
            if registration is not None:
                with suppress(Unavailable, OutcomeUnknown, TimeoutError):
                    async with asyncio.timeout(_LEAVE_S):
                        await registration.leave()

    async def _lost_since(self, renewed: float) -> None:
        """This node's registration is not there, which was there at that time. Returns once it may register again."""
        log.warning("this node is registered no more, and registers again")
        while (found := (await self._coordinator.members()).get(self._name)) is not None:
            entry = self._entry(self._name, found)
            if entry is None or entry.pulse == self._neighbour.address:
                return
            log.error(
                "another node has this node's number, at %s: two must not run on one data directory, nor on copies of"
                " one; end one of them",
                entry.address,
            )
            await asyncio.sleep(self._lease_s / _RENEWALS)
        if self._answers_since is not None and self._answers_since <= renewed:
            self._begin_anew("another node, or somebody, took its registration away")

    @property
    def _name(self) -> str:
        return self._me.node.hex()

    @property
    def _value(self) -> bytes:
        me = self._me
        entry = Entry(me.node.hex(), me.address, dict(me.transports), me.since, self._neighbour.address)
        return self._seal.sealed(msgspec.json.encode(entry))

    def _contact(
        self, *, renewed: bool | None = None, watched: bool | None = None, why: BaseException | None = None
    ) -> None:
        """Whether the coordinator answered."""
        before = self._renewed and self._watched
        self._renewed = self._renewed if renewed is None else renewed
        self._watched = self._watched if watched is None else watched
        now = self._renewed and self._watched
        if now and not before:
            self._answers_since = asyncio.get_running_loop().time()
            log.info("the coordinator answers")
        elif before and not now:
            self._answers_since = None
            log.warning("the coordinator does not answer; members stay members meanwhile: %s", str(why) or repr(why))

    # the others

    async def _follow(self) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                async with aclosing(self._coordinator.watch_members()) as watch:
                    async for entries in watch:
                        self._contact(watched=True)
                        pause_s = _PAUSE_S
                        self._take(entries)
            except Unavailable as error:
                self._contact(watched=False, why=error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S, self._lease_s / _RENEWALS)

    def _take(self, entries: Mapping[str, bytes]) -> None:
        """These are registered now."""
        self.look()
        before, self._decoded = self._decoded, {}
        found: dict[bytes, tuple[Member, bytes]] = {}
        pulses: dict[bytes, str] = {}
        for name, value in entries.items():
            if name == self._name or len(found) >= MAX_MEMBERS:
                continue
            known = before.get(name)
            entry = known[1] if known is not None and known[0] == value else self._entry(name, value)
            self._decoded[name] = value, entry
            if entry is not None:
                node = bytes.fromhex(entry.node)
                found[node] = Member(node, entry.address, entry.transports, entry.since), value
                pulses[node] = entry.pulse
        self._entries = found
        for node, (member, _) in found.items():
            now = self._members.get(node)
            if member.since <= self._fallen.get(node, -1):
                self._evict(node)
            elif now is None or now.since < member.since:
                if now is not None:
                    self._remove(node, "it has begun anew")
                self._add(member)
            elif now.since == member.since and now != member:
                self._add(member)
        self._sweep()
        self._neighbour.follow({node: pulse for node, pulse in pulses.items() if node in self._members})

    def _entry(self, name: str, value: bytes) -> Entry | None:
        """What a node wrote; None for anything else."""
        try:
            entry = msgspec.json.decode(self._seal.opened(value), type=Entry)
            check_address(entry.address)
            if entry.node != name or entry.since < 0 or len(bytes.fromhex(name)) != len(self._me.node):
                raise ValueError(f"it is of node {entry.node!r}")
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("the coordinator has for %r what no node of this cluster writes: %s", name[:100], error)
            return None
        if entry.major != pm.MAJOR:
            log.warning("node %s speaks version %d, and this one %d: it is no member", name, entry.major, pm.MAJOR)
            return None
        if entry.address == self._me.address and name != self._name:
            log.warning("node %s says that it listens at %s, as this one does", name, entry.address)
        return entry

    def _sweep(self) -> None:
        """Remove the members that are registered no more, once that can be believed."""
        if self._answers_since is None:
            return
        if asyncio.get_running_loop().time() < self._answers_since + self._lease_s:
            return
        for node in self._members.keys() - self._entries.keys() - {self._me.node}:
            self._fall(node, "its lease has run out, or it has left")

    def _ended(self, node: bytes) -> None:
        """The node's process has ended: its kernel says so."""
        if node in self._members:
            self._fall(node, "its process has ended")
            self._evict(node)

    def _fall(self, node: bytes, why: str) -> None:
        self._fallen[node] = self._members[node].since
        while len(self._fallen) > MAX_MEMBERS:
            del self._fallen[next(iter(self._fallen))]
        self._remove(node, why)

    def _evict(self, node: bytes) -> None:
        """Take away the registration of an incarnation that was removed here."""
        entry = self._entries.get(node)
        if entry is not None:
            task = asyncio.get_running_loop().create_task(self._evict_now(node.hex(), entry[1]))
            self._evicting.add(task)
            task.add_done_callback(self._evicting.discard)

    async def _evict_now(self, name: str, value: bytes) -> None:
        with suppress(Unavailable, OutcomeUnknown):  # tried again when it is seen again
            await self._coordinator.evict(name, value)

    def greeted(self, greet: pm.Greet) -> pm.Greeted:
        me = self._me
        return pm.Greeted(greet.id, pm.MAJOR, min(pm.MINOR, greet.minor), me.node, me.address, dict(me.transports))

    async def aclose(self) -> None:
        self._neighbour.close()
        await self._coordinator.aclose()

    # incarnations

    def look(self) -> None:
        if self._awake is None:
            return
        before, self._awake = self._awake, asyncio.get_running_loop().time()
        away_s = self._awake - before
        if away_s > self._lease_s / 2:
            self._contact(renewed=False, why=TimeoutError(f"this node was away for {away_s:.1f} s"))
        if away_s > self._lease_s and len(self._members) > 1:
            self._begin_anew(f"it was away for {away_s:.1f} s")

    def begin_anew_by(self, begin: Callable[[], int]) -> None:
        self._begin = begin

    def fences(self, node: bytes, since: int) -> bool:
        member = self._members.get(node)
        return since <= self._fallen.get(node, -1) or (member is not None and since < member.since)

    def met(self, node: bytes, since: int) -> None:
        known = self._members.get(node)
        if known is not None and known.since < since and node != self._me.node:
            self._remove(node, "it has begun anew")
            self._add(replace(known, since=since))

    def _begin_anew(self, why: str) -> None:
        log.warning("this node begins anew: %s", why)
        self._me = replace(self._me, since=self._begin())
        self._anew.set()
        self._add(self._me)

    def _add(self, member: Member) -> None:
        self._members = MappingProxyType({**self._members, member.node: member})
        self._changed()

    def _remove(self, node: bytes, why: str) -> None:
        member = self._members[node]
        self._members = MappingProxyType({n: m for n, m in self._members.items() if n != node})
        log.warning("node %s at %s is no member any more: %s", node.hex(), member.address, why)
        self._changed()

    def _changed(self) -> None:
        self._epoch += 1
        for watcher in self._watchers:
            watcher()


class _Seal:
    """An entry's code of authenticity, by the cluster's key; without a key there is none, on loopback alone."""

    def __init__(self, key: Key | None) -> None:
        self._key = None if key is None else hashlib.blake2b(key.secret, person=b"dataplane member").digest()

    def sealed(self, entry: bytes) -> bytes:
        """The value to register."""
        return entry if self._key is None else self._code(entry) + entry

    def opened(self, value: bytes) -> bytes:
        """The entry in a value. Raises ValueError where the code is not right."""
        if self._key is None:
            return value
        code, entry = value[:64], value[64:]
        if not hmac.compare_digest(code, self._code(entry)):
            raise ValueError("it was not written with the cluster's key")
        return entry

    def _code(self, entry: bytes) -> bytes:
        assert self._key is not None
        return hmac.new(self._key, entry, "sha256").hexdigest().encode()
