"""Where TransferQueue 0.1.11 is at fault, and what is done here: each line of the table in `docs/transfer_queue.md`."""

from __future__ import annotations

import enum
import sys
import threading
import types
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations.transfer_queue import GRPOGroupNSampler
from tests.integrations.marks import PLANE
from tests.processes import eventually

pytestmark = PLANE

KEYS = [f"k{i}" for i in range(4)]


def dense(rows: int = 4, width: int = 3) -> TensorDict:
    return TensorDict({"x": torch.arange(rows * width, dtype=torch.float32).view(rows, width)}, batch_size=[rows])


def test_dense_fields_are_read_dense(ours: Any, pid: str) -> None:
    put = dense()
    ours.kv_batch_put(KEYS, pid, fields=put)
    found = ours.kv_batch_get(KEYS[::-1], pid)["x"]
    assert not found.is_nested
    assert torch.equal(found, put["x"].flip(0))
    ours.kv_put("wider", pid, fields={"x": torch.zeros(5)})
    assert ours.kv_batch_get(["wider", "k0"], pid)["x"].is_nested


def test_clearing_all_rows_but_one_frees_their_memory(ours: Any, pid: str) -> None:
    keys = [f"k{i}" for i in range(256)]
    before = process.plane().stats().memory_used
    ours.kv_batch_put(keys, pid, fields=dense(256, 1 << 12))
    full = process.plane().stats().memory_used - before
    assert full >= 256 << 14
    ours.kv_clear(keys[1:], pid)
    eventually(lambda: process.plane().stats().memory_used - before < full / 8, "the memory came back")
    assert ours.kv_batch_get("k0", pid)["x"].shape == (1, 1 << 12)


def test_a_waiting_task_does_not_block_other_calls(ours: Any, pid: str) -> None:
    client = ours.get_client()
    client.put(dense(), partition_id=pid)
    started, found = threading.Event(), []

    def wait() -> None:
        started.set()
        found.append(client.get_meta(["x"], 6, pid, task_name="train", timeout=30))

    waiting = threading.Thread(target=wait)
    waiting.start()
    started.wait()
    for _ in range(20):
        assert ours.kv_list(pid) == {pid: {}}
    assert waiting.is_alive()
    assert not found
    client.put(dense(2), partition_id=pid)
    waiting.join(30)
    assert found[0].size == 6


def test_too_few_rows_raise_not_ready_at_the_deadline(ours: Any, pid: str) -> None:
    client = ours.get_client()
    client.put(dense(), partition_id=pid)
    with pytest.raises(ours.NoSampleInTime, match=r"wants 5 rows .* could have 4") as caught:
        client.get_meta(["x"], 5, pid, task_name="train", timeout=0.05)
    assert isinstance(caught.value, dp.NotReady)
    assert isinstance(caught.value, RuntimeError)


def test_an_unknown_key_is_an_error_and_not_a_shorter_batch(ours: Any, pid: str) -> None:
    ours.kv_batch_put(KEYS, pid, fields=dense())
    with pytest.raises(ours.NotThere, match=r"1 of 2 keys were not found in partition .* the first is 'never'"):
        ours.kv_batch_get(["k0", "never"], pid)


def test_a_read_of_unknown_fields_is_an_error_and_not_an_empty_batch(ours: Any, pid: str) -> None:
    ours.kv_batch_put(KEYS, pid, fields=dense())
    with pytest.raises(ours.NotThere, match="none of the fields never: put it first; its fields are x"):
        ours.kv_batch_get(KEYS, pid, "never")


def test_a_read_of_rows_cleared_after_the_lookup_is_an_error(ours: Any, pid: str) -> None:
    client = ours.get_client()
    meta = client.put(dense(), partition_id=pid)
    client.clear_samples(meta[1:2])
    with pytest.raises(ours.StorageKeyNotFoundError, match="1 of 4 rows") as caught:
        client.get_data(meta)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(ours.StorageKeyNotFoundError):
        client.put(TensorDict({"y": torch.ones(4)}, batch_size=[4]), metadata=meta)


