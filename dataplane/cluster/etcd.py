"""A cluster by etcd: each node writes there where it listens, and greets all who have.

etcd says whom to greet; who answers is a member, as with a fixed list (`cluster.static`). So nodes stay members while
etcd is away, what anybody writes there makes nobody a member, and the dead are found within the time of a greeting,
which no lease of etcd's gives: it extends them when its leader changes.

Each node has a key below `/dataplane/NAME/nodes/`, its number in hexadecimal, on a lease that it keeps alive: of a node
that has gone, the key goes with the lease. A key or lease that is not there any more (the node was stopped, etcd has
lost its data) is made again.

What always holds: what is read there is checked, and passed over with a line in the log where it is not what a node
writes; an etcd that does not answer is left for the next of those named, after pauses that get longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress

import msgspec

from dataplane.cluster.etcdapi import Etcd, EtcdError, Gone, available
from dataplane.cluster.membership import Member, Membership
from dataplane.cluster.static import BEAT_S, MAX_MEMBERS, StaticMembership
from dataplane.config import check_host_port
from dataplane.wire import peer_messages as pm
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""Seconds after which etcd forgets a node that it has not heard of. etcd's least is 2, or more where its elections take
longer."""

_PAUSE_S, _MAX_PAUSE_S = 0.1, 3.0
_LEAVE_S = 1.0


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What a node writes: who it is, and where it listens. The rest is for people who look."""

    node: str
    address: str
    transports: dict[str, str] = {}


class EtcdMembership(Membership):
    """See the module. `addresses` are HOST:PORT of etcd, `name` is that of the cluster."""

    def __init__(
        self,
        peers: Peers,
        me: Member,
        addresses: Iterable[str],
        name: str,
        beat_s: float = BEAT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        """Raises ValueError where no HTTP client is installed."""
        available()
        self._me = me
        self._greetings = StaticMembership(peers, me, (), beat_s)
        self._addresses = list(addresses)
        self._prefix = f"/dataplane/{name}/nodes/"
        self._key = (self._prefix + me.node.hex()).encode()
        self._lease_s = lease_s
        self._lease = 0
        self._entries: dict[bytes, _Entry] = {}

    @property
    def epoch(self) -> int:
        return self._greetings.epoch

    @property
    def members(self) -> Mapping[bytes, Member]:
        return self._greetings.members

    def greeted(self, greet: pm.Greet) -> pm.Greeted:
        return self._greetings.greeted(greet)

    def look(self) -> None:
        self._greetings.look()

    def begin_anew_by(self, begin: Callable[[], int]) -> None:
        self._greetings.begin_anew_by(begin)

    def fences(self, node: bytes, since: int) -> bool:
        return self._greetings.fences(node, since)

    def met(self, node: bytes, since: int) -> None:
        self._greetings.met(node, since)

    def watch(self, changed: Callable[[], None]) -> None:
        self._greetings.watch(changed)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._greetings.run())
            group.create_task(self._follow())

    async def _follow(self) -> None:
        """Follow one etcd after the other, for as long as each answers."""
        failed = 0
        while True:
            address = self._addresses[failed % len(self._addresses)]
            try:
                async with Etcd(address, timeout_s=self._lease_s / 2) as etcd:
                    try:
                        await self._register(etcd)
                        if failed:
                            log.warning("etcd at %s answers", address)
                        failed = 0
                        await self._keep_up(etcd)
                    except asyncio.CancelledError:
                        await self._leave(etcd)
                        raise
            except Gone as gone:  # to be made again
                log.warning("%s; this node registers anew", gone)
            except EtcdError as error:
                if not failed:
                    log.warning("etcd at %s fails; members stay members while they answer: %s", address, error)
                failed += 1
            rounds = failed // len(self._addresses)
            await asyncio.sleep(min(_PAUSE_S * 2 ** min(rounds, 10), _MAX_PAUSE_S))

    async def _register(self, etcd: Etcd) -> None:
        """Write this node's key, on a lease that lives."""
        if not self._lease or not await etcd.keep_alive(self._lease):
            self._lease = await etcd.grant(self._lease_s)
        me = self._me
        entry = _Entry(me.node.hex(), me.address, dict(me.transports))
        await etcd.put(self._prefix + entry.node, msgspec.json.encode(entry), self._lease)

    async def _keep_up(self, etcd: Etcd) -> None:
        """Keep the lease alive, and follow what others write. Raises EtcdError; Gone where lease or key are."""
        found, revision = await etcd.listing(self._prefix)
        self._entries = {}
        for key, value in found.items():
            self._read(key, value)
        self._seek(revision)
        keeping = asyncio.ensure_future(self._keep_alive(etcd))
        watching = asyncio.ensure_future(self._watch(etcd, revision + 1))
        try:
            await asyncio.wait((keeping, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (keeping, watching):
                task.cancel()
            ended = await asyncio.gather(keeping, watching, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _keep_alive(self, etcd: Etcd) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if not await etcd.keep_alive(self._lease):
                raise Gone("this node's lease has run out in etcd")

    async def _watch(self, etcd: Etcd, revision: int) -> None:
        async with aclosing(etcd.watch(self._prefix, revision)) as changes:
            async for changed, at in changes:
                for key, value in changed.items():
                    if value is not None:
                        self._read(key, value)
                    elif key == self._key:
                        raise Gone("this node's key has gone from etcd")
                    else:
                        self._entries.pop(key, None)
                self._seek(at)

    def _read(self, key: bytes, value: bytes) -> None:
        try:
            entry = msgspec.json.decode(value, type=_Entry)
            scheme, _, where = entry.address.partition("://")
            check_host_port(where)
            if scheme != "tcp" or (self._prefix + entry.node).encode() != key:
                raise ValueError(f"it is of node {entry.node!r}, at {entry.address!r}")
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("etcd has at %r what no node writes, and it is passed over: %s", key, error)
            self._entries.pop(key, None)
            return
        if entry.address == self._me.address and key != self._key:
            log.warning("node %s says that it listens at %s, as this one does", entry.node, entry.address)
        if key in self._entries or len(self._entries) < MAX_MEMBERS:
            self._entries[key] = entry

    def _seek(self, revision: int) -> None:
        self._greetings.outnumber(revision)
        self._greetings.seek(entry.address for entry in self._entries.values())

    async def _leave(self, etcd: Etcd) -> None:
        """Take the key away: nobody needs to greet who has ended."""
        lease, self._lease = self._lease, 0
        if lease:
            with suppress(EtcdError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await etcd.revoke(lease)
