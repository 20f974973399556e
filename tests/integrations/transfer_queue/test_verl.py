"""verl's V1 trainer path, its own classes, on what stands in for TransferQueue: what the rollout workers put, what the
replay buffer samples, what `tqbridge` brings to a worker group's functions. A whole run: `verl/test_fit.py`."""

from __future__ import annotations

import asyncio
import copyreg
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.integrations.marks import SYSTEMS

pytestmark = SYSTEMS

RESPONSES = 4  # a prompt
PROMPTS = 3
EOS = 2


@pytest.fixture(scope="module")
def verl(node: str) -> Iterator[SimpleNamespace]:
    """verl's modules, imported where we stand in."""
    from dataplane.integrations import transfer_queue as ours

    ours.install()
    from verl.protocol import BatchData
    from verl.trainer.ppo import padding_utils
    from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base
    from verl.utils import transferqueue_utils

    assert transferqueue_utils.tq.kv_put is ours.kv_put, "verl's modules that were there before are given ours"
    ours.close()  # what earlier tests told the job
    ours.init()
    yield SimpleNamespace(
        tq=ours,
        BatchData=BatchData,
        agent_loop=agent_loop_tq,
        buffer=replay_buffer,
        padding=padding_utils,
        trainer=trainer_base.PPOTrainer,
        bridge=transferqueue_utils.tqbridge,
    )
    ours.close()
    ours.uninstall()


def test_the_controllers_images_are_pickled_as_their_files(verl: SimpleNamespace) -> None:
    """From the job's `init` until its `close`; how is asked in `tests/integrations/verl/test_pickles.py`."""
    from PIL.PngImagePlugin import PngImageFile

    assert PngImageFile in copyreg.dispatch_table


def config() -> Any:
    from omegaconf import OmegaConf

    rollout = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "n": RESPONSES, "calculate_log_probs": True,
        "val_kwargs": {"n": 1, "top_p": 1.0, "top_k": -1, "temperature": 0.0},
        "agent": {"default_agent_loop": "single"},
    }  # fmt: skip
    actor = {"loss_agg_mode": "token-mean", "loss_scale_factor": None}
    algorithm = {
        "use_kl_in_reward": False,
        "adv_estimator": "grpo",
        "gamma": 1.0,
        "lam": 1.0,
        "rollout_correction": None,
    }
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "actor": actor}, "algorithm": algorithm})


def rollout_worker(verl: SimpleNamespace, *, fail: bool = False) -> Any:
    """verl's rollout worker, without a model: what it would generate is made up, how it is put is its own."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    class Worker(verl.agent_loop.AgentLoopWorkerTQ.__ray_metadata__.modified_class):
        def __init__(self) -> None:
            self.config = config()
            self.processor = self.tokenizer = self.reward_loop_worker_handles = None
            self.distillation_enabled = False
            self.background_tasks: set[Any] = set()

        async def _run_agent_loop(
            self, sampling_params: Any, trajectory: Any, *, agent_name: str, **kwargs: Any
        ) -> None:
            kwargs.pop("trace", None)
            i, session = kwargs["index"], kwargs["session_id"]
            if fail and session == 1:
                raise RuntimeError("the rollout failed")
            length = 2 + (i + session) % 3
            output = AgentLoopOutput(
                prompt_ids=list(range(10, 12 + i)),
                response_ids=[100 * i + session] * length,
                response_mask=[1] * length,
                response_logprobs=[-0.5] * length,
                reward_score=float(session),
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields={
                    "reward_extra_info": {"acc": float(session % 2)},
                    "min_global_steps": 1,
                    "max_global_steps": 1,
                },
            )
            await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    return Worker()


def prompts() -> TensorDict:
    messages = [[{"role": "user", "content": f"question {i}"}] for i in range(PROMPTS)]
    batch = TensorDict(
        {
            "uid": NonTensorStack(*[f"uid{i}" for i in range(PROMPTS)]),
            "index": torch.arange(PROMPTS),
            "raw_prompt": NonTensorStack(*[NonTensorData(each) for each in messages]),
            "reward_model": NonTensorStack(*[{"ground_truth": str(i), "style": "rule"} for i in range(PROMPTS)]),
            "data_source": NonTensorStack(*["made up"] * PROMPTS),
        },
        batch_size=[PROMPTS],
    )
    batch["global_steps"] = NonTensorData(1)
    return batch


def submit(verl: SimpleNamespace, *, fail: bool = False) -> None:
    """What the trainer does at the begin of a step: prompts registered, and handed to the rollout."""
    batch = prompts()
    batch["index"] = NonTensorStack(*range(PROMPTS))
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in range(PROMPTS)]
    verl.tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags)

    async def work() -> None:
        worker = rollout_worker(verl, fail=fail)
        await worker.generate_sequences(batch)
        await asyncio.gather(*worker.background_tasks)

    asyncio.run(work())


def replay(verl: SimpleNamespace, **more: Any) -> Any:
    given = {"max_off_policy_threshold": None, "max_off_policy_strategy": "drop", "sampler_kwargs": {}}
    return verl.buffer.ReplayBuffer("sync", config(), poll_interval=0.01, **(given | more))


@pytest.fixture
def sampled(verl: SimpleNamespace) -> Iterator[Any]:
    """A step's batch, as the trainer has it after the rollout."""
    submit(verl)
    batch, _ = replay(verl).sample(global_steps=1, partition_id="train", batch_size=PROMPTS)
    yield batch
    for name in verl.tq.get_client().get_partition_list():
        verl.tq.get_client().clear_partition(name)