def test_a_key_lookup_of_rows_without_keys_is_an_error(ours: Any, pid: str) -> None:
    client = ours.get_client()
    meta = client.put(dense(), partition_id=pid)
    assert ours.kv_list(pid) == {pid: {}}
    with pytest.raises(ours.NoKey, match="without a key"):
        client.kv_retrieve_keys(meta.global_indexes, pid)
    with pytest.raises(ours.NoKey, match="is not there"):
        client.kv_retrieve_keys([12345], pid)


def test_an_emptied_partition_can_be_cleared(ours: Any, pid: str) -> None:
    client = ours.get_client()
    client.clear_samples(client.put(dense(), partition_id=pid))
    assert pid in client.get_partition_list()
    client.clear_partition(pid)
    assert pid not in client.get_partition_list()


def test_row_indexes_are_never_reused(ours: Any, pid: str) -> None:
    client = ours.get_client()
    first = client.put(dense(), partition_id=pid)
    client.clear_samples(first)
    second = client.put(dense(), partition_id=pid)
    client.clear_partition(pid)
    third = client.put(dense(), partition_id=pid)
    indexes = first.global_indexes + second.global_indexes + third.global_indexes
    assert len(set(indexes)) == 12
    with pytest.raises(KeyError):
        client.get_data(first)


def test_rows_may_differ_in_dtype_and_kind(ours: Any, pid: str) -> None:
    ours.kv_put("a", pid, fields={"x": torch.ones(2)})
    ours.kv_put("b", pid, fields={"x": torch.ones(2, dtype=torch.int64)})
    ours.kv_put("c", pid, fields={"x": "text"})
    found = ours.kv_batch_get(["c", "a", "b"], pid).get("x").tolist()
    assert found[0] == "text"
    assert [each.dtype for each in found[1:]] == [torch.float32, torch.int64]


def test_a_value_that_cannot_be_stored_is_refused_with_its_row(ours: Any, pid: str) -> None:
    value = threading.Lock()
    with pytest.raises(dp.SchemaMismatch, match=r"column 'x', row 0: cannot hold"):
        ours.kv_put("a", pid, fields={"x": value})
    with pytest.raises(dp.SchemaMismatch, match=r"column 'x', row 1: cannot hold"):
        ours.kv_batch_put(["a", "b"], pid, fields=TensorDict({"x": NonTensorStack(1, value)}, batch_size=[2]))
    assert ours.kv_list(pid) == {}


