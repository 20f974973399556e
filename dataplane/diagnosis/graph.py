"""The performance graph of a job: the reports of its processes between two moments, and their waits for each other.

A `GraphRun` is the difference of two looks at the nodes' sums (`plane.diagnose`), as a value that is saved in a file
for `--compare`. Places and lines have a file and a line number; waits name the process and place that ended them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from dataplane.errors import Misuse

CONSUMING = ("consume", "deliveries", "take", "loader", "__iter__", "__next__")
PRODUCING = ("append", "extend", "send", "flush", "append_block")
_QUESTIONS = ("stats", "streams", "members", "tables", "graphs", "diagnose", "diagnosed")
IDLE = ("stream", "table", "connect", "close", "drop", *_QUESTIONS)
"""Calls that are not part of a step."""


class CallSiteRecord(msgspec.Struct, array_like=True):
    """A `recorder.CallSite` with its calls: `count`, and `exact_s`, their timed seconds."""

    number: int
    file: str
    line: int
    function: str
    kind: str
    said: dict[str, Any]
    count: int
    exact_s: float
    stood_s: float
    gap_s: float
    gaps: list[int]
    sized: list[float]

    @property
    def seconds(self) -> float:
        """Seconds in calls, as timed, or as sampled if a call has not ended."""
        return self.stood_s if self.stood_s > 1.5 * self.exact_s + 0.3 else self.exact_s

    def since(self, before: CallSiteRecord) -> CallSiteRecord:
        """The sums added since `before`."""
        gaps = [now - then for now, then in zip(self.gaps, before.gaps or [0] * len(self.gaps), strict=True)]
        sized = [now - then for now, then in zip(self.sized, before.sized or [0.0] * len(self.sized), strict=True)]
        return msgspec.structs.replace(
            self,
            count=self.count - before.count,
            exact_s=self.exact_s - before.exact_s,
            stood_s=self.stood_s - before.stood_s,
            gap_s=self.gap_s - before.gap_s,
            gaps=gaps,
            sized=sized,
        )


class Line(msgspec.Struct, array_like=True):
    """A line of user code, and the `seconds` that threads were sampled there. `first`: the first line of its function.
    `via`: the called function of a library, empty for none. `squares`: the sum of the squares of its seconds between
    two calls of the plane."""

    file: str
    line: int
    function: str
    first: int
    via: str
    seconds: float
    squares: float = 0.0


class Ender(msgspec.Struct, array_like=True):
    """The end of `count` waits of `seconds` in all: the client that ended them, 0 for the node itself, and its
    place."""

    client: int
    place: int
    count: int
    seconds: float


class Waited(msgspec.Struct, array_like=True):
    """Waits of one place for one thing."""

    place: int
    kind: str
    what: str
    count: int
    seconds: float
    enders: list[Ender]


class _Graph(msgspec.Struct):
    pid: int
    role: str
    seconds: float
    places: list[CallSiteRecord]
    lines: list[Line]
    ran_s: float = 0.0
    queued_s: float = 0.0
    computed_s: float = 0.0


@dataclass(slots=True)
class NodeLoop:
    """A node, over `seconds`. `ran_s`, `queued_s`: of its loop, running and queued for a processor. `computed_s`:
    processor time of all threads. `processors`: of its host, 0 if unknown; `busy_s`: their running time. `fetching_s`:
    the time in which bytes of other hosts were in transfer to it."""

    host: str
    ran_s: float = 0.0
    queued_s: float = 0.0
    computed_s: float = 0.0
    processors: int = 0
    busy_s: float = 0.0
    fetching_s: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class ProcessNode:
    """One process during `seconds`. `ran_s` and `queued_s`: how long its main thread ran, and queued for a processor;
    `computed_s`: the processor time of all its threads."""

    node: str
    host: str
    number: int
    pid: int
    label: str
    role: str
    seconds: float
    places: list[CallSiteRecord]
    lines: list[Line]
    waits: list[Waited]
    ran_s: float = 0.0
    queued_s: float = 0.0
    computed_s: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        """Its node and number, which waits name."""
        return self.node, self.number

    @property
    def total(self) -> float:
        """The seconds of its threads in calls and at lines, at least `seconds`."""
        counted = sum(place.seconds for place in self.places) + sum(line.seconds for line in self.lines)
        return max(self.seconds, counted, 1e-9)

    def place(self, number: int) -> CallSiteRecord | None:
        """The place with this number; None if there is none."""
        return next((place for place in self.places if place.number == number), None)

    @property
    def main(self) -> CallSiteRecord | None:
        """The place with the most time before its calls; None without two such times."""
        return max((p for p in self.places if p.gaps and sum(p.gaps) > 1), key=lambda p: p.gap_s, default=None)

    @property
    def rounds(self) -> int:
        """The number of rounds of its loop: the most calls of a consuming place, else of a producing place, else of put
        or get."""
        for kinds in (CONSUMING, PRODUCING, ("put", "get")):
            counts = [place.count for place in self.places if place.kind in kinds]
            if max(counts, default=0) > 0:
                return max(counts)
        return 0


@dataclass(slots=True)
class GraphRun:
    """A job over `seconds`. `notes`: sentences about missing reports."""

    seconds: float
    processes: list[ProcessNode]
    notes: list[str] = field(default_factory=list)
    nodes: dict[str, NodeLoop] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the run to a file, for `load`. Raises OSError."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> GraphRun:
        """The run that `save` wrote. Raises OSError, and Misuse for another file."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise Misuse(f"{path} is not a run of `dataplane diagnose --out`: {error}") from None