def test_rows_of_equal_lengths_come_nested_all_the_same(verl: SimpleNamespace, sampled: Any) -> None:
    """verl takes offsets of what it gets, also where the lengths happen to be equal."""
    data = verl.tq.kv_batch_get(keys=["uid0_0_0", "uid0_3_0"], partition_id="train", select_fields=["responses"])
    assert data["responses"].offsets().diff().tolist() == [2, 2]
    assert data["responses"].to_padded_tensor(padding=0).shape == (2, 2)


def test_a_failed_rollout_is_seen(verl: SimpleNamespace) -> None:
    submit(verl, fail=True)
    listed = verl.tq.kv_list("train")["train"]
    assert {listed[f"uid{i}"]["status"] for i in range(PROMPTS)} == {"failure"}
    buffer = replay(verl)
    buffer._sync_metadata_from_transfer_queue()
    assert buffer.failure_keys["train"] == {f"uid{i}" for i in range(PROMPTS)}
    verl.tq.get_client().clear_partition("train")


def test_groups_without_a_signal_are_evicted(verl: SimpleNamespace) -> None:
    """DAPO's filter reads `rm_scores` of finished groups and clears those whose rows all have the same."""
    submit(verl)
    same = TensorDict({"rm_scores": torch.zeros(RESPONSES, 1)}, batch_size=[RESPONSES])
    verl.tq.kv_batch_put([f"uid0_{s}_0" for s in range(RESPONSES)], "train", fields=same)
    buffer = replay(verl, filter_groups_metric="reward", refill_fn=lambda _: None, train_batch_size=2, gen_batch_size=1)
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert {key.split("_")[0] for key in batch.keys} == {"uid1", "uid2"}
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert not [key for key in verl.tq.kv_list("train")["train"] if key.startswith("uid0")]
    verl.tq.get_client().clear_partition("train")


def test_a_bridged_function_gets_rows_and_puts_what_it_returns(verl: SimpleNamespace, sampled: Any) -> None:
    """As a worker group calls it: the driver cuts the batch, each rank gets rows, the driver joins what they return."""

    @verl.bridge()
    def compute_log_prob(data: TensorDict) -> TensorDict:
        ids = data["input_ids"]
        assert ids.is_nested
        assert data["temperature"] == 0.7
        log_probs = torch.nested.nested_tensor_from_jagged(ids.values().float() / 100, ids.offsets())
        return TensorDict({"log_probs": log_probs, "metrics": NonTensorData({"loss": 1.0})}, batch_size=data.batch_size)

    sampled.extra_info["temperature"] = 0.7
    parts = verl.BatchData(sampled).chunk(2)
    assert [part.size for part in parts] == [6, 6]
    outputs = [compute_log_prob(part) for part in parts]
    joined = verl.BatchData(outputs).concat()
    assert isinstance(joined, verl.tq.KVBatchMeta)
    assert joined.keys == sampled.keys
    assert joined.extra_info["metrics"] == [{"loss": 1.0}, {"loss": 1.0}]
    data = verl.tq.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=["input_ids", "log_probs"])
    assert torch.equal(data["log_probs"].values(), data["input_ids"].values().float() / 100)


def test_a_bridged_coroutine_does_too(verl: SimpleNamespace, sampled: Any) -> None:
    @verl.bridge()
    async def score(data: TensorDict) -> TensorDict:
        return TensorDict({"values": data["rm_scores"]}, batch_size=data.batch_size)

    meta = asyncio.run(score(sampled))
    assert (meta.keys, meta.tags) == (sampled.keys, sampled.tags)
    assert "values" in meta.fields
    data = verl.tq.kv_batch_get_by_meta(meta, ["values", "rm_scores"])
    assert torch.equal(data["values"].values(), data["rm_scores"].values())
    assert verl.bridge()(lambda data: None)(sampled) is None


def test_padding_is_put_beside_the_rows(verl: SimpleNamespace, sampled: Any) -> None:
    """Padding has fields that the rows lack; they are left out of what both have."""
    padded = verl.padding.upsample_batch_to_divisible_size(sampled, 8, EOS)
    assert len(padded) == 16
    data = verl.tq.kv_batch_get(padded.keys, "train", ["input_ids", "attention_mask", "rm_scores"])
    assert "attention_mask" not in list(data.keys())
    assert len(data["input_ids"].unbind()) == 16


def test_prompts_are_kept_for_a_restart(verl: SimpleNamespace, tmp_path: Any) -> None:
    """What the asynchronous trainers do: prompts put with their fields, a checkpoint, and after a restart the rest."""
    batch = prompts()
    kept = batch.select(*[key for key in list(batch.keys()) if not isinstance(batch.get(key), NonTensorData)])
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1}] * PROMPTS
    verl.tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags, fields=kept)
    verl.tq.save_checkpoint(tmp_path / "transfer_queue", metadata={"global_steps": 1})
    verl.tq.get_client().clear_partition("train")
    verl.tq.load_checkpoint(tmp_path / "transfer_queue")
    again: list[Any] = []
    trainer = SimpleNamespace(
        trainer_mode="async", global_steps=2, agent_loop_manager=SimpleNamespace(generate_sequences=again.append)
    )
    assert verl.trainer._reissue_inflight_prompts(trainer, "train") == PROMPTS
    assert again[0]["raw_prompt"][1] == [{"role": "user", "content": "question 1"}]
    assert verl.tq.kv_list("train")["train"]["uid0"]["global_steps"] == 2
    verl.tq.get_client().clear_partition("train")
