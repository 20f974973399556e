"""What code written for TransferQueue relies on, asked of TransferQueue itself and of what stands in for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from tests.integrations.marks import SYSTEMS

pytestmark = SYSTEMS

KEYS = ["a", "b", "c", "d"]


def jagged(*rows: Any) -> Any:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=torch.int64) for row in rows], layout=torch.jagged)


def batch(rows: int = 4, **more: Any) -> TensorDict:
    columns = {
        "ids": torch.nested.as_nested_tensor(
            [torch.arange(i + 1, dtype=torch.int64) for i in range(rows)], layout=torch.jagged
        ),
        "score": torch.arange(rows, dtype=torch.float32),
        "answer": NonTensorStack(*[f"answer {i}" for i in range(rows)]),
    }
    return TensorDict(columns | more, batch_size=[rows])


def rows_of(value: Any) -> list[Any]:
    """Each row, whatever the field came back as."""
    if isinstance(value, torch.Tensor):
        return [row.tolist() for row in value.unbind()]
    return value.tolist()


def got(data: TensorDict, name: str) -> list[Any]:
    return rows_of(data.get(name))


def test_rows_put_by_key_are_read_by_key(tq: Any, pid: str) -> None:
    tq.kv_batch_put(KEYS, pid, fields=batch())
    data = tq.kv_batch_get(KEYS, pid)
    assert data.batch_size == (4,)
    assert got(data, "ids") == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert got(data, "score") == [0.0, 1.0, 2.0, 3.0]
    assert got(data, "answer") == [f"answer {i}" for i in range(4)]
    assert data["ids"].is_nested
    assert data["ids"].offsets().diff().tolist() == [1, 2, 3, 4]
    assert data["score"].shape == (4,)


def test_a_row_is_put_as_a_dict(tq: Any, pid: str) -> None:
    meta = tq.kv_put("one", pid, fields={"ids": torch.tensor([1, 2, 3]), "who": "me"}, tag={"score": 0.5})
    assert (meta.keys, meta.tags, meta.partition_id, sorted(meta.fields)) == (
        ["one"],
        [{"score": 0.5}],
        pid,
        ["ids", "who"],
    )
    data = tq.kv_batch_get("one", pid)
    assert got(data, "ids") == [[1, 2, 3]]
    assert got(data, "who") == ["me"]


def test_a_second_put_adds_fields_and_tags(tq: Any, pid: str) -> None:
    tq.kv_batch_put(KEYS, pid, fields=batch(), tags=[{"n": i} for i in range(4)])
    more = TensorDict({"reward": torch.ones(4)}, batch_size=[4])
    meta = tq.kv_batch_put(KEYS, pid, fields=more, tags=[{"done": True}] * 4)
    assert sorted(meta.fields) == ["answer", "ids", "reward", "score"]
    assert meta.tags == [{"n": i, "done": True} for i in range(4)]
    assert tq.kv_list(pid)[pid]["c"] == {"n": 2, "done": True}


def test_tags_are_put_and_listed_without_fields(tq: Any, pid: str) -> None:
    tq.kv_put("uid", pid, tag={"status": "running"})
    tq.kv_put("uid", pid, tag={"status": "finished", "step": 3})
    assert tq.kv_list(pid) == {pid: {"uid": {"status": "finished", "step": 3}}}
    assert tq.kv_list()[pid] == {"uid": {"status": "finished", "step": 3}}
    with pytest.raises(ValueError, match=r"."):
        tq.kv_batch_get("uid", pid)


def test_cleared_rows_are_removed(tq: Any, pid: str) -> None:
    tq.kv_batch_put(KEYS, pid, fields=batch(), tags=[{}] * 4)
    tq.kv_clear(["b", "c", "never there"], pid)
    assert sorted(tq.kv_list(pid)[pid]) == ["a", "d"]
    assert got(tq.kv_batch_get(["d", "a"], pid), "score") == [3.0, 0.0]
    with pytest.raises(ValueError, match=r"."):
        tq.kv_batch_get("b", pid)


def test_a_cleared_key_can_be_put_again(tq: Any, pid: str) -> None:
    tq.kv_batch_put(KEYS, pid, fields=batch(), tags=[{"old": 1}] * 4)
    tq.kv_clear("a", pid)
    tq.kv_put("a", pid, fields={"score": torch.tensor(9.0)})
    assert got(tq.kv_batch_get("a", pid), "score") == [9.0]
    assert tq.kv_list(pid)[pid]["a"] == {}


def test_a_field_that_no_row_has_is_left_out(tq: Any, pid: str) -> None:
    """verl's trainer asks for `ref_log_prob` and `values` whether there are any or not."""
    tq.kv_batch_put(KEYS, pid, fields=batch())
    assert list(tq.kv_batch_get(KEYS, pid, ["score", "values"]).keys()) == ["score"]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda tq, pid: tq.kv_batch_get("a", pid), id="no such partition"),
        pytest.param(lambda tq, pid: tq.kv_put("a", pid), id="nothing to put"),
        pytest.param(lambda tq, pid: tq.kv_batch_put(KEYS, pid), id="nothing to put, several"),
        pytest.param(lambda tq, pid: tq.kv_batch_put(KEYS[:3], pid, fields=batch()), id="too few keys"),
        pytest.param(lambda tq, pid: tq.kv_batch_put(KEYS, pid, tags=[{}] * 3), id="too few tags"),
        pytest.param(lambda tq, pid: tq.kv_batch_put([], pid, tags=[]), id="no keys"),
        pytest.param(lambda tq, pid: tq.kv_put("a", pid, fields={"x": jagged([1], [2])}), id="nested in a row"),
        pytest.param(lambda tq, pid: tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a"], [{}])), id="no partition"),
    ],
)
def test_invalid_arguments_are_value_errors(tq: Any, pid: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        wrong(tq, pid)


def test_the_metadata_returned_by_a_put_reads_its_rows(tq: Any, pid: str) -> None:
    meta = tq.kv_batch_put(KEYS, pid, fields=batch())
    assert got(tq.kv_batch_get_by_meta(meta), "score") == [0.0, 1.0, 2.0, 3.0]
    part = meta.select_keys(["c", "b"])
    assert got(tq.kv_batch_get_by_meta(part, "score"), "score") == [2.0, 1.0]
    with pytest.raises(ValueError, match="nothing"):
        tq.kv_batch_get_by_meta(part, "nothing")


def test_the_asynchronous_key_value_calls_behave_like_the_synchronous_ones(tq: Any, pid: str) -> None:
    async def work() -> Any:
        await tq.async_kv_batch_put(KEYS, pid, fields=batch())
        await asyncio.gather(*(tq.async_kv_put(key, pid, tag={"seen": True}) for key in KEYS))
        meta = tq.KVBatchMeta(keys=KEYS, tags=[{}] * 4, partition_id=pid, fields=["score"])
        data = await tq.async_kv_batch_get_by_meta(meta)
        listed = await tq.async_kv_list(pid)
        await tq.async_kv_clear(KEYS[:2], pid)
        left = await tq.async_kv_batch_get(KEYS[2:], pid)
        return data, listed, left

    data, listed, left = asyncio.run(work())
    assert got(data, "score") == [0.0, 1.0, 2.0, 3.0]
    assert listed == {pid: {key: {"seen": True} for key in KEYS}}
    assert got(left, "score") == [2.0, 3.0]


@pytest.mark.parametrize("call", ["kv_put", "async_kv_put"])
@pytest.mark.parametrize("whole", [False, True], ids=["a dict", "a TensorDict"])
def test_a_data_parser_transforms_the_fields_of_a_single_row(tq: Any, pid: str, call: str, *, whole: bool) -> None:
    """It gets columns of one row."""

    def parse(fields: dict[str, Any]) -> dict[str, Any]:
        return {"answer": [text.upper() for text in fields["answer"]], "score": fields["score"] + torch.ones(1, 2)}

    fields: Any = {"answer": "yes", "score": torch.zeros(2)}
    if whole:
        fields = TensorDict({"answer": NonTensorStack("yes"), "score": torch.zeros(1, 2)}, batch_size=[1])
    if call == "kv_put":
        tq.kv_put("k", pid, fields, data_parser=parse)
    else:
        asyncio.run(tq.async_kv_put("k", pid, fields, data_parser=parse))
    data = tq.kv_batch_get("k", pid)
    assert (got(data, "answer"), got(data, "score")) == (["YES"], [[1.0, 1.0]])


def test_rows_put_without_keys_are_fetched_once_a_task(tq: Any, pid: str) -> None:
    client = tq.get_client()
    put = client.put(batch(), partition_id=pid)
    assert put.size == 4
    assert put.is_ready
    assert put.field_names == ["answer", "ids", "score"]
    first = client.get_meta(["ids"], 3, pid, task_name="train")
    assert first.global_indexes == sorted(put.global_indexes)[:3]
    assert first.field_names == ["ids"]
    put_as = dict(zip(put.global_indexes, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]], strict=True))
    assert got(client.get_data(first), "ids") == [put_as[index] for index in first.global_indexes]
    left = client.get_meta(["ids"], 1, pid, task_name="train")
    assert sorted(first.global_indexes + left.global_indexes) == sorted(put.global_indexes)
    put.update_custom_meta([{"w": i} for i in range(4)])
    client.set_custom_meta(put)
    other = client.get_meta(["ids"], 4, pid, task_name="other")
    assert other.custom_meta == [{"w": i} for i in range(4)]
    assert [sample.custom_meta["w"] for sample in other.samples] == [0, 1, 2, 3]