_TIMES = ("ran_s", "queued_s", "computed_s", "busy_s", "fetching_s", "seconds")

Look = Mapping[str, Any]
"""The reports of nodes, in the form of `Figures` about "graphs"."""


def between(before: Look, after: Look, seconds: float) -> GraphRun:
    """The run between two looks, which are about `seconds` apart. A process that began in between counts from its
    beginning, and one that has ended is left out. Raises Misuse for invalid reports."""
    earlier = {(node["node"], each["number"]): each for node in before["nodes"] for each in node["clients"]}
    found, notes = [], []
    for node in after["nodes"]:
        if node.get("error"):
            notes.append(f"the node at {node['host']} did not tell: {node['error']}")
        if node.get("left_out"):
            notes.append(f"{node['left_out']} processes of node {node['node']} are left out: there are too many")
        for each in node["clients"]:
            process = _process(node, each, earlier.get((node["node"], each["number"])), seconds)
            if process is not None:
                found.append(process)
    gone = earlier.keys() - {process.key for process in found}
    if gone:
        notes.append(f"processes that ended, or made no call meanwhile: {len(gone)}")
    return GraphRun(seconds, _named(found), notes, _nodes(before, after))


def _nodes(before: Look, after: Look) -> dict[str, NodeLoop]:
    """By node, its activity from one look to the other."""
    earlier = {node["node"]: node for node in before["nodes"]}
    found = {}
    for node in after["nodes"]:
        then = earlier.get(node["node"], {})
        if node["node"]:
            times = {name: max(0.0, node.get(name, 0.0) - then.get(name, 0.0)) for name in _TIMES}
            found[node["node"]] = NodeLoop(node["host"], processors=node.get("processors", 0), **times)
    return found


def _process(node: Look, now: Look, before: Look | None, seconds: float) -> ProcessNode | None:
    try:
        graph = msgspec.msgpack.decode(now["graph"], type=_Graph)
        waits = msgspec.convert(now["waits"], list[Waited])
        then = msgspec.msgpack.decode(before["graph"], type=_Graph) if before is not None else None
        waited = msgspec.convert(before["waits"], list[Waited]) if before is not None else []
    except msgspec.MsgspecError as error:
        raise Misuse(f"process {now.get('pid')} reported no performance graph: {error}") from None
    places, lines = graph.places, graph.lines
    if then is not None:
        old = {place.number: place for place in then.places}
        places = [place.since(old[place.number]) if place.number in old else place for place in places]
        stood = {(line.file, line.line): line for line in then.lines}
        lines = [_line_since(line, stood.get((line.file, line.line))) for line in lines]
        waits = _since(waits, waited)
        seconds = graph.seconds - then.seconds
        graph.ran_s, graph.queued_s = graph.ran_s - then.ran_s, graph.queued_s - then.queued_s
        graph.computed_s -= then.computed_s
    else:
        seconds = min(seconds, graph.seconds)
    places = [place for place in places if place.kind not in IDLE and (place.count or place.seconds)]
    lines = [line for line in lines if line.seconds > 0]
    if not any(place.number for place in places):
        return None
    where = (node["node"], node["host"], now["number"], graph.pid, now["label"], graph.role)
    times = (max(0.0, each) for each in (graph.ran_s, graph.queued_s, graph.computed_s))
    return ProcessNode(*where, max(seconds, 0.0), places, lines, waits, *times)


def _line_since(line: Line, before: Line | None) -> Line:
    """The time added since `before`. A line that was forgotten in between counts from the time that it was seen
    again."""
    if before is None or before.seconds > line.seconds:
        return line
    squares = max(0.0, line.squares - before.squares)
    return msgspec.structs.replace(line, seconds=line.seconds - before.seconds, squares=squares)


