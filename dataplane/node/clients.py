"""One connected client of a node: executes its requests, and releases its resources when it ends.

Invariants: every request with an id gets exactly one reply, even if decoding, execution or encoding fails
(`wire.boundary`) or the node ends the connection meanwhile. Nothing is sent once the client has ended. A request that
does not have to wait is executed at once. A request that waits runs in an asyncio task, which is cancelled when the
connection ends. All waiting requests share one memory bound (`node.requests.waiting_bytes`). A client that violates the
protocol is disconnected, without effect on others. The descriptor of a segment is sent to a client at most twice: for
reading, and for writing if the client owns the segment.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from dataplane import waiting
from dataplane.errors import DataplaneError, LimitExceeded, PeerUnavailable, ProtocolMismatch, revive
from dataplane.log_lines import log_line
from dataplane.node.local.streams import LocalStreams
from dataplane.node.local.tables import LocalTables
from dataplane.node.requests.row_requests import ROW_REQUESTS, RowRequest, RowRequests
from dataplane.node.requests.shard_requests import SHARD_REQUESTS, ShardRequest, ShardRequests
from dataplane.node.requests.waiting_bytes import REQUEST, SMALL, WaitingBytes, footprint
from dataplane.node.sessions.checks import bound
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.node.telemetry import Telemetry
from dataplane.observe.ring import RING_BYTES
from dataplane.store.store import Store
from dataplane.stream import requests as r
from dataplane.waiting import busy_s, computed_s, processor_s, processors
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.boundary import Heads, InvalidMessageLog, failure
from dataplane.wire.client_messages import AnyRequest, decoder
from dataplane.wire.framing import frame
from dataplane.wire.local import LocalChannel, peer

if TYPE_CHECKING:
    from dataplane.node.clustered.single_node import SingleNode
    from dataplane.node.hosts import Hosts

log = logging.getLogger(__name__)
_complaints = InvalidMessageLog(log)

_decoder = decoder(AnyRequest)
_clients = itertools.count(1)
_heads = Heads(AnyRequest)
_DISCARD = 64 << 10  # bytes that are read at a time to be discarded
_REPORTS_S = 1.0  # seconds between two performance reports of a client
_WAITS_FOR: dict[type[Any], str] = {r.Consume: "rows", r.Look: "rows", sm.PinShards: "disk", rm.AdmitRows: "permits"}
_WAITS_FOR |= {rm.AppendRows: "permits", sm.Reserve: "", sm.PutShard: "", rm.ExtendRows: ""}  # "": see `Budget`
_ALONE_S, _CLUSTER_S = 5.0, 25.0  # the longest answer about streams and tables, without and with other hosts


@dataclass(frozen=True)
class NodeServices:
    """The parts of a node that serve its clients."""

    node: bytes
    store: Store
    needed: NeededShards
    streams: LocalStreams
    tables: LocalTables
    hosts: Hosts | None
    clustered: Hosts | SingleNode | None
    """The owner of the streams and tables if these are partitions, else None."""
    waits: WaitingBytes
    observing: Telemetry
    figures: Callable[[], dict[str, Any]]
    clients: Collection[Client]
    gone: Callable[[Client], None]
    """Called once for each client, at its end."""


class Client:
    """A connection, from its acceptance to its end."""

    def __init__(self, connected: socket.socket, services: NodeServices) -> None:
        self.pid, _ = peer(connected)
        self.label = f"pid {self.pid}"
        self.number = next(_clients)
        self.waits = waiting.ClientWaits()
        self.graph = b""
        """The client's last report of its performance."""
        self.token = secrets.token_bytes(16)
        """A child of the client's process inherits its pins by this token."""
        self._services = services
        self._store = services.store
        self._hosts = services.hosts
        self._observing = services.observing
        self._greeted = False
        self._leaving = False
        self._socket = connected
        self._waiting: dict[int, asyncio.Task[None]] = {}
        self._kept = services.waits.client()
        self._channel = LocalChannel(connected, _decoder, self._received, self._closed, refused=self._refused)
        staged = StagedColumns(services.needed)
        self._shards = ShardRequests(self, services, staged, self._channel)
        self._rows = RowRequests(self, services, staged, self._channel)

    def __str__(self) -> str:
        return self.label

    def close(self, error: DataplaneError, number: int = 0) -> None:
        """Stop receiving from the client, and send the error for the request `number` and all that wait. Abort the
        client's reservations. Its pins stay until it ends the connection, since its views may still use that memory."""
        self._farewell(error, number, error)

    def _farewell(self, error: DataplaneError, number: int, its: DataplaneError) -> None:
        """Close as `close` does, but with the error `its` for the request `number`."""
        for each in dict.fromkeys((0, number, *self._waiting)):
            self._channel.send(failure(each, its if each and each == number else error, self))
        self._channel.close(error)

    def end(self, error: DataplaneError) -> None:
        """The node stops: send the error and end the connection, even if the client has pins or leases."""
        self._channel.send(failure(0, error, self))
        self._channel.close()
        if self._leaving:
            self._leave()

    def revoke_silent(self) -> None:
        """Revoke the client's permits to append to streams if it has sent nothing for the lease."""
        if self._store.reservations.silent(self):
            self._rows.revoke()

    def _closed(self, error: DataplaneError | None) -> bool:
        for task in self._waiting.values():
            task.cancel()
        if error is None or isinstance(error, PeerUnavailable):
            log.info("client %s has disconnected: %s", self.label, error)
            self._rows.leave()
            self._release_all()
            return False
        _complaints.log(logging.WARNING, f"pid {self.pid}", "client %s was cut off: %s", self.label, log_line(error))
        self._leaving = True
        self._rows.leave()
        self._store.reservations.revoke(self)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._linger)
        except OSError:  # the end of the connection would never be noticed
            self._leaving = False
            self._release_all()
            return False
        return True

    def _release_all(self) -> None:
        """Release all resources of the client, when its process has ended or closed the connection."""
        self._rows.pending.leave()
        self._store.leave(self)
        self._observing.leave(self)
        self._services.gone(self)

    def _linger(self) -> None:
        """Discard input until the client ends the connection."""
        try:
            ended = not self._socket.recv(_DISCARD)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            self._leave()

    def _leave(self) -> None:
        self._leaving = False
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._release_all()

    # Requests

    def _received(self, request: m.FromClient) -> None:
        self._store.reservations.touch(self)
        identifier = getattr(request, "id", 0)
        waiting.asked.set((self.number, identifier))
        if not self._greeted and not isinstance(request, m.Hello):
            self.close(ProtocolMismatch("a connection begins with hello"), identifier)
            return
        try:
            answering = self._answer(request)
            if answering is not None:
                self._wait(request, answering)
        except Exception as error:  # the boundary: a request that fails must not end other clients
            self._fail(identifier, error)

    def _refused(self, body: bytes, error: DataplaneError) -> bool:
        """Answer a message that could not be decoded, if it has an id. Returns whether the connection continues."""
        number = _heads.number(body)
        said = error if isinstance(error, ProtocolMismatch | LimitExceeded) else None
        self._farewell(said or ProtocolMismatch(f"not a message: {error}"), number or 0, error)
        return self._channel.open

    def _fail(self, identifier: int, error: Exception) -> None:
        if isinstance(error, ProtocolMismatch):
            self.close(error, identifier)
        elif identifier == 0:  # a message without an id has no reply
            said = failure(0, error, self)
            self.close(error if isinstance(error, DataplaneError) else revive(said.name, said.message, said.fields))
        else:
            self._channel.send(failure(identifier, error, self))

    def _answer(self, request: m.FromClient) -> Coroutine[Any, Any, None] | None:
        """Execute the request. If it has to wait, return a coroutine that answers it."""
        if isinstance(request, m.ReadStats | rm.ListStreams) and not self._is_here(request.node):
            return self._figures_elsewhere(request)
        kind = type(request)
        if kind in ROW_REQUESTS:
            return self._rows.answer(cast(RowRequest, request))
        if kind in SHARD_REQUESTS:
            return self._shards.answer(cast(ShardRequest, request))
        match request:
            case m.ReadStats(about="members"):
                self._channel.send(m.Figures(request.id, {} if self._hosts is None else self._hosts.figures()))
            case m.ReadStats(about="metrics"):
                return self._send_metrics(request)
            case m.ReadStats(about="graphs"):
                own = (
                    graphs_of(self._services.node, self._services.clients)
                    if self._hosts is None
                    else self._hosts.graphs()
                )
                self._channel.send(m.Figures(request.id, {"nodes": [own]}))
            case m.ReadStats():
                self._channel.send(m.Figures(request.id, self._services.figures()))
            case m.ReadClock() | m.ListRings() | m.ReadRing():
                if not self._is_here(request.node):
                    return self._ask_elsewhere(request)
                self._channel.send(self._observing.answer(request))
            case m.Cancel():
                self._rows.pending.end(request.request)
                task = self._waiting.get(request.request)
                if task is not None:
                    task.cancel()
            case m.Hello():
                self._hello(request)
            case m.Disconnect():
                for task in self._waiting.values():
                    task.cancel()
                self._rows.leave()
                self._rows.pending.leave()
            case m.Alive():
                pass
            case m.Report():
                bound("performance graph", m.MAX_REPORT, len(request.graph))
                self.graph = request.graph
        return None

    def _is_here(self, node: bytes) -> bool:
        return node in (b"", self._services.node)

    async def send_later(self, reply: m.Reply) -> None:
        """Send a reply once the client has received enough of the earlier replies. Raises LimitExceeded if the waiting
        replies take too much memory."""
        framed = frame(reply)
        del reply  # the reply takes several times as much memory as the frame
        with self._kept.keep(len(framed)):
            await self._channel.room()
            self._channel.post(framed)

    def _hello(self, request: m.Hello) -> None:
        if request.major != m.MAJOR:
            self.close(
                ProtocolMismatch(
                    f"this node speaks protocol {m.MAJOR}.{m.MINOR}, the client {request.major}.{request.minor};"
                    " install the same major version of rollout-dataplane on both sides",
                    ours=f"{m.MAJOR}.{m.MINOR}",
                    theirs=f"{request.major}.{request.minor}",
                ),
                request.id,
            )
            return
        self._greeted = True
        self.label = f"{log_line(request.label[:80])} (pid {self.pid})"
        grants: list[m.SegmentGrant] = []
        descriptors: list[int] = []
        segment, nbytes = self._store.prewarm(self) if request.writes else (None, 0)
        if segment is not None:
            grants, descriptors = self._shards.grants.new([segment], writable=True)
        ring = self._observing.grant(self, self.pid, self.label)
        welcome = m.Welcome(
            id=request.id,
            major=m.MAJOR,
            minor=min(m.MINOR, request.minor),
            node=self._services.node,
            capacity=self._store.budget.capacity,
            lease_s=self._store.reservations.lease_s,
            grants=grants,
            prewarm=nbytes,
            token=self.token,
            shared_s=_ALONE_S if self._services.clustered is None else _CLUSTER_S,
            ring=RING_BYTES if ring is not None else 0,
            reports_s=_REPORTS_S if request.writes else 0.0,
            holds=self._store.budget.capacity + self._store.disk.quota if self._hosts is None else 0,
        )
        self._channel.send(welcome, descriptors if ring is None else [*descriptors, ring])

    # Waiting requests

    def _wait(self, request: Any, answering: Coroutine[Any, Any, None]) -> None:
        identifier = request.id
        try:
            bound("requests of a client that wait", m.MAX_WAITING, len(self._waiting) + 1)
            if identifier in self._waiting:
                raise ProtocolMismatch(f"a request has the number {identifier} of one that waits")
            size = REQUEST + (footprint(request, m.MAX_WAITING_BYTES) if self._channel.size > SMALL else 0)
            self._kept.take(size)
        except DataplaneError:
            answering.close()
            raise

        def ended(task: asyncio.Task[None]) -> None:
            del self._waiting[identifier]
            self._kept.give_back(size)
            if task.cancelled():
                answering.close()  # it may not have begun
                self._channel.send(m.Failure(identifier, m.CANCELLED, "", {}))

        task = asyncio.get_running_loop().create_task(self._run(identifier, request, answering))
        self._waiting[identifier] = task
        task.add_done_callback(ended)

    async def _run(self, identifier: int, request: Any, answering: Coroutine[Any, Any, None]) -> None:
        # Other requests hardly wait, so their waits are not recorded; nor are those of appends of columns put before.
        put_before = isinstance(request, rm.AppendRows | rm.ExtendRows) and request.columns is None
        kind = None if put_before else _WAITS_FOR.get(type(getattr(request, "asked", request)))
        wait = waiting.begin(waiting.ClientWaits() if kind is None else self.waits, identifier, kind or "")
        try:
            await answering
        except Exception as error:  # the boundary, as in `_received`
            self._fail(identifier, error)
        finally:
            wait.end()

    async def _send_metrics(self, request: m.ReadStats) -> None:
        self._channel.send(m.Figures(request.id, await self._observing.snapshot()))

    async def _ask_elsewhere(self, request: m.ReadClock | m.ListRings | m.ReadRing) -> None:
        if self._hosts is None:
            raise PeerUnavailable(f"there is no node {request.node.hex()}: this node is in no cluster", address="")
        self._channel.send(await self._hosts.observed(request))

    async def _figures_elsewhere(self, request: m.ReadStats | rm.ListStreams) -> None:
        if self._hosts is None:
            node = request.node[:16].hex()
            raise PeerUnavailable(f"node {node} is no member: this node is alone", address=node)
        figures = await self._hosts.figures_of(request)
        await self.send_later(m.Figures(request.id, figures.values))


