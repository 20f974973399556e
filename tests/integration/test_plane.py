"""Putting, getting and freeing, by both faces, with a real node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dataplane as dp
from tests.cases import each_case
from tests.processes import MIB, StandingNode, eventually, pattern


def columns(rows: int = 6) -> dict[str, Any]:
    """A rollout's columns, one of each kind; the larger ones become shards of their own."""
    lengths = [(7 * row) % 5 for row in range(rows)]
    return {
        "input_ids": [np.arange(n, dtype=np.int64) + row for row, n in enumerate(lengths)],
        "pixel_values": [np.full((n + 1, 1176), row, dtype=np.float32) for row, n in enumerate(lengths)],
        "log_probs": torch.arange(rows * 3, dtype=torch.bfloat16).reshape(rows, 3),
        "reward": np.linspace(0, 1, rows),
        "big": pattern(3, rows * (64 << 10), rows),
        "answer": [f"réponse {row}" for row in range(rows)],
        "raw": [bytes([row]) * row for row in range(rows)],
        "meta": [{"uid": row, "tags": ["a"] * row} for row in range(rows)],
    }


def check(batch: dp.Batch, rows: list[int], total: int = 6) -> None:
    """Fails where the batch is not those rows of `columns()`."""
    expected = columns(total)
    assert len(batch) == len(rows)
    for name in batch:
        values = expected[name]
        if isinstance(values, torch.Tensor):
            assert torch.equal(batch[name].torch(), values[rows])
        elif isinstance(values, np.ndarray):
            assert np.array_equal(batch[name].numpy(), values[rows])
        elif isinstance(values[0], np.ndarray):
            for got, row in zip(batch[name].numpy(), rows, strict=True):
                assert got.dtype == values[row].dtype
                assert np.array_equal(got, values[row])
        else:
            assert batch[name].to_list() == [values[row] for row in rows]


def test_the_first_put_of_a_process_may_reserve_memory(node: StandingNode) -> None:
    """It is made while no event loop runs."""
    with dp.connect(node.address) as plane:
        assert len(plane.get(plane.put({"x": np.zeros((256, 128), np.int32)}))["x"]) == 256
        assert plane.stats().reserved_bytes == 0


def test_single_rows_of_a_shard_can_be_freed(plane: Any) -> None:
    ref = plane.put(columns())
    plane.free(ref[1:3])
    check(plane.get(ref[3:]), [3, 4, 5])
    check(plane.get(ref[:1]), [0])
    for gone in (ref, ref[1:2], ref[[0, 2]], ref.select("answer")[:2], ref.select("big")[2:]):
        with pytest.raises(dp.Freed):
            plane.get(gone)
    plane.free(ref[[0, 5]])
    check(plane.get(ref[3:5]), [3, 4])
    assert plane.stats().memory_used > 0
    plane.free(ref[3:5])
    assert plane.stats().memory_used == 0


def test_freed_rows_of_a_large_shard_are_known_up_to_a_bound(plane: Any) -> None:
    """A row of each block of 65,536 is freed; the bits of 25 million rows are sent."""
    block = 1 << 16
    ref = plane.put({"x": np.zeros(400 * block, np.uint8)})
    plane.free(ref[: 360 * block : block])
    assert len(plane.get(ref[1:block])) == block - 1
    with pytest.raises(dp.Freed):
        plane.get(ref[5 * block :])
    plane.free(ref[360 * block :: block])
    with pytest.raises(dp.LimitExceeded, match="put fewer rows"):
        plane.get(ref[1:block])
    plane.free(ref)


def test_scopes_are_freed_together(plane: Any) -> None:
    first = plane.put(columns(), scope="step-1")
    second = plane.put({"x": [1, 2]}, scope="step-1")
    other = plane.put(columns(), scope="step-2")
    kept = plane.put({"x": [3]})
    plane.free(scope="step-1")
    for gone in (first, second):
        with pytest.raises(dp.Freed):
            plane.get(gone)
    check(plane.get(other), list(range(6)))
    plane.free(scope="step-1")
    plane.free(scope="never")
    plane.free(scope="step-2")
    assert plane.get(kept)["x"].to_list() == [3]
    assert plane.stats().shards == 1


