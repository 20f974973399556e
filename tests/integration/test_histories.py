"""Histories, end to end: recorded, bounded, read in place, by several processes, over hosts and on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.history import HistoPipe
from tests.etcd import EtcdServer, needs_etcd
from tests.integration.test_hosts import Host, together
from tests.processes import MIB, StandingNode, Worker, eventually


@pytest.fixture
def plane(node: StandingNode) -> Any:
    with dp.connect(node.address) as plane:
        yield plane


def tokens_of(history: Any, key: str) -> list[list[int]]:
    return [each.tokens.tolist() for each in history.responses(key)]


def test_responses_are_there_by_prompt_the_oldest_epoch_first(plane: Any) -> None:
    history = plane.history("h")
    assert history.responses("p") == []
    assert history.known(["p", "q"]) == [[], []]
    history.add("p", [4, 5], epoch=2, reward=0.5)
    history.add("p", np.array([1, 2, 3]), epoch=1)
    history.add("p", [], epoch=3)
    history.add("q", [9], epoch=1, reward=float("nan"))
    assert tokens_of(history, "p") == [[1, 2, 3], [4, 5]]
    assert [(each.epoch, each.reward) for each in history.responses("p")] == [(1, None), (2, 0.5)]
    [[one], [], two] = history.known(["q", "absent", "p"])
    assert (one.length, one.reward, [each.length for each in two]) == (1, None, [3, 2])
    history.drop()
    assert plane.stats().shards == 0


def test_what_is_no_response_is_refused_and_leaves_nothing(plane: Any) -> None:
    history = plane.history("h")
    for bad in ([0.5], [[1]], ["a"], [1 << 40]):
        with pytest.raises(dp.SchemaMismatch):
            history.add("p", bad)
    for arguments in ({"reward": "x"}, {"epoch": "x"}):
        with pytest.raises(dp.Misuse):
            history.add("p", [1], **arguments)
    ref = plane.put({"response_ids": [[1], [2]]})
    with pytest.raises(dp.Misuse, match="1 keys"):
        history.record(ref, key=["a"])
    plane.free(ref)
    for settings in ({"keep": 0}, {"samples": 0}, {"dtype": "float32"}, {"keep": 100, "samples": 100}):
        with pytest.raises(dp.Misuse):
            plane.history("h", **settings)
    assert plane.stats().shards == 0


def test_a_history_is_bounded(plane: Any) -> None:
    history = plane.history("h", max_bytes="1MiB", samples=4)
    for epoch in range(4):
        for step in range(8):
            keys = [f"p{step}-{row}" for row in range(16)]
            ref = plane.put({"key": keys, "response_ids": [np.full(2048, row, np.int32) for row in range(16)]})
            history.record(ref, epoch=epoch, reward=[float(row) for row in range(16)])
            plane.free(ref)
    held = history.known([f"p{step}-{row}" for step in range(8) for row in range(16)])
    assert sum(each.length for several in held for each in several) * 4 <= MIB * 1.2
    oldest = [min((each.epoch for each in several), default=9) for several in held]
    assert sum(epoch < 2 for epoch in oldest) == 0  # the older epochs went
    assert plane.stats().memory_used < 3 * MIB
    history.drop()
    assert plane.stats().shards == 0


def test_a_stream_is_followed_until_it_closes(plane: Any) -> None:
    stream = plane.stream("rollouts", tasks=["history", "train"])
    history = plane.history("h")
    for version in (1, 2):
        columns = {"response_ids": [np.arange(3, dtype=np.int32) + version] * 2, "reward": np.array([0.0, 1.0])}
        stream.append(columns, group=["a", "b"], version=version)
    stream.close()
    assert history.follow(stream, reward="reward") == 4
    assert tokens_of(history, "a") == [[1, 2, 3], [2, 3, 4]]
    assert [each.reward for each in history.responses("b")] == [1.0, 1.0]


def drafts(pipe: Any, address: str) -> None:
    with dp.connect(address) as plane:
        drafter = plane.history("h").drafter("p")
        drafter.accept([3, 4])
        pipe.send(drafter.propose(4))


def test_other_processes_draft_from_it(plane: Any, node: StandingNode) -> None:
    plane.history("h").add("p", [1, 2, 3, 4, 5, 6, 7, 8])
    drafter = plane.history("h").drafter("p")
    assert drafter.propose(4) == [1, 2, 3, 4]
    assert plane.history("h").drafter("q").propose() == []
    with Worker(drafts, node.address) as worker:
        assert worker.hear() == [5, 6, 7, 8]


def test_both_faces_are_one(node: StandingNode) -> None:
    async def run() -> list[int]:
        async with dp.aio.connect(node.address) as plane:
            history = plane.history("h")
            await asyncio.gather(*(history.add(f"p{n}", [1, 2, 3], epoch=1) for n in range(8)))
            return [len(await history.responses(f"p{n}")) for n in range(8)]

    assert asyncio.run(run()) == [1] * 8


def test_lengths_and_a_schedule_come_from_it(plane: Any) -> None:
    history = plane.history("h")
    keys = [f"p{n}" for n in range(32)]
    for epoch in (1, 2):
        ref = plane.put({"key": keys, "response_ids": [np.zeros(10 * (n + 1), np.int32) for n in range(32)]})
        history.record(ref, epoch=epoch)
        plane.free(ref)
    lengths = history.lengths([*keys, "unknown"])
    assert (np.diff(lengths.tokens[:32]) > 0).all()
    assert lengths.known.tolist() == [2] * 32 + [0]
    schedule = history.schedule(keys, 4, samples=2)
    assert sorted(np.concatenate(schedule.workers).tolist()) == list(range(32))
    assert schedule.bubbles < 0.1
    history.drop()


def test_a_durable_history_is_there_again(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="16MiB", spill=0, prewarm=0, data_dir=tmp_path / "data")
    with dp.connect(config=config) as plane:
        plane.history("h", durable=True).add("p", [1, 2, 3], epoch=5, reward=1.0)
    with dp.connect(config=config) as plane:
        [response] = plane.history("h").responses("p")
        assert (response.tokens.tolist(), response.epoch, response.reward) == ([1, 2, 3], 5, 1.0)


@needs_etcd
def test_hosts_share_a_history_and_outlive_one_of_them(tmp_path: Path) -> None:
    with (
        EtcdServer(tmp_path) as etcd,
        Host(tmp_path / "0", f"etcd://{etcd.address}/h") as one,
        Host(tmp_path / "1", f"etcd://{etcd.address}/h") as two,
        dp.connect(one.address) as first,
        dp.connect(two.address) as second,
    ):
        together(first, second)
        first.history("h").add("p", [1, 2, 3, 4], epoch=1)
        second.history("h").add("p", [5, 6, 7, 8], epoch=2)
        assert tokens_of(second.history("h"), "p") == [[1, 2, 3, 4], [5, 6, 7, 8]]
        before = second.stats()
        for _ in range(3):
            second.history("h").drafter("p")
        assert second.stats().put_bytes == before.put_bytes  # the copy of the host serves all
        first.history("h").add("q", [1], epoch=1)
        second.history("h").add("q", [2], epoch=2)
        first.close()
        one.kill()
        assert tokens_of(second.history("h"), "q") == [[2]]  # the other was on the dead host alone


def test_rollout_workers_pull_prompts_by_predicted_length(plane: Any) -> None:
    history = plane.history("h")
    for number in (*range(6), *range(6)):
        history.add(f"p{number}", np.zeros(10 * (number + 1), np.int32), epoch=0)
    prompts = plane.stream("prompts", tasks=["rollout"])
    for step in (0, 1, 2):
        keys = [f"p{number}" for number in range(6)]
        predicted = history.lengths(keys).tokens.round().tolist()
        prompts.append({"key": keys}, version=step, tags={"predicted_tokens": predicted})
    taken = []
    for _ in range(3):
        with prompts.consume("rollout", rows=4, columns=["key"], sampler=HistoPipe(max_lag=1)) as delivery:
            taken += [
                (version, int(key[1:]))
                for version, key in zip(delivery.versions, delivery.get()["key"].to_list(), strict=True)
            ]
    assert taken == [(0, n) for n in (5, 4, 3, 2, 1, 0)] + [(1, n) for n in range(6)]
    prompts.drop()
    history.drop()


def test_a_stream_is_recorded_in_its_history_beside_who_opened_it(plane: Any) -> None:
    history = plane.history("h")
    stream = plane.stream("rollouts", ["actor"], history=history.following(reward="reward"))
    assert list(stream.settings.tasks) == ["actor", "history"]
    for epoch in (1, 2):
        stream.append({"response_ids": [np.int32([epoch, 2]), np.int32([epoch])]}, group=["p", "q"], version=epoch)
        with stream.consume("actor", rows=2, min_rows=2, columns=["response_ids"]) as delivery:
            stream.extend(delivery.ref, {"reward": [0.5, 1.0]})
    stream.close()
    stream.follower.wait(60)
    assert stream.follower.rows == 4
    assert tokens_of(history, "p") == [[1, 2], [2, 2]]
    assert [(each.epoch, each.reward) for each in history.responses("q")] == [(1, 1.0), (2, 1.0)]
    with pytest.raises(dp.Misuse, match="a stream's history"):
        plane.stream("other", ["actor"], history="h")


def test_rows_that_a_closed_plane_left_are_recorded_by_the_next(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        plane.stream("rollouts", ["history"]).append({"response_ids": [[1], [2]]}, group="p")
        follower = plane.stream("rollouts", history=plane.history("h")).follower
        eventually(lambda: follower.rows == 2, "it records")
    assert not follower.running
    with dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", ["history"])
        stream.append({"response_ids": [[3]]}, group="p")
        stream.close()
        plane.stream("rollouts", history=plane.history("h")).follower.wait(60)
        assert sorted(tokens_of(plane.history("h"), "p")) == [[1], [2], [3]]
