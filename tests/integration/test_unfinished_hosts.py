"""Rows in progress over several nodes on loopback: pieces that stay on the hosts where they were made, read as one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.integration.test_stream_hosts import nothing_kept
from tests.processes import eventually


def test_pieces_of_several_hosts_are_one_row(planes: list[Any]) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in planes]
    row = streams[0].begin(group="g", version=1, columns={"prompt": ["1+1="]})
    made = []
    for number in range(6):
        piece = np.arange(number * 10, number * 10 + number)
        row.append({"response_ids": [piece], "reward": np.array([number])}, version=number // 2)
        made += piece.tolist()
        assert [each.key for each in streams[(number + 1) % 3].unfinished()] == [row.key]
        with pytest.raises(dp.LeaseExpired):
            streams[(number + 1) % 3].resume(row.key)
        before = row
        before.release()
        row = streams[(number + 1) % 3].resume(None if number % 2 else row.key)
        assert row.tokens == len(made)
        assert row.get("response_ids")["response_ids"].to_list() == [made]
        with pytest.raises(dp.LeaseExpired):
            before.append({"response_ids": [[1]]})
    row.finish()
    row.finish()
    assert streams[1].unfinished() == []
    with streams[1].consume("actor", rows=1, columns=["prompt", "response_ids", "version_spans", "reward"]) as delivery:
        batch = delivery.get()
        assert batch["response_ids"].to_list() == [made]
        assert batch["version_spans"].to_list() == [[[0, 1, 0], [1, 6, 1], [6, 15, 2]]]
        assert (batch["prompt"].to_list(), batch["reward"].to_list()) == (["1+1="], [5])
        assert (delivery.groups, delivery.versions, delivery.keys) == (["g"], [0], [row.key])
        del batch
    eventually(lambda: all(map(nothing_kept, planes)), "every piece is freed where it is")


def test_replicated_pieces_of_an_unfinished_row_survive_the_death_of_a_host(
    hosts: list[Any], planes: list[Any]
) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"], replicas=2) for plane in planes]
    row = streams[0].begin("r", group="g")
    row.append({"response_ids": [[1, 2]]}, version=1)
    row.release()
    row = streams[1].resume("r")
    row.append({"response_ids": [[3]]}, version=1)
    row.append({"response_ids": [[4]]}, version=2)
    hosts[1].kill()
    taken: list[Any] = []

    def free() -> bool:
        with suppress(dp.Retryable):
            taken.append(streams[2].resume())
        return bool(taken) and taken[-1] is not None

    eventually(free, "who died holds nothing")
    assert taken[-1].tokens == 4
    taken[-1].append({"response_ids": [[5]]}, version=2)
    taken[-1].finish()
    with streams[0].consume("actor", rows=1, columns=["response_ids", "version_spans"], timeout=60) as delivery:
        batch = delivery.get()
        assert batch["response_ids"].to_list() == [[1, 2, 3, 4, 5]]
        assert batch["version_spans"].to_list() == [[[0, 3, 1], [3, 5, 2]]]
        del batch
    assert streams[0].lost() == []
