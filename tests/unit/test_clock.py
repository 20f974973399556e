from __future__ import annotations

import time

import pytest

from dataplane.clock import Deadline, monotonic


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_counts_down_to_zero_and_no_further() -> None:
    clock = FakeClock()
    deadline = Deadline.after(5, clock)
    assert (deadline.remaining_s, deadline.waited_s) == (5, 0)
    clock.now += 2
    assert (deadline.remaining_s, deadline.waited_s) == (3, 2)
    clock.now += 4
    assert (deadline.remaining_s, deadline.waited_s) == (0, 6)


def test_a_jump_of_wall_time_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline.after(1000)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert monotonic is time.monotonic
    assert 990 < deadline.remaining_s <= 1000
