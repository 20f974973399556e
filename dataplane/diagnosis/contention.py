"""The cost of contention on hosts: for processors, and for links.

The kernel counts for a thread how long it ran, and how long it was runnable without a processor (`schedstat`). A thread
that computes for `ran_s` and queues for `queued_s` takes `(ran_s + queued_s) / ran_s` times as long as it would alone:
the share `queued_s / (ran_s + queued_s)` of its time belongs to the host, but at most the queueing itself. A call of
the plane is computed by the process and its node, so the times of both are added. For code, which may sleep, the rest
of the process's queueing belongs to the host.

A wait for a processor is a cause of the job only as far as the job itself uses the processors. Without the queueing,
each of its processes would use `computed_s / (seconds - queued_s)` processors. If the sum is at most the number of
processors, the job alone would not wait: the wait is due to others, is reported as "crowded", and no change of the job
helps. Otherwise, the share of the demand that would be unmet alone, relative to the unmet share, belongs to the job.

A call to another host shares its link with fetched bytes. The share of time with bytes in transfer at any node is the
share of such calls that belongs to the link: "fetch", at the line of the node that waits longest for bytes.

Pure functions of a `graph.GraphRun`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dataplane.diagnosis.backtracking import Activity, Share, parts
from dataplane.diagnosis.graph import Index, Line, NodeLoop, ProcessNode


def parted(shares: Iterable[Share], index: Index) -> Iterator[Share]:
    """The shares, with waits for a processor split off as "processor" and "crowded", and waits behind transfers as
    "fetch"."""
    used = {host.name: host for host in hosts(index)}
    for share in shares:
        of = _queued(share, index)
        if of > 0:
            node = index.run.nodes.get(share.process.node)
            own = used[node.host].own if node is not None and node.host in used else 0.0
            yield replace(share, kind="processor", seconds=share.seconds * of * own)
            yield replace(share, kind="crowded", seconds=share.seconds * of * (1.0 - own))
            share = replace(share, seconds=share.seconds * (1.0 - of))
        if share.kind == "plane" and (behind := _behind(share, index)) is not None:
            of, fetcher, part = behind
            yield replace(share, kind="fetch", seconds=share.seconds * of, process=fetcher, part=part)
            share = replace(share, seconds=share.seconds * (1.0 - of))
        yield share


@dataclass(frozen=True, slots=True)
class HostUse:
    """A host's processors, on average: `job`, used by the job; `wanted`, which the job would use if it never waited for
    one; and `others`, used by other processes."""

    name: str
    processors: int
    job: float
    wanted: float
    others: float

    @property
    def own(self) -> float:
        """The share of waits for a processor that would remain if the job were alone."""
        if self.wanted <= self.processors:
            return 0.0
        return min(1.0, (self.wanted - self.processors) / max(self.wanted - self.job, 1e-9))


def hosts(index: Index) -> list[HostUse]:
    """The use of each host that reports its processors. The nodes of a host are counted together."""
    found: dict[str, list[float]] = {}
    for node in index.run.nodes.values():
        if node.processors:
            seconds = max(node.seconds or index.run.seconds, 1e-9)
            _add(found.setdefault(node.host, [0.0, 0.0, 0.0, 0.0]), node, seconds)
            busy = max(found[node.host][3], node.busy_s / seconds)
            found[node.host][2:] = max(found[node.host][2], node.processors), busy
    for process in index.run.processes:
        at = index.run.nodes.get(process.node)
        if at is not None and at.host in found:
            _add(found[at.host], process, max(process.seconds, 1e-9))
    return [
        HostUse(name, int(count), job, wanted, max(0.0, busy - job))
        for name, (job, wanted, count, busy) in found.items()
    ]


def _add(sums: list[float], each: ProcessNode | NodeLoop, seconds: float) -> None:
    """Add the number of processors that a process or node used, and would have used without queueing."""
    computed_s = max(each.computed_s, each.ran_s)
    sums[0] += computed_s / seconds
    sums[1] += computed_s / max(seconds - each.queued_s, each.ran_s, 1e-9)


def _behind(share: Share, index: Index) -> tuple[float, ProcessNode, Activity] | None:
    """For a call: the share of time in which bytes were in transfer to any node, and the call on its node that waits
    longest for bytes. None for other activities, or without such a call."""
    fetching = [node.fetching_s / (node.seconds or index.run.seconds) for node in index.run.nodes.values()]
    if len(fetching) < 2 or not any(fetching) or share.part.kind != "plane":
        return None
    here = index.run.nodes.get(share.process.node)
    waiting = [
        (process, part)
        for process in index.run.processes
        if process.node == share.process.node
        for part in parts(process)
        if part.kind == "fetch"
    ]
    if here is None or not waiting:
        return None
    free = math.prod(1.0 - min(1.0, each) for each in fetching)
    return 1.0 - free, *max(waiting, key=lambda each: each[1].seconds)


def _queued(share: Share, index: Index) -> float:
    """The part of a share that was a wait for a processor."""
    process = share.process
    if share.kind == "plane" and share.part.kind == "plane":  # not a wait for rows without a known producer
        return _of_calls(process, index)
    if share.kind == "code" and isinstance(share.part.at, Line):
        called = sum(place.seconds for place in process.places)
        left = process.queued_s - called * _of_calls(process, index)
        return min(1.0, max(0.0, left) / max(sum(line.seconds for line in process.lines), 1e-9))
    return 0.0


def _of_calls(process: ProcessNode, index: Index) -> float:
    """The part of a process's calls of the plane in which it or its node waited for a processor."""
    node = index.run.nodes.get(process.node)
    ran, queued = process.ran_s, process.queued_s
    if node is not None:
        ran, queued = ran + node.ran_s, queued + node.queued_s
    called = sum(place.seconds for place in process.places)
    return min(queued / (ran + queued), queued / max(called, 1e-9), 1.0) if queued > 0 else 0.0