def test_a_class_that_the_reader_lacks_is_named(ours: Any, pid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With field and row, and what to import; the rows are there, and are read once it is imported."""
    made = types.ModuleType("users_own")
    monkeypatch.setitem(sys.modules, "users_own", made)
    made.Level = enum.Enum("Level", "LOW HIGH", module="users_own")  # type: ignore[attr-defined]
    values: list[Any] = ["text", {"kept": torch.ones(2), "level": made.Level.HIGH}, 3]
    for key, value in zip("abc", values, strict=True):
        ours.kv_put(key, pid, fields={"x": value})
    monkeypatch.delitem(sys.modules, "users_own")
    with pytest.raises(dp.SchemaMismatch, match=r"column 'x', row 2: .*Level.*import users_own before") as caught:
        ours.kv_batch_get(["c", "a", "b"], pid)
    assert (caught.value.column, caught.value.row) == ("x", 2)
    monkeypatch.setitem(sys.modules, "users_own", made)
    assert ours.kv_batch_get(["c", "a", "b"], pid)["x"][2]["level"] is made.Level.HIGH


def test_a_tag_that_cannot_be_stored_is_misuse(ours: Any, pid: str) -> None:
    with pytest.raises(dp.Misuse, match="tag"):
        ours.kv_put("a", pid, tag={"x": object()})
    assert ours.kv_list(pid) == {}


def test_a_put_larger_than_the_memory_budget_is_refused(ours: Any, pid: str) -> None:
    with pytest.raises(dp.LimitExceeded, match="memory budget"):
        rows = torch.arange(4, dtype=torch.uint8)[:, None].repeat(1, 64 << 20)  # equal ones are stored once
        ours.kv_batch_put(KEYS, pid, fields=TensorDict({"x": rows}, [4]))


def test_a_batch_of_no_rows_is_refused(ours: Any, pid: str) -> None:
    with pytest.raises(ValueError, match="no rows"):
        ours.get_client().put(TensorDict({"x": torch.empty(0, 2)}, batch_size=[0]), partition_id=pid)


def fetch(ours: Any, pid: str, rows: int, sampler: Any, **config: Any) -> Any:
    from dataplane.integrations.transfer_queue import sampling
    from dataplane.integrations.transfer_queue.session import session

    return sampling.fetch(session().partition(pid), ["x"], rows, "train", sampler, config, 0.0, sampling.Withdrawal())


def test_groups_are_not_mixed_when_a_row_is_missing(ours: Any, pid: str) -> None:
    """TransferQueue's sampler takes any consecutive indexes: with row 1 not ready, it gives 2, 3, 4 of two prompts."""
    client = ours.get_client()
    meta = client.get_meta(["x"], 6, pid, mode="insert")
    ready = [0, 2, 3, 4, 5]
    client.put(TensorDict({"x": torch.tensor(ready)}, batch_size=[5]), metadata=meta.select_samples(ready))
    sampler = GRPOGroupNSampler(3)
    assert fetch(ours, pid, 3, sampler).global_indexes == meta.global_indexes[3:]
    assert fetch(ours, pid, 3, sampler) is None


def test_groups_are_not_mixed_when_a_prompt_has_fewer_rows(ours: Any, pid: str) -> None:
    client, sampler = ours.get_client(), GRPOGroupNSampler(3)
    client.put(dense(2), partition_id=pid)  # one rollout of this prompt failed
    whole = client.put(dense(6), partition_id=pid)
    client.put(dense(1), partition_id=pid)
    assert fetch(ours, pid, 6, sampler).global_indexes == whole.global_indexes
    assert fetch(ours, pid, 3, sampler) is None


def test_groups_are_identified_by_a_tag(ours: Any, pid: str) -> None:
    for key, uid in [("a", 1), ("b", 2), ("c", 1), ("d", 3), ("e", 2), ("f", 1)]:
        ours.kv_put(key, pid, fields={"x": torch.zeros(1)}, tag={"uid": uid})
    sampler, client = GRPOGroupNSampler(2), ours.get_client()
    rows = fetch(ours, pid, 4, sampler)
    assert client.kv_retrieve_keys(rows.global_indexes, pid) == ["a", "c", "b", "e"]
    assert fetch(ours, pid, 2, sampler) is None


def test_ranks_get_whole_groups_of_about_equal_length(ours: Any, pid: str) -> None:
    client = ours.get_client()
    put = client.put(dense(8), partition_id=pid)
    put.update_custom_meta([{"total_lengths": n} for n in (9, 9, 1, 1, 5, 5, 5, 5)])
    client.set_custom_meta(put)
    parts = []
    for rank in (1, 0):
        sampler = ours.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)  # as in a process of its own
        parts.append(fetch(ours, pid, 4, sampler, dp_rank=rank, batch_index=0))
    assert sorted(parts[0].global_indexes + parts[1].global_indexes) == put.global_indexes
    assert [sum(each["total_lengths"] for each in part.custom_meta) for part in parts] == [20, 20]
    assert client.check_consumption_status("train", pid)


def test_ranks_that_name_the_same_batch_get_the_same_rows(ours: Any, pid: str) -> None:
    client = ours.get_client()
    put = client.put(dense(4), partition_id=pid)

    def batch(rank: int, index: int) -> Any:
        return fetch(ours, pid, 2, ours.RankAwareSampler(), dp_rank=rank, batch_index=index).global_indexes

    assert batch(0, 0) == batch(0, 0) == put.global_indexes[:2]
    assert batch(1, 0) == put.global_indexes[2:]
    assert batch(0, 0) == put.global_indexes[:2]


def test_a_custom_sampler_selects_and_consumes_rows(ours: Any, pid: str) -> None:
    class Last(ours.BaseSampler):
        """The last rows; one of them may come again."""

        def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
            chosen = ready_indexes[-batch_size:]
            return chosen, chosen[:-1]

    put = ours.get_client().put(dense(4), partition_id=pid)
    assert fetch(ours, pid, 2, Last()).global_indexes == put.global_indexes[2:]
    assert fetch(ours, pid, 2, Last()).global_indexes == [put.global_indexes[1], put.global_indexes[3]]