@each_case("size", [4096, 4 * MIB], ids=["inline", "shared"])
@each_case("timeout", [0, -3.5, np.float32(0), -float("inf")])
def test_a_call_past_its_deadline_succeeds_only_without_waiting(plane: Any, size: int, timeout: float) -> None:
    plane.free(plane.put({"x": pattern(1, size)}, timeout=timeout))
    held = plane.put({"x": pattern(0, 32 * MIB)}, timeout=60)
    view = plane.get(held)["x"].numpy()
    with pytest.raises(dp.Backpressure):
        plane.put({"x": pattern(2, size)}, timeout=timeout)
    assert plane.stats().waiting == 0
    assert view[0, 7] == 7
    del view
    plane.free(held)
    eventually(lambda: plane.stats().memory_used == 0, "also if it was being spilled")


def test_everything_after_close_is_closed(node: StandingNode, plane: Any) -> None:
    ref = plane.put({"x": pattern(1, MIB)})
    open_draft = plane.draft({"x": dp.dense((1,), "uint8")})
    plane.close()
    plane.close()
    calls = [
        lambda: plane.put({"x": [1]}),
        lambda: plane.get(ref),
        lambda: plane.free(ref),
        lambda: plane.stats(),
        lambda: plane.draft({"x": dp.dense((1,), "uint8")}),
        lambda: open_draft.seal(),
    ]
    for call in calls:
        with pytest.raises(dp.Closed):
            call()
    open_draft.drop()
    with dp.connect(node.address) as other:
        assert np.array_equal(other.get(ref)["x"].numpy(), pattern(1, MIB))
        eventually(lambda: other.stats().reserved_bytes == 0, "the draft's memory is back")


def test_bytes_on_disk_are_attributed_too(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="8MiB", spill="8MiB", spill_dir=tmp_path, prewarm=0, compression="never")
    with dp.connect(config=config) as plane:
        for seed in range(3):
            plane.put({"x": pattern(seed, 2 * MIB)}, scope="old")
        views = [plane.get(plane.put({"x": pattern(seed, 2 * MIB)}, scope="new"))["x"].numpy() for seed in range(3)]
        with pytest.raises(dp.Backpressure, match=r"6\.0 MiB pinned of scope new.* spilled of scope old.*; the disk"):
            plane.put({"x": pattern(9, 2 * MIB)}, timeout=0)
        held = [(each["how"], each["owner"]) for each in plane.stats().holders]
        assert held == [("pinned", "scope new"), ("stored", "scope old"), ("spilled", "scope old")]
        assert len(views) == 3


def test_memory_is_attributed_to_streams_tables_and_scopes(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:

        def owned() -> dict[str, int]:
            return {holder["owner"]: holder["bytes"] for holder in plane.stats().holders}

        plane.put({"x": pattern(1, MIB)}, scope="step 7")
        stream, table = plane.stream("rollouts", tasks=["actor"]), plane.table("prompts")
        stream.append({"x": pattern(2, 2 * MIB)})
        table.upsert(["a"], {"x": pattern(3, 3 * MIB)})
        stream.append(plane.put({"x": pattern(4, 2 * MIB)}))
        assert owned() == {"stream rollouts": 4 * MIB, "table prompts": 3 * MIB, "scope step 7": MIB}
        assert all(0 <= holder["oldest_s"] < 600 for holder in plane.stats().holders)
        with stream.consume("actor", rows=2, columns=["x"], min_rows=2) as delivery:
            batch = delivery.get()
            with pytest.raises(dp.Backpressure, match=r"4\.0 MiB pinned of stream rollouts"):
                plane.put({"x": pattern(5, 30 * MIB)}, timeout=0.1)
            assert len(batch) == 2
            del batch, delivery
        table.drop()
        eventually(lambda: not owned().keys() - {"scope step 7"})  # that may be on disk by now
