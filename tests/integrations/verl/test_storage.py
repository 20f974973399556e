"""TransferQueue with its rows in the plane, through its own client, in several processes of a Ray job. Which values
come back, in which order and from several puts: `test_values.py`; from several workers: `test_fit.py`."""

from __future__ import annotations

import asyncio
import enum
import gc
import itertools
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorData, NonTensorStack, TensorDict

import dataplane as dp
from dataplane.integrations.verl import cells, commits
from dataplane.integrations.verl.controller import Controller
from tests.integrations.images import IMAGE, PAGES, SharedImages, check, pixels, trajectories
from tests.integrations.marks import SYSTEMS
from tests.integrations.verl.storage_job import job, stats, used, worker
from tests.processes import eventually

pytestmark = SYSTEMS

_number = itertools.count()


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    with job(memory="64MiB", spill=0, prewarm=0, timeout=5) as made:
        yield made


@pytest.fixture(scope="module")
def other(queue: Any) -> Any:
    """Another process."""
    return worker()


@pytest.fixture
def partition(queue: Any) -> Iterator[str]:
    """One of its own for each test. When that is cleared, nothing is left in the store."""
    name = f"p{next(_number)}"
    yield name
    queue.get_client().clear_partition(name)
    eventually(lambda: used() == 0, "all of it is freed")


def there(actor: Any, name: str, *arguments: Any, **named: Any) -> Any:
    return ray.get(actor.call.remote(name, *arguments, **named), timeout=60)


def rows(count: int, **entries: Any) -> TensorDict:
    return TensorDict(entries, batch_size=[count])


# What goes in comes out, as TransferQueue gives it


def test_a_value_that_cannot_be_stored_is_refused_with_its_field_and_row(partition: str) -> None:
    """Says which field and row; nothing is stored, and no field is ready."""
    entries = rows(2, ok=torch.ones(2, 2), bad=NonTensorStack({"x": 1}, {"x": len}))
    with pytest.raises(dp.SchemaMismatch, match=r"column 'bad'.*row 1.*builtin_function") as raised:
        tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=entries)
    assert (raised.value.column, raised.value.row) == ("bad", 1)
    with pytest.raises(ValueError, match="not ready"):
        tq.kv_batch_get(keys=["a", "b"], partition_id=partition)
    with pytest.raises(dp.SchemaMismatch, match="'inner' is a TensorDict"):
        inner = TensorDict({"x": torch.ones(2)}, batch_size=[2])
        tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=rows(2, inner=inner))
    with pytest.raises(dp.Misuse, match="data_parser"):
        tq.kv_put("a", partition, {"x": "url"}, data_parser=lambda columns: None)


# Which rows and fields


