"""Failovers and members, from what hosts say that they lead."""

from __future__ import annotations

from dataplane.web.placement import EVENTS, Placement
from tests.unit.web.looking import A, B, C, looked, stats

KEY = f"rollouts/s1/0-{A}"


def kinds(placement: Placement) -> list[str]:
    return [event.kind for event in placement.events]


def test_a_partition_that_another_leads_once_its_leader_is_gone_has_failed_over() -> None:
    placement = Placement()
    assert placement.took(looked(0.0, stats(A, leads={KEY: 1}), stats(B, follows={KEY: 1}))) == {"rollouts"}
    assert placement.took(looked(1.0, stats(B, follows={KEY: 1}), silent={A: "gone"})) == set()
    assert [*placement.leaderless] == [KEY]
    assert placement.took(looked(2.0, stats(B, leads={KEY: 2}), silent={A: "gone"})) == {"rollouts"}
    assert placement.leaderless == {}
    assert kinds(placement) == ["failover"]
    assert (placement.events[0].what, placement.events[0].source, placement.events[0].target) == (
        "rollouts 0",
        "a:1",
        "b:1",
    )


def test_of_two_who_say_that_they_lead_the_newer_does() -> None:
    placement = Placement()
    placement.took(looked(0.0, stats(A, leads={KEY: 1}), stats(B, leads={KEY: 2})))
    assert placement.leaders == {KEY: B}
    placement.took(looked(1.0, stats(A, leads={KEY: 1}), stats(B, leads={KEY: 2})))
    assert kinds(placement) == []


def test_a_stream_that_was_dropped_is_not_without_a_leader() -> None:
    placement = Placement()
    placement.took(looked(0.0, stats(A, leads={KEY: 1})))
    placement.took(looked(1.0, stats(A)))
    assert (placement.leaders, placement.leaderless) == ({}, {})


def test_members_come_and_go() -> None:
    placement = Placement()
    placement.took(looked(0.0, stats(A), stats(B)))
    placement.took(looked(1.0, stats(A), stats(C)))
    assert [(event.kind, event.what) for event in placement.events] == [("left", "b:1"), ("joined", "c:1")]


def test_events_and_names_are_bounded() -> None:
    placement = Placement()
    for second in range(400):
        other = f"{second:016x}"
        placement.took(looked(float(second), stats(A), stats(other)))
    assert len(placement.events) == EVENTS
    assert len(placement.names) <= 2 * 2 + EVENTS
    assert placement.events[-1].number > 700


def test_the_version_goes_up_with_each_change_alone() -> None:
    placement = Placement()
    placement.took(looked(0.0, stats(A, leads={KEY: 1}), stats(B)))
    version = placement.version
    placement.took(looked(1.0, stats(A, leads={KEY: 1}), stats(B)))
    assert placement.version == version
    placement.took(looked(2.0, stats(A, leads={KEY: 1}), stats(B, follows={KEY: 1})))
    assert placement.version == version + 1
    assert placement.table() == {"rollouts": [("0", A, [B], True)]}


def test_of_two_partitions_of_one_number_one_is_shown() -> None:
    """Both nodes made it at the stream's beginning; its table names one, and the other is dropped."""
    placement, other = Placement(), f"rollouts/s1/0-{B}"
    placement.took(looked(0.0, stats(A, leads={KEY: 1}), stats(B, leads={other: 1}, follows={KEY: 1})))
    assert placement.table() == {"rollouts": [("0", A, [B], True)]}
    placement.took(looked(1.0, stats(A, leads={KEY: 1}), stats(B, follows={KEY: 1})))
    assert placement.table() == {"rollouts": [("0", A, [B], True)]}
    assert placement.leaderless == {}
    assert kinds(placement) == []