def test_a_request_for_more_rows_than_ready_is_an_error(tq: Any, pid: str) -> None:
    client = tq.get_client()
    client.put(batch(), partition_id=pid)
    with pytest.raises(RuntimeError, match=r"."):
        client.get_meta(["ids"], 5, pid, task_name="train")
    assert client.get_meta(["ids"], 4, pid, task_name="train").size == 4


def test_rows_are_inserted_first_and_put_later(tq: Any, pid: str) -> None:
    client = tq.get_client()
    meta = client.get_meta(["ids", "score", "answer"], 4, pid, mode="insert")
    assert not meta.is_ready
    assert meta.field_names == ["answer", "ids", "score"]
    after = client.put(batch(), metadata=meta)
    assert after.is_ready
    assert after.global_indexes == meta.global_indexes
    assert got(client.get_data(after), "score") == [0.0, 1.0, 2.0, 3.0]


def test_a_stage_adds_its_fields_to_the_rows_it_got(tq: Any, pid: str) -> None:
    client = tq.get_client()
    client.put(batch(), partition_id=pid)
    meta = client.get_meta(["ids"], 2, pid, task_name="reward")
    client.put(TensorDict({"reward": torch.tensor([[1.0], [2.0]])}, batch_size=[2]), metadata=meta)
    _, status = client.get_production_status(["ids", "reward"], pid)
    assert sorted(status.tolist()) == [[1, 0], [1, 0], [1, 1], [1, 1]]
    train = client.get_meta(["score", "reward"], 2, pid, task_name="train")
    assert train.global_indexes == meta.global_indexes
    assert got(client.get_data(train), "reward") == [[1.0], [2.0]]


