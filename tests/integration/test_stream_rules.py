"""Rules of streams that are easily broken, end to end: retries, replicas, samplers of one's own, ends, mistakes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.client import consuming, delivery
from tests.cases import each_case
from tests.processes import StandingNode, eventually, until
from tests.streams import take

NODE = {"memory": "32MiB", "spill": 0}


@pytest.fixture
def plane(node: StandingNode) -> Iterator[dp.Plane]:
    """A process's plane. When its streams are dropped nothing is left in the node."""
    with dp.connect(node.address) as plane:
        yield plane
        for name in plane.streams():
            plane.stream(name).drop()
        eventually(lambda: plane.stats().shards == plane.stats().memory_used == 0, "nothing is left")


@pytest.fixture
def other(node: StandingNode, plane: dp.Plane) -> Iterator[dp.Plane]:
    with dp.connect(node.address) as other:
        yield other


def task(stream: Any, name: str = "a") -> Any:
    return stream.stats()["task"][name]


def test_a_repeated_append_on_a_full_stream_is_answered_at_once(plane: dp.Plane, other: dp.Plane) -> None:
    stream = plane.stream("s", ["a"], max_rows=2)
    columns = {"x": np.arange(2), "text": ["p", "q"]}
    stream.append(columns, keys=["a", "b"])
    held = plane.stats().memory_used
    for again in (stream, other.stream("s")):
        assert again.append(columns, keys=["a", "b"], timeout=0) == ["a", "b"]
    assert (plane.stats().memory_used, stream.stats()["appended"]) == (held, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.stream("s").append, columns, keys=["a", "c"], timeout=60)
        eventually(lambda: stream.stats()["waiting"] == 1, "another append waits")
        assert stream.append(columns, keys=["a", "b"], timeout=0) == ["a", "b"], "whoever waits"
        assert take(stream) == [0, 1]
        assert waiting.result(10) == ["a", "c"]
    assert take(stream) == [0, 1]
    assert stream.append(columns, keys=["a", "b"], timeout=0) == ["a", "b"]
    assert stream.stats()["appended"] == 6, "the rows had gone, so it was another append"


OTHERWISE: dict[str, dict[str, Any]] = {
    "a value": {"columns": {"x": [2]}},
    "a type": {"columns": {"x": np.array([1], np.int32)}},
    "a column": {"columns": {"y": [1]}},
    "its group": {"group": "h"},
    "its version": {"version": 8},
    "a tag's value": {"tags": {"t": 2}},
    "a tag's name": {"tags": {"u": 1}},
}


@each_case("what", OTHERWISE)
def test_an_append_with_the_same_keys_and_other_content_is_refused(plane: dp.Plane, what: str) -> None:
    stream = plane.stream(what, ["a"])
    base: dict[str, Any] = {"columns": {"x": [1]}, "keys": ["k"], "group": "g", "version": 7, "tags": {"t": 1}}
    stream.append(**base)
    with pytest.raises(dp.KeyExists, match="already") as caught:
        stream.append(**base | OTHERWISE[what])
    assert caught.value.key == "k"
    assert stream.append(**base) == ["k"]
    assert stream.stats()["rows"] == 1


def test_rows_with_and_without_a_group_are_appended_together(plane: dp.Plane) -> None:
    class Seen:
        group_rows: list[int] = []

        def choose(self, candidates: Any, want: int) -> Any:
            self.group_rows = candidates.group_rows.tolist()
            return np.arange(len(candidates))[:want]

    stream, seen = plane.stream("s", ["a"], max_deliveries=1, group_size=2), Seen()
    stream.append({"x": [0, 1, 2, 3]}, group=[None, "g", None, "g"])
    with stream.appender() as appender:
        appender.send({"x": [4, 5]}, group=[None, 5])
        appender.send({"x": [6]}, group=[None])
    assert stream.append({"x": [7]}, keys=["k"], group=[None]) == ["k"]
    assert stream.append({"x": [7]}, keys=["k"]) == ["k"], "the same append"
    delivery = stream.consume("a", rows=8, min_rows=8, columns=["x"], sampler=seen)
    assert delivery.groups == [None, "g", None, "g", None, 5, None, None]
    assert seen.group_rows == [1, 2, 1, 2, 1, 1, 1, 1]
    delivery.nack()

    groups = stream.dead_letters("a").groups
    assert stream.retry("a") == 8
    with stream.consume("a", rows=8, columns=["x"], timeout=0) as delivery:
        assert delivery.groups == groups


