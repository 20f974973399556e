"""A prompt's images, put once for each of its responses by TransferQueue's calls: stored once, freed with the last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.integrations import process
from tests.integrations.images import IMAGE, PAGES, SharedImages, check, pixels, trajectories
from tests.integrations.marks import SYSTEMS
from tests.processes import eventually

pytestmark = SYSTEMS


def used() -> int:
    return process.plane().stats().memory_used


@pytest.fixture
def queue(ours: Any) -> Any:
    return ours


@pytest.fixture
def partition(queue: Any, pid: str) -> Iterator[str]:
    before = used()
    yield pid
    queue.get_client().clear_partition(pid)
    eventually(lambda: used() == before, "nothing is left")


class TestSharedImages(SharedImages): ...


def test_partitions_share_images_and_are_cleared_independently(ours: Any, pid: str) -> None:
    ours.kv_batch_put(keys=["a"], fields=trajectories([1]), partition_id=pid)
    before = used()
    ours.kv_batch_put(keys=["a"], fields=trajectories([1]), partition_id=f"{pid}_val")
    assert used() - before <= PAGES
    ours.get_client().clear_partition(pid)
    check(ours, f"{pid}_val", ["a"], [1])
    ours.get_client().clear_partition(f"{pid}_val")


def test_rows_put_without_keys_share_images(ours: Any, pid: str) -> None:
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


def test_a_loaded_checkpoint_shares_values_as_before(queue: Any, partition: str, tmp_path: Path) -> None:
    before, keys = used(), [str(number) for number in range(24)]
    prompts = [number // 8 for number in range(24)]
    for key, prompt in zip(keys, prompts, strict=True):
        queue.kv_batch_put(keys=[key], fields=trajectories([prompt]), partition_id=partition)
    assert used() - before <= 3 * IMAGE + 24 * PAGES
    queue.save_checkpoint(tmp_path / "checkpoint")
    queue.load_checkpoint(tmp_path / "checkpoint")
    eventually(lambda: used() - before <= 3 * IMAGE + 24 * PAGES, "shared as before")
    check(queue, partition, keys, prompts)
