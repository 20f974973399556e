"""`get_meta` of ready rows: what is claimed, and by whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataplane.client.sync import Table
from tests.integrations.marks import KEPT
from tests.integrations.nursery import Process
from tests.integrations.transfer_queue.test_mistakes import program  # noqa: F401  # a fixture

pytestmark = KEPT

HOW: dict[str, Any] = {"data_fields": ["x"], "task_name": "t"}


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, batch_size=[count])


def test_a_cancelled_get_meta_claims_no_row(ours: Any, pid: str) -> None:
    client = ours.get_client()

    async def cancelled() -> None:
        call = asyncio.create_task(client.async_get_meta(**HOW, batch_size=4, partition_id=pid, timeout=60))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancelled())
    client.put(rows(4), partition_id=pid)
    assert len(client.get_meta(**HOW, batch_size=4, partition_id=pid, timeout=60)) == 4


def test_a_batch_of_which_a_row_is_cleared_when_it_is_claimed_has_the_others(
    ours: Any, pid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, claim = ours.get_client(), Table.claim
    ours.kv_batch_put(list("abcd"), pid, fields=rows(4))

    def clearing(self: Table, *args: Any, **how: Any) -> Any:
        given = claim(self, *args, **how)
        ours.kv_clear(["b"], pid)
        return given

    monkeypatch.setattr(Table, "claim", clearing)
    found = client.get_meta(**HOW, batch_size=4, partition_id=pid)
    assert client.kv_retrieve_keys(found.global_indexes, pid) == ["a", "c", "d"]


def test_tags_may_be_scalars_of_numpy_and_torch(ours: Any, pid: str) -> None:
    tag = {"a": np.float32(1.5), "b": np.int64(7), "c": np.bool_(True), "d": torch.tensor(3), "e": [np.int8(1)]}
    ours.kv_put("k", pid, {"x": torch.ones(1)}, tag)
    assert ours.kv_list(pid)[pid] == {"k": {"a": 1.5, "b": 7, "c": True, "d": 3, "e": [1]}}


def test_groups_are_given_once_they_are_whole(program: Callable[..., Process]) -> None:  # noqa: F811
    code = """
        import threading
        from transfer_queue import GRPOGroupNSampler
        size = 3
        tq.init({"controller": {"sampler": GRPOGroupNSampler(n_samples_per_prompt=size)}, **SMALL})
        client, found = tq.get_client(), []
        def put(uid, which, partition="p"):
            fields = TensorDict({"x": torch.ones(len(which))}, batch_size=[len(which)])
            tags = [{"uid": uid}] * len(which) if uid else None
            tq.kv_batch_put([f"{uid}{number}" for number in which], partition, fields=fields, tags=tags)
        def get(size, partition="p"):
            how = {"batch_size": size, "partition_id": partition, "task_name": "t", "timeout": 60}
            return sorted(client.kv_retrieve_keys(client.get_meta(["x"], **how).global_indexes, partition))
        for uid in "abc":
            put(uid, range(size - 1))
        waiting = threading.Thread(target=lambda: found.extend(get(2 * size)))
        waiting.start()
        put("d", range(size))  # one whole group, which is too few
        assert get(size) == [f"d{number}" for number in range(size)]  # fewer rows are ready than before
        put("a", [size - 1])
        put("b", [size - 1])
        waiting.join()
        assert found == sorted(f"{uid}{number}" for uid in "ab" for number in range(size))

        put("", range(size), "q")
        put("", range(2 * size), "q")  # once more, with a second group
        groups = [get(size, "q"), get(size, "q")]
        assert sorted(sum(groups, [])) == sorted(str(number) for number in range(2 * size))
        tell("done")
    """
    with program(code) as process:
        assert process.hear() == "done"
