"""A node's measurements of its own work and of its clients, for metrics and traces.

It owns the rings of events (`observe.ring`) of the node and of each client, and the last events of the clients that
ended last. Every `FOLD_S` it adds the new events to histograms and reads the leader of each partition.

Invariants: the rings of connected clients take at most 1/64 of the node's memory, or `_LEAST_RINGS` rings if that is
more. Of ended clients the last `_GONE` are remembered. The memory of histograms and sums does not depend on the number
of streams. Invalid events of a client affect only its own figures. Nothing here is on the path of a request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from dataplane.errors import Freed
from dataplane.observe import ring
from dataplane.observe.latency import Latencies
from dataplane.observe.ledger import Ledger, StreamCounts, TaskCounts
from dataplane.observe.metrics import Exporter
from dataplane.observe.ring import PastEvents, RingReader, RingWriter
from dataplane.observe.snapshot import Snapshot
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.progress import ACKED, EXPIRED, LEASED, REDELIVERED
from dataplane.stream.statistics import Waiting
from dataplane.wire import messages as m

if TYPE_CHECKING:
    from dataplane.node.clustered.single_node import SingleNode
    from dataplane.node.clustered.streams import ClusteredStreams
    from dataplane.node.hosts import Hosts
    from dataplane.node.local.streams import LocalStream, LocalStreams

log = logging.getLogger(__name__)

_Seen = tuple[StreamCounts, list[list[int]], list[int], float | None]
"""The last counts of a stream: its counters, the counters of `Progress` by task, the rows left by task, and the
arrival of its oldest row, by the stream's clock."""

_Seeing = tuple[Hashable, str, LeasedRows, Waiting, bool, float]
"""A stream to count: identity, name, rows and leases, waiting requests, whether it was created here, and the time."""

_COUNTED = itemgetter(LEASED, REDELIVERED, ACKED, EXPIRED)
_tuple = tuple.__new__  # saves half a microsecond for each of thousands of tuples

FOLD_S = 0.5
"""Seconds between two reads of the rings: a ring overflows at 65,000 events a second."""

_GONE, _GONE_EVENTS = 32, 4096  # ended clients that are remembered, and events of each
_PART, _LEAST_RINGS = 64, 32  # rings take 1 / _PART of the node's memory, or this number of rings if that is more
_GONE_S = 60.0  # seconds for which ended clients are remembered
_SLICE = 100  # streams that are counted before requests are answered again
_SCRAPE_S = 5.0  # timeout of a scrape for the figures
_MOST_EVENTS = 3 << 20  # bytes of events in an answer; a ring has fewer


@dataclass(slots=True)
class _Ring:
    number: int
    pid: int
    label: str
    fd: int
    reader: RingReader

    def close(self) -> None:
        self.reader.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class _Departed:
    number: int
    pid: int
    label: str
    reader: PastEvents
    at: float