def test_force_fetch_gives_all_rows_ready_or_not(tq: Any, pid: str) -> None:
    client = tq.get_client()
    put = client.put(batch(), partition_id=pid)
    client.put(TensorDict({"reward": torch.ones(2, 1)}, batch_size=[2]), metadata=put[:2])
    meta = client.get_meta(["reward"], None, pid, mode="force_fetch")
    ready = dict(zip(meta.global_indexes, meta.production_status.tolist(), strict=True))
    assert [ready[index] for index in put.global_indexes] == [1, 1, 0, 0]
    assert not meta.is_ready


def test_production_and_consumption_status_are_reported(tq: Any, pid: str) -> None:
    client = tq.get_client()
    assert tq.kv_list(pid) == {}
    assert client.get_production_status(["ids"], pid) == (None, None)
    assert client.get_consumption_status("train", pid) == (None, None)
    assert not client.check_consumption_status("train", pid)
    put = client.put(batch(), partition_id=pid)
    assert client.check_production_status(["ids", "score"], pid)
    assert not client.check_production_status(["unknown"], pid)
    client.get_meta(["ids"], 3, pid, task_name="train")
    indexes, status = client.get_consumption_status("train", pid)
    assert indexes.tolist() == sorted(put.global_indexes)
    assert status.tolist() == [1, 1, 1, 0]
    assert not client.check_consumption_status("train", pid)
    client.get_meta(["ids"], 1, pid, task_name="train")
    assert client.check_consumption_status("train", pid)
    assert client.reset_consumption(pid, "train")
    assert client.get_consumption_status("train", pid)[1].tolist() == [0, 0, 0, 0]
    assert client.get_meta(["ids"], 4, pid, task_name="train").size == 4