def test_a_class_that_the_reader_lacks_is_named(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With field and row, and what to import; the rows are there, and are read once it is imported."""
    made = types.ModuleType("users_own")
    monkeypatch.setitem(sys.modules, "users_own", made)
    made.Level = enum.Enum("Level", "LOW HIGH", module="users_own")  # type: ignore[attr-defined]
    for key, value in zip("abc", ["text", {"n": 1, "level": made.Level.HIGH}, 3], strict=True):
        tq.kv_batch_put([key], partition, rows(1, x=NonTensorStack(value)))
    monkeypatch.delitem(sys.modules, "users_own")
    for keys, row in ((["c", "a", "b"], 2), (["b"], 0)):
        with pytest.raises(dp.SchemaMismatch, match=rf"column 'x', row {row}: .*Level.*import users_own") as caught:
            tq.kv_batch_get(keys, partition)
        assert (caught.value.column, caught.value.row) == ("x", row)
    del caught
    monkeypatch.setitem(sys.modules, "users_own", made)
    assert list(tq.kv_batch_get(["c", "a", "b"], partition)["x"])[2]["level"] is made.Level.HIGH
    gc.collect()  # a traceback, which has what was read, refers to itself


def test_only_the_fields_that_are_asked_for_are_read(queue: Any, partition: str) -> None:
    entries = rows(4, small=torch.ones(4, 2), large=torch.ones(4, 100_000), text=NonTensorStack(*"abcd"))
    queue.kv_batch_put(keys=list("abcd"), partition_id=partition, fields=entries)
    read: list[dp.BatchRef] = []
    plain = dp.Plane.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dp.Plane, "get", lambda plane, ref, **how: (read.append(ref), plain(plane, ref, **how))[1])
        got = queue.kv_batch_get(keys=["c", "a"], partition_id=partition, select_fields=["small"])
    assert set(got.keys()) == {"small"}
    assert [(ref.columns, len(ref), ref.nbytes) for ref in read] == [(("small",), 2, 16)]


def test_rows_pass_between_stages_by_metadata(other: Any, partition: str) -> None:
    """get_meta, get_data and put of another field with that metadata, as consumers of a stage do."""
    client = tq.get_client()
    whole = client.put(rows(8, x=torch.arange(16).view(8, 2)), partition_id=partition)
    assert torch.equal(torch.stack(list(client.get_data(whole)["x"].unbind())), torch.arange(16).view(8, 2))
    meta = there(other, "get_meta", ["x"], 4, partition, "fetch", "stage")
    got = there(other, "get_data", meta)
    there(other, "put", rows(4, y=torch.stack(list(got["x"].unbind())) * 2), meta)
    both = client.get_meta(["x", "y"], 4, partition, "fetch", "next")
    got = client.get_data(both)
    assert all(torch.equal(x * 2, y) for x, y in zip(got["x"].unbind(), got["y"].unbind(), strict=True))
    assert client.check_production_status(["x"], partition)
    assert not client.check_production_status(["y"], partition)


# What is freed


def test_clearing_most_rows_frees_their_bytes(partition: str) -> None:
    keys = [f"k{i}" for i in range(256)]
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=rows(256, x=torch.ones(256, 16_384)))
    held = used()
    assert held >= 256 * 65_536
    tq.kv_clear(keys=keys[:100] + keys[101:], partition_id=partition)
    eventually(lambda: used() <= held / 256 + 65_536, "255 of 256 rows are free")
    assert tq.kv_batch_get(keys=[keys[100]], partition_id=partition)["x"].values().sum() == 16_384


def test_rows_with_different_fields_are_freed_completely(partition: str) -> None:
    """The controller's metadata of several rows names only what all of them have."""
    tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=rows(2, x=torch.ones(2, 4096)))
    tq.kv_batch_put(keys=["a"], partition_id=partition, fields=rows(1, y=torch.ones(1, 8192)))
    tq.kv_clear(keys=["a", "b"], partition_id=partition)
    eventually(lambda: used() == 0, "all of both rows is free")


def test_clearing_by_metadata_of_one_field_frees_the_rows(partition: str) -> None:
    client = tq.get_client()
    client.put(rows(4, x=torch.ones(4, 2), y=torch.ones(4, 8192)), partition_id=partition)
    client.clear_samples(client.get_meta(["x"], 4, partition, "fetch", "stage"))
    eventually(lambda: used() == 0, "y is free as well")


@pytest.mark.parametrize("keys", [["a"], ["a", "b"], ["b", "c"], ["a", "b", "c", "d"]], ids="".join)
def test_values_replaced_by_a_put_are_freed(partition: str, keys: list[str]) -> None:
    """Also where some of the rows did not have the field."""
    tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=rows(2, x=torch.zeros(2, 65_536)))
    for value in (1.0, 2.0):
        new = rows(len(keys), x=torch.full((len(keys), 65_536), value))
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=new)
    several = sorted({"a", "b", *keys})
    eventually(lambda: used() <= len(several) * 65_536 * 4 + 65_536, "a row is stored once")
    got = tq.kv_batch_get(keys=several, partition_id=partition)["x"]
    assert [float(row[0]) for row in got.unbind()] == [2.0 if key in keys else 0.0 for key in several]