class Telemetry:
    """The statistics and events of one node, which `serve` keeps up to date."""

    def __init__(
        self,
        streams: LocalStreams,
        figures: Callable[[], dict[str, Any]],
        *,
        records: bool = True,
        memory: int = 1 << 40,
    ) -> None:
        """`figures`: the node's statistics without streams and tables. `records`: whether this node and its clients
        record events, without which there are neither traces nor histograms. `memory`: the node's budget. Beyond the
        first `_LEAST_RINGS`, the rings of clients take at most the share `_PART` of it."""
        self._most_rings = max(_LEAST_RINGS, memory // _PART // ring.RING_BYTES)
        self._local = streams
        self._figures = figures
        self.records = records
        self.recorder: RingWriter | None = RingWriter() if records else None
        self.latencies = Latencies()
        self._ledger = Ledger()
        self._numbers = iter(range(1, 1 << 62))
        self._rings: dict[Hashable, _Ring] = {}
        self._gone: deque[_Departed] = deque()
        self._missed = 0
        self._full = False  # whether a client got no ring because others have all
        self._led: dict[str, bool] = {}
        self._leaders: dict[str, str] = {}
        self.failovers = 0
        if self.recorder is not None:
            self._own = _Ring(0, os.getpid(), "node", -1, self.recorder.reader())
        self._seen: dict[Hashable, _Seen] = {}
        self._hosts: Hosts | None = None
        self._exporter: Exporter | None = None
        self._clustered: Hosts | SingleNode | None = None
        streams.ending = self._ending

    # rings

    def grant(self, client: Hashable, pid: int, label: str) -> int | None:
        """Create a ring for a new client. Returns its descriptor, which the node keeps open; None if the client gets no
        ring."""
        if not self.records or client in self._rings:
            return None
        if len(self._rings) >= self._most_rings:
            if not self._full:
                why = "the memory for events is used by"
                log.warning("client %s and later ones record no events: %s %d others", label, why, len(self._rings))
            self._full = True
            return None
        try:
            fd = ring.create()
            try:
                reader = RingReader.of(fd)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:  # out of memory or descriptors: the client has no ring
            log.warning("client %s records no events: %s", label, error)
            return None
        self._rings[client] = _Ring(next(self._numbers), pid, label, fd, reader)
        return fd

    def leave(self, client: Hashable) -> None:
        """Release the ring of a client that has ended. Its last events stay readable for a while."""
        found = self._rings.pop(client, None)
        if found is None:
            return
        self._fold(found)
        past = found.reader.past(_GONE_EVENTS)
        found.close()
        self._gone.append(_Departed(found.number, found.pid, found.label, past, time.monotonic()))
        self._forget()

    def _forget(self) -> None:
        now = time.monotonic()
        while self._gone and (len(self._gone) > _GONE or now - self._gone[0].at > _GONE_S):
            self._gone.popleft()

    def _there(self) -> Iterator[_Ring]:
        if self.recorder is not None:
            yield self._own
        yield from self._rings.values()

    def _all(self) -> Iterator[_Ring | _Departed]:
        yield from self._there()
        yield from self._gone

    def _fold(self, each: _Ring) -> None:
        missed = each.reader.missed
        self.latencies.fold(each.reader.fresh())
        self._missed += each.reader.missed - missed

    def fold(self) -> None:
        for each in self._there():
            self._fold(each)
        self._forget()

    def watch(self, hosts: Hosts | None, clustered: Hosts | SingleNode | None) -> None:
        """Begin to count, when the node has started. `clustered`: the owner of the streams and tables if these are
        partitions."""
        self._hosts = hosts
        self._clustered = clustered
        if hosts is not None:
            hosts.fetcher.reading.timed = self.timed

    def export(self, host: str, port: int) -> None:
        """Serve `/metrics` at this address. Raises OSError if that is not possible, ValueError if `prometheus_client`
        is not installed."""
        loop = asyncio.get_running_loop()

        def snapshot() -> Snapshot:
            return Snapshot.of(asyncio.run_coroutine_threadsafe(self.snapshot(), loop).result(_SCRAPE_S))

        self._exporter = Exporter(host, port, snapshot)

    @property
    def exported(self) -> str | None:
        """HOST:PORT at which `/metrics` is served, or None."""
        return None if self._exporter is None else self._exporter.address

    async def serve(self) -> None:
        """Keep the statistics up to date until cancelled."""
        while True:
            await asyncio.sleep(FOLD_S)
            self.fold()
            self._watch_leaders()

    def timed(self, operation: str, began: int, nbytes: int) -> None:
        """Record an operation of the node that ends now."""
        if self.recorder is not None:
            self.recorder.record(ring.CODE[operation], began, nbytes)

    def answer(self, request: m.ListRings | m.ReadRing | m.ReadClock) -> m.Reply:
        """The reply to a request for this node's rings or clock. Raises Freed if the ring does not exist any more."""
        match request:
            case m.ReadClock():
                return m.ClockRead(request.id, time.monotonic_ns())
            case m.ListRings():
                return m.RingList(request.id, [self._described(each) for each in self._all()])
        for each in self._all():
            if each.number == request.ring:
                seconds = min(max(request.seconds, 0.0), 86400.0) if request.seconds == request.seconds else 0.0
                since = time.monotonic_ns() - int(seconds * 1e9)
                return m.RingEvents(request.id, each.reader.recent(max(0, since)).tobytes()[-_MOST_EVENTS:])
        raise Freed(f"there is no ring {request.ring}: its process ended too long ago")

    def _described(self, each: _Ring | _Departed) -> tuple[int, int, str, bool, list[tuple[int, int, str]]]:
        threads = [(place, thread.number, thread.name) for place, thread in each.reader.threads().items()]
        return each.number, each.pid, each.label, isinstance(each, _Ring), threads

    async def aclose(self) -> None:
        """Stop serving, and release all rings. Idempotent."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:  # a scrape that is under way may wait for this loop
            await asyncio.to_thread(exporter.close)
        for each in self._rings.values():
            each.close()
        self._rings.clear()
        self._gone.clear()
        self._local.ending = lambda _: None

    # partitions

    def _watch_leaders(self) -> None:
        """Count the partitions that this node leads after another node led them."""
        hosts = self._hosts
        if hosts is None:
            return
        led: dict[str, bool] = {}
        leaders: dict[str, str] = {}
        for hosted in hosts.partitions.replicas:
            leader = hosted.configuration.leader[0]
            led[hosted.partition] = leads = bool(hosted.replica.leads)
            before = self._leaders.get(hosted.partition, "") or leader  # "": a configuration without a leader
            leaders[hosted.partition] = leader = leader or before
            if leads and before != leader:
                self.failovers += 1
                if self.recorder is not None:
                    self.recorder.record(ring.CODE["failover"], time.monotonic_ns())
            elif not leads:  # this node has not taken over yet: keep the former leader for the next comparison
                leaders[hosted.partition] = before if before != leader and leader == hosted.me[0] else leader
        self._led, self._leaders = led, leaders

    # figures

    async def snapshot(self) -> dict[str, Any]:
        """The plain values of a `Snapshot`."""
        self.fold()
        found: list[StreamCounts] = []
        hosts = self._hosts
        known, self._seen = self._seen, {}
        for at, each in enumerate(self._streams()):
            seen = self._seen[each[0]] = _look(*each, known.get(each[0]))
            found.append(seen[0])
            if at % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
        if self._shared is None:  # a stream of this node that was dropped in a pause is counted already
            found = [each for each in found if self._local.named(cast(bytes, each.identity)) is not None]
        named = self._ledger.look(found)
        delivered, redelivered, acked, expired = self._ledger.counts
        values: dict[str, Any] = {
            "stats": self._figures(),
            "streams": named,
            "streams_in_all": len({each.name for each in found}),
            "appended": self._ledger.appended,
            "delivered": delivered,
            "redelivered": redelivered,
            "acked": acked,
            "expired": expired,
            "failovers": self.failovers,
            "latencies": self.latencies.values(),
            "missed_events": self._missed,
        }
        if hosts is not None:
            self._watch_leaders()
            values |= {
                "led": sum(self._led.values()),
                "followed": len(self._led) - sum(self._led.values()),
                "members": len(hosts.membership.members),
                "coordinated": bool(hosts.membership.coordination.answers),
            }
        return values

    def _streams(self) -> list[_Seeing]:
        now = self._local.now()
        found: list[_Seeing] = []
        found += [(each.token, each.name, each.leased, each.waiting, True, now) for each in self._local.all()]
        return found if self._shared is None else [*found, *self._shared.led(now)]

    @property
    def _shared(self) -> ClusteredStreams | None:
        return None if self._clustered is None else self._clustered.streams

    def _ending(self, stream: LocalStream) -> None:
        """Count a stream of this node for the last time: it is dropped."""
        with suppress(IndexError):  # the stream was never opened
            seen = _look(stream.token, stream.name, stream.leased, [], True, self._local.now(), None)
            self._ledger.close(seen[0])


def _look(
    identity: Hashable, name: str, leased: LeasedRows, waiting: Waiting, begun: bool, now: float, before: _Seen | None
) -> _Seen:
    """The counters of a stream. Unchanged ones are reused from `before`: few of a thousand streams change between two
    calls, and new objects cost garbage collections."""
    partition, progress = leased.partition, leased.partition.progress
    rows, appended, appends = partition.rows.count, partition.appended, sum(task is None for task, _ in waiting)
    waits = len(waiting) > appends
    if before is not None and (before[0].rows != rows or before[0].appended != appended):
        before = None  # rows were added or removed
    oldest = before[3] if before is not None else partition.metadata.oldest() if rows else None
    if before is not None and before[1] == progress.counts and not waits and not before[0].waits:
        tasks, counts, lefts = before[0].tasks, before[1], before[2]  # unchanged since the last look
    else:
        lefts = [sum(left.values()) for left in progress.left]
        tasks, counts = _tasks(leased, lefts, waiting), [list(each) for each in progress.counts]
    age_s = now - oldest if oldest is not None and oldest < now else 0.0
    began = partition.unfinished.oldest() if len(partition.unfinished) else None
    unfinished = len(partition.unfinished), 0.0 if began is None else max(0.0, now - began)
    found = (identity, name, rows, partition.nbytes, age_s, appends, appended, tasks, begun, waits, *unfinished)
    return _tuple(StreamCounts, found), counts, lefts, oldest


def _tasks(leased: LeasedRows, lefts: list[int], waiting: Waiting) -> dict[str, TaskCounts]:
    waits = [task for task, _ in waiting] if waiting else ()
    every = zip(leased.settings.tasks, lefts, leased.partition.progress.counts, strict=True)
    return {
        task: _tuple(TaskCounts, (left, waits.count(number) if waits else 0, _COUNTED(counts)))
        for number, (task, left, counts) in enumerate(every)
    }
