"""Diagnoses a run: combines detection and backtracking, and ranks the causes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from dataplane.diagnosis import detection
from dataplane.diagnosis.backtracking import Backtracking, PathStep, Share, parts
from dataplane.diagnosis.causes import Cause, CauseLink, Crowded, Diagnosis, Kind, Role, RunSize
from dataplane.diagnosis.collectives import ranks
from dataplane.diagnosis.contention import HostUse, hosts, parted
from dataplane.diagnosis.graph import CallSiteRecord, GraphRun, Index, Line, Look, ProcessNode, between
from dataplane.diagnosis.structure import Structure, Vertex, structure_of
from dataplane.errors import Misuse

MOST = 32
"""The largest number of causes."""

_LOCKS_VIA = ("acquire", "Condition.wait", "Event.wait", "Thread.join", "Lock", "Semaphore", "Queue.get", "result")
_CROWDED = 0.02  # the share of a step from which a crowded host is noted
_LIMITS = 0.8  # a last role that is busy for this share of its time is noted as what limits the job
_SATURATED = 0.9  # earlier acks do not help a process that is busy for this share of its time
_ROUNDS = 3  # the number of deliveries to prefetch in the advice


async def watched(
    look: Callable[[], Awaitable[Look]], wait: Callable[[float], Awaitable[None]], seconds: float
) -> GraphRun:
    """The run of the next `seconds`, from two looks at the nodes' sums. Raises the errors of `look` and `between`."""
    before = await look()
    await wait(seconds)
    return between(before, await look(), seconds)


def diagnosed(run: GraphRun, role: str | None = None) -> Diagnosis:
    """Diagnose a run. role: the role whose deliveries are steps; by default the last of the pipeline. Raises Misuse if
    no process has this role, or none consumes from a stream."""
    return _Diagnosing(run, role).diagnosis()


def compared(small: GraphRun, large: GraphRun, role: str | None = None) -> Diagnosis:
    """Explain why the step rate of `large` did not grow with its number of processes: the causes that do not scale,
    less their cost in `small`. Raises Misuse if a run lacks the role."""
    if len(small.processes) > len(large.processes):
        small, large = large, small
    before, after = _Diagnosing(small, role), _Diagnosing(large, role)
    ours = before.diagnosis()
    found = after.diagnosis()
    slopes = detection.scaling(small, large, (before.steps, after.steps))
    cost = {(c.kind, c.role, c.file, c.line): c.seconds for c in ours.causes}
    fewer = len(small.processes) / len(large.processes)
    causes = []
    for cause in found.causes:
        known = slopes.get((cause.role, cause.file, cause.line))
        seconds = cause.seconds - cost.get((cause.kind, cause.role, cause.file, cause.line), 0.0) * fewer
        if seconds > 0 and (known is None or known.slope > -0.9):
            causes.append(replace(cause, seconds=seconds, share=seconds / found.step_s if found.step_s else 0.0))
    causes.sort(key=lambda cause: -cause.seconds)
    lost = max(0.0, found.step_s - ours.step_s * fewer)
    sizes = RunSize(len(small.processes), ours.step_s), RunSize(len(large.processes), found.step_s)
    return replace(found, causes=tuple(causes), lost_s=lost, compared=sizes)


@dataclass(slots=True, eq=False)
class _Group:
    """Shares that end at one vertex."""

    kind: Kind
    shares: list[Share]
    part: float = 1.0
    processes: frozenset[tuple[str, int]] = frozenset()  # processes that show it; empty: all of the shares
    ratio: float = 0.0  # their time over that of similar processes; 0: unknown

    @property
    def seconds(self) -> float:
        return self.part * sum(share.seconds for share in self.shares)


