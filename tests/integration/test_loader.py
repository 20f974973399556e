"""The loader against a real node: what it yields, when it acks, what comes again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane as dp
from dataplane.client import consuming
from dataplane.client import loader as loading
from dataplane.client.sync import Stream
from tests.processes import StandingNode, Worker, eventually


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[dp.Plane]:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as connected:
        yield connected


@pytest.fixture
def stream(plane: dp.Plane) -> Stream:
    return plane.stream("rollouts", tasks=["actor"])


def fill(stream: Stream, rows: int, *, closed: bool = True) -> None:
    stream.append({"id": list(range(rows))}, keys=[f"k{i}" for i in range(rows)])
    if closed:
        stream.close()


def load(stream: Stream, **how: Any) -> Any:
    return dp.loader(stream, "actor", **{"rows": 2, "columns": ["id"]} | how)


def figures(stream: Stream) -> Any:
    return stream.stats()["task"]["actor"]


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["id"].tolist()
    return found


COLUMNS = {
    "id": torch.arange(3),
    "ids": [[1, 2, 3], [4], []],
    "half": [torch.ones(2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16), torch.zeros(0).bfloat16()],
    "image": [torch.ones(1, 2, 4), torch.ones(3, 1, 4), torch.ones(2, 2, 4)],
    "patches": [torch.ones(2, 4), torch.ones(1, 4), torch.ones(3, 4)],
    "answer": ["a", "b", "c"],
    "raw": [b"1", b"", b"3"],
    "mixed": [{"x": 1, "t": "u"}, {"x": 2, "t": "v"}, {"x": 3, "t": "w"}],
}


def one_batch(stream: Stream, **how: Any) -> Any:
    stream.append(COLUMNS)
    stream.close()
    [batch] = load(stream, rows=3, columns=list(COLUMNS), **how)
    return batch


def test_jagged_batches_have_all_kinds_of_columns(stream: Stream) -> None:
    batch = one_batch(stream)
    assert list(batch) == list(COLUMNS)
    assert ids(batch) == [0, 1, 2]
    assert batch["ids"].is_nested
    assert batch["ids"].layout == torch.jagged
    assert [row.tolist() for row in batch["ids"].unbind()] == COLUMNS["ids"]
    assert [tuple(row.shape) for row in batch["patches"].unbind()] == [(2, 4), (1, 4), (3, 4)]
    assert [tuple(row.shape) for row in batch["image"]] == [(1, 2, 4), (3, 1, 4), (2, 2, 4)]
    assert batch["answer"] == ["a", "b", "c"]
    assert batch["raw"] == [b"1", b"", b"3"]
    assert [(row["x"].item(), row["t"]) for row in batch["mixed"]] == [(1, "u"), (2, "v"), (3, "w")]


def test_a_padding_value_for_a_column_that_is_not_read_is_refused(stream: Stream) -> None:
    with pytest.raises(dp.Misuse, match="padding_value names 'idz', and the columns are id, ids, "):
        one_batch(stream, collate="padded", padding_value={"idz": 1})


def test_padded_batches_have_masks_and_padding_values(stream: Stream) -> None:
    batch = one_batch(stream, collate="padded", padding_value={"ids": -1})
    masked = {f"{name}_mask" for name in ("ids", "half", "image", "patches")}
    assert set(batch) == {*COLUMNS, *masked}
    assert batch["ids"].tolist() == [[1, 2, 3], [4, -1, -1], [-1, -1, -1]]
    assert batch["ids_mask"].tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert batch["half"].dtype == torch.bfloat16
    assert batch["half"].tolist() == [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert batch["patches"].shape == (3, 3, 4)
    assert batch["patches"].sum(dim=(1, 2)).tolist() == [8.0, 4.0, 12.0]
    assert batch["patches_mask"].sum(dim=1).tolist() == [2, 1, 3]
    assert batch["image"].shape == (3, 3, 2, 4)
    assert batch["image_mask"].sum(dim=(1, 2)).tolist() == [2, 3, 4]
    assert torch.equal(batch["image_mask"][..., None].expand(3, 3, 2, 4), batch["image"] == 1)
    assert batch["answer"] == ["a", "b", "c"]


@pytest.mark.gpu
@pytest.mark.parametrize("collate", ["jagged", "padded"])
def test_loaded_tensors_are_in_pinned_memory(stream: Stream, collate: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA")
    batch = one_batch(stream, pin_memory=True, collate=collate)
    assert batch["id"].is_pinned()
    assert batch["ids"].is_pinned()
    assert batch["mixed"][0]["x"].is_pinned()


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.long), 3])
def test_a_loader_yields_each_row_once_and_acks_it_after_its_step(stream: Stream, prefetch: int) -> None:
    fill(stream, 20)
    seen, batches = [], load(stream, prefetch=prefetch)
    for step, batch in enumerate(batches):
        assert figures(stream)["acked"] == 2 * step == batches.rows
        seen += ids(batch)
    assert seen == list(range(20))
    assert (batches.steps, batches.rows, figures(stream)["acked"]) == (10, 20, 20)


def test_a_loader_left_by_break_returns_all_its_rows(stream: Stream) -> None:
    fill(stream, 8)
    batches = load(stream, prefetch=2)
    for batch in batches:
        assert ids(batch) == [0, 1]
        break
    assert (figures(stream)["pending"], figures(stream)["leased"], batches.steps) == (8, 0, 0)
    assert [ids(batch) for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_failing_collate_returns_its_rows_and_raises(stream: Stream) -> None:
    fill(stream, 4)
    with pytest.raises(ZeroDivisionError):
        list(load(stream, collate=lambda _: 1 // 0))
    assert (figures(stream)["pending"], figures(stream)["leased"]) == (4, 0)


def test_a_loader_timeout_starts_when_a_batch_is_requested(stream: Stream) -> None:
    fill(stream, 2, closed=False)
    batches = load(stream, timeout=0.5)
    iteration = iter(batches)
    next(iteration)
    over = time.monotonic() + 0.6
    eventually(lambda: time.monotonic() > over)  # a step of more than the timeout, in which the next is fetched ahead
    with pytest.raises(dp.NotReady) as caught:
        next(iteration)
    assert (caught.value.stream, caught.value.task) == ("rollouts", "actor")
    assert caught.value.waited_s > 0.45
    assert batches.steps == 1
    eventually(lambda: figures(stream)["waiting"] == 0)


def test_a_step_longer_than_its_lease_raises_lease_expired(plane: dp.Plane) -> None:
    stream = plane.stream("rollouts", tasks=["actor"], max_deliveries=255)  # else it may die meanwhile
    fill(stream, 2)
    batches = iter(load(stream, lease=0.05))
    next(batches)
    before = figures(stream)["redelivered"]  # the lease of a batch may end before the loader returns it
    eventually(lambda: figures(stream)["redelivered"] > before)  # to the loader itself, which fetches ahead
    with pytest.raises(dp.LeaseExpired):
        next(batches)
    del batches
    assert [ids(batch) for batch in load(stream)] == [[0, 1]]


def test_prefetched_deliveries_stay_leased_during_long_steps(stream: Stream) -> None:
    fill(stream, 6)
    loaded = load(stream, lease=1.0, prefetch=2)
    batches = iter(loaded)
    seen = ids(next(batches))
    eventually(lambda: figures(stream)["leased"] == 6)
    loaded.ack()
    until = time.monotonic() + 1.5
    eventually(lambda: time.monotonic() > until)  # a step that is longer than the lease
    for batch in batches:
        seen += ids(batch)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert figures(stream)["redelivered"] == 0


@pytest.mark.parametrize("loader", [False, True])
def test_a_delivery_whose_renewal_before_use_fails_is_given_back(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, loader: bool
) -> None:
    async def fails(*_: Any) -> bool:
        raise dp.OutcomeUnknown("the node has not answered")

    for module in (consuming, loading):
        monkeypatch.setattr(module, "is_old", lambda *_: True)
        monkeypatch.setattr(module, "still_leased", fails)
    fill(stream, 2)
    with pytest.raises(dp.OutcomeUnknown):
        next(iter(load(stream) if loader else stream.deliveries("actor", rows=2, columns=["id"])))
    assert [figures(stream)[of] for of in ("pending", "leased", "redelivered")] == [2, 0, 0]


def _train(pipe: Connection, address: str) -> None:
    with dp.connect(address) as plane:
        batches = load(plane.stream("rollouts"))
        for batch in batches:
            pipe.send((ids(batch), batches.state_dict()))
            pipe.recv()


def test_a_new_loader_resumes_after_a_killed_one(plane: dp.Plane, stream: Stream) -> None:
    fill(stream, 8)
    with Worker(_train, plane.address) as trainer:
        assert trainer.hear()[0] == [0, 1]
        seen, state = trainer.ask()
        trainer.kill()
    assert seen == [2, 3]
    acked = {"steps": 1, "rows": 2, "version": 0}
    assert state == {"form": 1, "stream": "rollouts", "task": "actor", "sampler": None, **acked}
    eventually(lambda: figures(stream)["leased"] == 0)
    resumed = load(stream)
    resumed.load_state_dict(state)
    assert [ids(batch) for batch in resumed] == [[2, 3], [4, 5], [6, 7]]
    assert (resumed.steps, resumed.rows) == (4, 8)


def _hang(pipe: Connection, address: str, loader: bool) -> None:
    with dp.connect(address) as plane:
        stream = plane.stream("rollouts")
        how: Any = {"rows": 2, "columns": ["id"]}
        loop: Any = dp.loader(stream, "actor", **how) if loader else stream.deliveries("actor", **how)
        for step, got in enumerate(loop):
            if step == 1:
                pipe.send((loop.delivery if loader else got).keys)
                pipe.recv()


@pytest.mark.parametrize("loader", [False, True])
def test_only_the_current_batch_of_a_killed_process_counts_as_delivered(plane: dp.Plane, loader: bool) -> None:
    stream = plane.stream("rollouts", tasks=["actor"], max_deliveries=1)
    fill(stream, 10)
    for current in (["k2", "k3"], ["k6", "k7"]):
        with Worker(_hang, plane.address, loader) as trainer:
            assert trainer.hear() == current
            eventually(lambda: figures(stream)["leased"] == 4, "the next is fetched ahead")
            trainer.kill()
        eventually(lambda: figures(stream)["leased"] == 0)
    assert stream.dead_letters("actor").keys == ["k2", "k3", "k6", "k7"]
    assert [ids(batch) for batch in load(stream, at_end="ignore")] == [[8, 9]]


class Turns:
    """A sampler of a user's own, with a state."""

    def __init__(self) -> None:
        self.turn = 0

    def choose(self, candidates: Any, want: int) -> Any:
        self.turn += 1
        return list(range(min(want, len(candidates))))

    def state_dict(self) -> dict[str, int]:
        return {"turn": self.turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turn = state["turn"]


def test_a_loader_state_contains_the_sampler_state(stream: Stream) -> None:
    weighted = dp.Weighted("kind", {"a": 3.0, "b": 1.0})
    state = json.loads(json.dumps(load(stream, sampler=weighted).state_dict()))
    resumed = load(stream, sampler=dp.Weighted("kind", {"a": 1.0, "b": 1.0}))
    resumed.load_state_dict(state)
    assert resumed.state_dict()["sampler"] == load(stream, sampler=weighted).state_dict()["sampler"]
    with pytest.raises(dp.Misuse, match="another sampler"):
        load(stream, sampler=dp.Freshest(max_lag=3)).load_state_dict(state)
    with pytest.raises(dp.Misuse, match="another sampler"):
        load(stream).load_state_dict(state)
    with pytest.raises(dp.Misuse, match="another sampler"):
        load(stream, sampler=dp.CompleteGroups(2)).load_state_dict(load(stream).state_dict())
    load(stream).load_state_dict(load(stream, sampler=dp.Fifo()).state_dict())  # which is the default

    fill(stream, 4)
    first, second = Turns(), Turns()
    batches = load(stream, sampler=first)
    for _ in batches:
        state = batches.state_dict()
        break
    assert first.turn
    load(stream, sampler=second).load_state_dict(state)
    assert second.turn == state["sampler"]["turn"] > 0


def test_a_loader_over_a_dropped_stream_raises_closed(stream: Stream) -> None:
    fill(stream, 4, closed=False)
    batches = load(stream, at_end="ignore")
    stream.drop()
    with pytest.raises(dp.Closed) as caught:
        list(batches)
    assert not caught.value.drained


def test_a_loader_raises_peer_unavailable_when_its_node_dies(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", tasks=["actor"])
        batches = iter(load(stream))
        waiting = threading.Thread(target=lambda: (eventually(lambda: figures(stream)["waiting"]), node.kill()))
        waiting.start()
        with pytest.raises(dp.PeerUnavailable):
            next(batches)
        waiting.join()
