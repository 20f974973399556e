"""Rates and sums of two looks."""

from __future__ import annotations

import msgspec
import pytest

from dataplane.web.samples import MAX_NAME, sample
from tests.unit.observe.figures import task
from tests.unit.web.looking import A, B, looked, part, stats


def test_rates_are_of_a_nodes_own_time() -> None:
    before = looked(0.0, stats(A, 100.0, put_bytes=1000))
    now = looked(9.0, stats(A, 102.0, put_bytes=5000))
    [host] = sample(now, before).hosts
    assert host.put == 2000.0
    assert sample(now, None).hosts[0].put is None


def test_a_node_that_was_started_again_has_no_rate_yet() -> None:
    before = looked(0.0, stats(A, 100.0, put_bytes=10**9))
    now = looked(1.0, stats(A, 1.0, put_bytes=10, pid=8))
    assert sample(now, before).hosts[0].put is None


def test_a_stream_is_the_sum_of_its_parts() -> None:
    before = looked(0.0, stats(A, streams={"s": part(100, 40)}), stats(B, streams={"s": part(10, 0)}))
    now = looked(2.0, stats(A, streams={"s": part(120, 60)}), stats(B, streams={"s": part(30, 10)}))
    [stream] = sample(now, before).streams
    assert (stream.appended, stream.rows, stream.rate) == (150, 80, 20.0)
    reward = stream.tasks[0]
    assert (reward.name, reward.pending, reward.rate) == ("reward", 80, 15.0)
    assert reward.lag_s == pytest.approx(80 / 15, abs=0.1)


def test_a_part_that_passes_to_another_host_is_no_burst() -> None:
    before = looked(0.0, stats(A, streams={"s": part(5000, 4000)}), stats(B, streams={"s": part(10, 0)}))
    now = looked(1.0, stats(B, streams={"s": part(5010, 4000)}), silent={A: "gone"})
    assert sample(now, before, {"s"}).streams[0].rate is None
    died = looked(1.0, stats(B, streams={"s": part(15, 0)}), silent={A: "gone"})
    assert sample(died, before).streams[0].rate == 5.0


def test_what_waits_and_why_is_put_together() -> None:
    waits = {"reward": task(waiting=2, ready={"ids": 1}), "actor": task(incomplete=[_group("p1", 9.0)])}
    others = {"reward": task(waiting=1, ready={"ids": 4, "x": 0}), "actor": task(incomplete=[_group("p2", 70.0)])}
    now = looked(
        0.0,
        stats(A, streams={"s": part(1, 0, task=waits, waiting=3, behind=["actor"])}),
        stats(B, streams={"s": part(1, 0, task=others, behind=["actor", "reward"])}),
    )
    [stream] = sample(now, None).streams
    assert (stream.waiting, stream.behind) == (3, ("actor", "reward"))
    reward, actor = stream.tasks
    assert (reward.waiting, dict(reward.ready)) == (3, {"ids": 5, "x": 0})
    assert [group[0] for group in actor.incomplete] == ["p2", "p1"]


def _group(name: str, age_s: float) -> dict[str, object]:
    return {"group": name, "rows": 5, "of": 8, "dropped": 0, "age_s": age_s}


def test_names_of_strangers_are_short_and_plain() -> None:
    hostile = "\x1b[31m<script>\u202e" + "x" * 10_000
    now = looked(0.0, stats(A, streams={hostile: part(1, 0)}, spill_error=hostile))
    made = sample(now, None)
    for text in (made.streams[0].name, made.hosts[0].spill_error):
        assert len(text) <= MAX_NAME + 1
        assert text.isprintable()
    assert len(msgspec.json.encode(made)) < 4000
