"""A clock that a test moves."""

from __future__ import annotations

from dataplane.clock import Deadline
from dataplane.testing import ManualClock


def test_it_stands_still_until_it_is_advanced() -> None:
    clock = ManualClock()
    deadline = Deadline.after(5.0, clock)
    assert (clock(), deadline.remaining_s) == (0.0, 5.0)
    clock.advance(4.0)
    assert deadline.remaining_s == 1.0
    clock.advance(4.0)
    assert (deadline.remaining_s, deadline.waited_s) == (0.0, 8.0)


def test_who_waits_is_told_of_each_advance() -> None:
    clock, seen = ManualClock(), []
    clock.on_advance(lambda: seen.append(clock()))
    clock.advance(1.0)
    clock.advance(2.0)
    assert seen == [1.0, 3.0]
