"""What needs attention: named at once or once it lasts, and nothing where nothing is wrong."""

from __future__ import annotations

import asyncio
import dataclasses

from bench.cluster_figures import GeneratedPlane
from dataplane.web.alerts import HOLD_S, Alert
from dataplane.web.cluster_view import look
from dataplane.web.feed import Feed
from tests.cases import each_case


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
