"""Which etcd a cluster uses whose nodes were told of each other by address alone (`--join static://...`, or nothing).

A node asks those that it was told of which coordinator the cluster uses; one that knows answers with its servers and
what is needed to speak to them. The coordinator is an etcd that nodes run beside themselves, in a directory that ends
with the node: one server at first, three as soon as there are three members (`cluster.ensemble`).

- A node that was told of nobody has the coordinator in its process until somebody asks; what it has is moved then.
- Where nobody that is asked knows a coordinator, the node with the least address of those that answer founds: it starts
  a server, once more than half of all that it knows of have granted that, none of them founds already, and none knows
  of others. A grant is for one node, and runs out where that one does not found.
- A node uses a coordinator, and tells others of it, once that has answered it: what it was told of may be over.
- When so many servers' processes have ended that the rest are no majority, their etcd is over: no data of theirs
  outlives them. Who knows that tells those that it asks, and they believe it where theirs does not answer. The members
  whose processes have not ended found another in the same way, its generation is the next, and each restores what it
  knows.
- Those that were named and are no members are asked again and again: one may have been started there, told of nobody.

What always holds: a node uses coordinators of ascending generations; of one generation there is one, since two that
found have a majority each of what they know of. (Lists that have no node in common are two clusters.)
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from dataplane.clock import Clock, monotonic
from dataplane.cluster.detector import Detector, refused
from dataplane.cluster.groups import check_cancelled, first_of
from dataplane.cluster.membership import MAX_MEMBERS, Membership
from dataplane.coordinator.base import OutcomeUnknown, Unavailable
from dataplane.coordinator.current import CurrentCoordinator
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import DataplaneError, ProtocolMismatch
from dataplane.wire import auth
from dataplane.wire import peer_messages as pm
from dataplane.wire.auth import Key
from dataplane.wire.peer import Peers, check_address

if TYPE_CHECKING:
    from dataplane.cluster.ensemble import Ensemble

log = logging.getLogger(__name__)

_AGAIN_S, _MAX_AGAIN_S = 0.05, 0.5  # between rounds of asking
_FAILURES = (OSError, ValueError, Unavailable, OutcomeUnknown)  # for which a server of etcd is given up
_PAUSE_S = 2.0  # after an etcd could not be run
_ASK_S = 1.0
_GRANT_S = 5.0
_LOOK_S = 0.5  # between looks at the coordinator
_NAMED_S = 2.0  # between askings of those that were named and are no members, once they have been absent for a while
_NAMED_EACH_S = 0.02  # the same, for each member: all of them may ask the same one
_JOIN_S = 10.0  # for which who is no member yet waits for a coordinator that does not answer
_TOLD = 16  # members that who joins is told of, to ask those where the coordinator is over before it is a member
_HAND_OVER_S = 5.0  # until others have granted again what a server that took its time was begun for
_ASKED = 3  # others, while the coordinator does not answer
_TELL_ROUNDS = 20  # of asking in vain, after which the log says whom this node waits for


@dataclass(frozen=True, slots=True)
class Found:
    """A coordinator: HOST:PORT of its servers for clients, none where they are to be begun here; the cluster's name
    there, its generation, and the content of its key file where the cluster has no key of its own."""

    servers: tuple[str, ...]
    name: str
    generation: int
    secret: bytes = b""


class Founding:
    """See the module. `run` it beside the membership; `answer` what others ask."""

    def __init__(
        self,
        addresses: Iterable[str],
        address: str,
        listen: str,
        key: Key | None,
        peers: Peers,
        coordinator: CurrentCoordinator,
        membership: Membership,
        detector: Detector,
    ) -> None:
        """`addresses`: tcp://HOST:PORT of others, this node's own among them or not; `address`: this one's; `listen`:
        the host to listen on, empty for every address."""
        self._me = bytes.fromhex(membership.me)
        self._address, self._listen, self._key = address, listen, key
        self._named = {each for each in addresses if each != address}
        self._known = dict.fromkeys(sorted(self._named))  # whom to ask
        self._peers = peers
        self._coordinator = coordinator
        self._membership = membership
        self._detector = detector
        self._using: Found | None = None
        self._ensemble: Ensemble | None = None
        self._over = 0  # the generation that is over
        self._told_over, self._told_by = 0, dict[str, None]()  # as others know, and who does
        self._wanted = asyncio.Event()
        self._bereft = False  # told of nobody, it is without the coordinator of whoever had asked it
        self._granted: tuple[bytes, float] = b"", 0.0
        self._founds = False
        self._why = ""
        self._serves = membership.current[membership.me].serves
        self._changed = asyncio.Event()
        membership.watch(self._changed.set)

    def seek(self, addresses: Iterable[str]) -> None:
        """Others listen there, and no more where was said before."""
        self._named = {each for each in addresses if each != self._address}
        self._known = dict.fromkeys(sorted(self._named))
        self._bereft = self._bereft and not self._named
        if self._known:
            self._wanted.set()

    # What others ask

    def answer(self, asked: pm.FindCoordinator) -> pm.Coordinates:
        """Raises ProtocolMismatch."""
        if asked.major != pm.MAJOR:
            raise ProtocolMismatch(f"this node speaks version {pm.MAJOR}, not {asked.major}")
        if asked.node == self._me:
            return pm.Coordinates(asked.id, self._me)
        using = self._using
        if using is not None and using.generation > asked.over:
            secret = using.secret if self._key is None else b""
            known = [member.address for member in islice(self._membership.current.values(), _TOLD)]
            return pm.Coordinates(asked.id, self._me, list(using.servers), using.name, using.generation, secret, known)
        self._learn([asked.address])
        told = asked.node.hex()
        if asked.over > self._over and told in self._membership.current and told != self._membership.me:
            self._told_over = max(asked.over, self._told_over)
            self._told_by[asked.address] = None
        if using is None and not self._over:  # later, the members are who is to be asked
            self._learn(asked.known[:MAX_MEMBERS])
        self._wanted.set()
        granted = asked.claims and using is None and asked.over >= self._over
        granted = granted and self._grant(asked.node)
        if not asked.claims and self._granted[0] == asked.node:  # it has given up
            self._granted = b"", 0.0
        known, why = [*self._known], self._why
        return pm.Coordinates(
            asked.id, self._me, known=known, granted=granted, founds=self._founds, serves=self._serves, why=why
        )

    def _grant(self, node: bytes) -> bool:
        """Whether this node may found, as far as this one is concerned."""
        now = asyncio.get_running_loop().time()
        to, until_s = self._granted
        if to in (b"", node) or now > until_s:
            self._granted = node, now + _GRANT_S
            return True
        return False

    def _learn(self, addresses: Iterable[str]) -> None:
        for each in addresses:
            with suppress(ValueError):
                check_address(each)
                if each != self._address and len(self._known) < MAX_MEMBERS:
                    self._known.setdefault(each)

    # Finding it

    async def run(self) -> None:
        """Have a coordinator, until cancelled."""
        before: ProcessCoordinator | None = None
        self._bereft = False
        if not self._named:
            before = ProcessCoordinator()
            await self._coordinator.use(before)
            await self._wanted.wait()
        while True:
            found = await self._seek()
            try:
                async with asyncio.TaskGroup() as group:
                    running = group.create_task(self._run(found, before))
                    await self._stay(running)
                before, self._bereft = None, not self._named
            except (BaseExceptionGroup, *_FAILURES) as failed:
                error = first_of(failed, _FAILURES)
                check_cancelled()
                await self._failed(found, error)
            self._using = self._ensemble = None

    async def _failed(self, found: Found, error: BaseException) -> None:
        """This coordinator can not be used: say why, and wait a little before another is sought."""
        self._founds = False
        if found.servers:
            self._why = self._coordinator.why = f"the cluster's etcd does not answer: {error}"
            log.info("%s", self._why)
            await asyncio.sleep(_MAX_AGAIN_S)
        else:
            self._why = f"node {self._me.hex()} can not run the cluster's etcd: {error}"
            log.error("%s", self._why)
            await asyncio.sleep(_PAUSE_S)

    async def _seek(self) -> Found:
        """Ask until somebody knows, or this node is to found."""
        pause_s, rounds, least = _AGAIN_S, 0, True
        while True:
            self._wanted.clear()
            if not (self._known or self._named or self._over or self._bereft):
                await self._wanted.wait()  # who asked was this node, by another of its names
                continue
            claims = least and self._serves and self._grant(self._me)
            known = [*self._known]
            there = await self._round(known, claims)
            if not self._over:
                self._learn(address for each in there.values() for address in each.known[:MAX_MEMBERS])
            found = _best(there.values(), self._over)
            if found is not None:
                return found
            if self._over or self._bereft:
                await self._forget_ended([address for address in known if address not in there])
            first = (self._address < address or not each.serves for address, each in there.items())
            least = all(first) and not any(each.founds for each in there.values())
            if claims and least and known == [*self._known] and self._is_granted(there):
                secret = auth.new() if self._key is None else b""
                return Found((), f"cluster-{secrets.token_hex(8)}", self._over + 1, secret)
            if not least and self._granted[0] == self._me:
                self._granted = b"", 0.0
            self._why = self._coordinator.why = _waiting(there, self._known)
            rounds += 1
            if rounds == _TELL_ROUNDS:
                log.warning("%s", self._why)
            if rounds >= _TELL_ROUNDS and not there and not self._named and not self._over:
                self._known.clear()  # who asked has gone
                self._wanted.clear()
                await self._wanted.wait()
                rounds = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wanted.wait()
            await asyncio.sleep(_AGAIN_S)
            pause_s = min(2 * pause_s, _MAX_AGAIN_S)

    async def _round(self, known: list[str], claims: bool) -> dict[str, pm.Coordinates]:
        """Ask these; who answers, by address."""
        replies = await asyncio.gather(*(self._ask(address, claims) for address in known))
        there = {address: each for address, each in zip(known, replies, strict=True) if each is not None}
        for address in [address for address, each in there.items() if each.node == self._me]:
            del there[address]
            self._known.pop(address, None)  # another name of this node
        return there

    async def _forget_ended(self, silent: Iterable[str]) -> None:
        """Ask those no more whose processes have ended: nobody waits for them."""
        nodes = {member.address: node for node, member in self._membership.current.items()}
        self._detector.suspect([nodes[address] for address in silent if address in nodes])
        for address in silent:
            if address not in nodes and await refused(address):
                self._known.pop(address, None)

    def _is_granted(self, there: Mapping[str, pm.Coordinates]) -> bool:
        """Whether more than half of all have granted that this node founds, itself among them."""
        granting = {each.node for each in there.values() if each.granted}
        return 2 * (len(granting) + 1) > len(self._known) + 1

    async def _ask(self, address: str, claims: bool = False) -> pm.Coordinates | None:
        number, known = self._peers.next_id(), [*self._known]
        asked = pm.FindCoordinator(number, pm.MAJOR, self._me, self._address, known, claims, self._over)
        try:
            return await self._peers.request(address, asked, pm.Coordinates, _ASK_S)
        except DataplaneError:
            return None

    # Using it

    async def _run(self, found: Found, before: ProcessCoordinator | None) -> None:
        """Have this one be the coordinator, and take part in it. `before`: what this node had in its process."""
        from dataplane.cluster.ensemble import Ensemble  # with TLS and an HTTP client, which a lone node does not need

        check_installed()
        self._founds = not found.servers
        log.info("this node %s", "begins an etcd" if self._founds else "joins an etcd")
        key = self._key if self._key is not None else auth.parse(found.secret)
        host = self._address.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")
        ensemble = Ensemble(found.servers, found.name, key, host, self._listen, self._membership)

        async def begun() -> None:
            if not found.servers:
                await self._still_granted()
            if before is not None:
                await self._coordinator.use(None)  # closes it; who asks meanwhile waits for the next
                for name, value in before.values().items():
                    await ensemble.coordinator.swap(name, None, value)
            self._using, self._ensemble = replace(found, servers=ensemble.endpoints), ensemble
            self._founds, self._why, self._granted = False, "", (b"", 0.0)
            self._told_by.clear()
            self._membership.listed = False
            log.info("the cluster's etcd is at %s (%d)", ", ".join(ensemble.endpoints), found.generation)
            await self._coordinator.use(ensemble.coordinator)

        await ensemble.run(begun)

    async def _still_granted(self) -> None:
        """Return once others have granted again that this node founds: its server may have taken its time. Raises
        OSError where they use another coordinator, or do not in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HAND_OVER_S):
                while True:
                    there = await self._round(known := [*self._known], self._grant(self._me))
                    if _best(there.values(), self._over) is not None:
                        break
                    if self._is_granted(there):
                        return
                    if self._over:
                        await self._forget_ended([address for address in known if address not in there])
                    await asyncio.sleep(_AGAIN_S)
        raise OSError("others found another meanwhile")

    async def _stay(self, running: asyncio.Task[None]) -> None:
        """Return once this coordinator is over, or another has taken its place."""
        changed, asks, heard_s = self._changed, _Pauses(), monotonic()
        while not running.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await changed.wait()
            changed.clear()
            ensemble, using = self._ensemble, self._using
            if ensemble is None or using is None:
                heard_s = monotonic()
                continue
            self._using = using = replace(using, servers=ensemble.endpoints)
            answers = self._membership.coordination.answers
            over_s = ensemble.over_s() if ensemble.lost() else math.inf
            if not answers and self._told_over >= using.generation:
                over_s = min(over_s, monotonic())
            if over_s < math.inf:
                log.warning("the cluster's etcd has ended with its nodes; the others run another")
            elif answers:
                heard_s = monotonic()
                members = {member.address for member in self._membership.current.values()}
                if asks.due(absent := frozenset(self._named - members), _NAMED_EACH_S * len(members)):
                    await self._ask_named(absent, using)
                continue
            else:
                self._detector.suspect({server.node for server in ensemble.servers})
                await ensemble.look()
                await self._look_at_strangers(ensemble)
                stays = self._membership.listed or ensemble.runs or monotonic() - heard_s < _JOIN_S
                if stays and not await self._is_superseded(using, ensemble):
                    continue
                over_s = monotonic() if stays else math.inf  # there is no next one before this one has ended
            if self._membership.listed:
                self._over = using.generation
                others = [m.address for node, m in self._membership.current.items() if node != self._membership.me]
                self._known = dict.fromkeys([*others, *self._told_by])  # the members are who is to be asked
                self._told_by.clear()
            else:  # it was no member yet, and does not know them: it asks those that it knew before
                log.info("this node was no member when the cluster's etcd ended, and asks for another")
            await self._coordinator.use(None, over_s=over_s)
            running.cancel()
            return

    async def _look_at_strangers(self, ensemble: Ensemble) -> None:
        """Look whether those that run servers, and were no members yet when they ceased to answer, have ended: another
        node is there, or nobody is, as their host says."""
        for server in ensemble.strangers():
            answer = await self._ask(server.address)
            if (answer is not None and answer.node.hex() != server.node) or await refused(server.address):
                ensemble.ended(server)

    async def _ask_named(self, absent: Iterable[str], using: Found) -> None:
        """Ask those that were named and are no members, which lets them find this cluster."""
        for each in await asyncio.gather(*map(self._ask, absent)):
            if each is not None and each.servers and each.name != using.name:
                other = ", ".join(each.servers)
                log.error(
                    "node %s is of another cluster, whose etcd is at %s; end one of the two", each.node.hex(), other
                )

    async def _is_superseded(self, using: Found, ensemble: Ensemble) -> bool:
        """Ask a few others which coordinator they use: whether it is another than this one, which does not answer."""
        others = [m.address for node, m in self._membership.current.items() if node != self._membership.me]
        others = others or [*self._known]
        asked = random.sample(others, min(len(others), _ASKED))
        there = [each for each in await asyncio.gather(*map(self._ask, asked)) if each is not None and each.servers]
        for each in there:
            if each.name == using.name:
                ensemble.coordinator.use(each.servers)
        return any(each.generation > using.generation for each in there)


