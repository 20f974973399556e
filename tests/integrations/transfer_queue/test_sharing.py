"""A prompt's images, put once for each of its responses by TransferQueue's calls: stored once, freed with the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane as dp
from dataplane.integrations import process
from tests.integrations.images import IMAGE, PAGES, check, pixels, trajectories
from tests.integrations.marks import SYSTEMS
from tests.processes import eventually

pytestmark = SYSTEMS


@pytest.fixture
def queue(ours: Any) -> Any:
    return ours


@pytest.fixture
def used(queue: Any) -> Callable[[], int]:
    """Bytes that were put since the test began."""
    before = process.plane().stats().memory_used
    return lambda: process.plane().stats().memory_used - before


@pytest.fixture
def partition(queue: Any, pid: str, used: Callable[[], int]) -> Iterator[str]:
    yield pid
    queue.get_client().clear_partition(pid)
    eventually(lambda: used() == 0, "nothing is left")


def put(queue: Any, partition: str, keys: list[str], prompts: list[int]) -> None:
    queue.kv_batch_put(keys=keys, fields=trajectories(prompts), partition_id=partition)


def test_an_image_shared_by_responses_of_a_prompt_is_stored_once(queue: Any, partition: str, used: Any) -> None:
    pairs = [(prompt, response) for prompt in range(4) for response in range(8)]
    keys = [f"{prompt}_{response}" for prompt, response in pairs]
    for key, (prompt, response) in zip(keys, pairs, strict=True):
        if response % 2:
            put(queue, partition, [key], [prompt])
        else:
            fields = {"multi_modal_inputs": pixels(prompt), "input_ids": torch.arange(5 + prompt)}
            queue.kv_put(key, partition, fields=fields)
    assert used() <= (1 / 8 + 0.05) * len(keys) * IMAGE
    check(queue, partition, keys, [prompt for prompt, _ in pairs])
    for some in (keys[::8], keys[1::8], keys[3:8]):  # the first of each among them, whose put stored it
        queue.kv_clear(keys=some, partition_id=partition)
        queue.kv_clear(keys=some, partition_id=partition)
    check(queue, partition, [keys[2], *keys[10:16]], [0] + [1] * 6)
    queue.kv_clear(keys=keys[2:3], partition_id=partition)
    eventually(lambda: used() <= 3 * IMAGE + 4 * PAGES, "the first prompt's image has gone")
    check(queue, partition, keys[10:16], [1] * 6)


def test_concurrent_puts_of_one_image_store_it_once(queue: Any, partition: str, used: Any) -> None:
    keys = [str(number) for number in range(8)]

    async def put_all() -> None:
        puts = [queue.async_kv_batch_put(keys=[k], fields=trajectories([7]), partition_id=partition) for k in keys]
        await asyncio.gather(*puts)

    for _ in range(3):  # the second time what is known is gone, and all find that out at once
        asyncio.run(put_all())
        assert used() <= IMAGE + 8 * PAGES
        check(queue, partition, keys, [7] * 8)
        queue.kv_clear(keys=keys, partition_id=partition)
        eventually(lambda: used() == 0, "the last one frees it")


def test_a_replaced_row_does_not_affect_rows_that_share_its_image(queue: Any, partition: str, used: Any) -> None:
    for key, prompt in (("a", 1), ("b", 1), ("a", 2), ("b", 1)):
        put(queue, partition, [key], [prompt])
    check(queue, partition, ["a", "b"], [2, 1])
    put(queue, partition, ["b"], [2])
    check(queue, partition, ["b", "a"], [2, 2])
    eventually(lambda: used() <= IMAGE + PAGES, "the first image has gone")


def test_a_failed_put_stores_nothing_and_preserves_shared_images(queue: Any, partition: str, used: Any) -> None:
    put(queue, partition, ["a"], [1])
    before, fields = used(), trajectories([1])
    fields["large"] = torch.zeros(1, 160 << 20, dtype=torch.uint8)
    with pytest.raises(dp.LimitExceeded):
        queue.kv_batch_put(keys=["b"], fields=fields, partition_id=partition)
    assert used() == before
    queue.kv_clear(keys=["b"], partition_id=partition)
    check(queue, partition, ["a"], [1])


def test_partitions_share_images_and_are_cleared_independently(ours: Any, pid: str, used: Any) -> None:
    put(ours, pid, ["a"], [1])
    before = used()
    put(ours, f"{pid}_val", ["a"], [1])
    assert used() - before <= PAGES
    ours.get_client().clear_partition(pid)
    check(ours, f"{pid}_val", ["a"], [1])
    ours.get_client().clear_partition(f"{pid}_val")


def test_rows_put_without_keys_share_images(ours: Any, pid: str, used: Any) -> None:
    client = ours.get_client()
    metas = [client.put(trajectories([3]), partition_id=pid) for _ in range(8)]
    assert used() <= IMAGE + 8 * PAGES
    for _ in metas:
        found = client.get_data(client.get_meta(["multi_modal_inputs"], 1, pid, mode="fetch", task_name="t"))
        (entry,) = found["multi_modal_inputs"]
        assert torch.equal(
            (entry if isinstance(entry, dict) else entry.data)["pixel_values"], pixels(3)["pixel_values"]
        )
        del found, entry
    client.clear_partition(pid)
    eventually(lambda: used() == 0, "nothing is left")


def test_a_loaded_checkpoint_shares_values_as_before(queue: Any, partition: str, used: Any, tmp_path: Path) -> None:
    keys = [str(number) for number in range(24)]
    prompts = [number // 8 for number in range(24)]
    for key, prompt in zip(keys, prompts, strict=True):
        put(queue, partition, [key], [prompt])
    assert used() <= 3 * IMAGE + 24 * PAGES
    queue.save_checkpoint(tmp_path / "checkpoint")
    queue.load_checkpoint(tmp_path / "checkpoint")
    eventually(lambda: used() <= 3 * IMAGE + 24 * PAGES, "shared as before")
    check(queue, partition, keys, prompts)