class _Diagnosing:
    def __init__(self, run: GraphRun, role: str | None) -> None:
        self._run = run = replace(run)
        self._index = Index(run)
        if role is not None and role not in self._index.by_role:
            raise Misuse(f"no process has the role {role!r}; there are {', '.join(self._index.by_role) or 'none'}")
        self.role = role or self._index.last()
        if not self.role:
            raise Misuse("no process consumes from a stream, so there are no steps to diagnose")
        last = self._index.by_role[self.role]
        # Reports come late on a busy host, so the time between this role's own reports counts.
        run.seconds = statistics.mean(process.seconds for process in last) or run.seconds
        self._rounds = sum(process.rounds for process in last)
        self.steps = max(self._rounds, 1) / len(last)
        self._structures: dict[str, Structure | None] = {}
        self._odd = {name: detection.odd(self._index, name) for name in self._index.by_role}

    def diagnosis(self) -> Diagnosis:
        """See `diagnosed`."""
        last = self._index.by_role[self.role]
        step_s = self._run.seconds / self.steps
        backtracking = Backtracking(self._index, self._is_lock)
        shares = list(parted(backtracking.back(self.role), self._index))
        rounds = max(1, self._rounds)
        own = [share for share in shares if share.kind != "crowded" and share.seconds > 0]
        causes = [self._cause(group, rounds, step_s) for group in self._groups(own)]
        causes.sort(key=lambda cause: -cause.seconds)
        crowded = self._crowded(shares, rounds, step_s)
        notes = [*self._run.notes, *(_crowd(each) for each in crowded if each.share >= _CROWDED)]
        if (own_work := self._own_work(last)) is not None:
            notes.append(own_work)
        if self._rounds < len(last):
            notes.append("hardly a step ended in this time: look for longer")
        lost = sum(share.seconds for share in shares) / rounds
        roles = tuple(self._role(name) for name in self._index.by_role)
        told = self._run.seconds, self.role, self.steps, step_s, lost, tuple(causes[:MOST]), roles
        return Diagnosis(*told, tuple(notes), crowded)

    def _own_work(self, last: Sequence[ProcessNode]) -> str | None:
        """The note that the last role's own code limits the job; None if it waits for most of the time."""
        by_line: defaultdict[tuple[str, int, str], float] = defaultdict(float)
        for process in last:
            for part in parts(process):
                if part.kind == "code":
                    by_line[part.at.file, part.at.line, part.at.function] += part.seconds
        busy = sum(by_line.values()) / sum(process.total for process in last)
        if busy < _LIMITS:
            return None
        file, line, function = max(by_line, key=lambda at: by_line[at])
        return (
            f"{self.role!r} is busy {busy:.0%} of its time, so its own work limits the job, most of it at"
            f" {file}:{line} in {function}: make that faster, or give the role more processes"
        )

    def _crowded(self, shares: Sequence[Share], rounds: int, step_s: float) -> tuple[Crowded, ...]:
        """The hosts on which other jobs cost time, the largest cost first."""
        lost: defaultdict[str, float] = defaultdict(float)
        for share in shares:
            if share.kind == "crowded":
                node = self._run.nodes.get(share.process.node)
                lost[share.process.host if node is None else node.host] += share.seconds / rounds
        used = {host.name: host for host in hosts(self._index)}
        found = []
        for name, seconds in sorted(lost.items(), key=lambda each: -each[1]):
            host = used.get(name, HostUse(name, 0, 0.0, 0.0, 0.0))
            share_of = seconds / step_s if step_s else 0.0
            found.append(Crowded(name, host.processors, host.job, host.others, seconds, share_of))
        return tuple(found)

    # Vertices

    def _structure(self, file: str) -> Structure | None:
        if file not in self._structures:
            lines = {p.line for process in self._run.processes for p in process.places if p.file == file}
            self._structures[file] = structure_of(file, lines)
        return self._structures[file]

    def _vertex(self, at: Line | CallSiteRecord) -> Vertex | None:
        structure = self._structure(at.file)
        return structure.of(at.line) if structure is not None else None

    def _is_lock(self, line: Line) -> bool:
        vertex = self._vertex(line)
        if vertex is not None and vertex.kind == "lock" and (vertex.first == line.line or not vertex.parts):
            return True
        return any(name in line.via for name in _LOCKS_VIA)

    # Causes

    def _groups(self, shares: Sequence[Share]) -> list[_Group]:
        found: defaultdict[tuple[object, ...], list[Share]] = defaultdict(list)
        for share in shares:
            vertex = self._vertex(share.part.at) if share.kind == "code" else None
            lock = isinstance(share.part.at, Line) and self._is_lock(share.part.at)
            where = (vertex.first, vertex.last) if vertex is not None and not lock else share.part.at.line
            held = share.kind == "code" and share.late and not _saturated(share.process)
            late = share.process.key if share.kind == "code" and share.awaited else None
            key: tuple[object, ...] = share.process.role, share.part.at.file, where, late, held, lock
            if share.kind == "processor":  # all roles and lines of a host together
                key = share.process.host, "", 0, None, False, False
            found[share.kind, *key].append(share)
        groups = []
        for (kind, role, *_, waited_for, locked), ended in found.items():  # as the key above
            groups += self._kinds(str(kind), str(role), ended, late=bool(waited_for), lock=bool(locked))
        return groups

    def _kinds(self, kind: str, role: str, shares: list[Share], *, late: bool, lock: bool) -> list[_Group]:
        """The causes of shares of one vertex. `late`: others waited for its acks; `lock`: it waits at a lock."""
        if kind == "fetch":
            return [_Group(self._fetch(shares[0]), shares)]
        if kind == "plane":
            ahead = shares[0].part.at
            asks = isinstance(ahead, CallSiteRecord) and ahead.said.get("prefetch") == 0
            return [_Group("prefetch" if asks else "plane", shares)]
        if kind in ("limit", "budget", "disk", "processor", "collective"):
            return [_Group(cast(Kind, kind), shares)]
        if late or lock:
            return [_Group("ack" if late else "lock", shares)]
        ratio = self._late(shares[0]) if shares[0].awaited else 0.0
        if ratio >= detection.STRAGGLES:
            return [_Group("straggler", shares, ratio=ratio)]
        odd = self._odd[role]
        if odd is not None:
            lost = sum(share.seconds for share in shares) / (self._run.seconds * len(self._index.by_role[self.role]))
            part = min(1.0, odd.lost / lost) if lost else 0.0
            found = [_Group("host" if odd.host else "straggler", shares, part, odd.processes)]
            return [*found, _Group("code", shares, 1.0 - part)] if part < 1.0 else found
        return [_Group(self._unequal(shares), shares)]

    def _late(self, share: Share) -> float:
        """The awaited rank's time in its own code over the median of the other ranks'. 0 with a single rank."""
        step, late = share.way[-1], share.process
        there = ranks(self._run.processes, (step.part.at.file, step.part.at.function), step.process.role)
        busy = {each.key: _busy_s(each) / each.total for _, each in there}
        return busy.pop(late.key) / max(statistics.median_low(busy.values()), 1e-9) if len(busy) > 1 else 0.0

    def _fetch(self, share: Share) -> Kind:
        """The kind "link" if bytes of other hosts are slow, "prefetch" if they are requested only when needed."""
        process = share.process
        consuming = [p for p in process.places if "prefetch" in p.said]
        return "link" if any(p.said["prefetch"] > 0 for p in consuming) else "prefetch"

    def _unequal(self, shares: list[Share]) -> Kind:
        """The kind: "code" for equal rounds, "skew" if times follow the rows' sizes, else "tail"."""
        mains = {share.process.key: share.process.main for share in shares}
        known = [place for place in mains.values() if place is not None]
        if not known:
            return "code"
        whole = known[0]
        for other in known[1:]:
            if len(other.sized) == len(whole.sized):
                sums = [a + b for a, b in zip(whole.sized, other.sized, strict=True)]
                whole = msgspec.structs.replace(whole, sized=sums)
        lines = {(s.process.key, s.part.at.line): (s.part.at, s.process.rounds) for s in shares}
        hottest = max(shares, key=lambda share: share.part.seconds).part.at.line
        unequal = [(at, n) for (_, line), (at, n) in lines.items() if line == hottest and isinstance(at, Line)]
        if detection.deviation(unequal) < detection.UNEQUAL:
            return "code"
        return "skew" if detection.correlation(whole) > detection.FOLLOWS else "tail"

    def _cause(self, group: _Group, rounds: int, step_s: float) -> Cause:
        by_line: defaultdict[tuple[str, int, str], float] = defaultdict(float)
        for share in group.shares:
            at = share.part.at
            by_line[at.file, at.line, at.function] += share.seconds
        file, line, function = max(by_line, key=lambda key: by_line[key])
        first = max(group.shares, key=lambda share: share.seconds)
        keys = group.processes or {share.process.key for share in group.shares}
        processes = [self._index.by_key[key] for key in keys]
        hosts = sorted({process.host for process in processes})
        odd = self._odd[first.process.role]
        seconds = group.seconds / rounds
        what = next((step.part.kind for step in reversed(first.way) if first.late), first.part.kind)
        said = {
            "role": first.process.role,
            "host": ", ".join(hosts),
            "pids": ", ".join(str(process.pid) for process in processes),
            "ratio": group.ratio or (odd.ratio if odd is not None else 1.0),
            "what": "the limits" if what == "permits" else what,
            "prefetch": _ROUNDS,
        }
        setting, sentence = advice(group.kind, **said)
        chain = tuple(self._link(step, group, rounds) for step in first.way)
        return Cause(
            group.kind,
            file,
            line,
            function,
            first.process.role,
            ", ".join(hosts),
            tuple(sorted(process.pid for process in processes)),
            seconds,
            seconds / step_s if step_s else 0.0,
            chain,
            setting,
            sentence,
        )

    def _link(self, step: PathStep, group: _Group, rounds: int) -> CauseLink:
        at, process = step.part.at, step.process
        same = (process.role, at.file, at.line, step.part.kind)
        seconds = 0.0
        for share in group.shares:
            if any((o.process.role, o.part.at.file, o.part.at.line, o.part.kind) == same for o in share.way):
                seconds += share.seconds
        seconds *= group.part / rounds
        return CauseLink(process.role, process.host, at.file, at.line, at.function, step.part.kind, seconds)

    def _role(self, name: str) -> Role:
        processes = self._index.by_role[name]
        total = sum(process.total for process in processes)
        waiting: defaultdict[str, float] = defaultdict(float)
        for process in processes:
            for part in parts(process):
                if part.kind != "code":
                    waiting[part.kind] += part.seconds / total
        busy = sum(map(_busy_s, processes)) / total
        return Role(name, len(processes), _hosts(processes), busy, dict(waiting))


