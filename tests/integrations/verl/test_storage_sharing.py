"""A prompt's images, put once for each of its responses through the backend: stored once, freed with the last."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations.verl import cells, commits, sharing
from dataplane.integrations.verl.controller import Controller
from tests.integrations.images import IMAGE, PAGES, SharedImages, check, pixels, trajectories
from tests.integrations.marks import SYSTEMS
from tests.integrations.verl.storage_job import job, used, worker
from tests.processes import eventually

pytestmark = SYSTEMS


_number = itertools.count()


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    with job(memory="64MiB", spill=0, prewarm=0, timeout=5) as made:
        yield made


@pytest.fixture
def partition(queue: Any) -> Iterator[str]:
    """One of its own for each test. When that is cleared, nothing is left in the store."""
    name = f"shared{next(_number)}"
    yield name
    queue.get_client().clear_partition(name)
    eventually(lambda: used() == 0, "all of it is freed")


def put(queue: Any, partition: str, keys: list[str], prompts: list[int]) -> None:
    queue.kv_batch_put(keys=keys, fields=trajectories(prompts), partition_id=partition)


class TestSharedImages(SharedImages): ...


def test_rows_of_one_put_share_with_each_other_and_with_those_before(queue: Any, partition: str) -> None:
    put(queue, partition, ["a", "b"], [1, 1])
    assert used() <= IMAGE + PAGES
    put(queue, partition, ["c", "d", "e", "f"], [2, 1, 2, 3])
    assert used() <= 3 * IMAGE + 2 * PAGES
    check(queue, partition, ["f", "e", "d", "c", "b", "a"], [3, 2, 1, 2, 1, 1])
    queue.kv_clear(keys=["a", "b", "c"], partition_id=partition)
    check(queue, partition, ["d", "e", "f"], [1, 2, 3])
    queue.kv_clear(keys=["d", "f"], partition_id=partition)
    check(queue, partition, ["e"], [2])
    assert used() <= IMAGE + PAGES


def test_fields_whose_rows_are_the_same_object_are_stored_once_and_freed_one_by_one(queue: Any, partition: str) -> None:
    said = [{"role": "user", "content": bytes(range(256)) * 4096}]
    fields = {"prompt": NonTensorStack(NonTensorData(said)), "raw_prompt": NonTensorStack(NonTensorData(said))}
    for key in ("a", "b"):
        queue.kv_batch_put(keys=[key], fields=TensorDict(fields, batch_size=[1]), partition_id=partition)
    assert used() < 1.5 * (1 << 20)
    replaced = TensorDict({"prompt": NonTensorStack(NonTensorData("short"))}, batch_size=[1])
    queue.kv_batch_put(keys=["a"], fields=replaced, partition_id=partition)
    queue.kv_clear(keys=["b"], partition_id=partition)
    got = queue.kv_batch_get(keys=["a"], partition_id=partition)
    assert [got.get("prompt").tolist(), got.get("raw_prompt").tolist()] == [["short"], [said]]


def test_large_rows_that_come_at_once_are_told_together(
    queue: Any, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several prompts; what they share is stored once, and freed with the last of each."""
    submitted, all_there, told = [], threading.Event(), []
    submit, tell = commits.Committer.submit, Controller.tell

    def counted(self: Any, each: commits.Put) -> None:
        submit(self, each)
        submitted.append(each)
        if len(submitted) == 8:
            all_there.set()

    def telling(self: Any, name: str, rows: Any, *arguments: Any) -> None:
        assert all_there.wait(60)
        told.append(len(rows))
        tell(self, name, rows, *arguments)

    async def put_all() -> None:
        fields = [trajectories([n % 3]) for n in range(8)]
        for n, each in enumerate(fields):
            each["uid"] = NonTensorStack(NonTensorData(f"u{n}"))
        await asyncio.gather(*[queue.async_kv_batch_put([str(n)], partition, each) for n, each in enumerate(fields)])

    monkeypatch.setattr(commits, "_SMALL", 0)
    monkeypatch.setattr(commits.Committer, "submit", counted)
    monkeypatch.setattr(Controller, "tell", telling)
    asyncio.run(put_all())
    assert sum(told) == 8
    assert len(told) <= 2, "the first, and those that came meanwhile"
    assert used() <= 3 * IMAGE + 8 * PAGES
    check(queue, partition, [str(n) for n in range(8)], [n % 3 for n in range(8)])
    got = queue.kv_batch_get(keys=[str(n) for n in range(8)], partition_id=partition, select_fields=["uid"])
    assert got.get("uid").tolist() == [f"u{n}" for n in range(8)]
    queue.kv_clear(keys=[str(n) for n in range(8) if n % 3], partition_id=partition)
    eventually(lambda: used() <= IMAGE + 3 * PAGES, "two of three images are freed")
    check(queue, partition, ["0", "3", "6"], [0] * 3)


