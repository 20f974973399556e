"""Trajectories whose responses share their prompt's image, and what is stored once of them by each integration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import dataplane as dp
from dataplane.integrations import process
from tests.processes import eventually

PATCHES = 112  # of 1176 float32: half a mebibyte
IMAGE = PATCHES * 1176 * 4
PAGES = 64 << 10  # bytes, more than all else of a row takes


def pixels(prompt: int) -> dict[str, Any]:
    """What the processor makes of a prompt's image: new memory each time."""
    made = torch.randn(PATCHES, 1176, generator=torch.Generator().manual_seed(prompt))
    return {"pixel_values": made, "image_grid_thw": torch.tensor([[1, 8, 14]])}


def trajectories(prompts: list[int]) -> TensorDict:
    """A response of each of these prompts."""
    inputs = [NonTensorData(pixels(prompt)) for prompt in prompts]
    ids = torch.nested.as_nested_tensor([torch.arange(5 + prompt) for prompt in prompts], layout=torch.jagged)
    return TensorDict({"multi_modal_inputs": NonTensorStack(*inputs), "input_ids": ids}, batch_size=[len(prompts)])


def check(queue: Any, partition: str, keys: list[str], prompts: list[int]) -> None:
    """Fails where these keys do not read as responses of these prompts."""
    got = queue.kv_batch_get(keys=keys, partition_id=partition)
    for entry, ids, prompt in zip(got["multi_modal_inputs"], got["input_ids"].unbind(), prompts, strict=True):
        found = entry if isinstance(entry, dict) else entry.data
        assert torch.equal(found["pixel_values"], pixels(prompt)["pixel_values"])
        assert torch.equal(found["image_grid_thw"], pixels(prompt)["image_grid_thw"])
        assert torch.equal(ids, torch.arange(5 + prompt))


class SharedImages:
    """A prompt's images, put once for each of its responses: stored once, freed with the last.

    A module that derives it has the fixtures `queue`, the module of TransferQueue's calls, and `partition`, the name of
    one, which is cleared after each test, when nothing is left of it.
    """

    @pytest.fixture
    def used(self, partition: str) -> Callable[[], int]:
        before = process.plane().stats().memory_used
        return lambda: process.plane().stats().memory_used - before

    def put(self, queue: Any, partition: str, keys: list[str], prompts: list[int]) -> None:
        queue.kv_batch_put(keys=keys, fields=trajectories(prompts), partition_id=partition)

    def test_an_image_shared_by_responses_of_a_prompt_is_stored_once(
        self, queue: Any, partition: str, used: Any
    ) -> None:
        pairs = [(prompt, response) for prompt in range(4) for response in range(8)]
        keys = [f"{prompt}_{response}" for prompt, response in pairs]
        for key, (prompt, response) in zip(keys, pairs, strict=True):
            if response % 2:
                self.put(queue, partition, [key], [prompt])
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

    def test_concurrent_puts_of_one_image_store_it_once(self, queue: Any, partition: str, used: Any) -> None:
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

    def test_rows_share_images_within_a_put_and_with_earlier_puts(self, queue: Any, partition: str, used: Any) -> None:
        self.put(queue, partition, ["a", "b", "c"], [1, 2, 1])
        self.put(queue, partition, ["d", "e"], [2, 1])
        assert used() <= 2 * IMAGE + 2 * PAGES
        check(queue, partition, ["e", "d", "c", "b", "a"], [1, 2, 1, 2, 1])
        queue.kv_clear(keys=["a", "b", "c"], partition_id=partition)
        check(queue, partition, ["d", "e"], [2, 1])
        queue.kv_clear(keys=["e"], partition_id=partition)
        check(queue, partition, ["d"], [2])

    def test_a_replaced_row_does_not_affect_rows_that_share_its_image(
        self, queue: Any, partition: str, used: Any
    ) -> None:
        for key, prompt in (("a", 1), ("b", 1), ("a", 2), ("b", 1)):
            self.put(queue, partition, [key], [prompt])
        check(queue, partition, ["a", "b"], [2, 1])
        self.put(queue, partition, ["b"], [2])
        check(queue, partition, ["b", "a"], [2, 2])
        eventually(lambda: used() <= IMAGE + PAGES, "the first image has gone")

    def test_a_failed_put_stores_nothing_and_preserves_shared_images(
        self, queue: Any, partition: str, used: Any
    ) -> None:
        self.put(queue, partition, ["a"], [1])
        before, fields = used(), trajectories([1])
        fields["large"] = torch.zeros(1, 160 << 20, dtype=torch.uint8)
        with pytest.raises(dp.LimitExceeded):
            queue.kv_batch_put(keys=["b"], fields=fields, partition_id=partition)
        assert used() == before
        queue.kv_clear(keys=["b"], partition_id=partition)
        check(queue, partition, ["a"], [1])
