"""Queries the cluster repeatedly, and keeps the content of the page for viewers.

Invariants: queries take at most a tenth of the time, with pauses of 10 s at most. Without a viewer there is a query
every `UNSEEN_S`, for the history. A viewer gets the newest tick, never a queue of ticks. A node that does not answer,
or was replaced, is an alert, and is queried again every second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from dataplane import __version__
from dataplane.client.connecting import Connecting
from dataplane.client.plane import AsyncPlane
from dataplane.clock import monotonic
from dataplane.errors import DataplaneError
from dataplane.web.alerts import Alert, Alerts
from dataplane.web.causes import Causes, CauseText
from dataplane.web.cluster_view import ClusterView, look
from dataplane.web.history import Key, RateHistory, rounded
from dataplane.web.placement import ClusterState
from dataplane.web.samples import Sample, sample
from dataplane.web.waits import WebWait, WebWaits

log = logging.getLogger(__name__)

LOOK_EVERY_S, UNSEEN_S = 1.0, 5.0
MAX_VIEWERS = 32
COARSE_S, COARSE = 5.0, 120
"""Buckets of the history of everything: ten minutes."""
FINE_S, FINE = 1.0, 180
"""Buckets of the history of streams and tasks: three minutes, for the timeline of a step."""

_SHARE = 10  # at most 1 / _SHARE of the time is used for queries
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedTick:
    """The whole content of the page at one moment. `down`: why the node does not answer; empty if it does."""

    number: int
    at: float
    down: str
    address: str
    version: str
    every_s: float
    sample: Sample | None
    waits: list[WebWait]
    alerts: list[Alert]
    events: list[Any]
    causes: tuple[CauseText, ...] = ()
    placement: int
    viewers: int


class Feed:
    """The feed of the cluster of the node at `address`. `run` it in the loop that uses it."""

    def __init__(self, address: str, connecting: Callable[[str], Any] | None = None) -> None:
        """`connecting(address)`: an asynchronous context manager of a plane; `Connecting` if None."""
        self.address = address
        self._connecting = connecting or (lambda address: Connecting(address, None, writes=False))
        self.coarse = RateHistory(COARSE_S, COARSE)
        self.fine = RateHistory(FINE_S, FINE)
        self.placement = ClusterState()
        self._attention = Alerts(self.coarse)
        self._waits = WebWaits()
        self._causes = Causes()
        self._before: ClusterView | None = None
        self._tick = FeedTick(
            number=0,
            at=time.time(),
            down="not looked at yet",
            address=address,
            version=__version__,
            every_s=LOOK_EVERY_S,
            sample=None,
            waits=[],
            alerts=[],
            events=[],
            placement=0,
            viewers=0,
        )
        self._encoded = _encode(self._tick)
        self._snapshot: tuple[int, bytes] = (-1, b"")
        self._changed = asyncio.Event()
        self._seen = asyncio.Event()
        self._viewers = 0
        self._took_s = 0.0

    # for viewers

    @property
    def tick(self) -> FeedTick:
        """The newest tick."""
        return self._tick

    @property
    def encoded(self) -> bytes:
        """The newest tick, as JSON."""
        return self._encoded

    @contextmanager
    def viewer(self) -> Iterator[bool]:
        """A context with one more viewer. Yields False if there are `MAX_VIEWERS`."""
        if self._viewers >= MAX_VIEWERS:
            yield False
            return
        self._viewers += 1
        self._seen.set()
        try:
            yield True
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._seen.clear()

    async def after(self, number: int) -> FeedTick:
        """Wait for a tick with a higher number. Returns the newest tick."""
        while self._tick.number <= number:
            await self._changed.wait()
        return self._tick

    def snapshot(self) -> bytes:
        """The newest tick and the coarse history, as JSON; encoded once a tick."""
        if self._snapshot[0] != self._tick.number:
            history = {"bucket_s": COARSE_S, "buckets": COARSE, "end": self.coarse.end, **_nested(self.coarse)}
            body = b'{"tick":' + self._encoded + b',"history":' + _encode(history) + b"}"
            self._snapshot = self._tick.number, body
        return self._snapshot[1]

    def stream(self, name: str) -> bytes | None:
        """The fine history of a stream and its partition, as JSON; None if there is no such stream."""
        known = None if self._tick.sample is None else {each.name: each for each in self._tick.sample.streams}
        if known is None or name not in known:
            return None
        keys = {
            "rate": ("stream", name, "rate"),
            "waiting": ("stream", name, "waiting"),
            "version": ("stream", name, "version"),
        }
        tasks = {
            task.name: {
                of: rounded(self.fine.series(("task", name, task.name, of)))
                for of in ("rate", "waiting", "leased", "pending")
            }
            for task in known[name].tasks
        }
        return _encode(
            {
                "name": name,
                "bucket_s": FINE_S,
                "end": self.fine.end,
                **{of: rounded(self.fine.series(key)) for of, key in keys.items()},
                "tasks": tasks,
                "partitions": self.placement.table().get(name, []),
            }
        )

    def partitions(self) -> bytes:
        """The leader and the followers of each partition, by stream, as JSON."""
        return _encode({"version": self.placement.version, "streams": self.placement.table()})

    # looking

    async def run(self) -> None:
        """Query until cancelled."""
        while True:
            try:
                async with self._connecting(self.address) as plane:
                    diagnosing = asyncio.ensure_future(self._causes.watch(plane, self._seen))
                    try:
                        await self._watch(plane)
                    finally:
                        diagnosing.cancel()
                        await asyncio.gather(diagnosing, return_exceptions=True)
            except (DataplaneError, OSError) as error:
                log.info("the node does not answer: %s", error)
                self._lost(str(error))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch(self, plane: AsyncPlane) -> None:
        while True:
            began_s = monotonic()
            seen = await look(plane)
            cost_s = -time.thread_time()
            self.took(seen)
            cost_s += time.thread_time()
            self._took_s = seen.took_s + cost_s
            await self._pause(began_s)

    async def _pause(self, began_s: float) -> None:
        """Wait until the next query is due."""
        due_s = began_s + self.every_s
        if self._viewers:
            await asyncio.sleep(max(0.0, due_s - monotonic()))
            return
        try:
            async with asyncio.timeout(max(0.0, began_s + UNSEEN_S - monotonic())):
                await self._seen.wait()
        except TimeoutError:
            return
        await asyncio.sleep(max(0.0, due_s - monotonic()))

    @property
    def every_s(self) -> float:
        """Seconds between two queries."""
        return max(LOOK_EVERY_S, min(_SHARE * self._took_s, 10.0))

    def took(self, seen: ClusterView) -> None:
        """Publish the result of a query."""
        moved = self.placement.took(seen)
        now = sample(seen, self._before, moved)
        since = None if self._before is None else self._before.wall_s
        self._before = seen
        self.coarse.add(now.at, dict(_measures(now, fine=False)), since)
        self.fine.add(now.at, dict(_measures(now, fine=True)), since)
        alerts = self._attention.took(now, self.placement)
        self.publish(self._made("", now, self._waits.took(now), alerts))

    def _lost(self, why: str) -> None:
        self._before = None
        alert = Alert(
            level="critical",
            tag="no answer",
            kind="cluster",
            of="node",
            since=time.time(),
            text=f"the node at {self.address} does not answer",
        )
        if self._tick.down and self._tick.alerts:
            alert = self._tick.alerts[0]
        self.publish(self._made(why, self._tick.sample, self._tick.waits, [alert]))

    def _made(self, down: str, now: Sample | None, waits: list[WebWait], alerts: list[Alert]) -> FeedTick:
        return FeedTick(
            number=self._tick.number + 1,
            at=time.time(),
            down=down,
            address=self.address,
            version=__version__,
            every_s=self.every_s,
            sample=now,
            waits=waits,
            alerts=alerts,
            events=[*self.placement.events][-50:],
            causes=self._causes.found,
            placement=self.placement.version,
            viewers=self._viewers,
        )

    def publish(self, tick: FeedTick) -> None:
        """Give all viewers this tick."""
        self._tick, self._encoded = tick, _encode(tick)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _measures(now: Sample, *, fine: bool) -> Iterator[tuple[Key, float | None]]:
    """The values of a sample that the history keeps."""
    for stream in now.streams:
        yield ("stream", stream.name, "rate"), stream.rate
        if fine:
            yield ("stream", stream.name, "waiting"), float(stream.waiting)
            yield ("stream", stream.name, "version"), float(stream.version)
        else:
            yield ("stream", stream.name, "rows"), float(stream.rows)
        for task in stream.tasks:
            yield ("task", stream.name, task.name, "rate"), task.rate
            yield ("task", stream.name, task.name, "pending"), float(task.pending)
            if fine:
                yield ("task", stream.name, task.name, "waiting"), float(task.waiting)
                yield ("task", stream.name, task.name, "leased"), float(task.leased)
    if fine:
        return
    up = [host for host in now.hosts if not host.silent]
    for host in up:
        yield ("host", host.node, "memory"), float(host.memory_used)
        yield ("host", host.node, "put"), host.put
        yield ("host", host.node, "fetched"), host.fetched
        yield ("host", host.node, "sent"), host.sent
        yield ("host", host.node, "answer"), host.answer_ms
    yield ("cluster", "memory"), float(sum(host.memory_used for host in up))
    yield ("cluster", "put"), _total([host.put for host in up])
    yield ("cluster", "crossed"), _total([host.fetched for host in up])
    yield ("cluster", "rows"), _total([stream.rate for stream in now.streams])
    yield (
        ("cluster", "waiting"),
        float(sum(host.waiting for host in up) + sum(s.waiting + sum(t.waiting for t in s.tasks) for s in now.streams)),
    )


def _total(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def _nested(history: RateHistory) -> dict[Hashable, Any]:
    """Series by kind and names: {"host": {node: {"memory": [...]}}, "task": {stream: {task: {"rate": [...]}}}, ...}."""
    found: dict[Hashable, Any] = {}
    for key, values in history.items():
        inner = found
        for part in key[:-1]:
            inner = inner.setdefault(part, {})
        inner[key[-1]] = values
    return found