def test_of_large_rows_that_come_at_once_each_fails_by_itself(
    queue: Any, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "_SMALL", 0)

    async def put_all() -> list[Any]:
        fields = [trajectories([n]) for n in range(6)]
        for n, each in enumerate(fields):
            each["extra"] = NonTensorStack(NonTensorData(threading.Lock() if n == 3 else "fine"))
        puts = [queue.async_kv_batch_put([str(n)], partition, each) for n, each in enumerate(fields)]
        return await asyncio.gather(*puts, return_exceptions=True)

    done = asyncio.run(put_all())
    assert [type(each) for each in done if isinstance(each, Exception)] == [dp.SchemaMismatch]
    assert isinstance(done[3], dp.SchemaMismatch)
    assert done[3].column == "extra"
    check(queue, partition, ["0", "1", "2", "4", "5"], [0, 1, 2, 4, 5])


def test_another_process_stores_its_own_and_reads_what_is_shared(queue: Any, partition: str) -> None:
    for key in ("a", "b"):
        put(queue, partition, [key], [1])
    other = worker()
    ray.get(other.call.remote("kv_batch_put", keys=["c"], fields=trajectories([1]), partition_id=partition), timeout=60)
    found = ray.get(other.call.remote("kv_batch_get", keys=["b"], partition_id=partition), timeout=60)
    (entry,) = found["multi_modal_inputs"]
    assert torch.equal((entry if isinstance(entry, dict) else entry.data)["pixel_values"], pixels(1)["pixel_values"])
    ray.get(other.call.remote("kv_clear", keys=["a", "b"], partition_id=partition), timeout=60)
    check(queue, partition, ["c"], [1])


def test_where_a_node_can_not_know_of_more_owners_rows_are_stored(
    queue: Any, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cell: bytes) -> bytes:
        raise dp.LimitExceeded("so many owners", what="owners", asked=2, limit=1)

    monkeypatch.setattr(cells, "retained", refuse)
    put(queue, partition, ["a", "b"], [1, 1])
    put(queue, partition, ["c"], [1])
    check(queue, partition, ["a", "b", "c"], [1, 1, 1])
    assert used() >= 3 * IMAGE


def test_a_checkpoint_is_loaded_as_it_was_shared(queue: Any, partition: str, tmp_path: Path) -> None:
    """Whether the values are still there or not: dicts that were put one by one, tensors too, objects put together."""
    keys = [str(number) for number in range(24)]
    prompts = [number // 8 for number in range(24)]
    for key, prompt in zip(keys, prompts, strict=True):
        fields = trajectories([prompt])
        fields["frames"] = pixels(prompt)["pixel_values"][None]
        queue.kv_batch_put(keys=[key], fields=fields, partition_id=partition)
    said = [{"image": bytes([prompt]) * IMAGE, "answer": key} for key, prompt in zip(keys, prompts, strict=True)]
    messages = TensorDict({"messages": NonTensorStack(*map(NonTensorData, said))}, batch_size=[24])
    queue.kv_batch_put(keys=keys, fields=messages, partition_id=partition)
    before = used()
    assert before <= 9 * IMAGE + 32 * PAGES
    queue.save_checkpoint(tmp_path / "checkpoint")
    for gone in (False, True):
        if gone:
            queue.get_client().clear_partition(partition)
            eventually(lambda: used() == 0, "all of it is freed")
        queue.load_checkpoint(tmp_path / "checkpoint")
        eventually(lambda: used() <= before, "shared as before")
        check(queue, partition, keys, prompts)
        got = queue.kv_batch_get(keys=keys, partition_id=partition, select_fields=["frames", "messages"])
        assert [entry if isinstance(entry, dict) else entry.data for entry in got["messages"]] == said
        for frames, prompt in zip(got["frames"].unbind(), prompts, strict=True):
            assert torch.equal(frames, pixels(prompt)["pixel_values"])
        del got, frames


def test_cells_of_one_value_are_freed_one_by_one(queue: Any) -> None:
    """Also together, and twice: each cell is its own."""
    made = sharing.put({"x": [pixels(5)] * 3}, {"x": cells.ROWS}, 5.0)
    assert len(set(made["x"])) == 3
    sharing.free({"x": cell} for cell in made["x"][:2])
    sharing.free({"x": cell} for cell in made["x"][:2])
    (found,) = cells.find({"x": made["x"][2:]})
    assert torch.equal(process.plane().get(found.ref)["x"].torch()[0]["pixel_values"], pixels(5)["pixel_values"])
    sharing.free({"x": cell} for cell in made["x"])
    assert used() == 0