def test_replicas_take_the_same_step(plane: dp.Plane, other: dp.Plane) -> None:
    stream, theirs = plane.stream("s", ["a"]), other.stream("s")
    stream.append({"x": [1, 2, 3, 4]})
    how: dict[str, Any] = {"rows": 2, "shards": 2, "columns": ["x"], "member": "m", "replicas": 2, "timeout": 0}
    steps = [each.take("a", replica=replica, **how) for replica, each in enumerate((stream, theirs))]
    assert [plane.get(step[rank])["x"].to_list() for rank in range(2) for step in steps] == [[1], [1], [2], [2]]
    for step in steps:
        assert task(stream)["acked"] == 0
        step.ack()
    assert task(stream)["acked"] == 2


def test_a_custom_sampler_sees_as_many_candidates_as_fit_a_message(plane: dp.Plane) -> None:
    class Longest:
        needs = ("p", "q")
        shown: list[int] = []

        def choose(self, candidates: Any, want: int) -> Any:
            self.shown.append(len(candidates))
            assert not candidates.whole
            if len(candidates) < 18_000:
                return []
            return np.argsort(-candidates.lengths["p"] - candidates.lengths["q"], kind="stable")[:want]

    stream = plane.stream("s", ["a"])
    for start in range(0, 70_000, 35_000):
        text = [b"aaa" if row in (7, 17_000) else b"a" for row in range(35_000)]
        stream.append({"x": np.arange(start, start + 35_000), "p": text, "q": text})
    assert take(stream, rows=3, sampler=Longest()) == [7, 17_000, 0]
    assert len(set(Longest.shown)) == len(Longest.shown) == 2, "first some, then more"


def test_a_sampler_that_does_not_work_harms_its_caller_alone(plane: dp.Plane) -> None:
    class Says:
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def choose(self, candidates: Any, want: int) -> Any:
            return self.rows if self.rows is not None else 1 // 0

    stream = plane.stream("s", ["a"])
    stream.append({"x": range(4)})
    with pytest.raises(ZeroDivisionError):
        take(stream, sampler=Says(None))
    for rows in ([4], [-1], [0, 0], [[0]], ["a"], [0.5], list(range(5)), dp.Choice(np.array([0]), np.array([0]))):
        with pytest.raises(dp.Misuse):
            take(stream, rows=4, sampler=Says(rows))
    assert take(stream) == [0, 1, 2, 3]


def test_a_closed_stream_delivers_what_a_sampler_chooses_though_it_is_less_than_min_rows(plane: dp.Plane) -> None:
    class One:
        def choose(self, candidates: dp.Candidates, want: int) -> list[int]:
            return [len(candidates) - 1]

    stream, how = plane.stream("s", ["a"]), {"rows": 4, "min_rows": 2, "sampler": One()}
    stream.append({"x": range(3)})
    with pytest.raises(dp.NotReady):
        take(stream, timeout=0, **how)
    stream.close()
    assert [take(stream, **how) for _ in range(3)] == [[2], [1], [0]]


def test_a_closed_stream_delivers_what_a_built_in_sampler_chooses_though_it_is_less_than_min_rows(
    plane: dp.Plane,
) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": range(4)}, tags={"kind": ["a", "b", "a", "b"]})
    stream.close()
    assert take(stream, rows=3, min_rows=3, sampler=dp.Weighted("kind", {"a": 1.0})) == [0, 2]


