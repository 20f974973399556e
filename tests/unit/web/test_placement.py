"""Failovers and members, from what hosts say that they lead."""

from __future__ import annotations

from dataplane.web.placement import EVENTS, ClusterState
from tests.unit.web.looking import A, B, looked, stats

KEY = f"rollouts/s1/0-{A}"


def kinds(placement: ClusterState) -> list[str]:
    return [event.kind for event in placement.events]


def test_a_new_leader_after_the_loss_of_the_old_one_is_a_failover_event() -> None:
    placement = ClusterState()
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


def test_events_and_names_are_bounded() -> None:
    placement = ClusterState()
    for second in range(400):
        other = f"{second:016x}"
        placement.took(looked(float(second), stats(A), stats(other)))
    assert len(placement.events) == EVENTS
    assert len(placement.names) <= 2 * 2 + EVENTS
    assert placement.events[-1].number > 700