def _since(waits: list[Waited], before: list[Waited]) -> list[Waited]:
    old = {(each.place, each.kind, each.what): each for each in before}
    found = []
    for each in waits:
        then = old.get((each.place, each.kind, each.what))
        if then is not None:
            ended = {(ender.client, ender.place): ender for ender in then.enders}
            enders = []
            for ender in each.enders:
                was = ended.get((ender.client, ender.place))
                if was is not None:
                    ender = Ender(ender.client, ender.place, ender.count - was.count, ender.seconds - was.seconds)
                enders.append(ender)
            count, seconds = each.count - then.count, each.seconds - then.seconds
            each = Waited(each.place, each.kind, each.what, count, seconds, [e for e in enders if e.seconds > 0])
        if each.seconds > 0:
            found.append(each)
    return found


def _named(processes: list[ProcessNode]) -> list[ProcessNode]:
    """The processes with their roles: the declared role, else the task that they consume for, else the name of the
    function of their main call."""
    hosts = defaultdict(set)
    for process in processes:
        hosts[process.host].add(process.node)
    for process in processes:
        if len(hosts[process.host]) > 1:  # several nodes on one machine
            process.host = f"{process.host}/{process.node[:6]}"
        if process.role:
            continue
        tasks = {p.said["task"]: p.count for p in process.places if p.kind in CONSUMING and "task" in p.said}
        if tasks:
            process.role = max(tasks, key=lambda task: tasks[task])
        else:
            named = [place for place in process.places if place.function] or process.places  # others have no caller
            main = max(named, key=lambda p: (p.kind in PRODUCING, p.count))
            process.role = main.function.rpartition(".")[2].strip("<>")
    return processes


class Index:
    """The processes of a run, by several keys."""

    def __init__(self, run: GraphRun) -> None:
        self.run = run
        self.by_key = {process.key: process for process in run.processes}
        self.by_role: defaultdict[str, list[ProcessNode]] = defaultdict(list)
        for process in run.processes:
            self.by_role[process.role].append(process)

    @cached_property
    def producers(self) -> dict[str, list[tuple[ProcessNode, CallSiteRecord]]]:
        """By stream, each process and call site that appends to it or extends its rows."""
        found: defaultdict[str, list[tuple[ProcessNode, CallSiteRecord]]] = defaultdict(list)
        for process in self.run.processes:
            for place in process.places:
                if place.kind in PRODUCING and place.said.get("stream"):
                    found[place.said["stream"]].append((process, place))
        return dict(found)

    def feeders(self, stream: str, columns: list[str], but: str) -> list[tuple[ProcessNode, CallSiteRecord]]:
        """The processes that make rows of a stream ready for a consumer of these columns, except the role `but`. These
        are those that extend rows by such a column, since the extend is the last step, or else those that append."""
        made = [(process, place) for process, place in self.producers.get(stream, ()) if process.role != but]
        asked = set(columns)
        late = [each for each in made if each[1].kind == "extend" and asked & set(each[1].said.get("columns", ()))]
        return late or [each for each in made if each[1].kind != "extend"]

    @cached_property
    def depth(self) -> dict[str, int]:
        """By role, the number of roles that its rows have passed through before."""
        feeds: defaultdict[str, set[str]] = defaultdict(set)
        for process in self.run.processes:
            for place in process.places:
                if place.kind in CONSUMING and place.said.get("stream"):
                    columns = place.said.get("columns", [])
                    for feeder, _ in self.feeders(place.said["stream"], columns, process.role):
                        feeds[process.role].add(feeder.role)
        depth = dict.fromkeys(self.by_role, 0)
        for _ in range(len(depth)):
            for role, before in feeds.items():
                depth[role] = max(depth[role], min(len(depth), 1 + max(depth[each] for each in before)))
        return depth

    def last(self) -> str:
        """The role whose deliveries are steps: a consuming one at the end of the pipeline, preferably with a trainer's
        name, then the deepest. Empty for none."""
        words = ("actor", "train", "learn", "update", "policy", "optim")
        consuming = [
            role
            for role, processes in self.by_role.items()
            if any(place.kind in CONSUMING for process in processes for place in process.places)
        ]
        feeding = {
            feeder.role
            for process in self.run.processes
            for place in process.places
            if place.kind in CONSUMING and place.said.get("stream")
            for feeder, _ in self.feeders(place.said["stream"], place.said.get("columns", []), process.role)
        }
        ends = [role for role in consuming if role not in feeding] or consuming
        named = {role: any(word in role.lower() for word in words) for role in ends}
        return max(ends, key=lambda role: (named[role], self.depth[role], role), default="")
