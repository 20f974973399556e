"""Puts that are awaited at the same time: made together, and each answered as if it had been made alone."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import dataplane as dp
from dataplane.integrations.transfer_queue import coalescing, row_access
from tests.integrations.images import check, trajectories
from tests.integrations.marks import PLANE

pytestmark = PLANE


@pytest.fixture
def singly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of rows that were laid out at once."""
    found: list[str] = []
    whole = coalescing.put_row

    def counted(partition: Any, one: Any) -> Any:
        made = whole(partition, one)
        if made is not None:
            found.extend(one.keys)
        return made

    monkeypatch.setattr(coalescing, "put_row", counted)
    return found


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each put that was made together, where none is laid out at once."""
    found: list[int] = []
    whole = row_access.put
    monkeypatch.setattr(coalescing, "put_row", lambda *_: None)

    def counted(partition: Any, keys: list[str], *args: Any) -> Any:
        found.append(len(keys))
        return whole(partition, keys, *args)

    monkeypatch.setattr(row_access, "put", counted)
    return found


def gathered(calls: list[Any]) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


def trajectory(i: int) -> dict[str, Any]:
    return {"ids": torch.arange(i % 7 + 1), "score": torch.tensor(float(i)), "turns": [{"role": "user", "n": i}]}


def test_coalesced_puts_store_the_same_rows_as_single_puts(ours: Any, pid: str, puts: list[int]) -> None:
    calls = [ours.async_kv_put(f"k{i}", pid, trajectory(i), {"i": i}) for i in range(200)]
    metas = gathered(calls)
    assert [meta.keys for meta in metas] == [[f"k{i}"] for i in range(200)]
    assert [meta.tags for meta in metas] == [[{"i": i}] for i in range(200)]
    assert {tuple(meta.fields) for meta in metas} == {("ids", "score", "turns")}
    assert sum(puts) == 200
    assert len(puts) < 50, "several at once"
    for i in range(200):
        ours.kv_put(f"k{i}", f"{pid}-alone", trajectory(i), {"i": i})
    keys = [f"k{i}" for i in range(200)]
    assert ours.kv_list(pid)[pid] == ours.kv_list(f"{pid}-alone")[f"{pid}-alone"]
    for chosen in (keys, keys[3:80:7]):  # of different lengths, and of one
        one, other = ours.kv_batch_get(chosen, pid), ours.kv_batch_get(chosen, f"{pid}-alone")
        assert one["ids"].is_nested == other["ids"].is_nested
        assert [row.tolist() for row in one["ids"].unbind()] == [row.tolist() for row in other["ids"].unbind()]
        assert torch.equal(one["score"], other["score"])
        assert one.get("turns").tolist() == other.get("turns").tolist()


@pytest.mark.parametrize("nbytes", [1, 64 << 10])
def test_an_invalid_put_among_coalesced_ones_fails_alone(ours: Any, pid: str, nbytes: int) -> None:
    def fields(i: int) -> dict[str, Any]:
        said = b"x" * nbytes
        return {**trajectory(i), "messages": [object(), said] if i == 3 else [{"content": said}]}

    answers = gathered([ours.async_kv_put(f"k{i}", pid, fields(i), {"i": i}) for i in range(8)])
    assert isinstance(answers[3], dp.SchemaMismatch)
    assert [answer.keys for i, answer in enumerate(answers) if i != 3] == [[f"k{i}"] for i in range(8) if i != 3]
    assert sorted(ours.kv_list(pid)[pid]) == [f"k{i}" for i in range(8) if i != 3]


def with_images(prompt: int, number: int) -> TensorDict:
    fields = trajectories([prompt])
    said = NonTensorStack({"content": bytes([prompt]) * (64 << 10), "n": prompt})
    fields["messages"], fields["raw"] = said, said
    fields["number"] = torch.tensor([number])
    return fields


def test_consecutive_single_puts_use_the_fast_layout_and_store_the_same_rows(
    ours: Any, pid: str, singly: list[str]
) -> None:
    pairs = [(prompt, number) for prompt in range(2) for number in range(3)]
    keys = [f"{prompt}_{number}" for prompt, number in pairs]

    async def each() -> list[Any]:
        small = [await ours.async_kv_put(f"k{i}", pid, trajectory(i), {"i": i}) for i in range(5)]
        own = f"{pid}-images"
        tagged = zip(keys, pairs, strict=True)
        return small + [await ours.async_kv_batch_put([k], own, with_images(*p), [{"n": p[1]}]) for k, p in tagged]

    metas = asyncio.run(each())
    assert singly == [*(f"k{i}" for i in range(5)), "0_1", "0_2", "1_1", "1_2"]
    assert [meta.keys for meta in metas] == [[f"k{i}"] for i in range(5)] + [[key] for key in keys]
    assert [meta.tags for meta in metas[5:]] == [[{"n": number}] for _, number in pairs]
    assert metas[5].fields == metas[6].fields
    for i in range(5):
        ours.kv_put(f"k{i}", f"{pid}-alone", trajectory(i), {"i": i})
    one, other = (ours.kv_batch_get([f"k{i}" for i in range(5)], name) for name in (pid, f"{pid}-alone"))
    assert [row.tolist() for row in one["ids"].unbind()] == [row.tolist() for row in other["ids"].unbind()]
    assert torch.equal(one["score"], other["score"])
    assert one.get("turns").tolist() == other.get("turns").tolist()
    check(ours, f"{pid}-images", keys, [prompt for prompt, _ in pairs])
    assert ours.kv_batch_get(keys, f"{pid}-images")["number"].tolist() == [number for _, number in pairs]


def test_small_puts_do_not_wait_for_large_puts_that_wait_for_memory(
    ours: Any, pid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, whole = threading.Event(), row_access.put

    def waits(partition: Any, keys: list[str], *args: Any) -> Any:
        if keys[0].startswith("large"):
            assert room.wait(60)
        return whole(partition, keys, *args)

    monkeypatch.setattr(row_access, "put", waits)

    async def put() -> None:
        large = [asyncio.ensure_future(ours.async_kv_batch_put([f"large{i}"], pid, with_images(i, i))) for i in (1, 1)]
        for i in range(8):
            await ours.async_kv_put(f"small{i}", pid, trajectory(i))
        assert not any(each.done() for each in large)
        room.set()
        await asyncio.gather(*large)

    try:
        asyncio.run(put())
    finally:
        room.set()


@pytest.mark.parametrize("call", ["by one key", "by keys", "by metadata"])
def test_rows_are_cleared_while_any_number_of_puts_waits(ours: Any, pid: str, call: str) -> None:
    ours.kv_put("k", pid, {"x": torch.tensor(1)})
    room, client = threading.Event(), ours.get_client()

    def wait(fields: dict[str, Any]) -> None:
        assert room.wait(60)

    def put(number: int) -> Any:
        fields, key = TensorDict({"x": torch.ones(1)}, batch_size=[1]), f"other {number}"
        if call == "by one key":
            return ours.async_kv_put(key, pid, fields, data_parser=wait)
        if call == "by keys":
            return ours.async_kv_batch_put([key], pid, fields, data_parser=wait)
        return client.async_put(fields, partition_id=f"{pid}-2", data_parser=wait)

    async def cleared() -> dict[str, Any]:
        puts = [asyncio.create_task(put(number)) for number in range(100)]
        try:
            await asyncio.sleep(0)  # each has begun
            await asyncio.wait_for(ours.async_kv_clear("k", pid), 20)
            left: dict[str, Any] = await asyncio.wait_for(ours.async_kv_list(pid), 20)
        finally:
            room.set()
            await asyncio.gather(*puts)
        return left

    assert asyncio.run(cleared()) == {pid: {}}


def test_puts_of_one_key_are_performed_in_order(ours: Any, pid: str) -> None:
    calls = []
    for turn in range(20):
        calls.append(ours.async_kv_put("k", pid, tag={"turn": turn}))
        calls.append(ours.async_kv_put("k", pid, {"x": torch.tensor(turn)}))
        calls.append(ours.async_kv_put(f"other {turn}", pid, {"x": torch.tensor(turn)}))
    gathered(calls)
    assert ours.kv_list(pid)[pid]["k"] == {"turn": 19}
    assert ours.kv_batch_get("k", pid)["x"].tolist() == [19]


def test_puts_continue_after_the_thread_pool_was_shut_down(
    ours: Any, pid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another thread closes and begins anew between the choice of the threads and their use."""
    ended, executor = ThreadPoolExecutor(1), coalescing.executor
    ended.shutdown()
    first = [ended]
    monkeypatch.setattr(coalescing, "executor", lambda name: first.pop() if first else executor(name))
    gathered([ours.async_kv_put("k", pid, {"x": torch.tensor(1)})])
    assert ours.kv_batch_get("k", pid)["x"].tolist() == [1]


def test_puts_continue_after_no_thread_could_be_started(ours: Any, pid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise RuntimeError("can't start new thread")

    puts = [ours.async_kv_put("k", pid, {"x": torch.tensor(1)}), ours.async_kv_put("l", [pid], {"x": torch.tensor(1)})]
    with monkeypatch.context() as patched:
        patched.setattr(coalescing, "executor", refuse)
        assert [type(each) for each in gathered(puts)] == [RuntimeError, TypeError]
    gathered([ours.async_kv_put("m", pid, {"x": torch.tensor(1)})])
    assert [*ours.kv_list(pid)[pid]] == ["m"]


def test_a_forked_child_can_put_rows(ours: Any, pid: str) -> None:
    gathered([ours.async_kv_put("a", pid, trajectory(1))])
    child = os.fork()
    if not child:
        try:
            gathered([ours.async_kv_put("b", pid, trajectory(2))])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert sorted(ours.kv_list(pid)[pid]) == ["a", "b"]