def _crowd(crowded: Crowded) -> str:
    used = "its processors"
    if crowded.processors:
        used = f"{crowded.others:.1f} of its {crowded.processors} processors (this job {crowded.job:.1f})"
    return (
        f"host {crowded.host}: other processes use {used}. {crowded.share:.0%} of each step is spent waiting for a"
        " processor, which also lengthens the causes below"
    )


def _hosts(processes: Sequence[ProcessNode]) -> tuple[str, ...]:
    return tuple(sorted({process.host for process in processes}))


def _saturated(process: ProcessNode) -> bool:
    return _busy_s(process) > _SATURATED * process.total


def _busy_s(process: ProcessNode) -> float:
    """The seconds of a process in its own code."""
    return sum(part.seconds for part in parts(process) if part.kind == "code")


# Advice for each kind of cause: a setting of the plane, of a role, or the code, and a sentence.

_ADVICE: dict[str, tuple[str, str]] = {
    "code": ("workers", "make this line faster, or give the role {role} more processes"),
    "skew": (
        "sampler",
        "rows differ much in length: balance tokens (TokenBalanced), limit the length, or append each row by itself",
    ),
    "tail": ("workers", "it takes long at times: bound it by a timeout, overlap it, or give {role} more processes"),
    "lock": ("", "{role} waits for another thread or process here: shorten what is done under it, or do without"),
    "straggler": ("placement", "process {pids} takes {ratio:.1f} times as long as its peers: move or replace it"),
    "host": ("placement", "host {host} takes {ratio:.1f} times as long as others: move roles off it, or repair it"),
    "ack": ("max_rows", "rows wait for this before they are acked: ack as soon as they are read, or raise {what}"),
    "budget": (
        "memory",
        "producers wait for memory: raise NodeConfig.memory, free earlier, or use dedupe",
    ),
    "disk": (
        "spill_dir",
        "the disk is waited for: use a faster spill_dir, more memory, or dedupe",
    ),
    "link": (
        "placement",
        "bytes come over the link from another host: put {role} beside their producer, or use dedupe",
    ),
    "prefetch": ("prefetch", "rows are asked for when they are needed: use deliveries(..., prefetch={prefetch})"),
    "limit": ("{what}", "producers and consumers wait for each other: raise {what} of the stream"),
    "processor": (
        "placement",
        "the job wants more processors than {host} has: move processes off it, start fewer, or give them fewer threads",
    ),
    "collective": (
        "",
        "all ranks wait equally long here, for bytes or each time for another rank: balance tokens, or overlap it",
    ),
    "plane": ("rows", "it is in calls of the plane: bring or take more rows at a time"),
}


def advice(kind: str, **said: Any) -> tuple[str, str]:
    """The setting to change (empty for none), and a sentence of advice."""
    setting, sentence = _ADVICE[kind]
    return setting.format(**said), sentence.format(**said)
