"""Rules of streams that are easily broken, end to end: retries, replicas, samplers of one's own, ends, mistakes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.wire.messages import MAX_INLINE
from tests.cases import each_case
from tests.processes import StandingNode, eventually

MORE_THAN_A_MESSAGE = np.zeros((1, 2 * MAX_INLINE), np.uint8)
"""A row of which the columns are put before it is appended."""

SURROGATE = "\ud800"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, memory="32MiB", spill=0) as node:
        yield node


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
    """Another's."""
    with dp.connect(node.address) as other:
        yield other


class Call:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Any]) -> None:
        try:
            self._result = make()
        except BaseException as error:
            self._error = error

    def result(self, timeout_s: float = 10.0) -> Any:
        """What it returned. Raises what it raised."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the call hangs"
        if self._error is not None:
            raise self._error
        return self._result


def after(seconds: float) -> None:
    """Let time pass that something is measured by."""
    until = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > until, f"{seconds} s have passed")


def task(stream: Any, name: str = "a") -> Any:
    return stream.stats()["task"][name]


def values(delivery: Any) -> list[int]:
    return [int(x) for x in delivery.get("x")["x"].to_list()]


def take(stream: Any, name: str = "a", rows: int = 100, timeout: float = 0, **how: Any) -> list[int]:
    """The values of one delivery, acked."""
    with stream.consume(name, rows=rows, timeout=timeout, **{"columns": ["x"]} | how) as delivery:
        return values(delivery)


class First:
    """A sampler of the user's own that does what Fifo does."""

    def choose(self, candidates: Any, want: int) -> Any:
        return np.arange(min(want, len(candidates)))


