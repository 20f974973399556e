"""A prompt's images, put once for each of its responses by TransferQueue's calls: stored once, freed with the last."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensordict", reason="needs tensordict: make test-integrations")
import dataplane as dp  # noqa: E402
from dataplane.integrations import process  # noqa: E402
from tests.integrations.images import IMAGE, PAGES, check, pixels, trajectories  # noqa: E402
from tests.integrations.marks import SYSTEMS  # noqa: E402
from tests.processes import eventually  # noqa: E402

pytestmark = SYSTEMS


def used() -> int:
    return process.plane().stats().memory_used


def test_what_the_responses_of_a_prompt_share_is_stored_once(ours: Any, pid: str) -> None:
    before = used()
    pairs = [(prompt, response) for prompt in range(4) for response in range(8)]
    keys = [f"{prompt}_{response}" for prompt, response in pairs]
    for key, (prompt, response) in zip(keys, pairs, strict=True):
        if response % 2:
            ours.kv_batch_put(keys=[key], fields=trajectories([prompt]), partition_id=pid)
        else:
            fields = {"multi_modal_inputs": pixels(prompt), "input_ids": torch.arange(5 + prompt)}
            ours.kv_put(key, pid, fields=fields)
    assert used() - before <= (1 / 8 + 0.05) * len(keys) * IMAGE
    check(ours, pid, keys, [prompt for prompt, _ in pairs])
    ours.kv_clear(keys[::8], pid)  # the first of each, whose put stored it
    ours.kv_clear(keys[1::8], pid)
    check(ours, pid, keys[2:8] + keys[10:16], [0] * 6 + [1] * 6)
    ours.kv_clear(keys[:8], pid)
    eventually(lambda: used() - before <= 3 * IMAGE + 4 * PAGES, "the first prompt's image has gone")
    ours.kv_clear(keys, pid)
    eventually(lambda: used() == before, "nothing is left")


def test_responses_put_at_once_wait_for_one_of_them(ours: Any, pid: str) -> None:
    before = used()

    async def put_all() -> None:
        await asyncio.gather(
            *(ours.async_kv_batch_put(keys=[str(n)], fields=trajectories([7]), partition_id=pid) for n in range(8))
        )

    for _ in range(3):  # the second time what is known is gone, and all find that out at once
        asyncio.run(put_all())
        assert used() - before <= IMAGE + 8 * PAGES
        check(ours, pid, [str(n) for n in range(8)], [7] * 8)
        ours.kv_clear([str(n) for n in range(8)], pid)
        eventually(lambda: used() == before, "the last one frees it")


def test_responses_of_several_prompts_put_at_once_are_stored_once_a_prompt(ours: Any, pid: str) -> None:
    before = used()
    waves = [[(prompt, wave) for prompt in range(wave + 1)] for wave in range(6)]  # of each, the last is a new prompt's

    async def run(wave: list[tuple[int, int]]) -> None:
        puts = [
            ours.async_kv_batch_put(
                keys=[f"{prompt}_{number}"], fields=trajectories([prompt]), partition_id=pid, tags=[{"n": prompt}]
            )
            for prompt, number in wave
        ]
        await asyncio.gather(*puts)

    for wave in waves:
        asyncio.run(run(wave))
    pairs = [pair for wave in waves for pair in wave]
    keys = [f"{prompt}_{number}" for prompt, number in pairs]
    assert used() - before <= 6 * IMAGE + len(keys) * PAGES // 2
    check(ours, pid, keys, [prompt for prompt, _ in pairs])
    ours.kv_clear(keys, pid)
    eventually(lambda: used() == before, "nothing is left")


def test_rows_of_one_put_share(ours: Any, pid: str) -> None:
    before = used()
    ours.kv_batch_put(keys=["a", "b", "c"], fields=trajectories([1, 2, 1]), partition_id=pid)
    ours.kv_batch_put(keys=["d", "e"], fields=trajectories([2, 1]), partition_id=pid)
    assert used() - before <= 2 * IMAGE + 2 * PAGES
    check(ours, pid, list("edcba"), [1, 2, 1, 2, 1])
    ours.kv_clear(["a", "b", "c"], pid)
    check(ours, pid, ["d", "e"], [2, 1])
    ours.kv_clear(["d", "e"], pid)
    eventually(lambda: used() == before, "nothing is left")


def test_a_row_that_is_replaced_takes_nothing_from_others(ours: Any, pid: str) -> None:
    for key, prompt in (("a", 1), ("b", 1), ("a", 2), ("b", 1)):
        ours.kv_batch_put(keys=[key], fields=trajectories([prompt]), partition_id=pid)
    check(ours, pid, ["a", "b"], [2, 1])
    ours.kv_batch_put(keys=["b"], fields=trajectories([2]), partition_id=pid)
    check(ours, pid, ["b", "a"], [2, 2])


def test_partitions_share_and_are_cleared_apart(ours: Any, pid: str) -> None:
    ours.kv_batch_put(keys=["a"], fields=trajectories([1]), partition_id=pid)
    before = used()
    ours.kv_batch_put(keys=["a"], fields=trajectories([1]), partition_id=f"{pid}_val")
    assert used() - before <= PAGES
    ours.get_client().clear_partition(pid)
    check(ours, f"{pid}_val", ["a"], [1])
    ours.get_client().clear_partition(f"{pid}_val")


def test_rows_that_are_inserted_share(ours: Any, pid: str) -> None:
    before, client = used(), ours.get_client()
    metas = [client.put(trajectories([3]), partition_id=pid) for _ in range(8)]
    assert used() - before <= IMAGE + 8 * PAGES
    for _ in metas:
        found = client.get_data(client.get_meta(["multi_modal_inputs"], 1, pid, mode="fetch", task_name="t"))
        (entry,) = found["multi_modal_inputs"]
        assert torch.equal(
            (entry if isinstance(entry, dict) else entry.data)["pixel_values"], pixels(3)["pixel_values"]
        )
        del found, entry
    client.clear_partition(pid)
    eventually(lambda: used() == before, "nothing is left")


def test_a_put_that_fails_leaves_nothing_and_what_it_shares(ours: Any, pid: str) -> None:
    ours.kv_batch_put(keys=["a"], fields=trajectories([1]), partition_id=pid)
    before = used()
    fields = trajectories([1])
    fields["large"] = torch.zeros(1, 160 << 20, dtype=torch.uint8)
    with pytest.raises(dp.LimitExceeded):
        ours.kv_batch_put(keys=["b"], fields=fields, partition_id=pid)
    assert used() == before
    check(ours, pid, ["a"], [1])
