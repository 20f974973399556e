"""Events of many processes in the Chrome Trace Event format, which Perfetto and chrome://tracing open.

A process is a group of tracks, and a thread is a track. Calls of one thread that overlap without nesting (several
coroutines of one loop) are on adjacent tracks. Arrows lead from an append to the consume that received its rows, and
from the consume to the ack. The format: "Trace Event Format", Duflot and others, Google 2016.

Invariants: the document is valid for any input bytes; times are of one clock, and none is negative.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np

from dataplane.observe.ring import CODE, OPERATIONS, Events, Thread, flows

_ARROWS = 64  # from appends to one consume, at most
_APPEND, _CONSUME = CODE["flow append"], CODE["flow consume"]
_GRANT, _ACK = CODE["flow grant"], CODE["flow ack"]
_FAILOVER = CODE["failover"]


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """The last events of a process. node: its node, in hex. ahead_ns: how far its host's clock is ahead of this one's,
    to within error_ns. events: `observe.ring.EVENT`, by its clock."""

    node: str
    pid: int
    label: str
    alive: bool
    threads: Mapping[int, Thread]
    ahead_ns: int
    error_ns: int
    events: Events


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One call of a process, in nanoseconds of this host's clock. process: its index; thread: its position in the ring;
    track: 0 for the thread's first; value: bytes."""

    process: int
    thread: int
    track: int
    code: int
    began: int
    ended: int
    value: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The last seconds of all processes. missing: by node that did not answer, the reason."""

    processes: tuple[TracedProcess, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    def chrome(self) -> Iterator[dict[str, Any]]:
        """The events of the document, one by one."""
        spans = [span for at, process in enumerate(self.processes) for span in _spans(at, process)]
        start = min((span.began for span in spans), default=0)
        for at, process in enumerate(self.processes):
            yield from self._named(at, process, [span for span in spans if span.process == at])
        for span in spans:
            yield _event(span, start)
        yield from self._arrows(spans, start)

    def write(self, file: TextIO) -> int:
        """Write the document. Returns the number of calls and failovers."""
        spans = 0
        file.write('{"displayTimeUnit":"ms","otherData":')
        json.dump({"missing": dict(self.missing), "made_by": "dataplane trace"}, file)
        file.write(',"traceEvents":[')
        for at, event in enumerate(self.chrome()):
            spans += event["ph"] in "Xi"
            file.write(",\n" if at else "\n")
            json.dump(event, file)
        file.write("\n]}\n")
        return spans

    def _named(self, at: int, process: TracedProcess, spans: list[TraceSpan]) -> Iterator[dict[str, Any]]:
        ended = "" if process.alive else ", ended"
        what = f"node {process.node}" if process.label == "node" else process.label
        text = f"{what} (pid {process.pid}{ended})" if f"pid {process.pid}" not in what else f"{what}{ended}"
        yield _meta("process_name", at, 0, {"name": text})
        yield _meta("process_labels", at, 0, {"labels": f"clock to {process.error_ns / 1e3:.0f} us"})
        yield _meta("process_sort_index", at, 0, {"sort_index": at})
        for thread, track in sorted({(span.thread, span.track) for span in spans}):
            named = process.threads.get(thread)
            name = "threads" if named is None else f"{named.name} {named.number}"
            yield _meta("thread_name", at, _tid(thread, track), {"name": name + (f" ({track + 1})" if track else "")})
            yield _meta("thread_sort_index", at, _tid(thread, track), {"sort_index": _tid(thread, track)})

    def _arrows(self, spans: list[TraceSpan], start: int) -> Iterator[dict[str, Any]]:
        """Arrows from appends to the consumes of their rows, and from consumes to acks."""
        named = {(span.process, span.thread, span.began): span for span in spans if span.code != CODE["reserve"]}
        appends: list[tuple[int, int, TraceSpan]] = []
        consumes: list[tuple[TraceSpan, int, int]] = []
        grants: dict[int, TraceSpan] = {}
        acks: list[tuple[TraceSpan, int]] = []
        for at, process in enumerate(self.processes):
            for each in process.events[flows(process.events)]:
                span = named.get((at, int(each["thread"]), int(each["began"]) - process.ahead_ns))
                if span is None:
                    continue
                identity, count = int(each["ended"]), max(1, min(int(each["value"]), 1 << 20))
                match int(each["code"]):
                    case code if code == _APPEND:
                        appends.append((identity, identity + count, span))
                    case code if code == _CONSUME:
                        consumes.append((span, identity, identity + count))
                    case code if code == _GRANT:
                        grants[identity] = span
                    case _:
                        acks.append((span, identity))
        pairs = [*_given(appends, consumes), *((grants[i], span) for span, i in acks if i in grants)]
        for number, (source, target) in enumerate(pairs, 1):
            yield _flow("s", source, number, start)
            yield _flow("f", target, number, start)


def _given(
    appends: list[tuple[int, int, TraceSpan]], consumes: list[tuple[TraceSpan, int, int]]
) -> Iterator[tuple[TraceSpan, TraceSpan]]:
    """The pairs of an append and a consume of its rows, at most `_ARROWS` for each consume."""
    appends.sort(key=lambda each: each[:2])
    firsts = [first for first, _, _ in appends]
    drawn: dict[tuple[TraceSpan, TraceSpan], None] = {}
    counts: dict[TraceSpan, int] = {}
    for span, first, stop in consumes:
        at = max(0, bisect.bisect_right(firsts, first) - 1)
        while at < len(appends) and appends[at][0] < stop and counts.get(span, 0) < _ARROWS:
            begins, ends, source = appends[at]
            if ends > first and begins < stop and source.began <= span.ended and (source, span) not in drawn:
                drawn[source, span] = None
                counts[span] = counts.get(span, 0) + 1
            at += 1
    yield from drawn


def _spans(at: int, process: TracedProcess) -> Iterator[TraceSpan]:
    """The calls of a process, each on a track on which overlapping calls nest."""
    events = process.events[~flows(process.events)]
    events = events[(events["ended"] >= events["began"]) & (events["code"] > 0) & (events["code"] < len(OPERATIONS))]
    events = events[np.lexsort((-events["ended"].astype(np.int64), events["began"]))]
    tracks: dict[int, list[list[int]]] = {}
    for each in events:
        thread, began, ended = int(each["thread"]), int(each["began"]), int(each["ended"])
        open_ends = tracks.setdefault(thread, [])
        track = 0
        for ends in open_ends:
            while ends and ends[-1] <= began:
                ends.pop()
            if not ends or ends[-1] >= ended:
                break
            track += 1
        else:
            open_ends.append([])
        open_ends[track].append(ended)
        shift = process.ahead_ns
        yield TraceSpan(at, thread, track, int(each["code"]), began - shift, ended - shift, int(each["value"]))


def _tid(thread: int, track: int) -> int:
    return thread * 1000 + min(track, 999) + 1


def _meta(name: str, process: int, thread: int, values: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process + 1, "tid": thread, "args": values}


def _event(span: TraceSpan, start: int) -> dict[str, Any]:
    name = OPERATIONS[span.code]
    where = {"pid": span.process + 1, "tid": _tid(span.thread, span.track), "ts": (span.began - start) / 1e3}
    if span.code == _FAILOVER:
        return {"ph": "i", "s": "p", "name": name, "cat": "dataplane", **where}
    values = {"bytes": span.value} if span.value else {}
    took = (span.ended - span.began) / 1e3
    return {"ph": "X", "name": name, "cat": "dataplane", "dur": took, **where, "args": values}


def _flow(kind: str, span: TraceSpan, number: int, start: int) -> dict[str, Any]:
    # An arrow binds to the slice around it. The slice's end is used: there, outputs exist and inputs are known.
    at = (max(span.began, span.ended - 1) - start) / 1e3
    event = {"ph": kind, "id": number, "name": "rows", "cat": "dataplane", "pid": span.process + 1}
    return event | {"tid": _tid(span.thread, span.track), "ts": at} | ({"bp": "e"} if kind == "f" else {})
