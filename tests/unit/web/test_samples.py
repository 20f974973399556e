"""Rates and sums of two looks."""

from __future__ import annotations

import msgspec
import pytest

from dataplane.web.placement import EVENTS, ClusterState
from dataplane.web.samples import MAX_NAME, sample
from dataplane.web.waits import WebWait, WebWaits
from tests.unit.web.looking import A, B, looked, part, stats


def test_a_node_that_was_started_again_has_no_rate_yet() -> None:
    before = looked(0.0, stats(A, 100.0, put_bytes=10**9))
    now = looked(1.0, stats(A, 1.0, put_bytes=10, pid=8))
    assert sample(now, before).hosts[0].put is None


def test_stream_figures_are_summed_over_hosts() -> None:
    before = looked(0.0, stats(A, streams={"s": part(100, 40)}), stats(B, streams={"s": part(10, 0)}))
    now = looked(2.0, stats(A, streams={"s": part(120, 60)}), stats(B, streams={"s": part(30, 10)}))
    [stream] = sample(now, before).streams
    assert (stream.appended, stream.rows, stream.rate) == (150, 80, 20.0)
    reward = stream.tasks[0]
    assert (reward.name, reward.pending, reward.rate) == ("reward", 80, 15.0)
    assert reward.lag_s == pytest.approx(80 / 15, abs=0.1)


def test_untrusted_names_are_shortened_and_printable() -> None:
    hostile = "\x1b[31m<script>\u202e" + "x" * 10_000
    now = looked(0.0, stats(A, streams={hostile: part(1, 0)}, spill_error=hostile))
    made = sample(now, None)
    for text in (made.streams[0].name, made.hosts[0].spill_error):
        assert len(text) <= MAX_NAME + 1
        assert text.isprintable()
    assert len(msgspec.json.encode(made)) < 4000


# Who waits for whom, and for what.


def waits_at(at_s: float, waits: WebWaits, **changed: object) -> list[WebWait]:
    return waits.took(sample(looked(at_s, stats(A, **changed), stats(B)), None))


def test_a_request_that_waits_for_memory_names_the_holder() -> None:
    holders = ({"holder": "train.py (pid 31)", "bytes": 1 << 20, "how": "pinned"},)
    [wait] = waits_at(0.0, WebWaits(), waiting=2, waiting_bytes=4096, holders=holders)
    assert wait.whom == "train.py (pid 31) (1.0 MiB pinned)"
    assert wait.what == "4.0 KiB of memory on a:1"


# Failovers and members, from what hosts say that they lead.

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
