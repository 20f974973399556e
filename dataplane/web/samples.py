"""The content of the page at one moment: the statistics of a query, and rates since the previous one. Pure functions.

Rates are per second: of the node's uptime for hosts, and of the time between the queries for streams. Invariants: a
rate is None if it is unknown: at the first query, for a node that did not answer both, and for a stream whose partition
moved meanwhile, since its totals pass to another host and would appear as a burst.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataplane.observe.stats import Stats
from dataplane.web.cluster_view import ClusterView

MAX_NAME = 200
"""The largest length of a name from another process."""

_HOLDERS = 3
_RATES = {"put": "put_bytes", "fetched": "fetched_bytes", "sent": "sent_bytes", "spilled": "spilled_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """A node. Sizes in bytes; `put`, `fetched`, `sent` and `spilled` in bytes per second. `answer_ms`: the time of its
    answer. `silent`: why it did not answer, empty if it did; other values are then 0."""

    node: str
    name: str
    own: bool = False
    silent: str = ""
    memory_used: int = 0
    memory_budget: int = 0
    disk_used: int = 0
    disk_budget: int = 0
    spill_error: str = ""
    put: float | None = None
    fetched: float | None = None
    sent: float | None = None
    spilled: float | None = None
    waiting: int = 0
    waiting_bytes: int = 0
    holders: tuple[tuple[str, str, int], ...] = ()
    clients: int = 0
    shards: int = 0
    leads: int = 0
    follows: int = 0
    answer_ms: float = 0.0
    uptime_s: float = 0.0
    transports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of a stream. `rate`: acked rows per second. `lag_s`: the time to process the pending rows at that rate;
    None if unknown. `ready`: ready rows, by the columns that consumers wait for. `incomplete`: groups that the task
    waits for: name, present rows, rows of the whole group, age in seconds."""

    name: str
    pending: int = 0
    leased: int = 0
    acked: int = 0
    rate: float | None = None
    lag_s: float | None = None
    waiting: int = 0
    ready: Mapping[str, int] = field(default_factory=dict)
    incomplete: tuple[tuple[str, int, int, float], ...] = ()
    redelivered: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSample:
    """A stream over all hosts. `rate`: appended rows per second; `waiting`: appends that wait for room. `behind`: the
    tasks that must ack rows to make room. A limit of 0 is none."""

    name: str
    rows: int = 0
    max_rows: int = 0
    bytes: int = 0
    max_bytes: int = 0
    appended: int = 0
    rate: float | None = None
    oldest_s: float = 0.0
    version: int = 0
    waiting: int = 0
    behind: tuple[str, ...] = ()
    closed: bool = False
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of the cluster at one moment. `at`: seconds since 1970; `at_s`: of the monotonic clock. `coordinator`:
    its address, "" for none; `answers`: whether the coordinator answers."""

    at: float
    at_s: float
    hosts: tuple[HostSample, ...] = ()
    streams: tuple[StreamSample, ...] = ()
    coordinator: str = ""
    answers: bool = True


def sample(now: ClusterView, before: ClusterView | None, moved: Collection[str] = ()) -> Sample:
    """The content of the page at one moment. `moved`: streams whose partition has another leader than in the sample
    before."""
    coordination = now.members.get("coordination", {})
    return Sample(
        at=now.wall_s,
        at_s=now.at_s,
        hosts=tuple(_hosts(now, before)),
        streams=tuple(_streams(now, before, moved)),
        coordinator=clipped(coordination.get("coordinator", "")),
        answers=bool(coordination.get("answers", True)) or coordination.get("coordinator", "none").startswith("none"),
    )


def clipped(text: str) -> str:
    """A name from another process, without control characters, of at most `MAX_NAME` characters."""
    plain = "".join(c if c.isprintable() else "?" for c in text[:MAX_NAME])
    return plain + "…" if len(text) > MAX_NAME else plain


def _hosts(now: ClusterView, before: ClusterView | None) -> Iterable[HostSample]:
    members = now.members.get("members", {})
    for node in sorted({*members, *now.stats}):
        member, stats = members.get(node, {}), now.stats.get(node)
        name = clipped(member.get("address", "").removeprefix("tcp://") or "this host")
        if stats is None:
            yield HostSample(node=node, name=name, silent=clipped(now.silent.get(node, "")) or "it does not answer")
            continue
        then = None if before is None else before.stats.get(node)
        yield _host(stats, then, name, now, member)


def _host(stats: Stats, then: Stats | None, name: str, now: ClusterView, member: Mapping[str, Any]) -> HostSample:
    seconds = 0.0 if then is None or then.pid != stats.pid else stats.uptime_s - then.uptime_s
    rates = {of: _rate(getattr(stats, total), getattr(then, total, 0), seconds) for of, total in _RATES.items()}
    holders = ((clipped(h["holder"]), str(h["how"]), int(h["bytes"])) for h in stats.holders[:_HOLDERS])
    return HostSample(
        node=stats.node,
        name=name,
        own=stats.node == now.own,
        memory_used=stats.memory_used,
        memory_budget=stats.memory_budget,
        disk_used=stats.disk_used,
        disk_budget=stats.disk_budget,
        spill_error=clipped(stats.spill_error),
        waiting=stats.waiting,
        waiting_bytes=stats.waiting_bytes,
        holders=tuple(holders),
        clients=stats.clients,
        shards=stats.shards,
        leads=len(stats.leads),
        follows=len(stats.follows),
        answer_ms=round(1000 * now.answer_s.get(stats.node, 0.0), 2),
        uptime_s=stats.uptime_s,
        transports=tuple(sorted(member.get("transports", {}))),
        put=rates["put"],
        fetched=rates["fetched"],
        sent=rates["sent"],
        spilled=rates["spilled"],
    )


def _rate(now: float, then: float, seconds: float) -> float | None:
    """The increase per second; None if unknown, 0 if the counter restarted."""
    return round(max(0.0, (now - then) / seconds), 1) if seconds > 0 else None


def _streams(now: ClusterView, before: ClusterView | None, moved: Collection[str]) -> Iterable[StreamSample]:
    both = (
        ()
        if before is None
        else [n for n, s in now.stats.items() if n in before.stats and before.stats[n].pid == s.pid]
    )
    names: dict[str, list[Mapping[str, Any]]] = {}
    for stats in now.stats.values():
        for name, figures in stats.streams.items():
            names.setdefault(name, []).append(figures)
    for name in sorted(names):
        then: list[Mapping[str, Any]] = []
        since: list[Mapping[str, Any]] = []
        if before is not None and name not in moved:
            then = [before.stats[node].streams[name] for node in both if name in before.stats[node].streams]
            since = [now.stats[node].streams[name] for node in both if name in now.stats[node].streams]
        seconds = now.at_s - before.at_s if then and before is not None else 0.0
        yield _stream(name, names[name], then, since, seconds)


def _stream(
    name: str,
    parts: Sequence[Mapping[str, Any]],
    then: Sequence[Mapping[str, Any]],
    since: Sequence[Mapping[str, Any]],
    seconds: float,
) -> StreamSample:
    first = parts[0]
    behind = dict.fromkeys(clipped(task) for part in parts for task in part["behind"])

    def shares(of: Sequence[Mapping[str, Any]], task: str) -> list[Mapping[str, Any]]:
        return [part["task"][task] for part in of if task in part["task"]]

    tasks = [
        _task(task, shares(parts, task), shares(then, task), shares(since, task), seconds) for task in first["task"]
    ]
    return StreamSample(
        name=clipped(name),
        rows=_sum(parts, "rows"),
        max_rows=first["max_rows"],
        bytes=_sum(parts, "bytes"),
        max_bytes=first["max_bytes"],
        appended=_sum(parts, "appended"),
        rate=_rate(_sum(since, "appended"), _sum(then, "appended"), seconds),
        oldest_s=round(max(part["oldest_s"] for part in parts), 1),
        version=max(part["latest_version"] for part in parts),
        waiting=_sum(parts, "waiting"),
        behind=tuple(behind),
        closed=all(part["closed"] for part in parts),
        tasks=tuple(tasks),
    )


def _task(
    name: str,
    parts: Sequence[Mapping[str, Any]],
    then: Sequence[Mapping[str, Any]],
    since: Sequence[Mapping[str, Any]],
    seconds: float,
) -> Task:
    rate = _rate(_sum(since, "acked"), _sum(then, "acked"), seconds)
    pending = _sum(parts, "pending")
    ready: dict[str, int] = {}
    for part in parts:
        for columns, rows in part["ready"].items():
            ready[clipped(columns)] = ready.get(clipped(columns), 0) + rows
    groups = sorted((group for part in parts for group in part["incomplete"]), key=lambda group: -group["age_s"])
    return Task(
        name=clipped(name),
        pending=pending,
        leased=_sum(parts, "leased"),
        acked=_sum(parts, "acked"),
        rate=rate,
        lag_s=round(pending / rate, 1) if rate else None if pending else 0.0,
        waiting=_sum(parts, "waiting"),
        ready=dict([*ready.items()][:8]),
        incomplete=tuple((clipped(str(g["group"])), g["rows"], g["of"], round(g["age_s"], 1)) for g in groups[:3]),
        redelivered=_sum(parts, "redelivered"),
        dead=_sum(parts, "dead"),
    )


def _sum(parts: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(part[name] for part in parts)
