"""One connected client of a node: executes its requests, and releases what it held when it ends.

Invariants: every request with an id gets exactly one reply, whatever fails while it is decoded, executed or encoded
(`wire.boundary`), even if the client is disconnected meanwhile. A request that need not wait is executed without a
task. One that waits does so in a task that ends with the connection, within the memory bound for waiting requests of
all clients (`node.request_bytes`). A client that violates the protocol is disconnected, without effect on others. Each
segment's descriptor is sent once for each right (read, or write as its owner).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from dataplane import waiting
from dataplane.batch.rows import Rows
from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, Freed, LimitExceeded, OwnerDied, PeerUnavailable, ProtocolMismatch, revive
from dataplane.node.grants import Grants
from dataplane.node.pending_shards import PendingShards
from dataplane.node.performance import graphs_of
from dataplane.node.request_bytes import REQUEST, SMALL, Waits, footprint
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.node.shards.remote import wanted_of
from dataplane.node.shards.retention import links_of
from dataplane.node.streams.client import StreamClient, StreamRequest
from dataplane.node.streams.inline import Carrying, Inlining
from dataplane.node.streams.local import LocalStreams
from dataplane.node.streams.sessions import Waiting
from dataplane.node.streams.staged_columns import StagedColumns
from dataplane.node.tables.inline import WritingInline
from dataplane.node.tables.tables import TableRequest, Tables, Tabling
from dataplane.node.telemetry import Telemetry
from dataplane.observe.ring import RING_BYTES
from dataplane.store.freeings import UNKNOWN, FreeCause
from dataplane.store.reservations import Reservation
from dataplane.store.store import Pinned, Store
from dataplane.stream import requests as r
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire import places
from dataplane.wire.boundary import Heads, failure, line
from dataplane.wire.framing import frame
from dataplane.wire.invalid_messages import InvalidMessageLog
from dataplane.wire.local import Channel, peer
from dataplane.wire.partial_frames import PartialFrames

if TYPE_CHECKING:
    from dataplane.node.clustered.either_streams import DurablePartitions, EitherStreams
    from dataplane.node.clustered.either_tables import EitherTables
    from dataplane.node.clustered.tables import TableClient
    from dataplane.node.hosts import Hosts

log = logging.getLogger(__name__)
_complaints = InvalidMessageLog(log)

_decoder = m.decoder(m.Request)
_clients = itertools.count(1)
_heads = Heads(m.Request)
_DISCARD = 64 << 10  # bytes
_MAX_TIMEOUT_S = 365 * 86400.0
_REPORTS_S = 1.0  # how often clients report
_WAITS_FOR: dict[type[Any], str] = {r.Consume: "rows", r.Look: "rows", m.Pin: "disk", m.Admit: "permits"}
_WAITS_FOR |= {m.AppendInline: "permits", m.Reserve: "", m.Put: "", m.ExtendInline: ""}  # `Budget` says if for memory
_ALONE_S, _CLUSTER_S = 5.0, 25.0  # that an answer about streams and tables may take, alone and with other hosts


class Client:
    """A connection, from its acceptance to its end. `gone(client)` is called once, at the end."""

    def __init__(
        self,
        connected: socket.socket,
        store: Store,
        needed: NeededShards,
        local: LocalStreams,
        tables: Tables,
        hosts: Hosts | None,
        durable: DurablePartitions | None,
        node: bytes,
        figures: Callable[[], dict[str, Any]],
        others: Collection[Client],
        gone: Callable[[Client], None],
        waits: Waits,
        halves: PartialFrames,
        observing: Telemetry,
    ) -> None:
        self.pid, _ = peer(connected)
        self.label = f"pid {self.pid}"
        self.number = next(_clients)
        self.waits = waiting.Waits()
        self.graph = b""
        """What the client reported last of its performance."""
        self._store = store
        self._needed = needed
        staged = self._staged = StagedColumns(needed)
        self._handing = PendingShards(lambda shards: needed.free_unhanded(shards, self.label))
        shared = None if hosts is None else hosts.tables
        service = local if hosts is None or hosts.streams is None else hosts.streams
        streams = StreamClient(service, staged, self._room, owner=self)
        here = Tabling(tables, staged)
        self._inlining = Inlining(self, node, store, streams, staged)
        self._streams: StreamClient | EitherStreams = streams
        self._tables: Tabling | TableClient | EitherTables = here if shared is None else shared.client(staged)
        self._either: EitherStreams | None = None
        if durable is not None:
            self._streams = self._either = durable.client(streams, local, staged, self._room)
            self._tables = durable.table_client(staged, tables, here)
            self._inlining_durable = Inlining(self, node, store, self._either.clustered, staged)
        self._writing = WritingInline(self, node, store, staged, self._tables)
        self._hosts = hosts
        self._node = node
        self._figures = figures
        self._observing = observing
        self._others = others
        self._gone = gone
        self.token = secrets.token_bytes(16)
        """By which a child of the client's process inherits its pins."""
        self._greeted = False
        self._leaving = False
        self._socket = connected
        self._waiting: dict[int, asyncio.Task[None]] = {}
        self._kept = waits.client()
        self._grants = Grants(store.arena)
        self._channel = Channel(connected, _decoder, self._received, self._closed, refused=self._refused, halves=halves)

    def __str__(self) -> str:
        return self.label

    def close(self, error: DataplaneError, number: int = 0) -> None:
        """Stop receiving from the client, and send it the error, for the request `number` and all that wait. Its
        reservations are aborted; its pins stay until it ends the connection, since its views may still use that
        memory."""
        self._farewell(error, number, error)

    def _farewell(self, error: DataplaneError, number: int, its: DataplaneError) -> None:
        """As `close`; the request `number` gets its own error `its`."""
        for each in dict.fromkeys((0, number, *self._waiting)):
            self._channel.send(failure(each, its if each and each == number else error, self))
        self._channel.close(error)

    def end(self, error: DataplaneError) -> None:
        """The node stops: send the error and end the connection, whatever the client holds."""
        self._channel.send(failure(0, error, self))
        self._channel.close()
        if self._leaving:
            self._leave()

    def revoke_silent(self) -> None:
        """Revoke the client's permits to append to streams if it shows no sign of life."""
        if self._streams.expected and self._store.silent(self):
            self._streams.revoke()

    def _closed(self, error: DataplaneError | None) -> bool:
        for task in self._waiting.values():
            task.cancel()
        if error is None or isinstance(error, PeerUnavailable):
            log.info("client %s has gone: %s", self.label, error)
            self._ask_no_more()
            self._go()
            return False
        _complaints.log(logging.WARNING, f"pid {self.pid}", "client %s was cut off: %s", self.label, line(error))
        self._leaving = True
        self._ask_no_more()
        self._store.revoke(self)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._linger)
        except OSError:  # its end would never be heard of
            self._leaving = False
            self._go()
            return False
        return True

    def _ask_no_more(self) -> None:
        """Release the client's leases: its rows go to other consumers."""
        self._streams.leave()
        self._tables.leave()
        self._staged.leave()

    def _go(self) -> None:
        """Release everything that the client had: its process has ended, or has released it."""
        self._handing.leave()
        self._store.leave(self)
        self._observing.leave(self)
        self._gone(self)

    def _linger(self) -> None:
        """Wait for the end of a connection from which nothing more is received."""
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
        self._go()

    # Requests

    def _received(self, request: m.Request) -> None:
        self._store.touch(self)
        identifier = getattr(request, "id", 0)
        waiting.asked.set((self.number, identifier))
        if not self._greeted and not isinstance(request, m.Hello):
            self.close(ProtocolMismatch("a connection begins with hello"), identifier)
            return
        try:
            answering = self._answer(request)
            if answering is not None:
                self._wait(request, answering)
        except Exception as error:  # the boundary: what one client asks for is not the other clients' end
            self._fail(identifier, error)

    def _refused(self, body: bytes, error: DataplaneError) -> bool:
        """A message could not be decoded: answer it if it has an id. Returns whether the connection continues."""
        number = _heads.number(body)
        said = error if isinstance(error, ProtocolMismatch | LimitExceeded) else None
        self._farewell(said or ProtocolMismatch(f"not a message: {error}"), number or 0, error)
        return self._channel.open

    def _fail(self, identifier: int, error: Exception) -> None:
        if isinstance(error, ProtocolMismatch):
            self.close(error, identifier)
        elif identifier == 0:  # a message without an id has nobody who would hear of it
            said = failure(0, error, self)
            self.close(error if isinstance(error, DataplaneError) else revive(said.name, said.message, said.fields))
        else:
            self._channel.send(failure(identifier, error, self))

    def _answer(self, request: m.Request) -> Coroutine[Any, Any, None] | None:
        """Execute the request if it need not wait. Returns the reply, or an awaitable for it."""
        match request:
            case m.Put() | m.AppendInline() | m.ExtendInline():
                return self._answer_inline(request)
            case m.WriteInline():
                return self._write_inline(request)
            case m.Pin():
                if request.devices and self._store.keeps(request.shards):
                    return self._pin_rest(request)
                if request.others:
                    return self._pin_others(request)
                self._check_pin(request.shards, apart=request.apart)
                held = self._store.pin_now(self, request.shards)
                if held is None:
                    return self._pin_later(request)
                self._send_held(request, held)
            case m.LiveRows():
                self._bound("rows of a shard, to be told which count", m.MAX_LIVE, request.count)
                bits = self._store.live(request.shard, request.column, request.first, request.count)
                self._channel.send(m.LiveBits(request.id, bits))
            case m.Unpin():
                self._store.unpin(self, request.shards)
            case m.InheritPins():
                self._inherit(request)
            case m.Prefetch():
                return self._prefetch(request)
            case m.FreeElsewhere():
                return self._free_elsewhere(request)
            case m.Retain():
                return self._retain(request)
            case m.Replicate():
                return self._replicate(request)
            case m.Members():
                self._channel.send(m.Figures(request.id, {} if self._hosts is None else self._hosts.figures()))
            case m.Reserve():
                self._bound("reservation of so many shards", m.MAX_SHARDS, len(request.sizes))
                made = self._store.reserve_now(self, request.sizes)
                if made is None:
                    return self._reserve_later(request)
                self._send_reserved(request.id, made)
            case m.Seal():
                self._bound("layout", m.MAX_LAYOUT, max((len(layout) for _, layout in request.shards), default=0))
                self._bound("scope", m.MAX_SCOPE, len(request.scope))
                self._staged.begin(request.scope)
                self._store.seal(self, request.shards, scope=request.scope, holder=self.label, hold=request.hold)
                self._channel.send(m.Done(request.id))
            case m.Keep():
                self._keep(request)
            case m.Landed():
                self._store.land(self, request.shard, request.reserved)
                self._channel.send(m.Done(request.id))
            case m.Stays():
                self._store.stays(self, request.shard, revive(request.name, request.message, request.fields))
            case m.Offering():
                self._store.offered(self, request.shard, request.reader, request.address, request.ticket)
            case m.OfferKept():
                return self._offer_kept(request)
            case m.Abort():
                self._store.abort(self, request.shards)
            case m.Free():
                self._free(request)
            case m.Stats() | m.Streams() if request.node not in (b"", self._node):
                return self._figures_elsewhere(request)
            case m.Stats():
                self._channel.send(m.Figures(request.id, self._figures()))
            case m.Observe():
                return self._observe(request)
            case m.ReadClock() | m.ListRings() | m.ReadRing():
                if request.node not in (b"", self._node):
                    return self._ask_elsewhere(request)
                self._channel.send(self._observing.answer(request))
            case m.Cancel():
                self._handing.end(request.request)
                task = self._waiting.get(request.request)
                if task is not None:
                    task.cancel()
            case m.Hello():
                self._hello(request)
            case m.Leave():
                for task in self._waiting.values():
                    task.cancel()
                self._ask_no_more()
                self._handing.leave()
            case m.Alive():
                pass
            case m.Report():
                self._bound("performance graph", m.MAX_REPORT, len(request.graph))
                self.graph = request.graph
            case m.Graphs():
                return self._send_graphs(request)
            case _:
                return self._answer_shared(request)
        return None

    def _answer_shared(self, request: StreamRequest | TableRequest) -> Coroutine[Any, Any, None] | None:
        deadline = self._deadline(getattr(request, "timeout_s", 0.0))
        answer: m.Reply | Waiting | None
        match request:
            case m.Admit():
                self._handing.begin(request.id, request.handing)
            case m.Append():
                self._handing.end(request.admitted)
        if isinstance(request, TableRequest):
            answer = self._tables.answer(request, deadline)
        else:
            answer = self._streams.answer(request, deadline)
        if isinstance(answer, m.Message):
            self._channel.send(answer)
        elif answer is not None:
            return self._answer_later(request, answer)
        return None

    def _answer_inline(self, request: Carrying) -> Coroutine[Any, Any, None] | None:
        inlining = self._inlining
        if self._either is not None and not isinstance(request, m.Put):
            inlining = (
                self._inlining if self._either.of(request.stream) is self._either.here else self._inlining_durable
            )
        answer = inlining.answer(request, self._deadline(request.timeout_s))
        if not isinstance(answer, m.Message):
            return self._answer_soon(answer)
        self._channel.send(answer)
        return None

    def _write_inline(self, request: m.WriteInline) -> Coroutine[Any, Any, None] | None:
        answer = self._writing.answer(request, self._deadline(request.timeout_s))
        if not isinstance(answer, m.Message):
            return self._answer_soon(answer)
        self._channel.send(answer)
        return None

    async def _answer_soon(self, answer: Waiting) -> None:
        """Send a small reply without waiting for room: what it reports could not be undone."""
        self._channel.send(await answer())

    async def _room(self) -> bool:
        return await self._channel.room()

    async def _answer_later(self, request: StreamRequest | TableRequest, answer: Waiting) -> None:
        reply = await answer()
        try:
            if self._channel.full:
                await self._send_later(reply)
            else:
                self._channel.send(reply)
        except BaseException:  # it is too large, or was cancelled as it waited to be sent
            if isinstance(request, m.AskStream | m.Admit):
                self._streams.untold(request, reply)
            raise

    async def _send_later(self, reply: m.Reply) -> None:
        """Send a reply once the client has received enough of the earlier ones. Raises LimitExceeded if the replies
        that wait take too much memory."""
        framed = frame(reply)
        del reply  # which takes several times as much
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
        self.label = f"{line(request.label[:80])} (pid {self.pid})"
        grants: list[m.Grant] = []
        descriptors: list[int] = []
        segment, nbytes = self._store.prewarm(self) if request.writes else (None, 0)
        if segment is not None:
            grants, descriptors = self._grants.new([segment], writable=True)
        ring = self._observing.grant(self, self.pid, self.label)
        welcome = m.Welcome(
            id=request.id,
            major=m.MAJOR,
            minor=min(m.MINOR, request.minor),
            node=self._node,
            capacity=self._store.budget.capacity,
            lease_s=self._store.lease_s,
            grants=grants,
            prewarm=nbytes,
            token=self.token,
            shared_s=_ALONE_S if self._hosts is None and self._either is None else _CLUSTER_S,
            ring=RING_BYTES if ring is not None else 0,
            reports_s=_REPORTS_S if request.writes else 0.0,
            holds=self._store.budget.capacity + self._store.disk.quota if self._hosts is None else 0,
        )
        self._channel.send(welcome, descriptors if ring is None else [*descriptors, ring])

    def _inherit(self, request: m.InheritPins) -> None:
        for client in self._others:
            if secrets.compare_digest(client.token, request.token):
                self._store.pins.inherit(client, self)
                self._channel.send(m.Done(request.id))
                return
        raise Freed("the client whose pins were to be inherited has gone")

    def _keep(self, request: m.Keep) -> None:
        self._bound("shards to be kept", m.MAX_RETAINED, len(request.shards))
        self._bound("scope", m.MAX_SCOPE, len(request.scope))
        for size, layout, handle in request.shards:
            self._bound("layout", m.MAX_LAYOUT, len(layout))
            self._bound("handle", m.MAX_HANDLE, len(handle))
            if size < 0:
                raise ProtocolMismatch(f"a shard of {size} bytes")
        self._staged.begin(request.scope)
        numbers: list[int] = []
        try:
            for size, layout, handle in request.shards:
                numbers.append(
                    self._store.keep(
                        self, size, layout, handle, scope=request.scope, holder=self.label, tell=self._tell_kept
                    )
                )
        except BaseException:
            self._store.free(numbers)
            raise
        self._channel.send(m.Kept(request.id, numbers))

    def _tell_kept(self, shard: int, land: bool, offer: m.OfferTo | None) -> None:
        self._channel.send(m.Keeping(0, shard, land, offer))

    def _check_pin(self, shards: list[int], *, apart: bool) -> None:
        self._bound("request for so many shards", m.MAX_SHARDS, len(shards))
        if len(set(shards)) < len(shards):
            raise ProtocolMismatch("a request for shards names one twice")
        self._bound(
            "description of what is to be read; get fewer rows or columns at a time",
            m.MAX_FRAME // 2,
            self._store.description(shards, apart=apart),
        )

    def _bound(self, what: str, limit: int, asked: int) -> None:
        if asked > limit:
            raise LimitExceeded(f"{asked} is more than {limit}: {what}", what=what, asked=asked, limit=limit)

    def _free(self, request: m.Free) -> None:
        freeings = self._store.freeings
        freeings.cause = FreeCause("scope" if request.scope else "free", self.label)
        try:
            parts = [(shard, columns, Rows.decode(rows)) for shard, columns, rows in request.parts]
            self._needed.free_parts(parts)
            self._store.free(request.shards)
            if request.scope:
                self._staged.free(request.scope)
        except (ValueError, IndexError) as error:
            raise ProtocolMismatch(f"no part of a shard: {error}") from None
        finally:
            freeings.cause = UNKNOWN
        self._channel.send(m.Done(request.id))

    async def _send_graphs(self, request: m.Graphs) -> None:
        if self._hosts is None:
            nodes = [graphs_of(self._node, self._others)]
        else:
            nodes = [self._hosts.graphs(), *await self._hosts.others_graphs()]
        self._channel.send(m.Figures(request.id, {"nodes": nodes}))

    # What has to wait

    def _wait(self, request: Any, answering: Coroutine[Any, Any, None]) -> None:
        identifier = request.id
        try:
            self._bound("requests of a client that wait", m.MAX_WAITING, len(self._waiting) + 1)
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
        kind = _WAITS_FOR.get(
            type(getattr(request, "asked", request))
        )  # of others nobody waits for the answer, or not for long
        wait = waiting.begin(waiting.Waits() if kind is None else self.waits, identifier, kind or "")
        try:
            await answering
        except Exception as error:  # the boundary, as in `_received`
            self._fail(identifier, error)
        finally:
            wait.end()

    def _deadline(self, timeout_s: float) -> Deadline:
        if not timeout_s >= 0:  # NaN too
            raise ProtocolMismatch(f"a timeout is seconds, not {timeout_s}")
        return Deadline.after(min(timeout_s, _MAX_TIMEOUT_S))

    async def _prefetch(self, request: m.Prefetch) -> None:
        self._bound("request for so many shards", m.MAX_SHARDS, len(request.own) + len(request.others))
        deadline = self._deadline(request.timeout_s)
        copies = await self._copies(request.others, deadline, request.parts) if request.others else []
        for number in dict.fromkeys([*request.own, *copies]):  # one by one: all need not fit at once
            held = await self._store.pin(self, [number], deadline)
            self._store.unpin(self, [each.shard for each in held])
        self._channel.send(m.Done(request.id))

    async def _copies(
        self,
        shards: Sequence[m.Wanted],
        deadline: Deadline,
        parts: Sequence[m.RowParts] = (),
        chunks: Sequence[m.ChunkPart] = (),
    ) -> list[int]:
        """The local numbers of shards of other nodes, of which `parts`, or parts of `chunks`, are wanted."""
        if self._hosts is None or self._hosts.fetcher is None:
            node = shards[0][0].hex() if shards else ""
            why = "either it was stopped, or it is another host's, and this node is alone"
            raise OwnerDied(
                f"the shards were put on node {node}, and this is node {self._node.hex()}; {why}", node=node
            )
        try:
            wanted = wanted_of(shards, parts, chunks)
        except ValueError as error:
            raise ProtocolMismatch(f"no rows of a shard: {error}") from None
        waiting.turn("fetch", shards[0][0].hex() if shards else "")
        return await self._hosts.fetcher.find(wanted, deadline)

    def _patched(
        self, copies: Sequence[int], chunks: Sequence[m.ChunkPart], deadline: Deadline
    ) -> AbstractAsyncContextManager[None]:
        """A context in which those of these copies are made here from their changes for which that is possible."""
        fetcher = None if self._hosts is None else self._hosts.fetcher
        if fetcher is None or not any(steps for _, steps in chunks):
            return nullcontext()
        steps = [(number, steps) for number, (_, steps) in zip(copies, chunks, strict=True)]
        return fetcher.patching.ready(steps, deadline)

    async def _observe(self, request: m.Observe) -> None:
        self._channel.send(m.Figures(request.id, await self._observing.snapshot()))

    async def _ask_elsewhere(self, request: m.ReadClock | m.ListRings | m.ReadRing) -> None:
        if self._hosts is None:
            raise PeerUnavailable(f"there is no node {request.node.hex()}: this one is alone", address="")
        self._channel.send(await self._hosts.observed(request))

    async def _replicate(self, request: m.Replicate) -> None:
        self._bound("request for so many shards", pm.MAX_SHARDS, len(request.shards))
        if not request.shards or request.replicas < 2:
            raise ProtocolMismatch(f"{request.replicas} replicas of {len(request.shards)} shards")
        if self._hosts is None or self._hosts.fetcher is None:
            what = "nodes of the cluster"
            raise LimitExceeded(
                f"{request.replicas} replicas, and this node is alone", what=what, asked=request.replicas, limit=1
            )
        replicas = self._hosts.fetcher.replicas
        nodes = await replicas.replicate(request.shards, request.replicas, self._deadline(request.timeout_s))
        self._channel.send(m.Replicated(request.id, nodes))

    async def _free_elsewhere(self, request: m.FreeElsewhere) -> None:
        if self._hosts is None or self._hosts.fetcher is None:
            node = request.node.hex()
            raise OwnerDied(f"what is to be freed is on node {node}, and this node is alone: free it there", node=node)
        await self._hosts.fetcher.free(request.node, request.parts)
        self._channel.send(m.Done(request.id))

    def _retain(self, request: m.Retain) -> Coroutine[Any, Any, None] | None:
        self._bound("links to so many shards", m.MAX_RETAINED, len(request.shards))
        wanted = links_of(request.shards)
        if request.node != self._node:
            return self._retain_elsewhere(request)
        self._channel.send(m.Retained(request.id, self._node, self._store.retain(wanted, holder=self.label)))
        return None

    async def _figures_elsewhere(self, request: m.Stats | m.Streams) -> None:
        if self._hosts is None:
            node = request.node[:16].hex()
            raise PeerUnavailable(f"node {node} is no member: this node is alone", address=node)
        figures = await self._hosts.figures_of(request)
        await self._send_later(m.Figures(request.id, figures.values))

    async def _retain_elsewhere(self, request: m.Retain) -> None:
        if self._hosts is None or self._hosts.fetcher is None:
            node = request.node.hex()
            raise OwnerDied(f"the shards were put on node {node}, which is not in the cluster: put again", node=node)
        links = await self._hosts.fetcher.retain(request.node, request.shards)
        self._channel.send(m.Retained(request.id, request.node, links))

    async def _reserve_later(self, request: m.Reserve) -> None:
        self._send_reserved(
            request.id, await self._store.reserve(self, request.sizes, self._deadline(request.timeout_s))
        )

    async def _pin_later(self, request: m.Pin) -> None:
        held = await self._store.pin(self, request.shards, self._deadline(request.timeout_s))
        await self._when_room(held)
        self._send_held(request, held)

    async def _when_room(self, held: list[Pinned]) -> None:
        """Wait until the client has received enough to be sent these; if it has not, its pins are released."""
        try:
            await self._channel.room()
        except BaseException:
            self._store.unpin(self, [each.shard for each in held])
            raise

    async def _pin_rest(self, request: m.Pin) -> None:
        """Answer with held handles for the shards that clients keep, and with the others as usual."""
        kept = self._store.map_kept(self, request.shards)
        mapped = {shard.number for shard, _ in kept}
        rest = [number for number in request.shards if number not in mapped]
        try:
            deadline = self._deadline(request.timeout_s)
            copies = await self._copies(request.others, deadline, request.parts) if request.others else []
            shards = [*rest, *copies]
            self._check_pin(shards, apart=request.apart)
            held = await self._store.pin(self, shards, deadline) if shards else []
            await self._when_room(held)
        except BaseException:
            self._store.unpin(self, [each.number for _, each in kept])
            raise
        told = [(s.number, each.number, s.size, s.layout, s.live_bits(), each.handle) for s, each in kept]
        self._send_held(request, held, told)

    async def _offer_kept(self, request: m.OfferKept) -> None:
        self._bound("shards that are kept, to be offered", m.MAX_RETAINED, len(request.shards))
        offers = [] if self._hosts is None else await self._hosts.offers_kept(request)
        self._channel.send(m.KeptOffers(request.id, offers))

    async def _pin_others(self, request: m.Pin) -> None:
        self._bound("request for so many shards", m.MAX_SHARDS, len(request.shards) + len(request.others))
        deadline = self._deadline(request.timeout_s)
        copies = await self._copies(request.others, deadline, request.parts, request.chunks)
        shards = [*request.shards, *copies]
        self._check_pin(shards, apart=request.apart)
        held = self._store.pin_now(self, shards)
        if held is None:
            async with self._patched(copies, request.chunks, deadline):
                held = await self._store.pin(self, shards, deadline)
        await self._when_room(held)
        self._send_held(request, held)

    # Replies that grant segments

    def _send_reserved(self, identifier: int, made: list[Reservation]) -> None:
        extents = [(r.shard, r.extent.segment, r.extent.offset, r.extent.size) for r in made]
        gone = self._grants.gone()
        grants, descriptors = self._grants.new((r.extent.segment for r in made), writable=True)
        self._channel.send(m.Reserved(identifier, extents, grants, gone), descriptors)

    def _send_held(self, request: m.Pin, held: list[Pinned], kept: Sequence[m.KeptOne] = ()) -> None:
        layouts: dict[bytes, int] = {}
        lives: list[bytes] = []
        apart: list[int] = []
        numbers: list[int] = []
        for shard, extent, layout, cells in held:
            live = 0
            if cells is not None and request.apart and cells.large:
                apart.append(shard)
            elif cells is not None:
                lives.append(cells.encode())
                live = len(lives)
            numbers += shard, extent.segment, extent.offset, extent.size, layouts.setdefault(layout, len(layouts)), live
        gone = self._grants.gone()
        carried = self._store.carry(self, held, m.MAX_CARRIED) if request.carry and not (kept or apart) else b""
        if carried:
            at = 0
            for first, size in enumerate(numbers[3 :: places.WIDTH]):
                numbers[first * places.WIDTH + 1 : first * places.WIDTH + 3] = -1, at
                at += size
        segments = {p.extent.segment for p in held} if not carried else ()
        grants, descriptors = self._grants.new(segments, writable=False)
        packed = places.pack(numbers)
        reply = m.Held(request.id, packed, list(layouts), grants, lives, gone, apart, list(kept), carried)
        self._channel.send(reply, descriptors)
