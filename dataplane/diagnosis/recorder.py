"""Profiles this process: the source lines that call the plane (places), and the lines that run between two such calls.

A place is a line outside of this package that calls the package. The first call from a line walks the stack to find the
place; later calls look it up by code object and instruction. `place` returns the number of the place, which is in the
low bits of each request's number. The calls of each place are counted, and their times are summed (`diagnosis.calls`).
The time between two calls belongs to the user's own code: a thread samples the stacks of the calling threads about
`RATE` times a second, and adds the time since the last sample to the line of each. Nothing is traced. The sums go to
the node every second.

Invariants: at most `MOST_PLACES` places and `MOST_LINES` lines are kept in a run of any length. Calls from further
places count under place 0, and a further line replaces the line with the least time. The sampling thread ends when all
planes of the process are closed.

Rejected: `sys.settrace` and `sys.setprofile` (they cost tens of times as much as is acceptable); a signal by
ITIMER_PROF (interrupts the user's system calls); instrumentation of the user's source, line by line (the user's code
runs unchanged).
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, Token, copy_context
from types import CodeType, FrameType
from typing import Any, Protocol

import msgspec

from dataplane.diagnosis import _calls
from dataplane.diagnosis.collectives import COLLECTIVE, COLLECTIVES
from dataplane.waiting import PLACES, computed_s, processor_s
from dataplane.wire.messages import MAX_REPORT

RATE = 25.0
"""Samples per second, on average: at random intervals, to avoid a period of the job."""

MOST_PLACES = 192
MOST_LINES = 256
BUCKETS = 24
"""The number of buckets of the time between calls, by powers of two from `GAP_S`."""

GAP_S = 0.001
"""The time between two calls, in seconds, from which it is counted by itself."""
_GAP_NS = int(1e9 * GAP_S)

_INSIDE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = tuple(
    {os.path.dirname(os.__file__) + os.sep, os.path.dirname(threading.__file__) + os.sep, "<frozen", "<string>"}
)
_DISTRIBUTED = os.path.join("", "torch", "distributed", "")
_SITES = ("site-packages", "dist-packages")
_DEEPEST = 200
_COUNTED_ROWS = 64  # rows of a column of lists whose lengths are summed

_number: ContextVar[int] = ContextVar("place", default=-1)
_now = time.perf_counter
_clock = time.monotonic_ns


class Reporter(Protocol):
    """A connection to a node, to which sums are reported."""

    def report(self, graph: bytes) -> None:
        """Send the graph. Thread-safe; never blocks."""


class CallSite:
    """A line that calls the plane, and the call: its name `kind`, and its arguments `said`. `gap_s`: the time since the
    thread's previous calls, in all; `gaps`: the counts of such times by powers of two. `sized`: sums over the same
    calls of 1, size, size squared, seconds, seconds squared and size times seconds. `stood_s`: the time in its calls by
    the samples, which include a call that has not ended."""

    __slots__ = ("code", "gap_s", "gaps", "kind", "line", "number", "said", "sized", "stood_s")

    def __init__(self, number: int, code: CodeType | None, line: int, kind: str, said: dict[str, Any]) -> None:
        self.number = number
        self.code = code
        self.line = line
        self.kind = kind
        self.said = said
        self.stood_s = 0.0
        self.gap_s = 0.0
        self.gaps: list[int] = []
        self.sized: list[float] = []

    def told(self, count: int, nanoseconds: int) -> list[Any]:
        """The fields of `graph.CallSiteRecord`. `count`, `nanoseconds`: of its calls."""
        file, function = ("", "") if self.code is None else (self.code.co_filename, self.code.co_qualname)
        where = [self.number, file, self.line, function, self.kind, self.said]
        return [*where, count, 1e-9 * nanoseconds, self.stood_s, self.gap_s, self.gaps, self.sized]


class PlaceRecorder:
    """The places and lines of this process."""

    def __init__(self) -> None:
        self._calls = _calls.Calls(_number.get, self._walk, self._gap, _GAP_NS)
        self.place = self._calls.place
        """Returns the number of the place that calls the plane now; 0 if there is none."""
        self.called = self._calls.called
        """Counts a call of a place that ends now: its number, and its begin in nanoseconds of the monotonic clock."""
        self._reset()

    @property
    def active(self) -> bool:
        """Whether there is a reporter."""
        return self._calls.active

    @active.setter
    def active(self, active: bool) -> None:
        self._calls.active = active

    def _reset(self) -> None:
        self._forget()
        self._lock = threading.Lock()
        self._reporters: dict[Reporter, float] = {}
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def _forget(self) -> None:
        """Reset the sums."""
        self._calls.reset()
        self._inside: dict[int, CodeType] = {}  # this package's code, by id: hashing code takes microseconds
        self._outside: dict[int, CodeType] = {}
        self._user: dict[int, tuple[CodeType, bool]] = {}  # by id: whether the code is the user's
        self._sites: dict[tuple[int, int], CallSite] = {}
        self._places = [CallSite(0, None, 0, "", {})]
        self._lines: dict[tuple[int, int], list[Any]] = {}
        self._threads: set[int] = set()
        self._began = time.monotonic()
        self._before = (*processor_s(), computed_s())
        self._sampled_s = 0.0

    # Places

    def _walk(self) -> tuple[int, int, int, int]:
        """The place that calls `_calls`, which has no frame of its own."""
        frame: FrameType | None = sys._getframe(1)
        place = self._find(frame)
        depth = 0
        while frame is not None:
            code = frame.f_code
            if id(code) in self._outside:
                return place.number, id(code), frame.f_lasti, depth
            if id(code) not in self._inside:
                break
            frame, depth = frame.f_back, depth + 1
        return place.number, 0, 0, 0

    def _find(self, frame: FrameType | None) -> CallSite:
        """The place of the innermost frame that is not of this package."""
        inside = self._inside
        last: FrameType | None = None
        code = frame.f_code if frame is not None else None
        while frame is not None and id(code) in inside:
            last, frame = frame, frame.f_back
            code = frame.f_code if frame is not None else None
        if frame is None:
            return self._places[0]
        found = self._sites.get((id(code), frame.f_lasti))
        return self._learn(frame, last) if found is None else found

    def _learn(self, frame: FrameType, last: FrameType | None) -> CallSite:
        """Register the place of an unknown frame, and return it; place 0 if there is no room."""
        while frame.f_code.co_filename.startswith(_INSIDE):
            self._inside[id(frame.f_code)] = frame.f_code
            if frame.f_back is None:
                return self._places[0]
            last, frame = frame, frame.f_back
        key = (id(frame.f_code), frame.f_lasti)
        with self._lock:
            if key in self._sites:
                return self._sites[key]
            if last is None or not self._is_user(frame.f_code):
                return self._places[0]
            kind, line = last.f_code.co_name, frame.f_lineno
            for place in self._places[1:]:
                if (place.code, place.line, place.kind) == (frame.f_code, line, kind):
                    break
            else:
                if len(self._places) >= MOST_PLACES or len(self._sites) >= 4 * MOST_PLACES:
                    return self._places[0]
                place = CallSite(len(self._places), frame.f_code, line, kind, _said(last))
                self._places.append(place)
            self._sites[key] = place
            self._outside[key[0]] = frame.f_code
            return place

    def _is_user(self, code: CodeType) -> bool:
        known = self._user.get(id(code))
        if known is not None:
            return known[1]
        name = code.co_filename
        own = not name.startswith(_LIBRARY) and not any(site in name for site in _SITES)
        own = own and not name.startswith(_INSIDE)
        if len(self._user) < 2 * MOST_LINES:
            self._user[id(code)] = (code, own)
        return own

    # Calls

    def enter(self) -> tuple[Token[int] | None, int]:
        """Begin a call, whose requests belong to the calling place. Returns the argument of `leave`."""
        if not self._calls.active or _number.get() >= 0:
            return None, 0
        return _number.set(self.place()), _clock()

    def leave(self, entered: tuple[Token[int] | None, int]) -> None:
        """End the call that `enter` began, and count it."""
        token, began = entered
        if token is not None:
            number = _number.get()
            _number.reset(token)
            self.called(number, began)

    @contextmanager
    def within(self, request: int) -> Iterator[None]:
        """A context whose requests belong to the place of `request`. They are not counted: that call counts its own
        time."""
        token = _number.set(request & PLACES)
        try:
            yield
        finally:
            _number.reset(token)

    def awaits(self) -> int:
        """The time at which a coroutine sends a request, in ns of the monotonic clock; 0 within a call that counts its
        time."""
        return _clock() if self._calls.active and _number.get() < 0 else 0

    def awaited(self, request: int, began: int) -> None:
        """Count the answered request with this number, which was sent at `began`."""
        if began:
            self.called(request, began)

    def context(self) -> Context:
        """A copy of the current context, for tasks whose requests belong to the calling place."""
        context = copy_context()
        if self.active and _number.get() < 0:
            context.run(_number.set, self._find(sys._getframe(1)).number)
        return context

    def _gap(self, number: int, nanoseconds: int) -> None:
        """Add the time between the thread's previous call and the call that ends now to the statistics of its call
        site."""
        place, seconds = self._places[number if number < len(self._places) else 0], 1e-9 * nanoseconds
        self._threads.add(threading.get_ident())
        if not place.gaps:
            place.gaps, place.sized = [0] * BUCKETS, [0.0] * 6
        place.gaps[min(BUCKETS - 1, int(seconds / GAP_S).bit_length())] += 1
        place.gap_s += seconds
        size = _size(sys._getframe(1))
        for i, value in enumerate((1.0, size, size * size, seconds, seconds * seconds, size * seconds)):
            place.sized[i] += value

    # Lines

    def _look(self, seconds: float) -> None:
        """Add the time since the last sample to the lines of the threads."""
        self._sampled_s += seconds
        frames = _calls.current_frames()
        for ident in list(self._threads):
            frame = frames.get(ident)
            if frame is None:
                self._threads.discard(ident)
            else:
                self._stand(frame, seconds)
        del frames

    def _stand(self, frame: FrameType | None, seconds: float) -> None:
        inner, via = frame, ""
        for _ in range(_DEEPEST):
            if frame is None:
                return
            if frame.f_code.co_filename.startswith(_INSIDE):
                self._called_from(frame).stood_s += seconds
                return
            if self._is_user(frame.f_code):
                break
            via = via or frame.f_code.co_qualname
            frame = frame.f_back
        else:
            return
        key = (id(frame.f_code), frame.f_lineno)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= MOST_LINES:
                del self._lines[min(self._lines, key=lambda each: self._lines[each][1])]
            line = self._lines.setdefault(key, [frame.f_code, 0.0, via, 0.0, 0.0, 0.0])
        if not line[2].startswith(COLLECTIVE):
            line[2] = _collective(inner, frame) or line[2]
        line[1] += seconds
        left = self._calls.left
        if line[3] == left:  # still between the same two calls
            line[4] += seconds
        else:
            line[5] += line[4] * line[4]
            line[3], line[4] = left, seconds

    def _called_from(self, frame: FrameType) -> CallSite:
        """The place of the outermost call that contains the frame, even if the call runs an event loop in between."""
        nearest, outer = frame, frame.f_back
        for _ in range(_DEEPEST):
            if outer is None or self._is_user(outer.f_code):
                break
            if outer.f_code.co_filename.startswith(_INSIDE):
                nearest = outer
            outer = outer.f_back
        return self._find(nearest)

    # Reports

    def attach(self, reporter: Reporter, every_s: float) -> None:
        """Report to this connection every `every_s` seconds or more often. The first connection resets the sums,
        because its node does not know this process."""
        with self._lock:
            if self._thread is None:
                self._forget()
                self.active = True
            self._reporters[reporter] = every_s
            self._threads.add(threading.main_thread().ident or 0)
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="dataplane-recorder", daemon=True
                )
                self._thread.start()

    def detach(self, reporter: Reporter) -> None:
        """Stop reporting to this connection; after the last, stop sampling. Idempotent."""
        with self._lock:
            if self._reporters.pop(reporter, None) is None or self._reporters or self._stop is None:
                return
            self._stop.set()
            thread, self._thread, self._stop, self.active = self._thread, None, None, False
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        looked = reported = _now()
        chance = random.Random()  # the random module's global generator belongs to the user
        while not stop.wait(chance.uniform(0.5, 1.5) / RATE):
            now = _now()
            self._look(now - looked)
            looked = now
            every_s = min(self._reporters.values(), default=1.0)
            if now - reported >= every_s:
                reported = now
                graph = self.graph()
                for reporter in list(self._reporters):
                    reporter.report(graph)

    def graph(self) -> bytes:
        """The result of `told`, encoded in MessagePack. If they exceed the size of a report, the lines with the least
        time are left out."""
        told = self.told()
        lines = sorted(told["lines"], key=lambda line: -line[5])
        while len(encoded := msgspec.msgpack.encode(told)) > MAX_REPORT and lines:
            told["lines"] = lines = lines[: len(lines) // 2]
        return encoded

    def told(self) -> dict[str, Any]:
        """All sums since `attach` began them, as plain values in the form of `graph._Graph`."""
        now = (*processor_s(), computed_s())
        ran_s, queued_s, computed = (each - before for each, before in zip(now, self._before, strict=True))
        return {
            "pid": os.getpid(),
            "role": os.environ.get("DATAPLANE_ROLE", ""),
            "seconds": time.monotonic() - self._began,
            "ran_s": ran_s,
            "queued_s": queued_s,
            "computed_s": computed,
            "places": [place.told(*self._calls.totals(place.number)) for place in list(self._places)],
            "lines": [
                [code.co_filename, line, code.co_qualname, code.co_firstlineno, via, seconds, squares + stay * stay]
                for (_, line), (code, seconds, via, _, stay, squares) in list(self._lines.items())
            ],
        }

    def forked(self) -> None:
        """Reset the recorder in a forked child, in which the sampling thread does not run."""
        self._reset()


def _collective(frame: FrameType | None, last: FrameType) -> str:
    """The collective of torch among the frames from `frame` out to the user's frame `last`; empty for none."""
    while frame is not None and frame is not last:
        code = frame.f_code
        if code.co_name in COLLECTIVES and _DISTRIBUTED in code.co_filename:
            return COLLECTIVE + code.co_name
        frame = frame.f_back
    return ""


