"""Streams, end to end, by both faces: rows appended, extended, consumed, acknowledged and gone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.client.delivery import Delivery
from tests.processes import MIB, StandingNode, Worker, eventually, pattern
from tests.streams import take, values


def rollouts(rows: int, start: int = 0) -> dict[str, Any]:
    return {
        "x": np.arange(start, start + rows),
        "ids": [np.arange(1 + row % 4) for row in range(start, start + rows)],
        "answer": [f"réponse {row}" for row in range(start, start + rows)],
    }


@pytest.mark.usefixtures("empty")
def test_rows_pass_through_their_tasks_and_are_removed(plane: Any) -> None:
    stream = plane.stream("rollouts", tasks=["reward", "actor"], max_bytes="2MiB")
    keys = stream.append(
        rollouts(6), group=[0, 0, 1, 1, 2, 2], version=[3, 3, 3, 4, 4, 4], tags={"domain": ["math", "code"] * 3}
    )
    assert len(set(keys)) == 6
    with pytest.raises(dp.NotReady) as early:
        stream.consume("actor", rows=6, columns=["x", "reward"], timeout=0)
    assert (early.value.stream, early.value.task) == ("rollouts", "actor")
    with stream.consume("reward", rows=4, columns=["x", "answer"]) as delivery:
        assert len(delivery) == 4
        assert delivery.ref.columns == ("x", "answer")
        assert delivery.keys == keys[:4]
        assert delivery.groups == [0, 0, 1, 1]
        assert delivery.versions == [3, 3, 3, 4]
        assert delivery.tags == {"domain": ["math", "code", "math", "code"]}
        batch = delivery.get()
        assert batch["answer"].to_list() == rollouts(6)["answer"][:4]
        stream.extend(delivery.ref, {"reward": batch["x"].numpy() * 10})
        del batch
    assert delivery.settled
    with stream.consume("actor", rows=6, columns=["reward", "x"], timeout=0) as delivery:
        assert delivery.keys == keys[:4]
        assert delivery.get()["reward"].to_list() == [0, 10, 20, 30]
    stats = stream.stats()
    assert (stats["rows"], stats["appended"]) == (2, 6)
    assert stats["task"]["actor"]["acked"] == 4
    assert stats["task"]["reward"]["pending"] == 2
    assert plane.streams()["rollouts"]["rows"] == 2
    stream.extend(keys[4:], {"reward": [40, 50]})
    stream.close()
    for task in ("reward", "actor"):
        assert take(stream, task) == [4, 5]
        with pytest.raises(dp.Closed):
            stream.consume(task, rows=1, columns=["x"], timeout=5)
    with pytest.raises(dp.Closed):
        stream.append(rollouts(1))
    assert stream.stats()["bytes"] == 0


@pytest.mark.usefixtures("empty")
def test_invalid_extends_are_misuse_and_store_nothing(plane: Any) -> None:
    stream, other = plane.stream("s", ["a"]), plane.stream("t", ["a"])
    stream.append(rollouts(4), keys=list("abcd"))
    (made,) = other.append(rollouts(1))
    delivery = stream.consume("a", rows=4, columns=["x"], timeout=0)
    foreign = other.consume("a", rows=1, columns=["x"], timeout=0)
    put = plane.put({"x": [1]})
    wrong: dict[str, tuple[Any, Any]] = {
        "an unknown key": (["nobody"], {"y": [1]}),
        "a key that another stream made": ([made], {"y": [1]}),
        "a number that was never given": (["~17"], {"y": [1]}),
        "a row twice": (["a", "a"], {"y": [1, 2]}),
        "a row twice by reference": (delivery.ref[[0, 0]], {"y": [1, 2]}),
        "another stream's": (foreign.ref, {"y": [1]}),
        "nobody's": (put, {"y": [1]}),
        "a column that is there": (["a"], {"x": [1]}),
        "too few": (delivery.ref, {"y": [1]}),
        "another kind": (["a"], {"answer": np.zeros((1, 3))}),
        "no key": ([7], {"y": [1]}),
    }
    shards = plane.stats().shards
    for what, (rows, columns) in wrong.items():
        with pytest.raises(dp.Misuse):
            stream.extend(rows, columns, replace=what == "another kind")
    eventually(lambda: plane.stats().shards == shards, "nothing of it is kept")
    stream.extend(["b"], {"x": [100]}, replace=True)
    stream.extend(delivery.ref[:0], {"y": []})
    stream.extend(delivery.ref[:0], put[:0])
    delivery.nack()
    assert take(stream, "a") == [0, 100, 2, 3]
    with pytest.raises(dp.Misuse):
        stream.extend(["b"], {"y": [1]})  # it has gone
    foreign.ack()
    plane.free(put)


def scorer(pipe: Any, address: str) -> None:
    """Scores rows that somebody else was delivered."""
    with dp.connect(address) as plane:
        stream = plane.stream("s")
        ref = pipe.recv()
        stream.extend(ref[::-1], {"reward": -plane.get(ref)["x"].numpy()[::-1]})
        pipe.send("done")


@pytest.mark.usefixtures("empty")
def test_a_delivered_reference_is_extended_by_another_process(node: StandingNode, plane: Any) -> None:
    stream = plane.stream("s", ["score", "use"])
    stream.append(rollouts(6))
    with Worker(scorer, node.address) as worker:
        with stream.consume("score", rows=6, columns=["x"]) as delivery:
            repeated = [part.repeat(3)[:1] for part in delivery.ref[[4, 0, 2]]]
            assert worker.ask(dp.concat(repeated)) == "done"
        worker.join()
    with stream.consume("use", rows=6, columns=["x", "reward"], timeout=0) as ready:
        assert ready.get()["reward"].to_list() == [0, -2, -4]
    stream.drop()


@pytest.mark.usefixtures("empty")
def test_a_reference_is_appended_without_copying_its_bytes(plane: Any) -> None:
    stream, following = plane.stream("s", ["a"]), plane.stream("t", ["b"])
    ref = plane.put({"x": np.arange(4), "pixels": pattern(1, MIB, 4)})
    before = plane.stats().memory_used
    stream.append(ref[[3, 1]].repeat(2), group=["p", "p", "q", "q"])
    assert plane.stats().memory_used == before
    with stream.consume("a", rows=4, columns=["x", "pixels"], sampler=dp.CompleteGroups(2), timeout=0) as delivery:
        batch = delivery.get()
        assert batch["x"].to_list() == [3, 3, 1, 1]
        assert np.array_equal(batch["pixels"].numpy(), pattern(1, MIB, 4)[[3, 3, 1, 1]])
        del batch
        following.append(delivery.ref)  # handed on, without its bytes being moved
    assert plane.stats().memory_used == before
    assert take(following, "b") == [3, 3, 1, 1]
    for gone in (ref[3:], ref[1:2]):
        with pytest.raises(dp.Freed):
            plane.get(gone)
    assert np.array_equal(plane.get(ref[0:1])["x"].numpy(), [0])  # it was not appended
    with pytest.raises(dp.Freed):
        stream.append(ref)
    plane.free(ref)


@pytest.mark.usefixtures("empty")
def test_deliveries_are_acked_nacked_and_renewed(plane: Any) -> None:
    stream = plane.stream("s", ["a", "b"], max_deliveries=2)
    stream.append(rollouts(4), keys=list("abcd"))
    held = stream.consume("b", rows=1, columns=["x"])
    with stream.consume("a", rows=2, columns=["x"], lease=30) as first:
        first.renew()
        first.nack()
        first.nack()  # settled
    with pytest.raises(dp.LeaseExpired, match="given back before"):
        first.ack()
    with pytest.raises(dp.LeaseExpired):
        first.renew()
    with pytest.raises(ZeroDivisionError), stream.consume("a", rows=2, columns=["x"]) as second:
        assert values(second) == [0, 1]
        raise ZeroDivisionError
    assert second.settled
    dead = stream.dead_letters("a")
    assert dead.keys == ["a", "b"]
    assert dead.reasons == ["ZeroDivisionError: "] * 2
    assert plane.get(dead.ref)["answer"].to_list() == rollouts(2)["answer"]
    third = stream.consume("a", rows=2, columns=["x"])
    assert values(third) == [2, 3]
    third.ack()
    third.ack()
    with pytest.raises(dp.LeaseExpired, match="acked before"):
        third.nack()
    stream.close()
    with pytest.raises(dp.Closed):  # the dead wait for nobody
        take(stream, "a", timeout=5)
    stream.drop_rows(dead.keys)
    assert (len(stream.dead_letters("a")), stream.stats()["task"]["a"]["dead"], values(held)) == (0, 0, [0])
    stream.drop()


@pytest.mark.usefixtures("empty")
def test_a_prefetched_delivery_is_renewed_before_use(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now, renewed, renew = itertools.count(0, 30), [], Delivery.renew

    async def noted(self: Delivery) -> None:
        await renew(self)
        renewed.append(len(renewed))
        if len(renewed) == 2:
            raise dp.LeaseExpired("others have it")

    for module in ("consuming", "delivery"):
        monkeypatch.setattr(f"dataplane.client.{module}.monotonic", lambda: next(now))
    monkeypatch.setattr(Delivery, "renew", noted)
    stream = plane.stream("s", ["a"])
    stream.append(rollouts(4))
    loop = stream.deliveries("a", rows=1, columns=["x"], lease=60)
    assert [values(next(loop)) for _ in range(3)] == [[0], [2], [3]], "what others have is skipped"
    assert len(renewed) == 4
    loop.close()
    stream.drop()


def test_a_delivery_iterator_closes_without_error_after_its_plane(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        stream = plane.stream("s", tasks=["t"])
        stream.append({"x": [1, 2]})
        loop = stream.deliveries("t", rows=1, columns=["x"])
        next(loop)
    loop.close()  # type: ignore[attr-defined]  # a generator
    with dp.connect(node.address) as plane, plane.stream("s").consume("t", rows=2, columns=["x"]) as delivery:
        assert len(delivery) == 2, "the row that it held is given to others"


def test_an_append_to_a_full_stream_holds_no_memory(plane: Any) -> None:
    stream = plane.stream("s", ["a"], max_rows=4)
    stream.append(rollouts(4))
    held = plane.stats().memory_used
    with pytest.raises(dp.Backpressure, match="max_rows"):
        stream.append({"x": [9], "big": pattern(1, MIB)}, timeout=0.05)
    with pytest.raises(dp.LimitExceeded):
        stream.append(rollouts(5), timeout=5)
    assert plane.stats().memory_used == held
    assert take(stream, "a", rows=1) == [0]
    stream.append(rollouts(1, 4), timeout=0)
    assert stream.stats()["rows"] == 4


# Reading ahead: what a reference means is in memory by the time that it is asked for.


def test_prefetched_shards_are_restored_before_they_are_read(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="8MiB", spill="64MiB", spill_dir=tmp_path, prewarm=0)
    with dp.connect(config=config) as plane:
        refs = [plane.put({"x": pattern(i, 2 * MIB, 2)}) for i in range(8)]
        eventually(lambda: plane.stats().spilled_shards, "some are on disk")
        restored = plane.stats().restored_bytes
        for ref in refs:  # some of them are there, and some not
            plane.prefetch(ref)
        eventually(lambda: plane.stats().restored_bytes > restored, "they come by themselves")
        for i, ref in enumerate(refs):
            assert (np.stack(plane.get(ref)["x"].numpy()) == pattern(i, 2 * MIB, 2)).all()