_MOST_WAITERS = 8  # clients that are named


def memory_waiters(clients: Collection[Client]) -> list[str]:
    """The labels of the first clients whose requests wait for memory."""
    waits = (each.label for each in clients if any(wait.kind == "memory" for wait in each.waits.open))
    return list(itertools.islice(waits, _MOST_WAITERS))


_MOST_GRAPHS = 3 << 20  # bytes of performance reports in one answer; clients beyond it are counted in `left_out`
_ENTRY = 64  # bytes, about, of one wait or one request that ended it


def graphs_of(node: bytes, clients: Collection[Client], fetching_s: float = 0.0) -> dict[str, Any]:
    """The load of this host and node, and `clients`: of each that has reported the `number`, `pid`, `label`, last
    report `graph`, and `waits` (`ClientWaits.told`). `fetching_s`: seconds during which this node read from other
    hosts."""
    found, left_out, nbytes = [], 0, 0
    for client in clients:
        if not client.graph:
            continue
        waits = client.waits.told()
        nbytes += len(client.graph) + _ENTRY * sum(1 + len(each[-1]) for each in waits)
        if nbytes > _MOST_GRAPHS:
            left_out += 1
            continue
        own = {name: getattr(client, name) for name in ("number", "pid", "label", "graph")}
        found.append({**own, "waits": waits})
    ran_s, queued_s = processor_s()
    return {
        "node": node.hex(),
        "host": socket.gethostname(),
        "clients": found,
        "left_out": left_out,
        "load": os.getloadavg()[0] / (os.cpu_count() or 1),  # runnable processes for each processor
        "ran_s": ran_s,
        "queued_s": queued_s,
        "seconds": time.monotonic(),
        "computed_s": computed_s(),
        "processors": processors(),
        "busy_s": busy_s(),
        "fetching_s": fetching_s,
    }
