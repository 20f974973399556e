"""Histories, end to end: recorded, bounded, read in place, by several processes, over hosts and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.etcd import needs_etcd
from tests.integration.test_hosts import connected
from tests.processes import MIB, StandingNode, eventually


@pytest.fixture
def plane(node: StandingNode) -> Any:
    with dp.connect(node.address) as plane:
        yield plane


def tokens_of(history: Any, key: str) -> list[list[int]]:
    return [each.tokens.tolist() for each in history.responses(key)]


def test_responses_are_listed_by_prompt_with_the_oldest_epoch_first(plane: Any) -> None:
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


def test_rows_without_a_group_are_not_recorded(plane: Any) -> None:
    stream = plane.stream("rollouts", tasks=["history"])
    history = plane.history("h")
    stream.append({"response_ids": [np.array([9], np.int32)]})
    stream.append({"response_ids": [np.array([1, 2], np.int32)]}, group="a", version=3)
    stream.close()
    assert history.follow(stream) == 1
    assert tokens_of(history, "a") == [[1, 2]]
    assert history.responses("a")[0].epoch == 3
    assert history.responses("None") == []


def test_a_durable_history_survives_a_restart(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="16MiB", spill=0, prewarm=0, data_dir=tmp_path / "data")
    with dp.connect(config=config) as plane:
        plane.history("h", durable=True).add("p", [1, 2, 3], epoch=5, reward=1.0)
    with dp.connect(config=config) as plane:
        [response] = plane.history("h").responses("p")
        assert (response.tokens.tolist(), response.epoch, response.reward) == ([1, 2, 3], 5, 1.0)


@needs_etcd
def test_hosts_share_a_history_and_outlive_one_of_them(tmp_path: Path) -> None:
    with connected(tmp_path) as ((one, _), (first, second)):
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


def test_rows_left_unrecorded_by_a_closed_plane_are_recorded_by_the_next(node: StandingNode) -> None:
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
