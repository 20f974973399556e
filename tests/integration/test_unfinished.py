"""Rows in progress, end to end: begun, brought piece by piece, taken up by others, finished or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.integration.test_hosts import Host
from tests.integration.test_stream_hosts import nothing_kept
from tests.processes import StandingNode, eventually

BOTH = pytest.mark.parametrize("node", ["alone", "clustered"], indirect=True)
"""A node that keeps streams by itself, and one whose streams have partitions."""


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    make = Host if getattr(request, "param", "") == "clustered" else StandingNode
    with make(tmp_path / "node", memory="32MiB") as node:
        yield node


@pytest.fixture
def plane(node: Any) -> Iterator[Any]:
    with dp.connect(node.address) as plane:
        yield plane


@pytest.fixture
def stream(plane: Any) -> Iterator[Any]:
    """A stream that leaves nothing behind once all rows are done."""
    yield plane.stream("rollouts", tasks=["actor"])
    eventually(lambda: plane.stats().shards == 0, "nothing is left in the node")


def taken(stream: Any, *columns: str, rows: int = 1) -> dict[str, list[Any]]:
    """Rows that are ready, once there are so many, by column; acked."""
    with stream.consume("actor", rows=rows, min_rows=rows, columns=columns, timeout=30) as delivery:
        batch = delivery.get()
        return {name: batch[name].to_list() for name in columns}


def test_ragged_columns_are_joined_and_other_columns_take_the_last_value(stream: Any) -> None:
    row = stream.begin("r", columns={"prompt": ["a"], "prompt_ids": [[7, 8]]}, tags={"domain": "math"})
    row.append({"response_ids": [[1, 2]], "logprobs": [np.array([[0.5], [1.5]], np.float32)]}, version=3)
    row.append({"response_ids": [[]], "score": np.array([1.0]), "prompt": ["b"]}, version=4)
    row.append({"response_ids": [[3]], "score": np.array([2.0]), "why": ["stop"]}, version=4)
    row.finish()
    names = ("prompt", "prompt_ids", "response_ids", "logprobs", "score", "why", "version_spans")
    assert taken(stream, *names) == {
        "prompt": ["b"],
        "prompt_ids": [[7, 8]],
        "response_ids": [[1, 2, 3]],
        "logprobs": [[[0.5], [1.5]]],
        "score": [2.0],
        "why": ["stop"],
        "version_spans": [[[0, 2, 3], [2, 3, 4]]],
    }


def test_a_mismatched_piece_is_refused_and_freed(plane: Any, stream: Any) -> None:
    row = stream.begin("r")
    row.append({"response_ids": [[1]], "hidden": [np.zeros((1, 3))]})
    shards = plane.stats().shards
    with pytest.raises(dp.SchemaMismatch):
        row.append({"response_ids": [[1.5]]})
    with pytest.raises(dp.SchemaMismatch, match="first dimension"):
        row.append({"hidden": [np.zeros((1, 4))]})
    for dense in (np.array([[2]]), [2]):
        with pytest.raises(dp.SchemaMismatch, match="pass a list with the array"):
            row.append({"response_ids": dense})
    with pytest.raises(dp.Misuse):
        row.append({"response_ids": [[1], [2]]})
    eventually(lambda: plane.stats().shards == shards, "what was refused is freed")
    row.append({"response_ids": [[2]], "logprobs": np.array([[0.5]])})
    with pytest.raises(dp.SchemaMismatch, match="dense arrays replace each other"):
        row.append({"response_ids": [[3]], "logprobs": np.array([[0.25]])})
    row.finish()
    assert taken(stream, "response_ids", "logprobs") == {"response_ids": [[1, 2]], "logprobs": [[0.5]]}


@BOTH
def test_a_piece_with_a_column_of_version_spans_is_refused(plane: Any, stream: Any) -> None:
    spans = {"version_spans": [np.zeros((1, 3), np.int64)]}
    with pytest.raises(dp.Misuse, match="version_spans"):
        stream.begin("r", columns=spans)
    row = stream.begin("r")
    row.append({"response_ids": [[1]]}, version=3)
    with pytest.raises(dp.Misuse, match="version_spans"):
        row.append(spans)
    ref = plane.put(spans)
    with pytest.raises(dp.Misuse, match="version_spans"):
        row.append(ref)
    plane.free(ref)
    row.finish()
    assert taken(stream, "version_spans") == {"version_spans": [[[0, 1, 3]]]}


def test_a_row_is_not_finished_after_it_was_abandoned_nor_the_reverse(stream: Any) -> None:
    abandoned, finished = stream.begin("a"), stream.begin("b")
    abandoned.abandon()
    abandoned.abandon()
    with pytest.raises(dp.Misuse, match="abandoned"):
        abandoned.finish()
    finished.append({"response_ids": [[1]]})
    finished.finish()
    finished.finish()
    with pytest.raises(dp.Misuse, match="finished"):
        finished.abandon()
    assert taken(stream, "response_ids") == {"response_ids": [[1]]}


async def test_a_row_can_be_extended_and_finished_after_a_failed_finish(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise dp.Backpressure

    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("rollouts", tasks=["actor"])
        row = await stream.begin("r")
        await row.append({"response_ids": [[1]]})
        with monkeypatch.context() as patched:
            patched.setattr(stream.writes, "extend", refuse)
            with pytest.raises(dp.Backpressure):
                await row.finish()
        await row.append({"response_ids": [[2]]})
        await row.finish()
        async with stream.consume("actor", rows=1, columns=["response_ids", "version_spans"]) as delivery:
            batch = await delivery.get()
            assert batch["response_ids"].to_list() == [[1, 2]]
            assert batch["version_spans"].to_list() == [[[0, 2, 0]]]
            del batch


async def test_a_piece_without_a_version_has_the_version_of_the_piece_before(node: Any) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("rollouts", tasks=["actor"])
        row = await stream.begin("r", version=1)
        await asyncio.gather(row.append({"response_ids": [[1]]}, version=5), row.append({"response_ids": [[2]]}))
        assert row.version == 5
        assert [token.spans for token in await stream.unfinished()] == [[(5, 2)]]
        await row.abandon()


def test_a_row_that_is_released_in_its_block_is_left_in_progress(stream: Any) -> None:
    with stream.begin("r") as row:
        row.append({"response_ids": [[1]]})
        row.release()
    (listed,) = stream.unfinished()
    assert f"tokens={listed.tokens}" in repr(listed)
    assert (listed.key, listed.pieces, listed.free) == ("r", 1, True)
    with stream.resume("r") as row:
        row.release()
        row.append({"response_ids": [[2]]})  # which takes it again
    assert taken(stream, "response_ids") == {"response_ids": [[1, 2]]}


@BOTH
def test_more_unfinished_rows_than_a_message_holds_are_listed(stream: Any) -> None:
    keys = [str(at) for at in range(9)]
    for key in keys:
        stream.begin(key, tags={"text": "x" * 600_000})
    listed = stream.unfinished()
    assert [each.key for each in listed] == keys
    stream.drop()


@pytest.mark.parametrize("lost", [dp.OutcomeUnknown, asyncio.CancelledError])
async def test_a_begin_with_an_unknown_outcome_can_be_repeated(
    node: Any, monkeypatch: pytest.MonkeyPatch, lost: type[BaseException]
) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("rollouts", tasks=["actor"])
        append = stream.writes.append_block

        async def unanswered(*columns: Any, **how: Any) -> None:
            await append(*columns, **how)
            raise lost

        with monkeypatch.context() as patched:
            patched.setattr(stream.writes, "append_block", unanswered)
            with pytest.raises(lost):
                await stream.begin("r", group="g")
        with pytest.raises(dp.Misuse):
            await stream.begin("r", group="another")
        row = await stream.begin("r", group="g")
        await row.append({"response_ids": [[1]]})
        assert [each.pieces for each in await stream.unfinished()] == [1]
        with pytest.raises(dp.Misuse):
            await stream.begin("r", group="g")


@pytest.mark.parametrize("key", ["r", None])
@pytest.mark.parametrize("lost", [dp.OutcomeUnknown, asyncio.CancelledError])
async def test_a_row_is_free_after_an_unanswered_resume(
    node: Any, monkeypatch: pytest.MonkeyPatch, lost: type[BaseException], key: str | None
) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("rollouts", tasks=["actor"])
        await (await stream.begin("r")).release()
        ask = stream.ask

        async def unanswered(*asked: Any) -> None:
            await ask(*asked)
            raise lost

        with monkeypatch.context() as patched:
            patched.setattr(stream, "ask", unanswered)
            with pytest.raises(lost):
                await stream.resume(key)
        assert (await stream.resume(key)).key == "r"


@BOTH
def test_unfinished_rows_round_trip_through_a_checkpoint(plane: Any, stream: Any, tmp_path: Path) -> None:
    row = stream.begin("r", group="g", version=1, columns={"prompt": ["p"]}, tags={"domain": "math"})
    row.append({"response_ids": [[1, 2]]}, version=2)
    row.append({"response_ids": [[3]]}, version=3)
    stream.checkpoint(tmp_path / "file")
    row.append({"response_ids": [[9]]}, version=3)
    row.abandon()
    again = plane.restore(tmp_path / "file", name="again")
    (listed,) = again.unfinished()
    assert (listed.key, listed.group, listed.tags, listed.pieces) == ("r", "g", {"domain": "math"}, 2)
    assert (listed.spans, listed.free, listed.version) == ([(2, 2), (3, 1)], True, 1)
    with pytest.raises(dp.NotReady):
        again.consume("actor", rows=1, columns=["response_ids"], timeout=0.01)
    taken_up = again.resume("r")
    assert taken_up.tokens == 3
    assert [*taken_up.get()] == ["prompt", "response_ids"]
    taken_up.append({"response_ids": [[4]]}, version=3)
    taken_up.append({"prompt": ["q"]}, version=4)
    assert taken_up.spans == again.unfinished()[0].spans == [(2, 2), (3, 2)]
    with pytest.raises(dp.LeaseExpired, match="by another object in this one"):
        again.resume("r")
    taken_up.finish()
    found = taken(again, "prompt", "response_ids", "version_spans")
    assert (found["prompt"], found["response_ids"]) == (["q"], [[1, 2, 3, 4]])
    assert found["version_spans"] == [[[0, 2, 2], [2, 4, 3]]]
    again.drop()


# Rows in progress over several nodes on loopback: pieces that stay on the hosts where they were made, read as one.


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
    assert sum(plane.stats().streams_in_all for plane in planes) == 1, "the node that leads it counts it"
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
