"""Calls are counted by the line that made them, by the extension and without it alike."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

from dataplane.diagnosis import calls as module
from dataplane.diagnosis.calls import CallCounts, PlainCalls, current_frames, plain_current_frames
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
def test_calls_are_counted_by_the_low_bits_of_their_number(kind: Callable[..., CallCounts]) -> None:
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


@each_case("ask", [current_frames, plain_current_frames])
def test_reading_thread_frames_preserves_the_garbage_collection_setting(ask: Callable[[], Any]) -> None:
    was = gc.isenabled()
    try:
        for wanted in (True, False):
            (gc.enable if wanted else gc.disable)()
            assert threading.get_ident() in ask()
            assert gc.isenabled() is wanted
    finally:
        (gc.enable if was else gc.disable)()
