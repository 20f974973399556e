"""The waits between clients, and their reasons, from one sample. The only state is the beginnings of current waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dataplane.config import format_size
from dataplane.web.samples import HostSample, Sample, StreamSample, Task

MAX_WAITS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class WebWait:
    """A wait: `who` has waited `since_s` seconds for `whom`; `what` is the reason. `count`: of requests. `stream`: ""
    for none."""

    who: str
    whom: str
    what: str
    stream: str = ""
    count: int = 1
    since_s: float = 0.0


class WebWaits:
    """The waits of the last sample."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, str, str], float] = {}

    def took(self, sample: Sample) -> list[WebWait]:
        """The waits of this sample, the longest first, at most `MAX_WAITS`."""
        since_s: dict[tuple[str, str, str], float] = {}
        waits = []
        for wait in waits_of(sample):
            key = wait.stream, wait.who, wait.whom
            since_s[key] = self._since_s.get(key, sample.at_s)
            waits.append((max(wait.since_s, sample.at_s - since_s[key]), wait))
        self._since_s = since_s
        waits.sort(key=lambda each: -each[0])
        return [
            WebWait(who=w.who, whom=w.whom, what=w.what, stream=w.stream, count=w.count, since_s=round(since, 1))
            for since, w in waits[:MAX_WAITS]
        ]


def waits_of(sample: Sample) -> Iterator[WebWait]:
    """The waits of a sample. `since_s` is as reported by the nodes, or 0."""
    for stream in sample.streams:
        yield from _of_stream(stream)
    for host in sample.hosts:
        yield from _of_host(host)


def _of_stream(stream: StreamSample) -> Iterator[WebWait]:
    if stream.waiting:
        whom = ", ".join(stream.behind) or "its tasks"
        held = format_size(stream.bytes) if stream.max_bytes else f"{stream.rows:,} rows"
        count = stream.waiting
        yield WebWait(who="producers", whom=whom, what=f"room: {held} held", stream=stream.name, count=count)
    for task in stream.tasks:
        yield from _of_task(stream, task)


def _of_task(stream: StreamSample, task: Task) -> Iterator[WebWait]:
    if task.waiting:
        columns = "; ".join(f"{names} ({rows:,} rows ready)" for names, rows in task.ready.items())
        whom = _feeding(stream, task)
        yield WebWait(who=task.name, whom=whom, what=columns or "rows", stream=stream.name, count=task.waiting)
    for group, rows, whole, age_s in task.incomplete:
        yield WebWait(
            who=task.name,
            whom="producers",
            what=f"group {group}: {rows} of {whole} rows are there",
            stream=stream.name,
            since_s=age_s,
        )


def _feeding(stream: StreamSample, task: Task) -> str:
    """The parties for which a task's consumers wait. If no pending row is ready: the tasks that hold rows and may add
    the columns. Else: the sampler or the producers."""
    if task.pending and not any(task.ready.values()):
        busy: Sequence[str] = [other.name for other in stream.tasks if other.leased and other.name != task.name]
        return ", ".join(busy) or "who adds these columns"
    if any(task.ready.values()):
        return "its own sampler or minimum"
    return "producers"


def _of_host(host: HostSample) -> Iterator[WebWait]:
    if host.waiting:
        who = f"{host.waiting:,} requests" if host.waiting > 1 else "1 request"
        holder = host.holders[0] if host.holders else None
        whom = f"{holder[0]} ({format_size(holder[2])} {holder[1]})" if holder else "memory to be freed"
        what = f"{format_size(host.waiting_bytes)} of memory on {host.name}"
        yield WebWait(who=who, whom=whom, what=what, count=host.waiting)
