"""Producer sequences: any order, any repetition, a bounded window."""

from __future__ import annotations

import pytest

from dataplane.replication import sessions as module
from dataplane.replication.sessions import WINDOW, Sessions, Settled


def test_a_result_is_kept_for_each_number_of_the_window() -> None:
    sessions = Sessions()
    for number in (2, 1, 4, 3):  # they may overtake each other
        assert sessions.result("p", number) is None
        sessions.keep("p", number, b"%d" % number)
    assert [sessions.result("p", number) for number in (1, 2, 3, 4)] == [b"1", b"2", b"3", b"4"]
    assert sessions.result("q", 1) is None


def test_below_the_window_a_number_is_settled() -> None:
    sessions = Sessions()
    for number in range(1, WINDOW + 6):
        sessions.keep("p", number, b"")
    with pytest.raises(Settled):
        sessions.result("p", 5)
    assert sessions.result("p", 6) == b""
    sessions.keep("p", 10**12, b"far")  # costs nothing by its distance
    with pytest.raises(Settled):
        sessions.result("p", WINDOW + 5)


def test_a_snapshot_holds_all_of_it() -> None:
    sessions, again = Sessions(), Sessions()
    for number in range(1, WINDOW + 3):
        sessions.keep("p", number, b"%d" % number)
    again.restore(sessions.snapshot())
    assert again.snapshot() == sessions.snapshot()
    assert again.result("p", WINDOW + 2) == b"%d" % (WINDOW + 2)
    with pytest.raises(Settled):
        again.result("p", 2)
    again.drop("p")
    assert again.result("p", 2) is None


def test_of_too_many_producers_those_are_forgotten_that_were_not_heard_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 3)
    sessions = Sessions()
    for producer in ("a", "b", "c", "a", "d", "e"):
        sessions.keep(producer, len(sessions.snapshot()), b"")
    assert sessions.producers == ["a", "d", "e"]
    restored = Sessions()
    restored.restore(sessions.snapshot())
    assert restored.producers == sessions.producers
