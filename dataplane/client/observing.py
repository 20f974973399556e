"""Queries to a node and its cluster over a plane: statistics for monitoring, and recent events for a trace."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.errors import DataplaneError, Lost, Misuse, Retryable
from dataplane.observe.metrics import families
from dataplane.observe.ring import EVENT, Thread
from dataplane.observe.snapshot import Snapshot
from dataplane.observe.trace import Trace, TracedProcess
from dataplane.wire import messages as m

if TYPE_CHECKING:
    from dataplane.client.plane import AsyncPlane


async def snapshot(plane: AsyncPlane) -> Snapshot:
    """The figures of the plane's node for monitoring. Raises PeerUnavailable, Closed, Forked."""
    plane.check()
    request = m.ReadStats(plane.connection.next_id(), about="metrics")
    return Snapshot.of((await plane.connection.request(request, m.Figures, 0.0)).values)


async def graphs(plane: AsyncPlane) -> dict[str, Any]:
    """Read the performance figures of the processes of all nodes, by a message to each node, because one may not hold
    all. The entry of another node that does not answer has an `error`. Raises the error of the plane's own node."""
    members, own = (await plane.members()).get("members", {}), plane.connection.welcome.node.hex()

    async def of_node(node: str) -> list[Any]:
        request = m.ReadStats(plane.connection.next_id(), bytes.fromhex(node), "graphs")
        try:
            return list((await plane.connection.request(request, m.Figures, 0.0)).values["nodes"])
        except DataplaneError as error:
            if node == own:
                raise
            address = members[node]["address"]
            return [{"node": "", "host": address, "clients": [], "left_out": 0, "error": str(error)}]

    found = await asyncio.gather(*map(of_node, {own: None} | members))
    return {"nodes": [each for nodes in found for each in nodes]}


async def collect(plane: AsyncPlane, seconds: float = 10.0) -> Trace:
    """Read the events of the last `seconds` of all nodes of the cluster, their clients, and clients that ended within
    the last minute. Times are by this host's clock. Returns a trace, whose `missing` has the errors of other nodes.
    Raises ValueError unless `seconds` is above 0 and at most 3600; PeerUnavailable, Closed, Forked."""
    if not 0 < seconds <= 3600:
        raise ValueError(f"a trace is of the last seconds, up to 3600, not of {seconds}")
    plane.check()
    nodes = [bytes.fromhex(node) for node in (await plane.members()).get("members", {})]
    own = plane.connection.welcome.node
    others = [node for node in nodes if node != own]
    processes = await _processes(plane, b"", own.hex(), 0, 0, seconds)
    found = await asyncio.gather(*(_of_node(plane, node, seconds) for node in others), return_exceptions=True)
    missing: dict[str, str] = {}
    for node, outcome in zip(others, found, strict=True):
        if isinstance(outcome, DataplaneError):
            missing[node.hex()] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            processes += outcome
    return Trace(tuple(processes), missing)


async def _of_node(plane: AsyncPlane, node: bytes, seconds: float) -> list[TracedProcess]:
    connection = plane.connection
    clock = await connection.request(m.ReadClock(connection.next_id(), node), m.ClockRead, 5.0)
    return await _processes(plane, node, node.hex(), clock.ahead, clock.error, seconds)


async def _processes(
    plane: AsyncPlane, node: bytes, name: str, ahead: int, error: int, seconds: float
) -> list[TracedProcess]:
    connection = plane.connection
    listed = await connection.request(m.ListRings(connection.next_id(), node), m.RingList, 5.0)
    found = []
    for ring, pid, label, alive, threads in listed.rings:
        if pid == os.getpid() and not node:  # this process
            continue
        try:
            request = m.ReadRing(connection.next_id(), node, ring, seconds)
            events = (await connection.request(request, m.RingEvents, 5.0)).events
        except (Lost, Retryable):  # the process or its node has ended meanwhile
            continue
        whole = np.frombuffer(events[: len(events) // EVENT.itemsize * EVENT.itemsize], EVENT)
        named = {place: Thread(number, text) for place, number, text in threads}
        found.append(TracedProcess(name, pid, label, alive, named, ahead, error, whole))
    return found


async def series(plane: AsyncPlane) -> list[tuple[str, str, str, dict[str, str], float]]:
    """Read the metrics of `/metrics` for another monitoring system. Returns for each its kind ("counter" or "gauge"),
    name, help text, labels (including `node`) and value. A histogram is returned as counters `_bucket`, `_count` and
    `_sum`. Raises as `snapshot`, and Misuse if the extra `metrics` is not installed."""
    try:
        from prometheus_client.core import Metric  # noqa: F401
    except ImportError as error:
        raise Misuse("metrics need prometheus_client: pip install 'rollout-dataplane[metrics]'") from error
    figures = await snapshot(plane)
    node = figures.stats.node
    found = []
    for family in families(figures):
        for sample in family.samples:
            kind = "counter" if family.type in ("counter", "histogram") else "gauge"
            found.append((kind, sample.name, family.documentation, sample.labels | {"node": node}, sample.value))
    return found
