"""What a simulation came to: rows a second, how busy who was, and what is the first to be too much."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.scale.controller import Controller
from bench.scale.costs import Costs
from bench.scale.job import Job
from bench.scale.streams import Stream
from dataplane.node.spread.far import MAX_CLIENTS
from dataplane.wire.peer import MAX_SOCKETS

FULL = 0.9
"""Of a processor or link: beyond it what waits grows without end."""

_DOES = {
    "greet": "greetings of membership, all to all",
    "append": "appends, asked of the groups' homes",
    "take": "rows that homes grant",
    "watch": "consumers that ask all homes",
    "ack": "acks",
    "settle": "acks told to who stores the columns",
    "read": "reads of many small shards",
    "limits": "the keeper of the stream's limits",
}


@dataclass(frozen=True)
class Outcome:
    """Utilisations are shares of one core, of the offered work: above 1 it is not done in time."""

    job: dict[str, Any]
    rows_s: float
    """That were acked, of all hosts."""
    node: float
    node_busiest: float
    client: float
    link: float
    by_kind: dict[str, float]
    """Of the busiest node."""
    messages_s: dict[str, float]
    append_ms: float
    delivery_ms: float
    first: str
    """What is nearest to its limit."""
    walls: list[str]
    controller_rows_s: float
    controller_payload_rows_s: float
    events: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def walls(hosts: int, clients: int = 8) -> list[str]:
    """The fixed numbers in the code that so many hosts, with so many clients each, are beyond."""
    found = []
    if hosts >= MAX_SOCKETS:
        found.append(f"{MAX_SOCKETS} ZeroMQ sockets a node")
    if hosts * clients > MAX_CLIENTS:
        found.append(f"{MAX_CLIENTS} clients of other nodes at a home")
    return found


def simulate(job: Job, costs: Costs) -> Outcome:
    """Run the job for its time. What is counted begins after `warm_s`."""
    stream = Stream(job, costs)
    cluster, loop = stream.cluster, stream.loop
    loop.run(job.warm_s)
    spent = {kind: each.copy() for kind, each in cluster.spent.items()}
    busy, messages = cluster.processors.busy.copy(), dict(cluster.messages)
    links = [way.busy.copy() for way in (cluster.links.out, cluster.links.into)]
    acked = stream.homes.acked
    loop.run(job.seconds)
    took = job.seconds - job.warm_s
    used = (cluster.processors.busy - busy) / took
    node, client = used[: job.hosts], used[job.hosts :]
    busiest = int(node.argmax())
    by_kind = {kind: float((each - spent.get(kind, 0.0))[busiest] / took) for kind, each in cluster.spent.items()}
    ways = (cluster.links.out, cluster.links.into)
    link = max(float((way.busy - before).max()) for way, before in zip(ways, links, strict=True)) / took
    rows_s = (stream.homes.acked - acked) / took
    return Outcome(
        job=asdict(job),
        rows_s=rows_s,
        node=float(node.mean()),
        node_busiest=float(node.max()),
        client=float(client.max()),
        link=link,
        by_kind=by_kind,
        messages_s={kind: (n - messages.get(kind, 0.0)) / took for kind, n in cluster.messages.items()},
        append_ms=_median_ms([ended - began for began, ended in stream.appended]),
        delivery_ms=_median_ms([ended - began for began, ended, _ in stream.delivered]),
        first=_first(node, client, link, by_kind),
        walls=walls(job.hosts),
        controller_rows_s=Controller(job, costs).capacity_rows_s(),
        controller_payload_rows_s=Controller(job, costs, payload=True).capacity_rows_s(),
        events=loop.events,
    )


def _median_ms(seconds: list[float]) -> float:
    return float(np.median(seconds)) * 1e3 if seconds else float("nan")


def _first(node: Any, client: Any, link: float, by_kind: dict[str, float]) -> str:
    most = max(by_kind, key=by_kind.__getitem__, default="append")
    one = node.max() > 1.5 * node.mean() + 0.01
    what = f"{'one node: ' if one else ''}{_DOES[most]}"
    shares = {what: float(node.max()), "a client's own process": float(client.max()), "a link": link}
    return max(shares, key=shares.__getitem__)
