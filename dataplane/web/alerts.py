"""Alerts from a sequence of samples: each names a host, a task or the cluster, and the reason.

Invariants: a warning appears only after its cause has been seen for `HOLD_S`, and each alert stays for `STAYS_S` after
its cause was last seen, so none flickers. Rates are compared with the past of the same host or task and with others of
its kind, never with a fixed rate. A host is slow if its rate fell to less than half of its earlier minimum, while most
hosts' rates did not. The ratio to its own past accounts for the different roles of hosts. A host is also slow if its
answers take `_TIMES` times as long as the others' median, and over `_SLOW_ANSWER_MS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dataplane.config import format_size
from dataplane.web.history import RateHistory
from dataplane.web.placement import ClusterState, label_of
from dataplane.web.samples import HostSample, Sample, StreamSample, Task

HOLD_S = 3.0
STAYS_S = 4.0
LEFT_S = 60.0
"""The time for which a host that has left is shown."""

_ALIKE = 3  # the fewest hosts that are compared with each other
_SLOW_ANSWER_MS = 100.0
_TIMES = 10.0
_RECENT_S, _BEFORE_S = 20.0, 120.0
_IDLE_S = 120.0  # a role may compute for a minute and hold nothing
_GROUP_S = 60.0
_DISK_FULL = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert. `level`: critical or warning. `tag`: one or two words for the cause. `kind` and `of`: host and its
    node, task and STREAM/TASK, or cluster and a name. `since`: seconds since 1970."""

    level: str
    tag: str
    kind: str
    of: str
    text: str
    since: float = 0.0


class Alerts:
    """The alerts, updated with each sample. `coarse` is the history that `feed` keeps."""

    def __init__(self, coarse: RateHistory) -> None:
        self._coarse = coarse
        self._first_s: dict[tuple[str, str, str], tuple[float, float]] = {}
        self._last_s: dict[tuple[str, str, str], tuple[float, Alert]] = {}
        self._dead: dict[str, int] = {}  # the dead letters that a task had when it was first seen

    def took(self, sample: Sample, placement: ClusterState) -> list[Alert]:
        """Add a sample. Returns the alerts that are shown now, critical ones first, then by name."""
        now_s = sample.at_s
        for alert in self._found(sample, placement):
            key = alert.kind, alert.of, alert.tag
            self._first_s.setdefault(key, (now_s, sample.at))
            self._last_s[key] = now_s, alert
        shown = []
        for key, (last_s, alert) in [*self._last_s.items()]:
            first_s, since = self._first_s[key]
            if now_s - last_s > STAYS_S:
                del self._last_s[key], self._first_s[key]
            elif alert.level == "critical" or last_s - first_s >= HOLD_S:
                shown.append(replace(alert, since=alert.since or since))
        return sorted(shown, key=lambda each: (each.level, each.kind, each.of, each.tag))

    def _found(self, sample: Sample, placement: ClusterState) -> Iterator[Alert]:
        yield from _of_cluster(sample, placement)
        yield from _of_members(sample, placement)
        yield from self._of_hosts(sample)
        for stream in sample.streams:
            yield from self._of_stream(stream)
        there = {f"{stream.name}/{task.name}" for stream in sample.streams for task in stream.tasks}
        self._dead = {of: dead for of, dead in self._dead.items() if of in there}

    def _of_hosts(self, sample: Sample) -> Iterator[Alert]:
        up = [host for host in sample.hosts if not host.silent]
        for host in sample.hosts:
            yield from _of_host(host)
        others = {host.node: [each.answer_ms for each in up if each.node != host.node] for host in up}
        slow = dict(self._fallen([("host", host.node, "put") for host in up]))
        slow |= dict(self._fallen([("host", host.node, "sent") for host in up]))
        for host in up:
            answers = others[host.node]
            if len(up) >= _ALIKE and host.answer_ms > max(_SLOW_ANSWER_MS, _TIMES * statistics.median(answers)):
                text = f"{host.name} takes {host.answer_ms:,.0f} ms to answer, others {statistics.median(answers):,.0f}"
                yield Alert(level="warning", tag="slow", kind="host", of=host.node, text=text)
            elif host.node in slow:
                recent, before = slow[host.node]
                text = f"{host.name} moves {_bytes(recent)}, before {_bytes(before)} at least; others go on as before"
                yield Alert(level="warning", tag="slow", kind="host", of=host.node, text=text)

    def _fallen(self, keys: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, tuple[float, float]]]:
        """The hosts whose rate is less than half of its earlier minimum, while the median host is at 80 % of its own or
        more. Yields node, rate and minimum."""
        ratios: dict[str, tuple[float, float]] = {}
        for key in keys:
            recent, before = self._recent_and_before(key)
            if before.size and before.min() > 0:
                ratios[key[1]] = recent, float(before.min())
        if len(ratios) < _ALIKE:
            return
        typical = statistics.median(recent / least for recent, least in ratios.values())
        for node, (recent, least) in ratios.items():
            if typical >= 0.8 and recent < 0.5 * least:
                yield node, (recent, least)

    def _recent_and_before(self, key: tuple[str, ...]) -> tuple[float, npt.NDArray[np.float64]]:
        """The mean of the last `_RECENT_S`, and the means of all such windows in the `_BEFORE_S` before, none if data
        are few. Windows are compared, because the load of a job has a period of one step."""
        window, before = (int(seconds / self._coarse.bucket_s) for seconds in (_RECENT_S, _BEFORE_S))
        series = self._coarse.series(key)[-window - before :].astype(np.float64)
        means = np.lib.stride_tricks.sliding_window_view(series, window).mean(axis=1)
        earlier = means[:-window]
        earlier = earlier[np.isfinite(earlier)]
        if not np.isfinite(means[-1]) or len(earlier) < before / 2:
            return 0.0, np.empty(0)
        return float(means[-1]), earlier

    def _of_stream(self, stream: StreamSample) -> Iterator[Alert]:
        for task in stream.tasks:
            of = f"{stream.name}/{task.name}"
            if stream.waiting and task.name in stream.behind:
                producers = "1 append waits" if stream.waiting == 1 else f"{stream.waiting:,} appends wait"
                text = f"{task.name} holds up {stream.name}: {producers} for room, {task.pending:,} rows pending"
                yield Alert(level="warning", tag="slow", kind="task", of=of, text=text)
            elif self._behind(stream, task):
                text = f"{task.name} falls behind in {stream.name}: {task.pending:,} rows pending, and more each second"
                yield Alert(level="warning", tag="behind", kind="task", of=of, text=text)
            if self._unattended(stream, task):
                text = f"no process consumes {task.name} of {stream.name}: {task.pending:,} rows are pending"
                yield Alert(level="warning", tag="unattended", kind="task", of=of, text=text)
            least = self._dead[of] = min(self._dead.get(of, task.dead), task.dead)  # fewer after a retry
            if task.dead > least:
                text = f"{task.name} of {stream.name} has given up {task.dead:,} rows"
                yield Alert(level="warning", tag="dead letters", kind="task", of=of, text=text)
            for group, rows, whole, age_s in task.incomplete[:1]:
                if age_s > _GROUP_S:
                    text = (
                        f"{task.name} of {stream.name} waits for group {group} since {age_s:,.0f} s: {rows} of {whole}"
                    )
                    yield Alert(level="warning", tag="incomplete", kind="task", of=of, text=text)

    def _behind(self, stream: StreamSample, task: Task) -> bool:
        """Whether the task's pending rows have doubled within the last minutes, to more than half a minute's work,
        while its consumers hold rows and none waits."""
        recent, before = self._recent_and_before(("task", stream.name, task.name, "pending"))
        busy = not task.waiting and task.leased > 0
        grown = before.size and recent > 2 * before.max() > 0
        return bool(busy and grown and task.lag_s is not None and task.lag_s > 30)

    def _unattended(self, stream: StreamSample, task: Task) -> bool:
        """Whether rows are pending, the oldest for `_IDLE_S`, and no consumer holds or requests any, or has acked one
        in this time."""
        if task.leased or task.waiting or task.rate or not task.pending or stream.oldest_s < _IDLE_S:
            return False
        rates = self._coarse.series(("task", stream.name, task.name, "rate"))[-int(_IDLE_S / self._coarse.bucket_s) :]
        return not bool((rates > 0).any())