def test_a_reader_with_old_metadata_reads_the_replaced_values(partition: str) -> None:
    client = tq.get_client()
    tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=rows(2, x=torch.zeros(2, 3)))
    meta = client.kv_retrieve_meta(["a", "b"], partition)
    tq.kv_batch_put(keys=["b"], partition_id=partition, fields=rows(1, x=torch.ones(1, 3)))
    assert [row.tolist() for row in client.get_data(meta)["x"].unbind()] == [[0, 0, 0], [1, 1, 1]]
    tq.kv_clear(keys=["a"], partition_id=partition)
    with pytest.raises(dp.Freed, match=r"no field 'x'.*cleared"):
        client.get_data(meta)


def test_values_read_before_a_clear_remain_readable(other: Any, partition: str) -> None:
    """A trainer's tensors lie in the store's memory, and go back when it lets go of them."""
    tq.kv_batch_put(keys=["a"], partition_id=partition, fields=rows(1, x=torch.ones(1, 1 << 20)))
    ray.get(other.hold.remote("kv_batch_get", ["a"], partition), timeout=60)
    tq.kv_clear(keys=["a"], partition_id=partition)
    assert used() >= 4 << 20
    assert ray.get(other.use.remote(lambda kept: float(kept["x"].values().sum())), timeout=60) == 1 << 20
    ray.get(other.hold.remote("get_partition_list"), timeout=60)
    eventually(lambda: used() == 0, "nobody has it any more")


# What goes wrong


def test_rows_of_a_writer_that_is_killed_are_read(partition: str) -> None:
    writer = worker()
    pid = ray.get(writer.hold.remote("kv_batch_put", ["a"], partition, rows(1, x=torch.ones(1, 1 << 18))), timeout=60)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"), "it is gone", 30)
    assert tq.kv_batch_get(keys=["a"], partition_id=partition)["x"].values().sum() == 1 << 18


def test_a_full_store_raises_backpressure_and_recovers(partition: str) -> None:
    """After the time that was set, not never; nothing of the put is there; room that comes back is used."""
    big, other = rows(1, x=torch.ones(1, 10 << 20)), rows(1, x=torch.zeros(1, 10 << 20))
    tq.kv_batch_put(keys=["a"], partition_id=partition, fields=big)
    with pytest.raises(dp.Backpressure) as raised:
        tq.kv_batch_put(keys=["b"], partition_id=partition, fields=other)
    assert raised.value.needed >= 40 << 20
    assert used() <= 41 << 20
    with pytest.raises(dp.LimitExceeded):
        tq.kv_batch_put(keys=["b"], partition_id=partition, fields=rows(1, x=torch.ones(1, 20 << 20)))
    tq.kv_clear(keys=["a"], partition_id=partition)
    tq.kv_batch_put(keys=["b"], partition_id=partition, fields=other)
    assert tq.kv_batch_get(keys=["b"], partition_id=partition)["x"].values().shape == (10 << 20,)


def test_values_replaced_by_a_put_with_the_same_metadata_are_freed(partition: str) -> None:
    client = tq.get_client()
    meta = client.put(rows(1, x=torch.ones(1, 1 << 18)), partition_id=partition)
    held = used()
    for value in (2, 3):
        meta = client.put(rows(1, x=torch.full((1, 1 << 18), float(value))), metadata=meta)
    eventually(lambda: used() == held, "one value is left")
    assert client.get_data(meta)["x"][0, 0] == 3


def test_values_refused_by_the_controller_are_freed_and_reported(partition: str) -> None:
    tq.kv_batch_put(keys=["a"], partition_id=partition, fields=rows(1, x=torch.ones(1, 2)))
    held = used()
    with pytest.raises(dp.Rejected, match="one dtype"):
        tq.kv_batch_put(keys=["b"], partition_id=partition, fields=rows(1, x=torch.ones(1, 4096, dtype=torch.int64)))
    eventually(lambda: used() == held, "it is freed")


