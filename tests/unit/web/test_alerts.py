"""What needs attention: named at once or once it lasts, and nothing where nothing is wrong."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cluster_figures import GeneratedPlane
from dataplane.web import causes
from dataplane.web.alerts import HOLD_S, Alert
from dataplane.web.causes import Causes, CauseText
from dataplane.web.cluster_view import look
from dataplane.web.feed import Feed
from tests.cases import each_case
from tests.processes import until
from tests.unit.observe.figures import task
from tests.unit.web.looking import A, looked, part, stats


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


def test_the_dead_letters_of_a_task_are_forgotten_with_its_stream() -> None:
    feed = Feed("unix:/nowhere")

    def tags(second: float, **streams: dict[str, Any]) -> list[str]:
        feed.took(looked(second, stats(A, streams=streams)))
        return [alert.tag for alert in feed.tick.alerts]

    def dead(letters: int) -> dict[str, Any]:
        return part(1, 0, task={"reward": task(dead=letters)})

    for second in range(10):
        assert tags(second, s=dead(3)) == []
    for second in range(10, 20):
        tags(second)
    assert feed._attention._dead == {}
    assert [tags(second, s=dead(4)) for second in range(20, 30)][-1] == []
    assert [tags(second, s=dead(5)) for second in range(30, 40)][-1] == ["dead letters"]
    assert [tags(second, s=dead(0)) for second in range(40, 50)][-1] == [], "they were retried"
    assert [tags(second, s=dead(1)) for second in range(50, 60)][-1] == ["dead letters"]


@each_case(
    ("ill", "tag", "within_s"),
    [("task", "slow", HOLD_S + 3), ("disk", "disk error", 2), ("left", "gone", 2), ("silent", "silent", 2)],
)
def test_each_fault_raises_its_alert_in_time(ill: str, tag: str, within_s: float) -> None:
    found = watched((ill,), 20, 40)
    assert not any(alerts for second, alerts in found.items() if second < 20)
    named = [second for second, alerts in found.items() if any(alert.tag == tag for alert in alerts)]
    assert named
    assert named[0] <= 20 + within_s
    assert {alert.tag for alerts in found.values() for alert in alerts} <= {tag, "leaderless"}


# The causes that the page shows: those of the time that has viewers.

OLD = CauseText(what="reward: code in score", cost="0.15 s of a step, 90 %", where="job.py:19", chain="", change="")


@asynccontextmanager
async def watching(found: Causes, plane: Any, seen: asyncio.Event) -> AsyncIterator[None]:
    task = asyncio.create_task(found.watch(plane, seen))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_causes_are_forgotten_while_nobody_views_them() -> None:
    found = Causes()
    found.found = (OLD,)
    async with watching(found, SimpleNamespace(graphs=object()), asyncio.Event()):
        await until(lambda: found.found == ())


async def test_a_diagnosis_that_fails_is_logged_and_followed_by_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(causes, "WATCH_S", 0.0)
    asked = 0

    async def graphs() -> None:
        nonlocal asked
        asked += 1
        raise ValueError("an odd graph")

    seen = asyncio.Event()
    seen.set()
    async with watching(Causes(), SimpleNamespace(graphs=graphs), seen):
        await until(lambda: asked > 2)
    assert "an odd graph" in caplog.text