def test_samples_and_partitions_are_cleared(tq: Any, pid: str) -> None:
    client = tq.get_client()
    put = client.put(batch(), partition_id=pid)
    client.clear_samples(put[1:3])
    left = client.get_meta(["ids"], 2, pid, task_name="train")
    assert sorted(left.global_indexes) == sorted([put.global_indexes[0], put.global_indexes[3]])
    assert pid in client.get_partition_list()
    client.clear_partition(pid)
    assert pid not in client.get_partition_list()
    client.clear_partition(pid)
    assert client.get_consumption_status("train", pid) == (None, None)


def test_keys_and_metadata_are_converted_into_each_other(tq: Any, pid: str) -> None:
    client = tq.get_client()
    tq.kv_batch_put(KEYS, pid, fields=batch())
    meta = client.kv_retrieve_meta(["c", "a"], pid)
    assert meta.is_ready
    assert meta.field_names == ["answer", "ids", "score"]
    assert client.kv_retrieve_keys(meta.global_indexes, pid) == ["c", "a"]
    assert got(client.get_data(meta.select_fields(["score"])), "score") == [2.0, 0.0]
    assert client.kv_retrieve_meta(["a", "unknown"], pid).size == 1
    assert client.kv_retrieve_meta(["a"], f"{pid}-unknown").size == 0
    made = client.kv_retrieve_meta(["new"], pid, create=True)
    assert made.size == 1
    assert not made.is_ready


@pytest.mark.parametrize("keys", [[], 3, ["a", 1], None], ids=repr)
def test_invalid_keys_are_refused(tq: Any, pid: str, keys: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        tq.get_client().kv_retrieve_meta(keys, pid)


@pytest.mark.parametrize("indexes", [[], "a", ["a"]], ids=repr)
def test_invalid_indexes_are_refused(tq: Any, pid: str, indexes: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        tq.get_client().kv_retrieve_keys(indexes, pid)


def test_a_put_without_partition_or_metadata_is_a_value_error(tq: Any) -> None:
    assert tq.get_client().get_data(tq.BatchMeta.empty()).batch_size == (0,)
    with pytest.raises(ValueError, match="partition_id"):
        tq.get_client().put(batch())
    with pytest.raises(ValueError, match="metadata"):
        tq.get_client().put(batch(), metadata=tq.BatchMeta.empty())


def test_the_asynchronous_client_calls_behave_like_the_synchronous_ones(tq: Any, pid: str) -> None:
    async def work() -> Any:
        client = tq.get_client()
        put = await client.async_put(batch(), partition_id=pid)
        meta = await client.async_get_meta(["ids"], 2, pid, task_name="train")
        data = await client.async_get_data(meta)
        kept = await client.async_check_consumption_status("train", pid)
        await client.async_clear_samples(put[1:])
        await client.async_clear_partition(pid)
        return data, kept, await client.async_get_partition_list()

    data, kept, partitions = asyncio.run(work())
    assert len(got(data, "ids")) == 2
    assert not kept
    assert pid not in partitions
