"""The seeds: the hosts whose nodes run the cluster's own etcd. Each runs one server, whose directory outlives the node.

    dataplane node --seeds h1,h2,h3 ...      # the same on every host

A node on one of these hosts runs a server as its child; other nodes are only clients. A seed that returns finds its
directory and rejoins. A seed that has lost it replaces its former server, if the others have a majority.

Invariants: a directory belongs to one list of seeds, one cluster name and one key; a node leaves the directory of
others unchanged. At most one living node uses a directory, which it locks. The first node also writes the list of seeds
to the coordinator, and a node with another list refuses to run. Servers answer only holders of the cluster's key
(`cluster.certificates`).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from dataplane.cluster.certificates import certificates
from dataplane.cluster.groups import first_of
from dataplane.cluster.server import EtcdServer, ServerAddress, program
from dataplane.config import ClusterConfig, environment
from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Unavailable
from dataplane.coordinator.etcd import EtcdCoordinator
from dataplane.coordinator.gateway import EtcdMember, Gateway
from dataplane.errors import Rejected
from dataplane.wire.auth import Key

log = logging.getLogger(__name__)

KEY = "seeds"
"""The key of the list of seeds at the coordinator."""

_ASK_S = 2.0
_AGAIN_S = 1.0
_HEAR_S, _LOOK_S = 10.0, 0.05


class SeedsDiffer(Rejected):
    """This node's list of seeds differs from that of the cluster or of the directory."""


class Seeds:
    """The cluster's own etcd, for one node.

    `run` is a task beside that of the membership. It is cancelled after the membership has ended, which still needs
    the coordinator to deregister.
    """

    def __init__(self, config: ClusterConfig, key: Key) -> None:
        """Raises ValueError if a package or program is not installed, OSError if the directory of the server cannot
        be used, SeedsDiffer if it belongs to another cluster."""
        how = config.joined
        self._list, self._name = sorted(how.addresses), how.name
        host = config.advertise or config.host
        self._certificates = certificates(key, [host.removeprefix("[").removesuffix("]")])
        tls = self._certificates.client()
        self.coordinator: Coordinator = EtcdCoordinator(self._list, self._name, tls=tls)
        self._config, self._tls = config, tls
        parent = Path(config.seed_dir or environment().spill_dir)
        mark = json.dumps({"version": 1, "seeds": self._list, "name": self._name, "key": key.public.decode()})
        own = [_Directory(parent, seed, mark) for seed in self._list if _is_own(seed.rpartition(":")[0], host)]
        for directory in own:
            directory.check()
        self._directory = next((directory for directory in own if directory.claim()), None)
        if self._directory is not None:
            program()  # raises ValueError if etcd is not installed
        elif own:
            log.warning("other nodes on this host run its etcd servers already")

    async def run(self) -> None:
        """Run this node's server, if it has one, until cancelled. Raises SeedsDiffer."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._directory is not None:
                    group.create_task(self._serve(self._directory))
                group.create_task(self._compare())
        except BaseExceptionGroup as differs:
            raise first_of(differs, (SeedsDiffer,)) from None

    async def _compare(self) -> None:
        """Compare the list with the one in etcd, which is written if it is missing. This is repeated periodically,
        since etcd may be wiped. Raises SeedsDiffer."""
        mine = json.dumps(self._list).encode()
        while True:
            try:
                theirs = await self.coordinator.swap(KEY, None, mine)
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(_AGAIN_S)
                continue
            if theirs != mine:
                raise SeedsDiffer(_differ(self._list, (theirs or b"").decode(errors="replace")))
            await asyncio.sleep(60 * _AGAIN_S)

    async def _serve(self, directory: _Directory) -> None:
        token = hashlib.blake2b(directory.mark.encode(), digest_size=16).hexdigest()
        server = EtcdServer(directory.path, _at(directory.seed), token, self._config.host, self._certificates)
        cluster = ",".join(_at(seed).listed for seed in self._list)

        async def state() -> tuple[str, str]:
            return await self._state(directory), cluster

        try:
            await server.run(state)
        finally:
            directory.release()

    async def _state(self, directory: _Directory) -> str:
        """The initial cluster state of this server: "new" to begin a cluster with the others, "existing" to join
        theirs. Raises SeedsDiffer."""
        others = [seed for seed in self._list if seed != directory.seed]
        if not others:
            return "new"
        coordinator = EtcdCoordinator(others, self._name, tls=self._tls, timeout_s=_ASK_S)
        gateway = Gateway(others, _ASK_S, self._tls)
        try:
            theirs = await coordinator.read(KEY)
            if theirs is not None and theirs != json.dumps(self._list).encode():
                raise SeedsDiffer(_differ(self._list, theirs.decode(errors="replace")))
            return await self._among(gateway, directory, others)
        except (Unavailable, OutcomeUnknown):
            return "existing" if directory.begun else "new"  # the others have no majority yet
        finally:
            await coordinator.aclose()
            await gateway.aclose()

    async def _among(self, gateway: Gateway, directory: _Directory, others: Sequence[str]) -> str:
        """As `_state`, if the other servers have a majority. Raises OSError if they do not accept this server yet: if
        it were started as "new", it would have the identity of its removed predecessor."""
        peer_url = _at(directory.seed).peer_url
        try:
            if directory.begun:
                if not await _is_removed(gateway, peer_url):
                    return "existing"
                directory.clear()
            state, number = await _replace(gateway, peer_url)
        except (Unavailable, OutcomeUnknown) as error:
            raise OSError(f"the other seeds do not take this server back yet: {error}") from error
        await asyncio.gather(*(self._hears(other, number) for other in others if number))
        return state

    async def _hears(self, other: str, number: int) -> None:
        """Wait until another server lists a server that was added, unless the other does not answer. The new server
        asks any of the servers for its identity; one with an outdated list would answer with that of the removed
        server."""
        gateway = Gateway([other], _ASK_S, self._tls)
        try:
            async with asyncio.timeout(_HEAR_S):
                while all(number != server.ID for server in await _servers(gateway)):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except (Unavailable, TimeoutError):
            return
        finally:
            await gateway.aclose()

    async def aclose(self) -> None:
        """Release the directory, if it never ran. Idempotent."""
        if self._directory is not None:
            self._directory.release()


async def _servers(gateway: Gateway) -> list[EtcdMember]:
    """The servers of the cluster, as listed by the one that answers."""
    return (await gateway.ask("cluster/member/list", {})).members


async def _is_removed(gateway: Gateway, peer_url: str) -> bool:
    """Whether the data of a server belongs to a server that was removed: the list has no entry with its address, or
    only one of a server that has never run. (A server that was added has no name until it runs.)"""
    return not any(server.name for server in await _servers(gateway) if peer_url in server.peerURLs)


async def _replace(gateway: Gateway, peer_url: str) -> tuple[str, int]:
    """Register a server that has no data. If the cluster lists it with a client address, it has run before and lost its
    data: its entry is replaced by a new one. Returns etcd's `initial-cluster-state` ("new" or "existing"), and the
    etcd id of the server if it was added, else 0."""
    mine = [server for server in await _servers(gateway) if peer_url in server.peerURLs]
    if mine and not mine[0].clientURLs and mine[0].name:
        return "new", 0
    for server in mine:
        log.warning("the etcd data of this seed are lost; it joins as a new server in place of server %x", server.ID)
        await gateway.ask("cluster/member/remove", {"ID": server.ID}, writes=True)
    await gateway.ask("cluster/member/add", {"peerURLs": [peer_url]}, writes=True)
    added = [server for server in await _servers(gateway) if peer_url in server.peerURLs]
    return "existing", added[0].ID if added else 0


def _at(seed: str) -> ServerAddress:
    """The addresses of a seed's server. The port for other servers is the one after that for clients."""
    host, _, port = seed.rpartition(":")
    return ServerAddress(seed, seed, f"{host}:{int(port) + 1}")


