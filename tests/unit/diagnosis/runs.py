"""Runs that were never run: processes with what they would have measured."""

from __future__ import annotations

from typing import Any

from dataplane.diagnosis.graph import CallSiteRecord, Ender, GraphRun, Line, ProcessNode, Waited
from dataplane.diagnosis.recorder import BUCKETS, GAP_S

SECONDS = 10.0
FILE = "job.py"


def place(
    number: int, kind: str, line: int, seconds: float, count: int = 100, gap_s: float = 0.0, **said: Any
) -> CallSiteRecord:
    """A line that calls the plane, `gap_s` seconds after the call before."""
    gaps = [0] * BUCKETS
    gaps[min(BUCKETS - 1, int(gap_s / GAP_S).bit_length())] = count if gap_s else 0
    sized = [count, 0.0, 0.0, gap_s * count, gap_s * gap_s * count, 0.0] if gap_s else []
    return CallSiteRecord(number, FILE, line, "work", kind, said, count, seconds, seconds, gap_s * count, gaps, sized)


def line(number: int, seconds: float, rounds: int = 100, function: str = "work", via: str = "") -> Line:
    """A line of user code that takes as long each round."""
    return Line(FILE, number, function, 1, via, seconds, seconds * seconds / rounds)


def waited(at: int, kind: str, seconds: float, *enders: int, what: str = "rows") -> Waited:
    """Waits of a place that these clients have ended, each as many."""
    ended = [Ender(client, 1, 10, seconds / len(enders)) for client in enders]
    return Waited(at, kind, what, 10 * max(1, len(enders)), seconds, ended)


def process(
    number: int,
    role: str,
    places: list[CallSiteRecord],
    lines: list[Line],
    waits: list[Waited] | None = None,
    host: str = "a",
) -> ProcessNode:
    """One that lived all the time."""
    return ProcessNode("n", host, number, 1000 + number, role, role, SECONDS, places, lines, waits or [])


def run(*processes: ProcessNode) -> GraphRun:
    """The job of these."""
    return GraphRun(SECONDS, list(processes))


def consuming(seconds: float, at: int = 1, **said: Any) -> CallSiteRecord:
    """The place of a consumer of stream `rows`."""
    return place(at, "deliveries", 5, seconds, task="t", stream="rows", columns=["ids"], prefetch=1, **said)


def appending(seconds: float, gap_s: float, count: int = 100) -> CallSiteRecord:
    """The place of a producer of stream `rows`."""
    return place(1, "append", 9, seconds, count, gap_s, stream="rows", columns=["ids"])