def _said(frame: FrameType) -> dict[str, Any]:
    """The arguments of a call of this package, as far as they exist: stream, task, columns, and prefetch."""
    found: dict[str, Any] = {}
    given = frame.f_locals
    inner = getattr(given.get("self"), "_inner", given.get("self"))
    name = getattr(getattr(inner, "_stream", inner), "name", None)
    if isinstance(name, str):
        found["stream"] = name
    task, how, prefetch = (given.get(each, getattr(inner, f"_{each}", None)) for each in ("task", "how", "prefetch"))
    if isinstance(task, str):
        found["task"] = task
    columns = given.get("columns", how.get("columns") if isinstance(how, dict) else None)
    listed = columns if isinstance(columns, dict | list | tuple | set) else ()
    names = [str(name)[:64] for name, _ in zip(listed, range(16), strict=False)]
    if names:
        found["columns"] = names
    if isinstance(prefetch, int):
        found["prefetch"] = prefetch
    return found


def _size(frame: FrameType | None) -> float:
    """The size of the columns that the outermost call of this package passes: the items of the largest column, of
    ragged ones if there are any; a reference's bytes; 0 for none."""
    last = frame
    for _ in range(8):
        if frame is None or not frame.f_code.co_filename.startswith(_INSIDE):
            break
        last, frame = frame, frame.f_back
    columns = last.f_locals.get("columns") if last is not None else None
    if not isinstance(columns, dict):
        return float(getattr(columns, "stored_nbytes", 0))
    lists = [each for each in columns.values() if isinstance(each, list | tuple) and each]
    ragged = [each for each in lists if _length(each[0]) is not None]
    return max(map(_items, ragged or columns.values()), default=0.0)


def _items(values: Any) -> float:
    if isinstance(values, list | tuple):
        lengths = map(_length, values[:_COUNTED_ROWS])
        return float(sum(1 if length is None else length for length in lengths))
    try:
        size: Callable[[], int] | int | None = getattr(values, "size", None)
        return float(size) if isinstance(size, int) else float(getattr(values, "nbytes", 0))
    except Exception:  # the boundary: as in `_length`; a sparse tensor has no nbytes
        return 0.0


def _length(row: Any) -> int | None:
    """The items of a row; None if it has no length, such as a number or a 0-d tensor."""
    try:
        return len(row)
    except Exception:  # the boundary: a user's class may raise any error, and a statistic must not fail the call
        return None


recorder = PlaceRecorder()
"""The recorder of this process."""

place = recorder.place
enter, leave, called = recorder.enter, recorder.leave, recorder.called
within = recorder.within
awaits, awaited, context = recorder.awaits, recorder.awaited, recorder.context
attach = recorder.attach
detach = recorder.detach

os.register_at_fork(after_in_child=recorder.forked)
