"""The node: one process a host, which owns the store of the host's clients and listens for them.

It ends on SIGTERM (on SIGINT too if it was started by hand), or with the process it was started for. However it ends,
the next node that starts there removes its socket and spill files, which are in directories that it locks
(`store.directory_claim`). Its memory has no name, so the kernel frees it.

Invariants: a failed system call does not end the node. A client that cannot be served is rejected. Background work
continues after a pause. At the end the node waits a bounded time for work that hangs.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane.clock import Clock, monotonic
from dataplane.closing import close_each
from dataplane.cluster.groups import first_of
from dataplane.config import ClusterConfig, NodeConfig, beyond_host, environment
from dataplane.errors import PeerUnavailable, Rejected, Unauthenticated
from dataplane.node.clients import Client, NodeServices, graphs_of, memory_waiters
from dataplane.node.local.streams import LocalStreams
from dataplane.node.local.tables import LocalTables
from dataplane.node.memory_trim import MemoryTrim
from dataplane.node.requests.waiting_bytes import WaitingBytes
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.node.telemetry import Telemetry
from dataplane.store.arena import OWN
from dataplane.store.directory_claim import DirectoryClaim
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.store import Store
from dataplane.wire.boundary import failure
from dataplane.wire.framing import frame
from dataplane.wire.local import format_address, listen, peer
from dataplane.wire.polling import polling_loop

if TYPE_CHECKING:
    from dataplane.node.clustered.single_node import SingleNode
    from dataplane.node.hosts import Hosts

log = logging.getLogger(__name__)

_STREAMS = 50  # the most streams, and the most tables, in a node's statistics
_AGAIN_S = 0.1  # pause before an operation that the system refused is tried again
_LEAVE_S = 4.0  # the longest time to leave the cluster
_MAX_SOCKET = 107  # bytes of a socket's path (unix(7))
_REMEDY = "set XDG_RUNTIME_DIR or TMPDIR to a directory that you can write to, or give the socket's path"
_GARBAGE = 5000, 10, 10  # fewer collections of new objects, which with 700 take 10 % of the time of a busy leader


class NodeServer:
    """A listening socket, its clients, and their store. Run by `serve`."""

    def __init__(
        self,
        config: NodeConfig,
        path: Path | None = None,
        cluster: ClusterConfig | None = None,
        clock: Clock = monotonic,
    ) -> None:
        """Listen for clients at `path`, or in a directory of the node's own. `cluster`: the cluster that `serve` joins.
        `clock` times leases, and must be the event loop's. Raises OSError if the node cannot listen, ValueError for an
        invalid key of the cluster; for the data directory DirectoryUnusable, Corrupt or Backpressure."""
        self.config = config
        if beyond := beyond_host(config):
            log.warning("%s; the kernel kills processes when memory runs out", beyond)
        self._claim: DirectoryClaim | None = None
        self.hosts: Hosts | None = None
        self._clients: set[Client] = set()
        self._started = time.monotonic()
        self._idle: Callable[[], None] | None = None
        self._abandoned = False
        with ExitStack() as undo:
            if path is None:
                runtime = Path(environment().runtime_dir)
                self._claim = DirectoryClaim(runtime, f"dataplane-{os.getuid()}", remedy=_REMEDY)
                undo.callback(self._claim.release)
                path = self._claim.path / "node.sock"
            self._path = path
            directory = None
            if config.data_path is not None:
                directory = DataDirectory(config.data_path, "" if cluster is None else cluster.joined.name)
                undo.callback(directory.close)
            self.id = secrets.token_bytes(8) if directory is None else directory.identity.node
            """The node's identity: new with each start, unless its data directory has one."""
            self._store = Store(config, directory=directory, clock=clock)
            undo.callback(self._store.abandon)
            self._trimming = MemoryTrim(lambda: self._store.arena.cool(OWN))
            self._needed = NeededShards(self.id, self._store)
            self._streams = LocalStreams(self._needed, clock)
            self._streams.freed = self._trimming.due
            self._tables = LocalTables(self.id, self._needed)
            self._observing = Telemetry(
                self._streams,
                self._own_figures,
                records=environment().observe,
                memory=self._store.statistics().budget.capacity,
            )
            self._store.disk.timed = self._observing.timed
            self._single: SingleNode | None = None
            if self._store.persistence is not None and cluster is None:
                from dataplane.node.clustered.single_node import SingleNode  # with ZeroMQ, as below

                self._single = SingleNode(self._store.persistence, self._needed)
            if cluster is not None:
                self.hosts = self._join(cluster, durable=directory is not None)
            self._services = self._serving(WaitingBytes(freed=self._trimming.freed))
            self._listener = _listen(path)
            undo.pop_all()

    def _join(self, cluster: ClusterConfig, *, durable: bool) -> Hosts:
        """This node's connection to the other nodes of its cluster."""
        from dataplane.node.hosts import Hosts  # with ZeroMQ, which a host alone does not need

        if durable and cluster.seeds and cluster.seed_dir is None:
            cluster = replace(cluster, seed_dir=self.config.data_dir)  # durable streams need etcd's data too
        freed, observing = self._trimming.freed, self._observing
        hosts = Hosts(cluster, self.id, self._store, self._needed, freed, observing, keeps=durable)
        hosts.graphs = self._graphs
        hosts.measured = self.figures
        return hosts

    def _serving(self, waits: WaitingBytes) -> NodeServices:
        return NodeServices(
            self.id,
            self._store,
            self._needed,
            self._streams,
            self._tables,
            self.hosts,
            self._clustered,
            waits,
            self._observing,
            self.figures,
            self._clients,
            self._client_gone,
        )

    @property
    def _clustered(self) -> Hosts | SingleNode | None:
        """The owner of the streams and tables if these are partitions; None if the node is outside a cluster and has no
        data directory."""
        return self._single if self.hosts is None else self.hosts

    @property
    def address(self) -> str:
        return format_address(self._path)

    @property
    def metrics_address(self) -> str | None:
        """HOST:PORT at which `/metrics` is served; None before that, or without metrics."""
        return self._observing.exported

    async def serve(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Answer clients until `stop` is set, then close the node. `ready` is called once clients can connect. Raises
        Rejected if the cluster does not admit this node."""
        loop = asyncio.get_running_loop()
        try:
            if self._single is not None:
                await self._single.recover()
            if self.hosts is not None:
                await self.hosts.start()
            self._observing.watch(self.hosts, self._clustered)
            if self.config.metrics_at is not None:
                self._observing.export(*self.config.metrics_at)
            self._hear()
            async with asyncio.TaskGroup() as group:
                background = [group.create_task(_lasting(self._store.residency.run))]
                background.append(group.create_task(_lasting(self._watch_leases)))
                if self.hosts is not None:
                    background.append(group.create_task(_lasting(self.hosts.run)))
                background.append(group.create_task(_lasting(self._observing.serve)))
                ready()
                await stop.wait()
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as refused:
            raise first_of(refused, (Rejected,)) from None
        finally:
            loop.remove_reader(self._listener.fileno())
            await self._close()

    def _hear(self) -> None:
        """Accept connections. If the system refuses, try again later."""
        if self._listener.fileno() < 0:  # closed meanwhile
            return
        try:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        except OSError as error:
            log.warning("no connection can be accepted now: %s", error)
            asyncio.get_running_loop().call_later(_AGAIN_S, self._hear)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # most likely out of descriptors: try again later
                log.warning("a client could not be accepted: %s", error)
                self._pause_accepting()
                return
            try:
                self._welcome(connected)
            except OSError as error:  # most likely out of memory or of descriptors to watch
                log.warning("a client could not be served: %s", error)
                connected.close()

    def _welcome(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        _, uid = peer(connected)
        if uid != os.getuid():
            refused = Unauthenticated(f"this node serves user {os.getuid()}, not {uid}", peer=str(uid))
            with suppress(OSError):
                connected.send(frame(failure(0, refused, self)))
            connected.close()
            return
        self._clients.add(Client(connected, self._services))

    def _client_gone(self, client: Client) -> None:
        self._clients.discard(client)
        if self._idle is not None and not self._clients:
            self._idle()

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as no client is connected."""
        self._idle = then
        if not self._clients:
            then()

    def guard_memory(self) -> None:
        """Prevent processes from opening segments for writing; see `store.segment`. Uses SIGIO."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGIO, self._store.arena.harden_opened)
        self._store.arena.guard()

    def _pause_accepting(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(_AGAIN_S, self._hear)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self.config.reservation_lease_s / 4)
            if self._store.persistence is not None:
                self._store.persistence.reserve_numbers()
            for client in self._store.reservations.revoke_silent():
                log.warning("client %s sent no heartbeat: its open reservations were released", client)
            for each in list(self._clients):
                each.revoke_silent()

    def figures(self) -> dict[str, Any]:
        """The node's statistics, as plain values."""
        clustered = self._clustered
        streams, tables = (self._streams, self._tables) if clustered is None else (clustered.streams, clustered.tables)
        return {
            **self._own_figures(),
            "streams": streams.figures(most=_STREAMS),
            "streams_in_all": len(streams),
            "tables": tables.figures(most=_STREAMS),
            "tables_in_all": len(tables),
        }

    def _graphs(self) -> dict[str, Any]:
        return graphs_of(self.id, self._clients, 0.0 if self.hosts is None else self.hosts.fetcher.reading.under_way_s)

    def _own_figures(self) -> dict[str, Any]:
        """The statistics of the node without streams and tables."""
        store = self._store.statistics()
        return {
            "node": self.id.hex(),
            "address": self.address,
            "metrics": self.metrics_address or "",
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started,
            "clients": len(self._clients),
            "memory_used": store.budget.used,
            "memory_budget": store.budget.capacity,
            "memory_peak": store.peak,
            "memory_resident": store.resident,
            "disk_used": store.disk.used,
            "disk_budget": store.disk.quota,
            "shards": store.shards,
            "spilled_shards": store.spilled_shards,
            "pinned_bytes": store.pinned,
            "reserved_bytes": store.reserved,
            "waiting": store.budget.waiting,
            "waiting_bytes": store.budget.waiting_bytes,
            "waiters": memory_waiters(self._clients) if store.budget.waiting else [],
            "waits": store.budget.waits,
            "waited_s": store.budget.waited_s,
            "put_bytes": store.put,
            "freed_bytes": store.freed,
            "spilled_bytes": store.disk.written,
            "restored_bytes": store.disk.read,
            "spill_error": store.disk.error,
            **({} if self.hosts is None else {**self.hosts.statistics(), **self.hosts.roles()}),
            "holders": store.holders,
        }

    async def _close(self) -> None:
        """Stop: end the clients, leave the cluster, and wait for the disk, each within a bounded time."""
        gone = PeerUnavailable("the node was stopped", address=self.address)
        await close_each(
            self._listener.close,
            *[partial(client.end, gone) for client in self._clients],
            self._observing.aclose,
            self._streams.close,
            self._trimming.close,
            self._tables.close,
            self._leave,
            *([] if self._single is None else [self._single.aclose]),
            self._store.aclose,
            self.abandon,
        )

    async def _leave(self) -> None:
        if self.hosts is None:
            return
        try:
            await self.hosts.aclose(_LEAVE_S)
        except TimeoutError:
            log.warning("reads by other hosts did not end within %s s; closing their connections", _LEAVE_S)
        except OSError as error:
            log.warning("leaving the cluster failed: %s", error)

    def abandon(self) -> None:
        """Remove everything of this node from the host, even if `serve` was never called. Idempotent."""
        if self._abandoned:
            return
        self._abandoned = True
        self._listener.close()
        self._store.abandon()
        if self._claim is not None:
            self._claim.release()
        else:
            with suppress(OSError):
                self._path.unlink()


async def _lasting(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until it returns; after an error, log it, pause and run `work` again. A boundary: an unexpected error
    must not end the node, which has the data of other processes. Raises Rejected."""
    pause_s = _AGAIN_S
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except Rejected:  # another attempt would not help
            raise
        except Exception:
            log.exception("unexpected error; the node continues")
        pause_s = _AGAIN_S if time.monotonic() - began > _LEAVE_S else min(2 * pause_s, _LEAVE_S)
        await asyncio.sleep(pause_s)


def _listen(path: Path) -> socket.socket:
    """Listen at `path`, and replace the socket of a node that has ended. Raises OSError if a process listens there, or
    the path cannot be used."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return listen(path)
    except OSError as error:
        if not path.is_socket():
            why = error.strerror or str(error)
            if len(os.fsencode(path)) > _MAX_SOCKET:
                why = f"the path has {len(os.fsencode(path))} bytes, and a socket's has at most {_MAX_SOCKET}"
            elif path.exists():
                why = "there is something else"
            said = f"the node can not listen at {path}: {why}. Choose another --socket"
            raise OSError(error.errno or errno.ENAMETOOLONG, said) from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener may never accept
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except BlockingIOError:
            raise FileExistsError(f"a process listens at {path} already, and accepts no connection") from None
        else:
            raise FileExistsError(f"a node listens at {path} already")
    return listen(path)


def run(node: NodeServer, *, starter: int | None = None, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT.

    A node that was started for the process `starter` ignores SIGINT, which a terminal sends to both. It serves until
    that process ends or, after SIGUSR1, until no client is connected.
    """
    gc.freeze()  # imported modules are no garbage: whole collections traverse a fifth of the objects
    gc.set_threshold(*_GARBAGE)
    try:
        with asyncio.Runner(loop_factory=polling_loop) as runner:
            runner.run(_run(node, starter, ready))
    finally:
        node.abandon()


async def _run(node: NodeServer, starter: int | None, ready: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    node.guard_memory()
    if starter is None:
        loop.add_signal_handler(signal.SIGINT, stop.set)
        await node.serve(stop, ready)
        return
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.add_signal_handler(signal.SIGUSR1, lambda: node.when_idle(stop.set))
    try:
        watched = os.pidfd_open(starter)  # readable once the process has ended
    except ProcessLookupError:
        return
    loop.add_reader(watched, stop.set)
    try:
        await node.serve(stop, ready)
    finally:
        loop.remove_reader(watched)
        os.close(watched)