class _Directory:
    """A server's directory. `mark` identifies its owner."""

    def __init__(self, parent: Path, seed: str, mark: str) -> None:
        self.path = parent / f"dataplane-seed-{os.getuid()}-{re.sub('[^A-Za-z0-9.-]', '-', seed)}"
        self.seed = seed
        self.mark = mark
        self._lock = -1

    def check(self) -> None:
        """Raises SeedsDiffer if the directory belongs to another cluster."""
        try:
            found = (self.path / "seeds.json").read_text()
        except FileNotFoundError:
            return
        if found != self.mark:
            raise SeedsDiffer(
                f"{self.path} holds the etcd of another cluster ({found[:500]}), and this is {self.mark}: give every"
                " host the --seeds, name and key that it was made with, or another --seed-dir; or remove it, if that"
                " cluster is over"
            )

    def claim(self) -> bool:
        """Lock and mark the directory. Returns False if another living node has it. Raises OSError, SeedsDiffer."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(self._lock)
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise PermissionError(f"{self.path} is another user's, or open to others; choose another --seed-dir")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.check()
            if not (self.path / "seeds.json").exists():
                if {each.name for each in self.path.iterdir()} - {"seeds.new"}:
                    raise SeedsDiffer(f"{self.path} is no seed's directory; choose another --seed-dir")
                written = self.path / "seeds.new"
                written.write_text(self.mark)
                written.replace(self.path / "seeds.json")
        except BlockingIOError:
            self.release()
            return False
        except BaseException:
            self.release()
            raise
        return True

    @property
    def begun(self) -> bool:
        """Whether the directory has data of a server."""
        return any((self.path / "etcd" / "member" / "wal").glob("*.wal"))

    def clear(self) -> None:
        """Delete the data of a server that was removed from its cluster and cannot return."""
        log.warning(
            "the etcd data in %s belong to a server that was removed from the cluster; they are deleted", self.path
        )
        shutil.rmtree(self.path / "etcd")

    def release(self) -> None:
        """Unlock the directory. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _differ(mine: list[str], theirs: str) -> str:
    given = ",".join(mine)
    return f"this node was given --seeds {given}, and the cluster has {theirs[:500]}: give every host the same list"


def _is_own(seed: str, host: str) -> bool:
    """Whether both names are of the same host."""
    if seed == host:
        return True
    try:
        found = [{info[4][0] for info in socket.getaddrinfo(each.strip("[]"), None)} for each in (seed, host)]
    except OSError:
        return False
    return bool(found[0] & found[1])
