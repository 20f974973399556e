"""What needs attention: named at once or once it lasts, and nothing where nothing is wrong."""

from __future__ import annotations

import asyncio
import dataclasses

from bench.cluster_figures import GeneratedPlane
from dataplane.web.attention import HOLD_S, STAYS_S, Alert
from dataplane.web.feed import Feed
from dataplane.web.looks import look
from tests.cases import each_case
from tests.unit.observe.figures import task
from tests.unit.web.looking import A, looked, part, stats


def shown(feed: Feed) -> list[tuple[str, str, str]]:
    return [(alert.level, alert.tag, alert.kind) for alert in feed.tick.alerts]


def watched(ill: tuple[str, ...], ill_s: int, until_s: int) -> dict[int, list[Alert]]:
    """The alerts by second of a generated cluster, looked at every other second."""
    now = [0.0]
    plane = GeneratedPlane(4, 1, seed=1, ill=ill, ill_s=ill_s, clock=lambda: now[0])
    feed, found = Feed(plane.address), {}
    for second in range(0, until_s, 2):
        now[0] = float(second)
        seen = asyncio.run(look(plane))  # type: ignore[arg-type]
        answer_s = dict.fromkeys(seen.answer_s, 0.002)
        feed.took(dataclasses.replace(seen, at_s=now[0], wall_s=1e9 + second, took_s=0.0, answer_s=answer_s))
        found[second] = feed.tick.alerts
    return found


def test_a_cluster_that_is_well_has_none() -> None:
    assert not any(watched((), 0, 240).values())


@each_case(
    ("ill", "tag", "within_s"),
    [("task", "slow", HOLD_S + 3), ("disk", "disk error", 2), ("left", "gone", 2), ("silent", "silent", 2)],
)
def test_what_goes_wrong_is_named(ill: str, tag: str, within_s: float) -> None:
    found = watched((ill,), 20, 40)
    assert not any(alerts for second, alerts in found.items() if second < 20)
    named = [second for second, alerts in found.items() if any(alert.tag == tag for alert in alerts)]
    assert named
    assert named[0] <= 20 + within_s
    assert {alert.tag for alerts in found.values() for alert in alerts} <= {tag, "leaderless"}


def test_a_host_that_does_less_than_before_stands_out() -> None:
    found = watched(("host",), 160, 200)
    assert {(alert.kind, alert.tag, alert.of) for alerts in found.values() for alert in alerts} == {
        ("host", "slow", GeneratedPlane(4, 1, seed=1).nodes[1])
    }
    assert found[198]
    assert not any(alerts for second, alerts in found.items() if second < 165)


def test_a_warning_comes_once_its_cause_lasts_and_goes_with_it() -> None:
    feed = Feed("x")
    held = part(9, 0, waiting=2, behind=["reward"], oldest_s=1.0)
    for second in range(24):
        stream = held if 5 <= second < 10 or second == 16 else part(9, 0, oldest_s=1.0)
        feed.took(looked(float(second), stats(A, streams={"s": stream})))
        assert bool(shown(feed)) == (5 + HOLD_S <= second <= 9 + STAYS_S), second


def test_a_task_that_nobody_consumes_is_named() -> None:
    feed = Feed("x")
    for second in range(6):
        feed.took(looked(float(second), stats(A, streams={"s": part(9, 0, oldest_s=130.0)})))
    assert ("warning", "unattended", "task") in shown(feed)


def test_dead_letters_are_named_as_they_come() -> None:
    feed = Feed("x")
    for second in range(8):
        dead = {"reward": task(dead=3 if second < 3 else 4), "actor": task()}
        feed.took(looked(float(second), stats(A, streams={"s": part(0, 0, task=dead)})))
        assert shown(feed) == ([("warning", "dead letters", "task")] if second >= 3 + HOLD_S else [])
