"""The etcd servers that nodes run beside themselves for a cluster without others: one at first, three of three members.

Which there are is a value of theirs, a list that changes by compare-and-set alone. A node without a server that is the
next in line adds itself to the list, then to etcd as a learner (etcd has one at a time), and is promoted once it has
caught up. A server whose node has gone, or that its node does not run any more, is taken out of the list, and another
takes its place; where the next in line does not manage, the one after it does. What is in etcd and not in the list is
taken out of etcd.

What always holds: a server is in the list before it is in etcd, so what etcd has and a list that was read later has not
is left over; no step waits for one that failed: each looks at the list as it is by then; a server's data end with its
node, so they are not synced to disk; nobody but a holder of the key that the certificates are made of is answered
(`cluster.certificates`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import msgspec

from dataplane.clock import Clock, monotonic
from dataplane.cluster.certificates import certificates
from dataplane.cluster.groups import check_cancelled, first_of
from dataplane.cluster.membership import Membership
from dataplane.cluster.roster import LIST, SERVERS, Server, decoded, encoded, in_line
from dataplane.cluster.server import EtcdServer, program
from dataplane.config import environment
from dataplane.coordinator.base import OutcomeUnknown, Unavailable
from dataplane.coordinator.etcd import EtcdCoordinator
from dataplane.coordinator.gateway import Gateway, Refused
from dataplane.store.claim import Claim
from dataplane.wire.auth import Key

log = logging.getLogger(__name__)

_ASK_S, _TRY_S = 3.0, 1.0  # a change of its servers that was not answered may be refused as made already
_BEGIN_S = 20.0  # until a server that begins has to answer
_CATCH_UP_S = 60.0
_AGAIN_S, _LOOK_S = 0.1, 1.0
_FAILURES = (OSError, ValueError, Unavailable, OutcomeUnknown)  # for which a server of etcd is given up
_MAX_AGAIN_S = 30.0  # between attempts to run a server here
_TURN_S = 10.0  # after which the next but one in line takes its turn, where there is none yet
_NOT_FOUND, _NO_LEARNER, _BEHIND = "member not found", "can only promote a learner", "in sync with"
"""What etcd answers where a server was taken out, where it is no learner any more, and where it has not caught up."""


class Ensemble:
    """The servers, as one node has to do with them. `run` it for as long as they are the cluster's coordinator."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        name: str,
        key: Key,
        own_host: str,
        listen: str,
        membership: Membership,
        clock: Clock = monotonic,
    ) -> None:
        """`endpoints`: HOST:PORT of servers, none where this node begins the first; `name`: the cluster's. `own_host`:
        by which others find this host; `listen`: on which servers here listen, empty for every address."""
        self.name = name
        self.servers: tuple[Server, ...] = ()
        """As last read."""
        self._own_host = f"[{own_host}]" if ":" in own_host else own_host
        self._listen = listen
        self._membership = membership
        self._clock = clock
        self._certificates = certificates(key, [own_host])
        self._tls = self._certificates.client()
        self._endpoints = endpoints
        self._own: asyncio.Task[None] | None = None
        self._own_name = ""
        self._checked: tuple[Server, ...] = ()
        self._odd: bytes | None = None  # what was read last that is no list
        self._over: dict[tuple[str, int], float] = {}  # processes that have ended, and when that was known
        self._listed: dict[str, Server] = {}  # by where other servers find them: all that ever were in the list
        self._voting: frozenset[str] = frozenset()  # as etcd said while it did not answer otherwise
        self._failed = 0  # times in a row that no server could be run here
        self._again_s = 0.0  # when to try that again
        self._short_since: float | None = None  # since when there are fewer servers than there could be
        self._due = asyncio.Event()
        membership.watch(self._due.set)
        if endpoints:
            self._connect(endpoints)

    def _connect(self, endpoints: tuple[str, ...]) -> None:
        self._endpoints = endpoints
        self.coordinator = EtcdCoordinator(endpoints, self.name, tls=self._tls)
        self._gateway = Gateway(endpoints, _ASK_S, self._tls, try_s=_TRY_S)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """HOST:PORT of those with a vote, for clients."""
        return self._endpoints

    @property
    def runs(self) -> bool:
        """Whether this node runs a server."""
        return self._own is not None

    def lost(self) -> bool:
        """Whether so many processes that run servers have ended that the others are no majority, for certain."""
        if self._voting:
            ended = [url for url in self._voting if url in self._listed and self._has_ended(self._listed[url])]
            return 2 * len(ended) >= len(self._voting)
        voting = [server for server in self.servers if server.ready]
        alive = sum(not self._has_ended(server) for server in voting)
        perhaps = sum(not server.ready and not self._has_ended(server) for server in self.servers)
        least_lost = 2 * (alive + perhaps) <= len(voting) + perhaps  # if those vote that the list has as learners
        return bool(voting) and 2 * alive <= len(voting) and least_lost

    async def look(self) -> None:
        """Ask who votes, while the servers do not answer otherwise: each knows that by itself. One may have been
        promoted, or taken out of the list, whose node ended before the list, or etcd, was changed too."""
        with suppress(Unavailable):
            found = (await self._gateway.ask("cluster/member/list", {})).members
            self._voting = frozenset(url for each in found if not each.isLearner for url in each.peerURLs)

    def _has_ended(self, server: Server) -> bool:
        life = server.node, server.life
        return life in self._over or self._membership.has_ended(*life)

    def over_s(self) -> float:
        """By when the processes had ended of all servers that have, as far as is known."""
        ended = [server for server in self._listed.values() if self._has_ended(server)]
        lives = [(server.node, server.life) for server in ended]
        return max((self._over.get(life, self._membership.ended_by(life[0])) for life in lives), default=self._clock())

    def strangers(self) -> list[Server]:
        """Servers whose nodes never were members as far as this one knows, so that nobody looks whether they live."""
        known = {*self._membership.current, *self._membership.missing}
        return [each for each in self.servers if each.node not in known and not self._has_ended(each)]

    def ended(self, server: Server) -> None:
        """The process that runs this one has ended."""
        self._over.setdefault((server.node, server.life), self._clock())

    async def run(self, begun: Callable[[], Awaitable[None]]) -> None:
        """Follow the servers, and run one if it is this node's turn, until cancelled. `begun` is awaited once they have
        answered. Raises, in a group, Unavailable where they do not, and OSError, ValueError and OutcomeUnknown where
        this node is to begin, and can not."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._endpoints:
                    self._saw(await self.coordinator.read(LIST))
                    if not self.servers:
                        raise Unavailable(f"{self.coordinator.address} has no list of its servers")
                else:
                    await self._begin(group)
                await begun()
                group.create_task(self._follow())
                while True:
                    self._due.clear()
                    try:
                        await self._tend(group)
                    except (Unavailable, OutcomeUnknown) as error:
                        log.debug("the servers are looked after later: %s", error)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await self._due.wait()
        finally:
            if self._endpoints:
                await self._gateway.aclose()
                await self.coordinator.aclose()

    # The list

    async def _follow(self) -> None:
        while True:
            with suppress(Unavailable):
                async with aclosing(self.coordinator.watch(LIST)) as watch:
                    async for value in watch:
                        self._saw(value)
            await asyncio.sleep(_AGAIN_S)

    def _saw(self, value: bytes | None) -> None:
        try:
            self.servers = decoded(value)
        except Unavailable as error:
            if value != self._odd:
                log.error("%s", error)
            self._odd = value
            raise
        self._listed |= {server.place.peer_url: server for server in self.servers}
        self._voting = frozenset()
        endpoints = tuple(server.clients for server in self.servers if server.ready)
        if endpoints:
            self._endpoints = endpoints
            self.coordinator.use(endpoints)
            self._gateway.use(endpoints)
        self._due.set()

    async def _change(self, change: Callable[[tuple[Server, ...]], tuple[Server, ...]]) -> tuple[Server, ...]:
        """Change the list, from whatever it is by then; what it is then. Raises Unavailable, OutcomeUnknown."""
        value = await self.coordinator.read(LIST)
        while True:
            servers = change(decoded(value))
            wanted = encoded(servers)
            if wanted == value:
                return servers
            found = await self.coordinator.swap(LIST, value, wanted)
            self._saw(found)
            if found == wanted:
                return servers
            value = found

    # What is due

    async def _tend(self, group: asyncio.TaskGroup) -> None:
        """Do what is due by the list as it was last seen, which may be old: whatever is done looks at it anew."""
        if not self.servers or not self._membership.coordination.answers:
            return
        if self._own is not None and self._own.done():
            self._own, self._own_name = None, ""
        if self._is_mislaid():
            await self._set_right()
        alive = [server for server in self.servers if self._is_alive(server)]
        if not alive:
            return
        if self._membership.me == min(server.node for server in alive):
            if len(alive) < len(self.servers):
                await self._change(lambda now: tuple(server for server in now if self._is_alive(server)))
            if self._checked != self.servers:
                await self._take_out()
        if self._own is None and self._is_turn(alive):
            self._own = group.create_task(self._join(self._new_server()))

    def _is_alive(self, server: Server) -> bool:
        member = self._membership.current.get(server.node)
        return member is not None and member.life == server.life

    def _is_mislaid(self) -> bool:
        """Whether this node runs a server that is not in the list, or one is in the list that it does not run."""
        if self._own is not None and not self._own_name:
            return False  # it is about to be added
        mine = {server.name for server in self.servers if self._is_own(server)}
        return mine != ({self._own_name} - {""})

    def _is_own(self, server: Server) -> bool:
        membership = self._membership
        return (server.node, server.life) == (membership.me, membership.current[membership.me].life)

    async def _set_right(self) -> None:
        """End the server here that is not in the list, and take out what is in the list and not run here."""
        servers = await self._change(
            lambda now: tuple(each for each in now if not self._is_own(each) or each.name == self._own_name)
        )
        if self._own is not None and self._own_name not in {each.name for each in servers}:
            await self._take_out()  # while it runs: of two that vote, one alone can not do that
            self._own.cancel()
            await asyncio.gather(self._own, return_exceptions=True)
            self._own, self._own_name = None, ""

    def _is_turn(self, alive: list[Server]) -> bool:
        """Whether this node is to run another server now."""
        line = in_line(self._membership.current, {server.node for server in alive})
        now = self._clock()
        if not line:
            self._short_since = None
            return False
        if self._short_since is None:
            self._short_since = now
        settled = len(alive) == len(self.servers) and all(server.ready for server in alive)
        if not settled or self._membership.me not in line or now < self._again_s:
            return False
        return now >= self._short_since + _TURN_S * line.index(self._membership.me)

    async def _take_out(self) -> None:
        """Take out of etcd what is not in the list, and promote who votes by the list. Raises Unavailable,
        OutcomeUnknown."""
        found = (await self._gateway.ask("cluster/member/list", {})).members
        servers = decoded(await self.coordinator.read(LIST))
        voting = {server.place.peer_url: server.ready for server in servers}
        for each in found:
            which = {"ID": each.ID}
            with suppress(Refused):  # another node has done it
                if not voting.keys() & each.peerURLs:
                    log.info("server %s of etcd is taken out: its node has gone", each.name or each.peerURLs)
                    await self._gateway.ask("cluster/member/remove", which, writes=True)
                elif each.isLearner and any(voting.get(url) for url in each.peerURLs):
                    await self._gateway.ask("cluster/member/promote", which, writes=True)
        same = {url: not each.isLearner for each in found for url in each.peerURLs} == voting
        self._checked = servers if same else ()

    # This node's own

    def _new_server(self) -> Server:
        me = self._membership.me
        clients, servers = (f"{self._own_host}:{port}" for port in _free_ports(self._listen))
        member = self._membership.current[me]
        return Server(me, member.life, f"{me}-{secrets.token_hex(4)}", clients, servers, member.address)

    async def _begin(self, group: asyncio.TaskGroup) -> None:
        """Begin the cluster of servers, with one here."""
        program()
        first = msgspec.structs.replace(self._new_server(), ready=True)
        self._connect((first.clients,))
        begun = asyncio.Event()

        async def begin() -> None:
            try:
                async with asyncio.timeout(_BEGIN_S):
                    while not begun.is_set():
                        try:
                            await self._change(lambda _: (first,))
                            begun.set()
                        except (Unavailable, OutcomeUnknown):
                            await asyncio.sleep(_AGAIN_S)
            except TimeoutError:
                raise OSError(f"the etcd that was started has not answered for {_BEGIN_S} s") from None

        self._own_name = first.name
        self._own = group.create_task(self._hold(first, "new", first.place.listed, begin))
        await begun.wait()

    async def _join(self, server: Server) -> None:
        """Run another server, until it is not in the list any more."""
        try:
            await self._join_now(server)
        except (BaseExceptionGroup, *_FAILURES) as error:
            log.warning("this node runs no server of etcd now: %s", first_of(error, _FAILURES))
            check_cancelled()
            self._failed += 1
            self._again_s = self._clock() + min(_LOOK_S * 2**self._failed, _MAX_AGAIN_S)
        finally:
            self._own_name = ""  # what is left in the list of this one is taken out then
            self._due.set()

    async def _join_now(self, server: Server) -> None:
        def added(now: tuple[Server, ...]) -> tuple[Server, ...]:
            full = len(now) >= SERVERS or not all(each.ready for each in now)
            return now if full or server in now else (*now, server)

        if server not in await self._change(added):
            return  # another node was first
        self._own_name = server.name
        await self._take_out()  # what is left of another, since etcd has one learner at a time
        asked = {"peerURLs": [server.place.peer_url], "isLearner": True}
        found = (await self._gateway.ask("cluster/member/add", asked, writes=True)).members
        numbers = [each.ID for each in found if server.place.peer_url in each.peerURLs]
        if not numbers:
            raise OSError("etcd does not name the server that it has added")
        listed = ",".join(f"{each.name or server.name}={each.peerURLs[0]}" for each in found)

        async def catch_up() -> None:
            await self._promote(numbers[0])
            ready = msgspec.structs.replace(server, ready=True)
            if ready not in await self._change(lambda now: tuple(ready if e == server else e for e in now)):
                raise OSError("it was taken out meanwhile")
            self._failed = 0
            log.info("this node runs a server of etcd, at %s", server.clients)

        await self._hold(server, "existing", listed, catch_up)

    async def _promote(self, number: int) -> None:
        """Have this server vote, once it has caught up. Raises OSError where it does not in time, or was taken out."""
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                while True:
                    try:
                        await self._gateway.ask("cluster/member/promote", {"ID": number}, writes=True)
                    except (Unavailable, OutcomeUnknown) as error:
                        if _NOT_FOUND in str(error):
                            raise OSError("it was taken out meanwhile") from None
                        if _NO_LEARNER in str(error) and _BEHIND not in str(error):
                            return
                    else:
                        return
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            raise OSError(f"it has not caught up in {_CATCH_UP_S} s") from None

    async def _hold(self, server: Server, state: str, listed: str, first: Callable[[], Awaitable[None]]) -> None:
        """Run a server here until cancelled, or until what is to be done first fails, or the server ends before."""
        directory = Claim(Path(environment().spill_dir), f"dataplane-etcd-{os.getuid()}")
        token = hashlib.blake2b(self.name.encode(), digest_size=16).hexdigest()
        etcd = EtcdServer(directory.path, server.place, token, self._listen, self._certificates, keeps=False)
        proven = asyncio.Event()

        async def how() -> tuple[str, str]:
            return state, listed

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(etcd.run(how, proven))
                await first()
                proven.set()
        finally:
            directory.release()


def _free_ports(host: str) -> tuple[int, int]:
    """Two ports that nobody listens at, now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as one, socket.create_server((host, 0), family=family) as other:
        return one.getsockname()[1], other.getsockname()[1]
