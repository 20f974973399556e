"""A clock that a test moves."""

from __future__ import annotations

import pytest

from dataplane.clock import Deadline
from dataplane.testing import ManualClock
from tests.cases import each_case


def test_it_stands_still_until_it_is_advanced() -> None:
    clock = ManualClock()
    deadline = Deadline.after(5.0, clock)
    assert (clock(), deadline.remaining_s) == (0.0, 5.0)
    clock.advance(4.0)
    assert deadline.remaining_s == 1.0
    clock.advance(4.0)
    assert (deadline.remaining_s, deadline.waited_s) == (0.0, 8.0)


def test_with_a_base_time_passes_by_itself() -> None:
    now = 100.0
    clock = ManualClock(base=lambda: now)
    clock.advance(7.0)
    now = 101.0
    assert clock() == 108.0


@each_case("seconds", [-1.0, float("nan")])
def test_it_never_goes_back(seconds: float) -> None:
    clock = ManualClock(3.0)
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(seconds)
    assert clock() == 3.0


def test_who_waits_is_told_of_each_advance() -> None:
    clock, seen = ManualClock(), []
    clock.on_advance(lambda: seen.append(clock()))
    clock.advance(1.0)
    clock.advance(2.0)
    assert seen == [1.0, 3.0]
