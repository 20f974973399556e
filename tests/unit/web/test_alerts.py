"""What needs attention: named at once or once it lasts, and nothing where nothing is wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bench.cluster_figures import GeneratedPlane
from dataplane.web import causes
from dataplane.web.access import PageAccess, read_token
from dataplane.web.alerts import HOLD_S, Alert
from dataplane.web.causes import Causes, CauseText
from dataplane.web.cluster_view import look
from dataplane.web.feed import Feed
from dataplane.web.placement import EVENTS, ClusterState
from dataplane.web.samples import MAX_NAME, sample
from dataplane.web.waits import WebWaits
from tests.cases import each_case
from tests.processes import until
from tests.unit.observe.figures import task
from tests.unit.web.looking import A, B, looked, part, stats


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


# Rates and sums of two looks.


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


def test_a_request_that_waits_for_memory_names_the_holder() -> None:
    holders = ({"holder": "train.py (pid 31)", "bytes": 1 << 20, "how": "pinned"},)
    now = looked(0.0, stats(A, waiting=2, waiting_bytes=4096, holders=holders), stats(B))
    [wait] = WebWaits().took(sample(now, None))
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


# Who may look.

TOKEN = "correct-horse-battery"


@each_case("host", ["localhost", "localhost:8642", "127.0.0.1:1", "127.9.9.9", "[::1]:8642", "[::1]"])
def test_without_a_token_requests_for_this_host_are_answered(host: str) -> None:
    assert PageAccess(None).allows(host=host)


@each_case("host", ["", "evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[::2]", "10.0.0.1"])
def test_requests_for_other_host_names_are_refused_without_a_token(host: str) -> None:
    assert not PageAccess(None).allows(host=host)


def test_a_token_is_accepted_in_a_header_or_as_a_derived_cookie() -> None:
    access = PageAccess(TOKEN)
    assert access.allows(host="any", authorization=f"Bearer {TOKEN}")
    assert access.allows(host="any", authorization=f"bearer  {TOKEN} ")
    assert access.allows(host="any", cookie=access.cookie)
    assert TOKEN not in access.cookie
    assert PageAccess(TOKEN + "x").cookie != access.cookie


def test_a_token_file_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token, made = read_token(path)
    assert made
    assert len(token) >= 24
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == (token, False)


@each_case("text", ["", "short", "x" * 5000, "two\nlines of some length", "nicht ganz richtig: ä"])
def test_an_invalid_token_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match="a token is one line"):
        read_token(tmp_path / "token")
