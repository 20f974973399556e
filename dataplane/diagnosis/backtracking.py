"""Backtracking from waits to their causes, along the edges of the performance graph.

It starts at the waits of the last role (the last stage of the job), follows each wait to the process that ended it, and
ends at activities that wait for nothing.

A wait for rows leads to the process whose append or extend ended it. Its seconds are distributed over this process's
activities. A path ends at lines of its own code, and continues at its waits. A wait for room (a limit of the stream, or
memory) leads to the process whose ack ended it. If this process has a role that the path came through, the two roles
wait for each other. Then the limit is the cause of the whole wait: without it, they would work in parallel. If the
node itself ended a wait for memory, the cause is the disk: the node spilled to free the memory.

Pure functions of a `graph.GraphRun`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataplane.diagnosis.collectives import is_collective, last_to_come, longer, meetings
from dataplane.diagnosis.graph import CONSUMING, CallSiteRecord, Ender, Index, Line, ProcessNode

PERMITS = ("permits", "max_lag", "max_rows", "max_bytes")
ROOM = (*PERMITS, "memory")
_DEEPEST = 8
_BLOCKED = 0.02  # the least weight of a process that waits for room all the time
_LEAST = 1e-4  # the share of the observed time below which waits are not followed


Seen = frozenset[str]
"""The roles that a path came through."""


@dataclass(frozen=True, slots=True)
class Activity:
    """An activity of a process, of `seconds`: a line of its own code (`kind` "code", or "collective" if it waits for
    other ranks), or a call at a place. `what`: the awaited stream; `enders`: the ends of its waits."""

    kind: str
    at: Line | CallSiteRecord
    seconds: float
    what: str = ""
    enders: tuple[Ender, ...] = ()


@dataclass(frozen=True, slots=True)
class PathStep:
    """A wait on the path, of which the path explains `seconds`."""

    process: ProcessNode
    part: Activity
    seconds: float


@dataclass(frozen=True, slots=True)
class Share:
    """The end of a path, which explains `seconds` of the last role's time. `way`: the waits that lead there. `kind`:
    "code", "limit" or "budget" (roles wait for each other), "disk", "fetch", "collective" or "plane"."""

    kind: str
    process: ProcessNode
    part: Activity
    seconds: float
    way: tuple[PathStep, ...]

    @property
    def late(self) -> bool:
        """Whether the last wait of the path was for room, which this process makes by its acks."""
        return bool(self.way) and self.way[-1].part.kind in ROOM

    @property
    def awaited(self) -> bool:
        """Whether other ranks waited for this process in a collective."""
        return bool(self.way) and self.way[-1].part.kind == "collective"


def parts(process: ProcessNode) -> list[Activity]:
    """The activities of a process. The time of calls is divided into the waits that the node measured, and the rest,
    "plane"."""
    found = [Activity("collective" if is_collective(line) else "code", line, line.seconds) for line in process.lines]
    for place in process.places:
        waits = [each for each in process.waits if each.place == place.number and each.seconds > 0]
        waited = sum(each.seconds for each in waits)
        scale = min(1.0, place.seconds / waited) if waited else 0.0
        for each in waits:
            found.append(Activity(each.kind, place, each.seconds * scale, each.what, tuple(each.enders)))
        rest = place.seconds - waited * scale
        if rest > 0:
            asks = place.kind in CONSUMING and not waits and place.stood_s > 0.5
            found.append(Activity("rows" if asks else "plane", place, rest, place.said.get("stream", "")))
    return found


class Backtracking:
    """Backtracking over one run, from the waits of any role."""

    def __init__(self, index: Index, is_lock: Callable[[Line], bool]) -> None:
        self._index = index
        self._is_lock = is_lock
        self._parts = {process.key: parts(process) for process in index.run.processes}

    def back(self, role: str) -> Iterator[Share]:
        """The causes of the waits of this role's processes. Their own code is no wait, except at locks."""
        for process in self._index.by_role[role]:
            for part in self._parts[process.key]:
                if part.kind != "code":
                    yield from self._follow(part, process, part.seconds, 1.0, (), frozenset({role}))
                elif isinstance(part.at, Line) and self._is_lock(part.at):
                    yield Share("code", process, part, part.seconds, ())

    def _follow(
        self, part: Activity, process: ProcessNode, seconds: float, weight: float, way: tuple[PathStep, ...], seen: Seen
    ) -> Iterator[Share]:
        """The causes of `seconds` of a wait at the end of the path `way` through the roles `seen`."""
        if seconds < _LEAST * self._index.run.seconds:
            return
        if part.kind == "rows" and len(way) < _DEEPEST:
            found = self._makers(part, process, seen)
            for other, of in found:
                step = PathStep(process, part, seconds * of)
                yield from self._blame(other, seconds * of, weight * of, (*way, step), seen | {other.role})
            if not found:
                yield Share("plane", process, part, seconds, way)
        elif part.kind in ROOM and len(way) < _DEEPEST:
            yield from self._room(part, process, seconds, weight, way, seen)
        elif part.kind == "collective" and isinstance(part.at, Line) and len(way) < _DEEPEST:
            yield from self._meeting(part.at, part, process, seconds, weight, way, seen)
        else:
            kind = "limit" if part.kind in PERMITS else "budget" if part.kind == "memory" else part.kind
            yield Share(kind if kind != "rows" else "plane", process, part, seconds, way)

    def _room(
        self, part: Activity, process: ProcessNode, seconds: float, weight: float, way: tuple[PathStep, ...], seen: Seen
    ) -> Iterator[Share]:
        """The causes of a wait for room: back from each ack that made room, or the limit if the ack's role is on the
        path."""
        ended = sum(ender.seconds for ender in part.enders) or 1.0
        left = seconds
        for ender in part.enders:
            of = ender.seconds / ended
            other = self._index.by_key.get((process.node, ender.client))
            if other is None and part.kind == "memory" and ender.client == 0:
                yield Share("disk", process, part, seconds * of, way)
                left -= seconds * of
            elif other is not None and other.role not in seen:
                step = PathStep(process, part, seconds * of)
                yield from self._blame(other, seconds * of, weight * of, (*way, step), seen | {other.role})
                left -= seconds * of
        if left > 1e-9:
            yield Share("budget" if part.kind == "memory" else "limit", process, part, left, way)

    def _meeting(
        self,
        line: Line,
        part: Activity,
        process: ProcessNode,
        seconds: float,
        weight: float,
        way: tuple[PathStep, ...],
        seen: Seen,
    ) -> Iterator[Share]:
        """The causes of a wait in a collective: the activities on which the last rank to arrive spent more time, and
        for the rest the collective itself."""
        at = line.file, line.function
        found = last_to_come(self._index.run.processes, at, process.role)
        own = meetings(process)[at]
        left = seconds
        if found is not None and found[0] is not process:
            late, least = found
            every = {self._key(each): each for each in self._parts[late.key] if each.kind != "collective"}
            mine = {self._key(each): each.seconds / process.total for each in self._parts[process.key]}
            more = longer({key: each.seconds / late.total for key, each in every.items()}, mine)
            owed = seconds * max(0.0, 1.0 - least / own) if more else 0.0
            left -= owed
            step = PathStep(process, part, owed)
            for key, of in more.items():
                if every[key].kind == "code":
                    yield Share("code", late, every[key], owed * of, (*way, step))
                else:
                    yield from self._follow(every[key], late, owed * of, weight, (*way, step), seen | {late.role})
        if left > 0:
            yield Share("collective", process, part, left, way)

    @staticmethod
    def _key(part: Activity) -> tuple[str, str, int]:
        return part.kind, part.at.file, part.at.line

    def _makers(self, part: Activity, process: ProcessNode, seen: frozenset[str]) -> list[tuple[ProcessNode, float]]:
        """The producers of the awaited rows, with weights of sum 1: those that ended waits at the node, or else those
        that feed the stream. A producer that waits for room itself has less weight."""
        weights: dict[tuple[str, int], float] = {}
        for ender in part.enders:
            other = self._index.by_key.get((process.node, ender.client))
            if other is not None and other.role not in seen:
                weights[other.key] = weights.get(other.key, 0.0) + ender.seconds
        place = part.at
        if not weights and isinstance(place, CallSiteRecord):
            stream = part.what or place.said.get("stream", "")
            for other, made in self._index.feeders(stream, place.said.get("columns", []), process.role):
                if other.role not in seen:
                    weights[other.key] = weights.get(other.key, 0.0) + 1.0 / max(1, made.count)
        for key in weights:
            weights[key] *= max(_BLOCKED, 1.0 - self._share(self._index.by_key[key], ROOM))
        total = sum(weights.values())
        return [(self._index.by_key[key], weight / total) for key, weight in weights.items()] if total else []

    def _share(self, process: ProcessNode, kinds: tuple[str, ...]) -> float:
        """The share of a process's time in waits of these kinds."""
        return sum(part.seconds for part in self._parts[process.key] if part.kind in kinds) / process.total

    def _blame(
        self, process: ProcessNode, seconds: float, weight: float, way: tuple[PathStep, ...], seen: Seen
    ) -> Iterator[Share]:
        """Distribute `seconds` that others waited for this process over its activities. `weight`: the share of this
        process among all that they waited for. Its own waits come first, because its own work does not delay the others
        while it waits."""
        every = self._parts[process.key]
        circles = [part for part in every if part.kind in ROOM and self._circles(part, process, seen)]
        blocked = self._blocked(process, seen)
        own = sum(part.seconds for part in circles)
        first = [(part, part.seconds * min(1.0, blocked * process.total / own)) for part in circles if own]
        first += [(part, part.seconds) for part in every if part.kind == "rows"]
        scale = weight * self._index.run.seconds / process.total
        waited = max(sum(each for _, each in first) * scale, 1e-12)
        for part, each in first:
            given = each * scale * min(1.0, seconds / waited)
            yield from self._follow(part, process, given, weight, way, seen)
        rest = [part for part in every if part not in circles and part.kind != "rows"]
        left, total = seconds - min(seconds, waited), sum(part.seconds for part in rest)
        for part in rest if total else ():
            given = left * part.seconds / total
            if part.kind == "code":
                yield Share("code", process, part, given, way)
            else:
                yield from self._follow(part, process, given, weight, way, seen)

    def _blocked(self, process: ProcessNode, seen: Seen) -> float:
        """The smallest share of time for which a process of this role is blocked by roles of the path. If one process
        is not blocked, others wait for that one, and no limit is the cause."""
        shares = []
        for each in self._index.by_role[process.role]:
            blocked = [part.seconds for part in self._parts[each.key] if self._circles(part, each, seen)]
            shares.append(sum(blocked) / each.total)
        return min(shares)

    def _circles(self, part: Activity, process: ProcessNode, seen: Seen) -> bool:
        """Whether roles of the path ended most of a wait for room."""
        if part.kind not in ROOM:
            return False
        back = 0.0
        for ender in part.enders:
            other = self._index.by_key.get((process.node, ender.client))
            back += ender.seconds if other is not None and other.role in seen - {process.role} else 0.0
        return back > 0.5 * sum(ender.seconds for ender in part.enders)
