"""What a process measures of itself: the right lines, and never more memory."""

from __future__ import annotations

import gc
import sys
import threading
import time
import tracemalloc
from types import CodeType
from typing import Any

import msgspec
import numpy as np
import torch

from dataplane.diagnosis import recorder as module
from dataplane.diagnosis._calls import Calls, current_frames
from dataplane.diagnosis.recorder import MOST_LINES, MOST_PLACES, RATE, PlaceRecorder
from dataplane.waiting import PLACES
from dataplane.wire.messages import MAX_REPORT
from tests.cases import each_case


class Reports:
    """A connection that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.some = threading.Event()

    def report(self, graph: bytes) -> None:
        self.told.append(msgspec.msgpack.decode(graph))
        self.some.set()


def calling(recorder: PlaceRecorder, name: str = "append", file: str = "dataplane/x.py") -> Any:
    """A function of the package, as its file says, that is called once."""
    source = f"def {name}(): return inner()\ndef inner():\n"
    source += " entered = recorder.enter()\n recorder.leave(entered)\n return recorder.place()"
    scope: dict[str, Any] = {"recorder": recorder}
    exec(compile(source, module._INSIDE + file, "exec"), scope)
    return scope[name]


def caller(number: int, call: Any) -> Any:
    """Code of a user, at a line of that number."""
    scope: dict[str, Any] = {"call": call}
    exec(compile("\n" * (number - 1) + "def work(): return call()", f"/users/job{number}.py", "exec"), scope)
    return scope["work"]


def test_recorded_places_and_lines_use_bounded_memory() -> None:
    tracemalloc.start()
    try:
        recorder = PlaceRecorder()
        recorder.active = True
        call = calling(recorder)
        work = [caller(number, call) for number in range(1, 1001)]
        codes = [each.__code__ for each in work]
        numbers = [each() for each in work]
        for number, code in enumerate(codes):
            stand(recorder, code, number)
        with_it = allocated()
        assert max(numbers) == MOST_PLACES - 1 <= PLACES
        assert len(recorder.told()["lines"]) <= MOST_LINES
        assert len(recorder.graph()) <= 128 << 10
        counters = sys.getsizeof(recorder._calls)  # fixed
        del recorder, call, work
        gc.collect()
        assert with_it - allocated() - counters <= 256 << 10  # planes of other tests may have a recorder too
    finally:
        tracemalloc.stop()


def test_a_report_with_long_file_names_fits_the_report_limit() -> None:
    recorder = PlaceRecorder()
    for number in range(MOST_LINES):
        code = caller(1, None).__code__.replace(co_filename=f"/users/{'long' * 250}/job{number}.py")
        stand(recorder, code, number)
    longest = max(line[5] for line in recorder.told()["lines"])
    graph = recorder.graph()
    assert len(graph) <= MAX_REPORT < len(msgspec.msgpack.encode(recorder.told()))
    assert longest in [line[5] for line in msgspec.msgpack.decode(graph)["lines"]]


def allocated() -> int:
    """The bytes that all recorders of this process have."""
    its = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, module.__file__)])
    return sum(each.size for each in its.statistics("filename"))


def stand(recorder: PlaceRecorder, code: CodeType, number: int) -> None:
    """A look at a thread that stands in this code."""

    class Frame:
        f_code, f_lineno, f_back = code, number + 1, None

    recorder._stand(Frame(), 1 / RATE)  # type: ignore[arg-type]


def test_time_between_calls_is_attributed_to_the_line_that_spends_it() -> None:
    recorder, reports = PlaceRecorder(), Reports()
    recorder.attach(reports, 0.2)
    try:
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            time.sleep(0.1)  # here
        assert reports.some.wait(30)
    finally:
        recorder.detach(reports)
    lines = {function: (line, seconds) for _, line, function, _, _, seconds, _ in recorder.told()["lines"]}
    name = "test_time_between_calls_is_attributed_to_the_line_that_spends_it"
    assert name in lines
    assert not recorder.active
    assert not [each for each in threading.enumerate() if each.name == "dataplane-recorder"]


def test_a_report_excludes_calls_of_planes_closed_before() -> None:
    """Else the process would seem to do there what it did for another."""
    recorder, reports = PlaceRecorder(), Reports()
    work = caller(7, calling(recorder))
    for _ in range(2):
        recorder.attach(reports, 60.0)
        number = work()
        told = {place[0]: place for place in recorder.told()["places"]}
        recorder.detach(reports)
        assert [place[6] for place in told.values()] == [0, 1]
        assert told[number][2] == 7


class Refusing:
    """A row that cannot tell its length."""

    def __len__(self) -> int:
        raise OSError("not loaded")


@each_case(
    ("values", "size"),
    [
        ([np.array(1.0), np.array(2.0)], 2),
        ([torch.tensor(1.0), torch.tensor(2.0)], 2),
        ([[1, 2, 3], [4]], 4),
        (torch.zeros(3, 4), 48),
        (torch.eye(3).to_sparse(), 0),
        ([Refusing(), [1, 2]], 3),
    ],
)
def test_a_call_does_not_fail_by_columns_without_a_length(values: Any, size: int) -> None:
    source = "def put(columns): return inner()\ndef inner(): recorder._gap(0, 2_000_000)"
    recorder = PlaceRecorder()
    scope: dict[str, Any] = {"recorder": recorder}
    exec(compile(source, module._INSIDE + "dataplane/x.py", "exec"), scope)
    scope["put"]({"column": values})
    assert recorder._places[0].sized[:2] == [1, size]


def nothing(*_: Any) -> Any:
    return 0, 0, 0, 0


def test_calls_are_counted_by_the_low_bits_of_their_number() -> None:
    calls = Calls(lambda: -1, nothing, nothing, 1 << 60)
    began = time.monotonic_ns() - 1000
    for _ in range(3):
        calls.called(7 << 10 | 5, began)
    count, nanoseconds = calls.totals(5)
    assert count == 3
    assert nanoseconds >= 3000
    assert calls.totals(7) == (0, 0)
    assert calls.totals(PLACES) == (0, 0)
    assert calls.left > began
    calls.reset()
    assert calls.totals(5) == (0, 0)


def test_reading_thread_frames_preserves_the_garbage_collection_setting() -> None:
    was = gc.isenabled()
    try:
        for wanted in (True, False):
            (gc.enable if wanted else gc.disable)()
            assert threading.get_ident() in current_frames()
            assert gc.isenabled() is wanted
    finally:
        (gc.enable if was else gc.disable)()