def _of_cluster(sample: Sample, placement: ClusterState) -> Iterator[Alert]:
    if not sample.answers:
        text = f"the coordinator at {sample.coordinator} does not answer: members stay, none can join"
        yield Alert(level="critical", tag="no coordinator", kind="cluster", of="coordinator", text=text)
    if placement.leaderless:
        named = ", ".join(label_of(partition) for partition in [*placement.leaderless][:3])
        more = len(placement.leaderless) - 3
        text = f"no host leads {named}" + (f" and {more:,} more" if more > 0 else "")
        yield Alert(level="critical", tag="leaderless", kind="cluster", of="partitions", text=text)


def _of_members(sample: Sample, placement: ClusterState) -> Iterator[Alert]:
    there = {host.name for host in sample.hosts}
    for event in placement.events:
        if event.kind == "left" and sample.at - event.at < LEFT_S and event.what not in there:
            text = f"{event.what} has left the cluster"
            yield Alert(level="critical", tag="gone", kind="cluster", of=event.what, text=text, since=event.at)


def _of_host(host: HostSample) -> Iterator[Alert]:
    def alert(level: str, tag: str, text: str) -> Alert:
        return Alert(level=level, tag=tag, kind="host", of=host.node, text=text)

    if host.silent:
        yield alert("critical", "silent", f"{host.name} does not answer: {host.silent}")
        return
    if host.spill_error:
        yield alert("critical", "disk error", f"the disk of {host.name} refuses: {host.spill_error}")
    if host.waiting:
        held = f", {host.holders[0][0]} holds {format_size(host.holders[0][2])}" if host.holders else ""
        yield alert("warning", "full", f"{host.waiting:,} requests wait for memory on {host.name}{held}")
    if host.disk_budget and host.disk_used > _DISK_FULL * host.disk_budget:
        yield alert("warning", "disk full", f"{host.name} has used {format_size(host.disk_used)} of its disk")


def _bytes(rate: float) -> str:
    return f"{format_size(int(rate))}/s"
