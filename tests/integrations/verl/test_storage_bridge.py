"""verl's own V1 path over the backend, as far as a host without GPUs goes: its agent loops' puts, bridge and steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dataplane.errors import Misuse
from dataplane.integrations.transfer_queue import standing
from tests.processes import eventually

ray = pytest.importorskip("ray", reason="needs Ray: make test-integrations")
verl = pytest.importorskip("verl", reason="needs verl: make test-integrations")
tq = pytest.importorskip("transfer_queue", reason="needs TransferQueue: make test-integrations")
import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # noqa: E402
from verl.utils.transferqueue_utils import tqbridge  # noqa: E402
from verl.workers.utils.padding import response_from_nested, response_to_nested  # noqa: E402

from tests.integrations.verl.storage_job import job, used  # noqa: E402

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.leaks(reason="Ray and TransferQueue keep threads and descriptors for as long as the process lives"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

PROMPT, RESPONSES = 4, (3, 5, 3, 2)
KEYS = [f"uid_{i}_0" for i in range(len(RESPONSES))]


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    with job(memory="64MiB", spill=0, prewarm=0) as made:
        yield made


def trajectory(number: int, response: int) -> dict[str, Any]:
    """What an agent loop has of one, as `AgentLoopWorkerTQ` makes it: text only where the number is even."""
    ids = torch.arange(PROMPT + response) + 100 * number
    images = {} if number % 2 else {"pixel_values": torch.full((4 + number, 8), float(number))}
    return {
        "uid": f"uid_{number}",
        "prompts": ids[:PROMPT],
        "responses": ids[PROMPT:],
        "response_mask": torch.ones(response, dtype=torch.int64),
        "loss_mask": torch.ones(response, dtype=torch.int64),
        "input_ids": ids,
        "position_ids": torch.arange(4 * len(ids)).view(4, len(ids))
        if not number % 2
        else torch.ones(4, len(ids)).long(),
        "rm_scores": torch.full((response,), float(number)),
        "multi_modal_inputs": images,
        "extra_fields": {"min_global_steps": None, "turns": [1, number]},
        "num_turns": number,
        "agent_name": "single_turn",
    }


class Worker:
    """What verl has in a worker group's process."""

    def __init__(self) -> None:
        import dataplane.integrations.verl.plugin  # noqa: F401  # which registers; verl's plugins do in a real job

    def put(self, number: int, fields: dict[str, Any], tag: dict[str, Any]) -> None:
        tq.init()
        tq.kv_batch_put([KEYS[number]], "train", list_of_dict_to_tensordict([fields]), [tag])

    @tqbridge()
    def compute_log_prob(self, batch: TensorDict) -> TensorDict:
        rows = [ids.float() / 2 for ids in batch["input_ids"].unbind()]
        seen = [float(images["pixel_values"].sum()) if images else 0.0 for images in batch["multi_modal_inputs"]]
        log_probs = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict({"log_probs": log_probs, "seen": torch.tensor(seen)}, batch_size=len(rows))


def test_a_step_of_the_v1_trainer(queue: Any) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
    puts = [
        workers[number % 2].put.remote(
            number, trajectory(number, length), {"status": "success", "seq": PROMPT + length}
        )
        for number, length in enumerate(RESPONSES)
    ]
    ray.get(puts, timeout=120)
    assert {key: tag["seq"] for key, tag in queue.kv_list("train")["train"].items()} == dict(
        zip(KEYS, [PROMPT + length for length in RESPONSES], strict=True)
    )

    # The bridge: KVBatchMeta there, a TensorDict in the worker, and a KVBatchMeta back.
    tags = [{} for _ in KEYS]
    fields = ["input_ids", "multi_modal_inputs"]
    meta = tq.KVBatchMeta(
        keys=KEYS[::-1], tags=tags, partition_id="train", fields=fields, extra_info={"temperature": 1.0}
    )
    output = ray.get(workers[0].compute_log_prob.remote(meta), timeout=120)
    assert {"log_probs", "seen"} <= set(output.fields)
    assert output.keys == KEYS[::-1]

    # The driver's own steps: response parts, padded, advantages, and back.
    names = ["log_probs", "response_mask", "prompts", "responses", "rm_scores", "uid", "seen", "extra_fields"]
    data = tq.kv_batch_get(keys=KEYS, partition_id="train", select_fields=names)
    assert data["prompts"].offsets().diff().tolist() == [PROMPT] * 4, "equally long rows are jagged too"
    assert data["responses"].offsets().diff().tolist() == list(RESPONSES)
    assert data["seen"].tolist() == [0.0, 0.0, 2.0 * 6 * 8, 0.0]
    assert data.get("extra_fields").tolist()[3] == {"min_global_steps": None, "turns": [1, 3]}
    data["old_log_probs"] = response_from_nested(data.pop("log_probs"), data["response_mask"])
    tq.kv_batch_put(keys=KEYS, partition_id="train", fields=data.select("old_log_probs"))
    mask = data["response_mask"]
    padded = DataProto(batch=tq.kv_batch_get(KEYS, "train", ["old_log_probs", "rm_scores"]).to_padded_tensor())
    advantages = response_to_nested(padded.batch["rm_scores"] - padded.batch["old_log_probs"], mask)
    tq.kv_batch_put(KEYS, "train", TensorDict({"advantages": advantages}, batch_size=4))
    got = tq.kv_batch_get(KEYS, "train", "advantages")["advantages"]
    assert [len(row) for row in got.unbind()] == list(RESPONSES)

    # Whatever fields the rows have, by whoever: all of them go, once nobody has a view.
    del data, mask, got
    tq.kv_clear(KEYS, "train")
    eventually(lambda: used() == 0, "the step's rows are freed")


def test_nothing_stands_in_for_transferqueue_while_it_runs(queue: Any) -> None:
    """What it gave verl would not be known any more."""
    from dataplane.integrations import transfer_queue as ours

    with pytest.raises(Misuse, match=r"install\(\) before transfer_queue.init\(\), or transfer_queue.close\(\)"):
        ours.install()
    assert sys.modules["transfer_queue"] is tq
    assert standing.VARIABLE not in os.environ