class Nothing:
    """One that chooses nothing, and says that it was asked."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def choose(self, candidates: Any, want: int) -> Any:
        self.asked.set()
        return []


class Expires:
    """One that lets all rows expire."""

    def choose(self, candidates: Any, want: int) -> Any:
        return dp.Choice([], np.arange(len(candidates)))


# Appending, and appending again


async def test_who_appends_while_the_stream_is_dropped_is_told_and_keeps_his_connection(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane, dp.aio.connect(node.address) as other:
        stream, theirs = await plane.stream("s", ["a"]), await other.stream("s")
        write = theirs._writer.write

        async def written(*args: Any) -> Any:
            ref = await write(*args)
            await stream.drop()
            return ref

        theirs._writer.write = written  # type: ignore[method-assign]
        with pytest.raises(dp.Closed):
            await theirs.append({"x": MORE_THAN_A_MESSAGE})
        assert (await other.stats()).shards == 0, "what was written for it is freed, over the same connection"
        assert await other.streams() == {}


def test_an_append_made_again_on_a_full_stream_is_answered_at_once(plane: dp.Plane, other: dp.Plane) -> None:
    stream = plane.stream("s", ["a"], max_rows=2)
    columns = {"x": np.arange(2), "text": ["p", "q"]}
    stream.append(columns, keys=["a", "b"])
    held = plane.stats().memory_used
    for again in (stream, other.stream("s")):
        assert again.append(columns, keys=["a", "b"], timeout=0) == ["a", "b"]
    assert (plane.stats().memory_used, stream.stats()["appended"]) == (held, 2)
    waiting = Call(lambda: other.stream("s").append(columns, keys=["a", "c"], timeout=60))
    eventually(lambda: stream.stats()["waiting"] == 1, "another append waits")
    assert stream.append(columns, keys=["a", "b"], timeout=0) == ["a", "b"], "whoever waits"
    assert take(stream) == [0, 1]
    assert waiting.result() == ["a", "c"]
    assert take(stream) == [0, 1]
    assert stream.append(columns, keys=["a", "b"], timeout=0) == ["a", "b"]
    assert stream.stats()["appended"] == 6, "the rows had gone, so it was another append"


def test_an_append_made_again_on_a_closed_stream_is_answered(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1]}, keys=["k"])
    stream.close()
    assert stream.append({"x": [1]}, keys=["k"]) == ["k"]
    with pytest.raises(dp.Closed):
        stream.append({"x": [2]}, keys=["k"])
    assert take(stream) == [1]


OTHERWISE: dict[str, dict[str, Any]] = {
    "a value": {"columns": {"x": [2]}},
    "a type": {"columns": {"x": np.array([1], np.int32)}},
    "a column": {"columns": {"y": [1]}},
    "a column more": {"columns": {"x": [1], "y": [1]}},
    "a text": {"columns": {"x": [1], "text": ["q"]}},
    "its group": {"group": "h"},
    "no group": {"group": None},
    "its version": {"version": 8},
    "a tag's value": {"tags": {"t": 2}},
    "a tag's name": {"tags": {"u": 1}},
    "no tags": {"tags": None},
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_an_append_with_the_same_keys_and_other_content_is_refused(plane: dp.Plane, what: str) -> None:
    stream = plane.stream("s", ["a"])
    base: dict[str, Any] = {"columns": {"x": [1]}, "keys": ["k"], "group": "g", "version": 7, "tags": {"t": 1}}
    if what == "a text":
        base["columns"] = {"x": [1], "text": ["p"]}
    stream.append(**base)
    with pytest.raises(dp.Misuse, match="already"):
        stream.append(**base | OTHERWISE[what])
    assert stream.append(**base) == ["k"]
    assert stream.stats()["rows"] == 1


def test_who_waits_for_room_that_dead_letters_take_is_told_so(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a"], max_rows=1, max_deliveries=1)
    stream.append({"x": [1]}, keys=["k"])
    stream.consume("a", rows=1, columns=["x"]).nack()
    with pytest.raises(dp.Backpressure, match="dead letters of a") as full:
        stream.append({"x": [2]}, timeout=0.05)
    (holder,) = full.value.holders
    assert (holder["how"], holder["holder"]) == ("dead letters", "task 'a' of stream 's'")
    assert holder["bytes"] > 0
    stream.drop_rows(stream.dead_letters("a").keys)
    stream.append({"x": [2]}, timeout=0)


async def test_a_producer_that_takes_long_and_is_alive_keeps_its_admission(tmp_path: Path) -> None:
    with StandingNode(tmp_path, spill=0, reservation_lease_s=0.4) as node:
        async with dp.aio.connect(node.address) as plane, dp.aio.connect(node.address) as other:
            stream, slow = await plane.stream("s", ["a"], max_rows=1), await other.stream("s")
            write, written, go_on = slow._writer.write, asyncio.Event(), asyncio.Event()

            async def slowly(*args: Any) -> Any:
                written.set()
                await go_on.wait()
                return await write(*args)

            slow._writer.write = slowly  # type: ignore[method-assign]
            appended = asyncio.create_task(slow.append({"x": MORE_THAN_A_MESSAGE}))
            await written.wait()
            with pytest.raises(dp.Backpressure):
                await stream.append({"x": [2]}, timeout=1.0)  # for more than two leases
            go_on.set()
            await appended
            assert (await stream.stats())["rows"] == 1


@pytest.mark.parametrize("first", ["the scope is freed", "the stream lets go"])
@pytest.mark.parametrize("how", ["drop", "ack", "drop_rows"])
def test_a_part_of_what_was_put_under_a_scope_leaves_nothing(plane: dp.Plane, first: str, how: str) -> None:
    ref = plane.put({"x": np.arange(10)}, scope="mine")
    stream = plane.stream("s", ["a"])
    keys = stream.append(ref[:2])

    def let_go() -> None:
        if how == "drop":
            stream.drop()
        elif how == "drop_rows":
            stream.drop_rows(keys)
        else:
            assert take(stream) == [0, 1]

    for step in (let_go, lambda: plane.free(scope="mine"))[:: 1 if first == "the stream lets go" else -1]:
        step()
    assert plane.stats().shards == plane.stats().memory_used == 0


def test_what_a_stream_has_of_a_scope_that_was_freed_can_be_read(plane: dp.Plane) -> None:
    ref = plane.put({"x": np.arange(10)}, scope="mine")
    stream = plane.stream("s", ["a"])
    stream.append(ref[3:5])
    plane.free(scope="mine")
    assert take(stream) == [3, 4]


# Extending


def test_what_a_closed_connection_brought_and_did_not_ack_is_brought_again(node: StandingNode, plane: dp.Plane) -> None:
    stream = plane.stream("s", ["score", "use"])
    stream.append({"x": [1, 2]})
    with dp.connect(node.address) as gone:
        theirs = gone.stream("s")
        delivery = theirs.consume("score", rows=2, columns=["x"], lease=3600)
        theirs.extend(delivery.ref, {"y": [0, 0]})
        with pytest.raises(dp.Misuse, match="already"):
            theirs.extend(delivery.ref[:1], {"y": [7]})
    with stream.consume("score", rows=2, columns=["x"], timeout=60) as delivery:
        stream.extend(delivery.ref[::-1], {"y": [20, 10]})
    with stream.consume("use", rows=2, columns=["x", "y"], timeout=0) as delivery:
        assert delivery.get()["y"].to_list() == [10, 20]
    assert plane.stats().shards == 0


def test_who_was_superseded_brings_nothing(plane: dp.Plane, other: dp.Plane) -> None:
    stream, theirs = plane.stream("s", ["score", "use"]), other.stream("s")
    stream.append({"x": [1]})
    late = stream.consume("score", rows=1, columns=["x"], lease=0.05)
    rightful = theirs.consume("score", rows=1, columns=["x"], timeout=60)
    shards = plane.stats().shards
    with pytest.raises(dp.LeaseExpired):
        stream.extend(late.ref, {"y": [111]})
    assert plane.stats().shards == shards
    theirs.extend(rightful.ref, {"y": [222]})
    rightful.ack()
    theirs.extend(rightful.ref, {"z": [333]})  # allowed: the row is still there for others
    with stream.consume("use", rows=1, columns=["y", "z"], timeout=0) as delivery:
        assert (delivery.get("y")["y"].to_list(), delivery.get("z")["z"].to_list()) == ([222], [333])


def test_what_is_replaced_can_be_read_by_who_holds_it(plane: dp.Plane, other: dp.Plane) -> None:
    stream, theirs = plane.stream("s", ["a"]), other.stream("s")
    keys = stream.append({"x": [1]})
    stream.extend(keys, {"y": [10]})
    held = theirs.consume("a", rows=1, columns=["x", "y"])
    stream.extend(keys, {"y": [20]}, replace=True)
    assert held.get("y")["y"].to_list() == [10]
    held.nack()
    with stream.consume("a", rows=1, columns=["y"], timeout=0) as delivery:
        assert delivery.get()["y"].to_list() == [20]
    assert plane.stats().shards == 0


def test_what_is_replaced_can_be_read_also_where_others_rows_came_with_it(plane: dp.Plane, other: dp.Plane) -> None:
    stream, theirs = plane.stream("s", ["a"]), other.stream("s")
    keys = stream.append({"x": [1, 2]})
    stream.extend(keys, {"y": [10, 11]})
    held = theirs.consume("a", rows=1, columns=["x", "y"])
    for key, value in zip(keys, (20, 21), strict=True):
        stream.extend([key], {"y": [value]}, replace=True)
    assert held.get("y")["y"].to_list() == [10]
    held.ack()


def test_a_made_key_of_another_stream_is_refused(plane: dp.Plane) -> None:
    stream, another = plane.stream("s", ["a"]), plane.stream("t", ["a"])
    stream.append({"x": [1]})
    (key,) = another.append({"x": [2]})
    for call in (lambda: stream.extend([key], {"y": [9]}), lambda: stream.drop_rows([key])):
        with pytest.raises(dp.Misuse, match="no row"):
            call()
    another.extend([key], {"y": [9]})
    assert take(stream) == [1]


# Replicas


@pytest.mark.parametrize("sampler", [None, dp.Fifo(), Nothing()], ids=["none", "built in", "of its own"])
def test_a_replica_waits_for_what_another_with_a_sampler_of_its_own_takes(
    plane: dp.Plane, other: dp.Plane, sampler: Any
) -> None:
    stream, theirs = plane.stream("s", ["a"]), other.stream("s")
    stream.append({"x": [1, 2, 3]})
    ranks = [{"rows": 2, "columns": ["x"], "member": "m", "replica": rank, "replicas": 2} for rank in range(2)]
    waits = {"sampler": sampler, "min_rows": 1} if isinstance(sampler, Nothing) else {"sampler": sampler, "rows": 4}
    if not isinstance(sampler, Nothing):
        waits["min_rows"] = 4
    second = Call(lambda: theirs.consume("a", **ranks[1] | waits, timeout=60))
    if isinstance(sampler, Nothing):
        assert sampler.asked.wait(60)
    else:
        eventually(lambda: task(stream)["waiting"] == 1, "the second waits")
    first = stream.consume("a", **ranks[0], sampler=First())
    assert second.result().keys == first.keys
    later = stream.consume("a", **ranks[0], sampler=First())
    assert theirs.consume("a", **ranks[1], sampler=First(), timeout=0).keys == later.keys
    first.ack()
    second.result().ack()
    assert task(stream)["acked"] == 2


def test_a_replica_that_asks_for_other_columns_is_told(plane: dp.Plane, other: dp.Plane) -> None:
    stream, theirs = plane.stream("s", ["a"]), other.stream("s")
    stream.append({"x": [1], "y": [2]})
    first = stream.consume("a", rows=1, columns=["x"], member="m", replica=0, replicas=2)
    for sampler in (None, First()):
        with pytest.raises(dp.Misuse, match="other"):
            theirs.consume("a", rows=1, columns=["y"], member="m", replica=1, replicas=2, sampler=sampler, timeout=0)
    again = theirs.consume("a", rows=1, columns=["x"], member="m", replica=1, replicas=2, timeout=0)
    assert again.keys == first.keys


def test_what_one_replica_fetched_ahead_and_left_the_others_keep(plane: dp.Plane, other: dp.Plane) -> None:
    stream, theirs = plane.stream("s", ["a"], max_deliveries=1), other.stream("s")
    stream.append({"x": [1, 2]})
    how: dict[str, Any] = {"rows": 1, "columns": ["x"], "member": "m", "replicas": 2}
    ahead = [stream.consume("a", replica=0, **how) for _ in range(2)]
    several = theirs.deliveries("a", replica=1, prefetch=1, **how)
    next(several).ack()
    several.close()
    for delivery in ahead:
        delivery.ack()
    with theirs.consume("a", replica=1, timeout=0, **how) as delivery:
        assert values(delivery) == [2]
    assert (task(stream)["acked"], task(stream)["dead"]) == (2, 0)


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


@each_case("shards", [0, -1, "2", 1.5, None])
def test_a_step_for_no_ranks_is_refused_before_anything_is_leased(plane: dp.Plane, shards: Any) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1]})
    with pytest.raises(dp.Misuse):
        stream.take("a", rows=1, shards=shards, columns=["x"], timeout=0)
    assert (task(stream)["leased"], task(stream)["pending"]) == (0, 1)


# Samplers


class Whole:
    """One that finds no more groups that fit."""

    def choose(self, candidates: Any, want: int) -> Any:
        return dp.Choice(np.arange(3), full=True)


@pytest.mark.parametrize(
    "sampler",
    [dp.CompleteGroups(2), dp.TokenBalanced("ids", 2, within=dp.CompleteGroups(2)), Whole()],
    ids=["groups", "balanced", "of one's own"],
)
@pytest.mark.parametrize("how", ["consume", "take"])
def test_where_whole_groups_do_not_make_as_many_fewer_come(plane: dp.Plane, sampler: Any, how: str) -> None:
    stream = plane.stream("s", ["a"])
    keys = stream.append({"x": np.arange(6), "ids": [[1]] * 6}, group=np.repeat(range(3), 2))
    stream.drop_rows(keys[1:2])
    if how == "consume":
        assert take(stream, rows=4, min_rows=4, sampler=sampler) == [0, 2, 3]
    else:
        with stream.take("a", rows=4, shards=2, columns=["x"], sampler=sampler, timeout=0) as step:
            assert sorted(x for ref in step for x in plane.get(ref)["x"].to_list()) == [0, 2, 3]
    assert take(stream) == [4, 5]


@pytest.mark.parametrize("how", ["consume", "take"])
@pytest.mark.parametrize("sampler", [None, First()], ids=["built in", "of one's own"])
def test_at_the_end_the_last_rows_come_though_they_are_fewer(plane: dp.Plane, sampler: Any, how: str) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1, 2, 3]})
    asked: dict[str, Any] = {"rows": 4, "columns": ["x"], "sampler": sampler, "timeout": 0}
    with pytest.raises(dp.NotReady):
        stream.consume("a", min_rows=4, **asked)
    stream.close()
    if how == "consume":
        assert take(stream, min_rows=4, **asked) == [1, 2, 3]
    else:
        with stream.take("a", shards=3, **asked) as step:
            assert [len(ref) for ref in step] == [1, 1, 1]
    with pytest.raises(dp.Closed):
        take(stream, min_rows=4, **asked)


def test_at_the_end_a_sampler_of_ones_own_waits_for_rows_that_others_may_give_back(
    plane: dp.Plane, other: dp.Plane
) -> None:
    stream, theirs = plane.stream("s", ["a"]), other.stream("s")
    stream.append({"x": [1, 2, 3]})
    held = stream.consume("a", rows=1, columns=["x"])
    stream.close()
    asked = Nothing()

    class Both(Nothing):
        def choose(self, candidates: Any, want: int) -> Any:
            asked.asked.set()
            return First().choose(candidates, want)

    waiting = Call(lambda: take(theirs, rows=3, min_rows=3, sampler=Both(), timeout=60))
    assert asked.asked.wait(60)
    held.nack()
    assert waiting.result() == [1, 2, 3]


async def test_groups_within_a_balanced_delivery_are_given_up_as_time_passes(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", ["a"])
        await stream.append({"ids": [[1], [2], [3]]}, group="g")
        balanced = dp.TokenBalanced("ids", 2, within=dp.CompleteGroups(4, timeout=0.1))

        async def consume() -> Any:
            return await stream.consume("a", rows=4, columns=["ids"], sampler=balanced, timeout=60)

        waiting = asyncio.create_task(consume())
        async with asyncio.timeout(60):
            while (await stream.stats())["task"]["a"]["expired"] < 3:
                await asyncio.sleep(0.01)
        assert not waiting.done()
        await stream.drop()
        with pytest.raises(dp.Closed):
            await waiting


def test_a_sampler_of_ones_own_that_judges_by_age_is_asked_again(plane: dp.Plane) -> None:
    class Old:
        judges_age = True
        asked = 0

        def choose(self, candidates: Any, want: int) -> Any:
            self.asked += 1
            return np.flatnonzero(candidates.age_s > 0.1)[:want] if self.asked > 1 else []

    stream, old = plane.stream("s", ["a"]), Old()
    stream.append({"x": [1]})
    assert take(stream, sampler=old, timeout=60) == [1]
    with pytest.raises(dp.NotReady):
        take(stream, sampler=old, timeout=0.05)


@pytest.mark.parametrize("sampler", [None, First()], ids=["built in", "of one's own"])
def test_who_waits_for_the_end_is_told_when_anothers_sampler_lets_the_last_rows_expire(
    plane: dp.Plane, other: dp.Plane, sampler: Any
) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1, 2]})
    stream.close()
    waiting = Call(lambda: take(other.stream("s"), columns=["y"], sampler=sampler, timeout=30))
    if sampler is None:
        eventually(lambda: task(stream)["waiting"] == 1, "it waits")
    with pytest.raises(dp.Closed):
        take(stream, sampler=Expires(), timeout=10)
    with pytest.raises(dp.Closed):
        waiting.result(5)
    assert task(stream)["expired"] == 2


def test_a_sampler_of_ones_own_is_shown_as_many_rows_as_a_message_holds(plane: dp.Plane) -> None:
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


def test_a_built_in_sampler_with_a_choose_of_ones_own_chooses_by_it(plane: dp.Plane) -> None:
    class Last(dp.Fifo):
        def choose(self, candidates: Any, want: int) -> Any:
            return np.arange(len(candidates))[-want:]

    stream = plane.stream("s", ["a"])
    stream.append({"x": [1, 2, 3]})
    assert take(stream, rows=2, sampler=Last()) == [2, 3]
    assert take(stream, rows=2, sampler=dp.Fifo()) == [1]


def test_tokens_of_a_column_that_has_none_are_refused(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1, 2], "ids": [[1, 2, 3], [4]]})
    with pytest.raises(dp.Misuse, match="has none"):
        take(stream, sampler=dp.TokenBalanced("x", 2))
    balanced = stream.consume("a", rows=2, columns=["x"], sampler=dp.TokenBalanced("ids", 2), timeout=0)
    assert [rows.tolist() for rows in balanced.rows_of()] == [[0], [1]]


def test_groups_that_lack_rows_are_named_and_dropped_by_name(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a", "b"])
    stream.append({"x": range(6)}, group=["g", "g", "h", 7, 7, 7])
    groups = dp.CompleteGroups(3)
    assert take(stream, rows=3, sampler=groups) == [3, 4, 5]
    with pytest.raises(dp.NotReady):
        take(stream, rows=3, sampler=groups)
    assert [(of["group"], of["rows"], of["dropped"], of["of"]) for of in task(stream)["incomplete"]] == [
        ("g", 2, 0, 3),
        ("h", 1, 0, 3),
    ]
    assert task(stream, "b")["incomplete"] == []
    stream.append({"x": [6]}, group=[7])
    for nobody in (["nobody"], ["7"], [8]):
        with pytest.raises(dp.Misuse, match="no row of the group"):
            stream.drop_rows(groups=["g", *nobody])
    stream.drop_rows(groups=["g", 7])
    assert [of["group"] for of in task(stream)["incomplete"]] == ["h"]
    assert take(stream, "b") == [2]
    stream.drop_rows(groups=[])


# Going on, and leaving


def test_each_delivery_is_waited_for_from_when_it_is_asked_for(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1]})
    several = stream.deliveries("a", rows=1, columns=["x"], prefetch=1, timeout=0.3)
    assert values(next(several)) == [1]
    after(0.5)  # the next is being fetched all that time, but nobody has asked for it
    append = Call(lambda: stream.append({"x": [2]}))
    assert values(next(several)) == [2]
    append.result()
    begun = time.monotonic()
    with pytest.raises(dp.NotReady):
        next(several)
    assert time.monotonic() - begun >= 0.3
    assert task(stream)["leased"] == 0


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
        async with asyncio.timeout(60):
            while (await stream.stats())["task"]["a"]["leased"]:
                await asyncio.sleep(0.002)
        figures = (await stream.stats())["task"]["a"]
        assert (figures["pending"], figures["dead"], figures["waiting"]) == (3, 0, 0)


async def test_a_delivery_that_comes_as_its_wait_is_cancelled_is_given_back(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", ["a"], max_deliveries=1)
        await stream.append({"x": [1]})
        consume, cancelled = stream.consume, asyncio.Event()

        async def consumed(*args: Any, **how: Any) -> Any:
            delivery = await consume(*args, **how)
            asyncio.get_running_loop().call_soon(waiting.cancel)
            cancelled.set()
            return delivery

        stream.consume = consumed  # type: ignore[assignment, method-assign]

        async def run() -> None:
            async for _ in stream.deliveries("a", rows=1, columns=["x"], prefetch=0):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(run())
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert cancelled.is_set()
        figures = (await stream.stats())["task"]["a"]
        assert (figures["leased"], figures["pending"], figures["dead"]) == (0, 1, 0)


@pytest.mark.parametrize("meanwhile", ["its lease ends", "the stream is dropped"])
@pytest.mark.parametrize("how", ["consume", "take", "deliveries"])
def test_what_leaves_the_block_is_what_its_caller_sees(plane: dp.Plane, how: str, meanwhile: str) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1]})
    asked: dict[str, Any] = {"rows": 1, "columns": ["x"], "lease": 0.05 if meanwhile == "its lease ends" else 60.0}
    with pytest.raises(ZeroDivisionError):
        if how == "deliveries":
            held: Any = next(stream.deliveries("a", prefetch=0, **asked))
        else:
            held = stream.consume("a", **asked) if how == "consume" else stream.take("a", shards=1, **asked)
        with held:
            if meanwhile == "its lease ends":
                eventually(lambda: task(stream)["leased"] == 0, meanwhile)
            else:
                stream.drop()
            raise ZeroDivisionError
    if meanwhile == "its lease ends":
        assert take(stream) == [1]


async def test_a_timeout_within_the_block_is_a_timeout(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", ["a"])
        await stream.append({"x": [1]})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), stream.consume("a", rows=1, columns=["x"], lease=0.05):
                await asyncio.Event().wait()


def test_an_ack_made_again_after_its_answer_was_lost_does_nothing(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a", "b"])
    stream.append({"x": [1]})
    delivery = stream.consume("a", rows=1, columns=["x"])
    for _ in range(3):
        delivery.ack()
        delivery._inner.settled = False
    with pytest.raises(dp.LeaseExpired):
        delivery.nack()
    assert task(stream)["acked"] == 1
    assert take(stream, "b") == [1]


def test_what_a_loader_fetched_ahead_stays_leased_however_short_its_steps_are(plane: dp.Plane) -> None:
    """A batch is handed out later than a lease after it was fetched, while none is waited for as long as a third."""
    stream = plane.stream("s", ["a"], max_deliveries=1)
    for i in range(10):
        stream.append({"x": [i]})
    stream.close()
    seen = []
    loader = dp.loader(
        stream, "a", rows=1, columns=["x"], lease=0.45, prefetch=6, collate=lambda batch: batch["x"].to_list()
    )
    for batch in loader:
        seen += batch
        after(0.1)
    assert seen == list(range(10))
    assert task(stream)["dead"] == 0


# What there is


def test_dead_letters_without_a_common_column_are_named(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a"], max_deliveries=1)
    stream.append({"x": [1]}, keys=["p"], group="g", version=3, tags={"t": 1})
    stream.append({"y": [1]}, keys=["q"])
    for column in ("x", "y"):
        stream.consume("a", rows=1, columns=[column]).nack()
    dead = stream.dead_letters("a")
    assert (len(dead), dead.keys, dead.ref) == (2, ["p", "q"], None)
    assert (dead.groups, dead.versions, dead.tags) == (["g", None], [3, 0], {"t": [1, None]})
    only = stream.dead_letters("a", most=1)
    assert (only.keys, only.ref.columns) == (["p"], ("x",))
    assert (len(stream.dead_letters("a", most=0)), len(stream.dead_letters("a", most=-1))) == (0, 0)
    stream.drop_rows(dead.keys)
    assert len(stream.dead_letters("a")) == 0


def test_a_handle_to_a_stream_that_was_made_anew_shows_nothing_of_the_new_one(plane: dp.Plane) -> None:
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


def test_columns_that_are_only_asked_for_do_not_use_up_those_a_stream_may_have(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a"])
    for i in range(70):
        with pytest.raises(dp.NotReady):
            stream.consume("a", rows=1, columns=[f"mistyped {i}"], timeout=0)
    stream.append({"x": [1]} | {f"c{i}": [i] for i in range(63)})
    with pytest.raises(dp.LimitExceeded):
        stream.append({"one more": [1]})
    assert take(stream) == [1]


def test_there_may_be_more_streams_than_a_message_tells_of(plane: dp.Plane) -> None:
    names = {f"stream {i}" for i in range(120)}
    for name in names:
        plane.stream(name, ["a"])
    assert set(plane.streams()) == names
    stats = plane.stats()
    assert (len(stats.streams), stats.streams_in_all) == (50, 120)
    assert set(stats.streams) <= names


# What can not be said


class Needs:
    def __init__(self, needs: Any) -> None:
        self.needs = needs

    def choose(self, candidates: Any, want: int) -> Any:
        return [0]


WRONG: dict[str, Callable[[dp.Plane, Any], Any]] = {
    "a number as task": lambda plane, _: plane.stream("t", tasks=[1]),
    "a text as tasks": lambda plane, _: plane.stream("t", tasks="x"),
    "a task that is no text": lambda plane, _: plane.stream("t", tasks=[SURROGATE]),
    "a name that is no text": lambda plane, _: plane.stream(SURROGATE, tasks=["a"]),
    "a number as name": lambda plane, _: plane.stream(5, tasks=["a"]),
    "deliveries and a half": lambda plane, _: plane.stream("t", tasks=["a"], max_deliveries=2.5),
    "a text as deliveries": lambda plane, _: plane.stream("t", tasks=["a"], max_deliveries="5"),
    "rows and a bit": lambda plane, _: plane.stream("t", tasks=["a"], max_rows=2.7),
    "no rows": lambda plane, _: plane.stream("t", tasks=["a"], max_rows=0),
    "fewer": lambda plane, _: plane.stream("t", tasks=["a"], max_rows=-1),
    "too many": lambda plane, _: plane.stream("t", tasks=["a"], max_rows=2**70),
    "a lag below none": lambda plane, _: plane.stream("t", tasks=["a"], max_lag=-1),
    "limits without tasks": lambda plane, _: plane.stream("s", max_deliveries=9),
    "a tag that is a number": lambda _, stream: stream.append({"x": [1]}, tags={1: "t"}),
    "a tag that is no text": lambda _, stream: stream.append({"x": [1]}, tags={SURROGATE: "t"}),
    "a tag's value that is none": lambda _, stream: stream.append({"x": [1]}, tags={"t": SURROGATE}),
    "tags without names": lambda _, stream: stream.append({"x": [1]}, tags=["t"]),
    "a key that is no text": lambda _, stream: stream.append({"x": [1]}, keys=[SURROGATE]),
    "dead letters of a number": lambda _, stream: stream.dead_letters(1),
    "dead letters of nobody": lambda _, stream: stream.dead_letters("nobody"),
    "a text as most": lambda _, stream: stream.dead_letters("a", most="1"),
    "rows for a number": lambda _, stream: take(stream, 1),
    "rows for what is no text": lambda _, stream: take(stream, SURROGATE),
    "a text as columns": lambda _, stream: take(stream, columns="x"),
    "no columns": lambda _, stream: take(stream, columns=None),
    "a column that is no text": lambda _, stream: take(stream, columns=[SURROGATE]),
    "a member that is none": lambda _, stream: take(stream, member=SURROGATE),
    "a replica that is none": lambda _, stream: take(stream, member="m", replica="0"),
    "fewer replicas than none": lambda _, stream: take(stream, member="m", replica=0, replicas=-1),
    "a sampler that is a number": lambda _, stream: take(stream, sampler=5),
    "a sampler that is a class": lambda _, stream: take(stream, sampler=dp.Fifo),
    "needs that are numbers": lambda _, stream: take(stream, sampler=Needs((1,))),
    "a text as needs": lambda _, stream: take(stream, sampler=Needs("ids")),
    "needs that are no text": lambda _, stream: take(stream, sampler=Needs([SURROGATE])),
    "a group that is none": lambda _, stream: stream.drop_rows(groups=[1.5]),
    "a group that is no text": lambda _, stream: stream.drop_rows(groups=[SURROGATE]),
    "a key to drop that is no text": lambda _, stream: stream.drop_rows([SURROGATE]),
}


def test_what_can_not_be_said_is_refused_and_the_connection_goes_on(plane: dp.Plane) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1, 2, 3], "ids": [[1], [2], [3]]}, keys=["p", "q", "r"])
    for what, say in WRONG.items():
        with pytest.raises(dp.Misuse):
            say(plane, stream)
        assert stream.stats()["rows"] == 3, what
    assert list(plane.streams()) == ["s"]
    assert (task(stream)["leased"], task(stream)["waiting"]) == (0, 0)
    assert take(stream) == [1, 2, 3]


@each_case(
    "say",
    [
        lambda stream: stream.extend(5, {"y": [1]}),
        lambda stream: stream.extend(None, {"y": [1]}),
        lambda stream: stream.drop_rows(5),
        lambda stream: stream.drop_rows(None),
        lambda stream: stream.drop_rows(groups=5),
        lambda stream: take(stream, timeout=10**400),
    ],
    ids=["extend 5", "extend None", "drop 5", "drop None", "drop group 5", "a very long timeout"],
)
def test_what_is_no_list_of_rows_or_number_of_seconds_is_refused(plane: dp.Plane, say: Any) -> None:
    stream = plane.stream("s", ["a"])
    stream.append({"x": [1]})
    with pytest.raises(dp.Misuse):
        say(stream)
    assert take(stream) == [1]