async def test_a_replica_whose_grant_ends_as_it_asks_for_it_chooses_again(
    node: StandingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    class First:
        def choose(self, candidates: dp.Candidates, want: int) -> list[int]:
            return [0]

    async with dp.aio.connect(node.address) as plane:
        stream, take = await plane.stream("s", ["a"]), consuming.Sampling._take
        await stream.append({"x": [0, 1]})
        how: dict[str, Any] = {"rows": 1, "columns": ["x"], "member": "m", "replicas": 2, "sampler": First()}
        given = await stream.consume("a", replica=0, **how)

        async def late(self: consuming.Sampling, *chosen: Any) -> Any:
            await given.nack()
            return await take(self, *chosen)

        monkeypatch.setattr(consuming.Sampling, "_take", late)
        async with stream.consume("a", replica=1, timeout=60, **how) as other:
            assert len(other) == 1


def test_a_tag_that_no_row_has_is_named(plane: dp.Plane) -> None:
    class Medium:
        tags_read = ("pass_rate", "level")

        def choose(self, candidates: dp.Candidates, want: int) -> Any:
            return np.argsort(candidates.tags["pass_rate"])[:want]

    stream = plane.stream("s", ["a"])
    stream.append({"x": [1]}, tags={"passrate": [0.5], "level": [1]})
    with pytest.raises(dp.Misuse, match="the tag 'pass_rate', which Medium reads; they have level"):
        take(stream, sampler=Medium())


async def test_deliveries_cancelled_at_any_step_lose_no_lease(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", ["a"], max_deliveries=1)
        await stream.append({"x": range(3)})
        for step in range(40):
            several = stream.deliveries("a", rows=1, columns=["x"], prefetch=step % 3)
            following = asyncio.create_task(anext(several))
            for _ in range(step // 2):
                await asyncio.sleep(0)
            following.cancel()
            try:
                await (await following).unseen()
            except asyncio.CancelledError:
                pass
            await several.aclose()

        async def settled() -> Any:
            figures = (await stream.stats())["task"]["a"]
            return None if figures["leased"] else figures

        figures = await until(settled)
        assert (figures["pending"], figures["dead"], figures["waiting"]) == (3, 0, 0)


async def test_deliveries_arrive_in_the_order_of_their_grants(node: StandingNode) -> None:
    class Late:
        """Chooses nothing the first time."""

        calls = 0

        def choose(self, candidates: dp.Candidates, want: int) -> list[int]:
            self.calls += 1
            return [] if self.calls == 1 else [0]

    async with dp.aio.connect(node.address) as plane:
        stream, sampler = await plane.stream("s", ["a"]), Late()
        await stream.append({"x": [0]})
        several = stream.deliveries("a", rows=1, columns=["x"], prefetch=1, sampler=sampler)
        following = asyncio.create_task(anext(several))
        await until(lambda: sampler.calls)
        await stream.append({"x": [1]})
        found = [(await (await following).get("x"))["x"].to_list()]
        found.append((await (await anext(several)).get("x"))["x"].to_list())
        assert found == [[0], [1]]
        await several.aclose()


async def test_a_delivery_granted_during_a_long_step_is_renewed_before_use(
    node: StandingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, renewed, renew = [0.0], [], delivery.Delivery.renew
    for module in (consuming, delivery):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])

    async def renewing(self: delivery.Delivery) -> None:
        renewed.append(len(self))
        await renew(self)

    monkeypatch.setattr(delivery.Delivery, "renew", renewing)
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", ["a"])
        await stream.append({"x": [0]})
        several = stream.deliveries("a", rows=1, columns=["x"], lease=60.0)
        await anext(several)
        now[0] = 7.0  # a step that blocks the loop
        await stream.append({"x": [1]})
        await anext(several)
        assert renewed
        await several.aclose()


def test_a_handle_to_a_dropped_stream_does_not_reach_a_new_one_of_its_name(plane: dp.Plane) -> None:
    old = plane.stream("s", ["a"])
    delivery = (old.append({"x": [1]}), old.consume("a", rows=1, columns=["x"]))[1]
    old.drop()
    new = plane.stream("s", ["b"])
    new.append({"x": [2]})
    for call in (
        old.stats,
        old.close,
        old.drop,
        delivery.ack,
        lambda: old.append({"x": [3]}),
        lambda: take(old, "a"),
        lambda: old.dead_letters("a"),
    ):
        with pytest.raises(dp.Closed):
            call()
    assert new.stats()["tasks"] == ["b"]
    assert take(new, "b") == [2]


def test_more_streams_than_fit_a_message_are_listed(plane: dp.Plane) -> None:
    names = {f"stream {i}" for i in range(120)}
    for name in names:
        plane.stream(name, ["a"])
    assert set(plane.streams()) == names
    stats = plane.stats()
    assert (len(stats.streams), stats.streams_in_all) == (50, 120)
    assert set(stats.streams) <= names