def test_a_put_that_is_cancelled_leaves_nothing(partition: str) -> None:
    """Whenever: its write goes on in a thread, and is undone."""

    async def use(after: float) -> bool:
        put = asyncio.create_task(tq.async_kv_batch_put(["a"], partition, rows(1, x=torch.ones(1, 1 << 20))))
        await asyncio.wait([put], timeout=after)
        return put.cancel()

    cancelled = [asyncio.run(use(after)) for after in (0.0, 0.001, 0.002, 0.004, 0.008)]
    assert any(cancelled)
    tq.kv_clear(keys=["a"], partition_id=partition)
    eventually(lambda: used() == 0, "what no row has is not there")


def test_a_put_cancelled_too_late_frees_the_values_it_replaced(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, begun, goes_on = Controller.tell, threading.Event(), threading.Event()

    def held_up(self: Controller, *arguments: Any) -> None:
        begun.set()
        assert goes_on.wait(30)
        tell(self, *arguments)

    async def use() -> None:
        put = asyncio.create_task(tq.async_kv_batch_put(["a"], partition, rows(1, x=torch.full((1, 1 << 18), 2.0))))
        assert await asyncio.to_thread(begun.wait, 30)
        put.cancel()
        goes_on.set()
        await asyncio.wait([put])
        assert put.cancelled()

    tq.kv_batch_put(keys=["a"], partition_id=partition, fields=rows(1, x=torch.ones(1, 1 << 18)))
    before = used()
    monkeypatch.setattr(Controller, "tell", held_up)
    asyncio.run(use())
    eventually(lambda: used() == before, "the first value is freed")
    assert tq.kv_batch_get(keys=["a"], partition_id=partition)["x"][0, 0] == 2


def test_values_replaced_by_overlapping_puts_are_freed(partition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them knew the others' cells when it began."""
    tell, goes_on = Controller.tell, threading.Event()
    submit, submitted = commits.Committer.submit, threading.Semaphore(0)

    def held_up(self: Controller, *arguments: Any) -> None:
        assert goes_on.wait(60)
        tell(self, *arguments)

    def counted(self: commits.Committer, put: commits.PendingPut) -> None:
        submit(self, put)
        submitted.release()

    def value(number: int) -> torch.Tensor:
        return torch.full((1, 1 << 17), float(number))

    async def use() -> None:
        fields = [rows(1, x=value(1), y=value(2)), rows(1, x=value(3)), rows(1, y=value(4))]
        puts = [asyncio.create_task(tq.async_kv_batch_put(["a"], partition, each)) for each in fields]
        try:
            for _ in puts:
                assert await asyncio.to_thread(submitted.acquire, timeout=30)
        finally:
            goes_on.set()
            await asyncio.gather(*puts)

    tq.kv_batch_put(keys=["a"], partition_id=partition, fields=rows(1, x=value(5), y=value(6)))
    before = used()
    monkeypatch.setattr(Controller, "tell", held_up)
    monkeypatch.setattr(commits.Committer, "submit", counted)
    asyncio.run(use())
    eventually(lambda: used() <= before, "one value of each field is left")


def test_no_value_bytes_pass_through_the_controller(partition: str) -> None:
    """What its controller holds of a row and field is a cell."""
    tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=rows(2, x=torch.ones(2, 1 << 18)))
    put = stats().put_bytes
    (first, _) = tq.get_client().kv_retrieve_meta(["a", "b"], partition)._custom_backend_meta
    assert set(first) == {"x"}
    assert len(first["x"]) < 80
    assert put >= 2 << 20


def test_short_lived_threads_leave_no_controller_sockets(queue: Any) -> None:
    controller = queue.get_client().storage_manager._controller
    controller.partitions()
    before = len(controller._idle)
    for _ in range(8):
        asking = threading.Thread(target=controller.partitions)
        asking.start()
        asking.join()
    assert len(controller._idle) == before


def test_transfer_queue_cannot_be_replaced_while_it_runs(queue: Any) -> None:
    """What it gave verl would not be known any more."""
    from dataplane.integrations import transfer_queue as ours
    from dataplane.integrations.transfer_queue import module_patch

    with pytest.raises(dp.Misuse, match=r"install\(\) before transfer_queue.init\(\), or transfer_queue.close\(\)"):
        ours.install()
    assert sys.modules["transfer_queue"] is tq
    assert module_patch.VARIABLE not in os.environ


# What rows share


class TestSharedImages(SharedImages): ...


def test_fields_with_identical_objects_are_stored_once_and_freed_separately(queue: Any, partition: str) -> None:
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


def test_large_concurrent_rows_share_values_and_fail_alone(
    queue: Any, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several prompts; what they share is stored once, and freed with the last of each."""
    monkeypatch.setattr(commits, "_SMALL", 0)

    async def put_all() -> list[Any]:
        fields = [trajectories([n % 3]) for n in range(9)]
        for n, each in enumerate(fields):
            each["extra"] = NonTensorStack(NonTensorData(threading.Lock() if n == 5 else f"u{n}"))
        puts = [queue.async_kv_batch_put([str(n)], partition, each) for n, each in enumerate(fields)]
        return await asyncio.gather(*puts, return_exceptions=True)

    done = asyncio.run(put_all())
    assert isinstance(done[5], dp.SchemaMismatch)
    assert done[5].column == "extra"
    rows = [n for n in range(9) if n != 5]
    assert not any(isinstance(done[n], BaseException) for n in rows)
    assert used() <= 3 * IMAGE + 8 * PAGES
    check(queue, partition, [str(n) for n in rows], [n % 3 for n in rows])
    got = queue.kv_batch_get(keys=[str(n) for n in rows], partition_id=partition, select_fields=["extra"])
    assert got.get("extra").tolist() == [f"u{n}" for n in rows]
    queue.kv_clear(keys=[str(n) for n in rows if n % 3], partition_id=partition)
    eventually(lambda: used() <= IMAGE + 3 * PAGES, "two of three images are freed")
    check(queue, partition, ["0", "3", "6"], [0] * 3)


def test_another_process_stores_a_separate_copy_and_reads_shared_values(queue: Any, other: Any, partition: str) -> None:
    for key in ("a", "b"):
        queue.kv_batch_put([key], partition, trajectories([1]))
    ray.get(other.call.remote("kv_batch_put", keys=["c"], fields=trajectories([1]), partition_id=partition), timeout=60)
    found = ray.get(other.call.remote("kv_batch_get", keys=["b"], partition_id=partition), timeout=60)
    (entry,) = found["multi_modal_inputs"]
    assert torch.equal((entry if isinstance(entry, dict) else entry.data)["pixel_values"], pixels(1)["pixel_values"])
    ray.get(other.call.remote("kv_clear", keys=["a", "b"], partition_id=partition), timeout=60)
    check(queue, partition, ["c"], [1])


def test_rows_are_stored_again_when_the_owner_limit_is_reached(
    queue: Any, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cell: bytes) -> bytes:
        raise dp.LimitExceeded("so many owners", what="owners", asked=2, limit=1)

    monkeypatch.setattr(cells, "retained", refuse)
    queue.kv_batch_put(["a", "b"], partition, trajectories([1, 1]))
    queue.kv_batch_put(["c"], partition, trajectories([1]))
    check(queue, partition, ["a", "b", "c"], [1, 1, 1])
    assert used() >= 3 * IMAGE


def test_a_loaded_checkpoint_shares_values_as_before(queue: Any, partition: str, tmp_path: Path) -> None:
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