class _Pauses:
    """When the same nodes are to be asked again: soon at first, then now and then."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._asked: frozenset[str] = frozenset()
        self._pause_s = self._next_s = 0.0

    def due(self, absent: frozenset[str], least_s: float) -> bool:
        """Whether these are to be asked now; from the second time on, `least_s` lies between."""
        now = self._clock()
        if absent != self._asked:
            self._asked, self._pause_s, self._next_s = absent, _LOOK_S, now
        if not absent or now < self._next_s:
            return False
        self._next_s = now + max(self._pause_s, least_s)
        self._pause_s = min(2 * self._pause_s, _NAMED_S)
        return True


def check_installed() -> None:
    """Raises ValueError where this node could not speak to the cluster's etcd."""
    from dataplane.cluster import certificates
    from dataplane.coordinator import gateway

    gateway.check_installed()
    certificates.check_installed()


def _best(there: Iterable[pm.Coordinates], over: int) -> Found | None:
    """The coordinator of the last generation that is known."""
    found = [each for each in there if each.servers and each.generation > over]
    best = max(found, key=lambda each: each.generation, default=None)
    return None if best is None else Found(tuple(best.servers), best.name, best.generation, best.secret)


def _waiting(there: Mapping[str, pm.Coordinates], known: Iterable[str]) -> str:
    """Why there is no coordinator yet."""
    said = [each.why for each in there.values() if each.why.startswith("node ")]
    silent = [address for address in known if address not in there]
    if said:
        return said[0]
    if silent:
        return f"no coordinator is known: of the others {', '.join(silent[:3])} do not answer"
    if there and not any(each.serves for each in there.values()):
        return "no node can run the cluster's etcd: pip install 'rollout-dataplane[etcd]' on each host"
    return "no coordinator is known yet: the nodes agree on who runs it"
