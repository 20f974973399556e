"""Calls are counted by the line that made them, by the extension and without it alike."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dataplane.diagnosis import calls as module
from dataplane.diagnosis import recorder as recording
from dataplane.diagnosis.calls import Calls, Found, PlainCalls, current_frames, plain_current_frames
from dataplane.diagnosis.recorder import Recorder
from dataplane.waiting import PLACES
from tests.cases import each_case

KINDS: list[Any] = [PlainCalls]
if module._calls is not None:
    KINDS.append(module._calls.Calls)


def nothing(*_: Any) -> Any:
    return 0, 0, 0, 0


def unknown() -> int:
    return -1


@each_case("kind", KINDS)
def test_calls_are_counted_by_the_low_bits_of_their_number(kind: Callable[..., Calls]) -> None:
    calls = kind(unknown, nothing, nothing, 1 << 60)
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


@each_case("kind", KINDS)
def test_a_gap_is_told_before_the_call_is_the_last(kind: Callable[..., Calls]) -> None:
    told: list[tuple[int, int]] = []
    calls = kind(unknown, nothing, lambda number, gap: told.append((number, gap)), 1000)
    left = calls.left
    calls.called(3, left + 1001)
    calls.called(3, calls.left + 1000)
    assert told == [(3, 1001)]


@each_case("kind", KINDS)
def test_what_is_called_may_fail(kind: Callable[..., Calls]) -> None:
    def fails(*_: Any) -> Any:
        raise LookupError("no place")

    calls = kind(unknown, fails, fails, 0)
    calls.active = True
    with pytest.raises(LookupError):
        calls.place()
    with pytest.raises(LookupError):
        calls.called(1, calls.left + 10**9)
    with pytest.raises(TypeError):
        calls.called("1", 1)  # type: ignore[arg-type]


def test_nothing_is_held_by_calls_that_are_forgotten() -> None:
    class Finds:
        def __call__(self) -> Found:
            return 0, 0, 0, 0

    for kind in KINDS:
        find = Finds()
        find.calls = kind(unknown, find, nothing, 0)  # type: ignore[attr-defined]
        gone = weakref.ref(find)
        del find
        gc.collect()
        assert gone() is None


# With the stack of a process


def package(source: str, **scope: Any) -> dict[str, Any]:
    """A module of the package, as its file says."""
    exec(compile(source, f"{recording._INSIDE}dataplane/made.py", "exec"), scope)
    return scope


def user(source: str, **scope: Any) -> dict[str, Any]:
    exec(compile(source, "/users/job.py", "exec"), scope)
    return scope


def test_a_place_is_found_again_without_a_walk() -> None:
    recorder = Recorder()
    recorder.active = True
    if isinstance(recorder._calls, PlainCalls):
        pytest.skip("without the extension each call is walked")
    walked, find = 0, recorder._find

    def counted(frame: Any) -> Any:
        nonlocal walked
        walked += 1
        return find(frame)

    recorder._find = counted  # type: ignore[method-assign]
    call = package("def put(): return place()\n", place=recorder.place)["put"]
    work = user("def work():\n return call()\n", call=call)["work"]
    for _ in range(640):
        work()
    assert 1 < walked <= 1 + 640 // 64


def test_a_function_that_is_called_back_has_places_of_its_own() -> None:
    """Its frame is above that of a line that calls too, as deep as that line's usual calls: found by the depth alone,
    the outer line would be named."""
    recorder = Recorder()
    recorder.active = True
    inside = package(
        "def consume(function):\n if function is None:\n  return deep()\n return function()\n"
        "def deep():\n return deeper()\n"
        "def deeper():\n return place()\n"
        "def get():\n return place()\n",
        place=recorder.place,
    )
    made = user(
        "def sample():\n return get()\ndef work(function):\n return consume(function)\n",
        get=inside["get"],
        consume=inside["consume"],
    )
    outer = made["work"](None)
    assert [made["work"](None) for _ in range(40)] == [outer] * 40
    inner = [made["work"](made["sample"]) for _ in range(200)]
    right = max(set(inner), key=inner.count)
    assert right != outer
    assert inner[-64:] == [right] * 64
    assert made["work"](None) == outer
    places = {place.number: place for place in recorder._places}
    assert (places[right].line, places[right].kind) == (2, "get")
    assert (places[outer].line, places[outer].kind) == (4, "consume")


@each_case("ask", [current_frames, plain_current_frames])
def test_to_ask_for_frames_leaves_it_as_it_was_whether_garbage_is_collected(ask: Callable[[], Any]) -> None:
    was = gc.isenabled()
    try:
        for wanted in (True, False):
            (gc.enable if wanted else gc.disable)()
            assert threading.get_ident() in ask()
            assert gc.isenabled() is wanted
    finally:
        (gc.enable if was else gc.disable)()
