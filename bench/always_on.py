"""The processor time of observation that is always on: in a call, and in the threads in the background.

A client's part of a call is measured alone. Each request gets the node's last real answer at once, so the client never
waits, and other processes do not change the figure. Blocks of calls with events and places, with one of them, and with
neither follow each other in random order. The least of the blocks counts, as in `timeit`. Shares are of the time of a
whole call of a real node.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import dataplane as dp
from bench.measure import Row, row
from dataplane.client.connection import Connection
from dataplane.client.loop_runner import LoopRunner
from dataplane.diagnosis import recorder
from dataplane.observe.ring import RingWriter
from dataplane.waiting import BITS
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm

BOUND = 1.0173  # of ScalAna, arXiv 2009.01692, table 2: 1.73 % on average
PAIRS = 9
_TURNS = 40
_CALLS = 50

KINDS = {"neither": (False, False), "events": (True, False), "places": (False, True), "both": (True, True)}
"""Whether events and places are on, by name."""


class _Echo:
    """A channel that answers every request at once with the same reply."""

    open = quiet = True
    broken = False

    def __init__(self, connection: Connection, reply: m.Reply) -> None:
        self._pending = connection._pending
        self._reply = reply

    def gather(self) -> None:
        """Do nothing: no message is pending."""

    def send(self, request: Any) -> None:
        """Answer the request, if its type has an answer."""
        future = self._pending.pop(getattr(request, "id", 0), None)
        if future is not None:
            future.set_result(self._reply)


@contextmanager
def _echoed(connection: Connection, call: Callable[[], object], kind: type[m.Reply]) -> Iterator[None]:
    """Let the connection answer each request in the block with the node's reply to this call."""
    channel, received, caught = connection._channel, connection._channel._received, []
    channel._received = lambda reply: (caught.append(reply), received(reply))
    try:
        call()
        connection._channel = _Echo(connection, next(each for each in caught if isinstance(each, kind)))
        yield
    finally:
        channel._received = received
        connection._channel = channel


def _bare_id(self: Connection) -> int:
    return next(self._requests) << BITS


def _bare_ask(self: LoopRunner, exchange: Any) -> Any:
    return self._ask(exchange, 0)


@contextmanager
def _with(connection: Connection, writer: Any, events: bool, places: bool) -> Iterator[None]:
    usual, active = (Connection.next_id, LoopRunner.ask), recorder.recorder.active
    connection.events = writer if events else None
    recorder.recorder.active = places
    if not places:
        Connection.next_id, LoopRunner.ask = _bare_id, _bare_ask  # type: ignore[method-assign]
    try:
        yield
    finally:
        Connection.next_id, LoopRunner.ask = usual  # type: ignore[method-assign]
        connection.events, recorder.recorder.active = writer, active


def _least(call: Callable[[], object], connection: Connection) -> dict[str, float]:
    """Microseconds of this thread's processor time a call, by `KINDS`: the least of `_TURNS` blocks each."""
    writer, found = connection.events or RingWriter().writer, dict.fromkeys(KINDS, float("inf"))
    for _ in range(_TURNS):
        for name in random.sample(list(KINDS), len(KINDS)):
            with _with(connection, writer, *KINDS[name]):
                began = time.thread_time_ns()
                for _ in range(_CALLS):
                    call()
                found[name] = min(found[name], (time.thread_time_ns() - began) / _CALLS / 1e3)
    return found


def _elapsed(call: Callable[[], object], connection: Connection) -> float:
    """Microseconds of a whole call without events and places: the least of many."""
    with _with(connection, connection.events, False, False):
        took = []
        for _ in range(2000):
            began = time.perf_counter_ns()
            call()
            took.append(time.perf_counter_ns() - began)
    return min(took) / 1e3


def calls(address: str) -> list[Row]:
    """The processor time of recording, as a share of a put and of a get of 1 KiB."""
    values = np.zeros((1, 256), np.float32)
    rows = []
    with dp.connect(address) as plane:
        connection = plane._inner.connection
        ref = plane.put({"x": values})
        work: dict[str, tuple[Callable[[], object], type[m.Reply]]] = {
            "put": (lambda: plane.put({"x": values}, scope="calls"), sm.ShardStored),
            "get": (lambda: plane.get(ref), sm.Held),
        }
        for name, (call, kind) in work.items():
            whole = _elapsed(call, connection)
            plane.free(scope="calls")
            with _echoed(connection, call, kind):
                pairs = [_least(call, connection) for _ in range(PAIRS)]
            plane.free(scope="calls")
            for what in ("events", "places", "both"):
                more = [each[what] - each["neither"] for each in pairs]
                detail = f"{statistics.median(more):.2f} us of {whole:.0f}; load {os.getloadavg()[0]:.1f}"
                shares = [1 + each / whole for each in more]
                rows.append(
                    row(f"processor time, {what}, 1 KiB {name}", shares, at_most=BOUND, unit="x", detail=detail)
                )
    return rows


def background(address: str) -> list[Row]:
    """The processor time of the thread that samples stacks, and of its reports, in a second."""
    with dp.connect(address) as plane:
        plane.put({"x": [1]})
        mine, shares = recorder.recorder, []
        mine._threads.add(threading.get_ident())
        for _ in range(PAIRS):
            looks = _processor_s(lambda: mine._look(0.0), 200)
            reports = _processor_s(mine.graph, 50)
            shares.append(1 + recorder.RATE * looks + reports)
    detail = f"{1e6 * looks:.0f} us a look, {1e6 * reports:.0f} a report; load {os.getloadavg()[0]:.1f}"
    return [row("looks and reports of a client, of a second", shares, at_most=BOUND, unit="x", detail=detail)]


def _processor_s(work: Callable[[], object], count: int) -> float:
    least = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(count):
            work()
        least = min(least, (time.thread_time() - began) / count)
    return least
