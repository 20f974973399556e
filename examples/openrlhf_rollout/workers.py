"""OpenRLHF's workers on a CPU, with its actor classes, executor, models and losses.

`forward`, `append` and `fit` take the same arguments as OpenRLHF's. In place of DeepSpeed, each rank has a whole model
and makes plain gradient steps with its own gradients. In place of vLLM, tokens are drawn at random.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch

from dataplane.integrations.openrlhf import LazyInputs
from examples.openrlhf_rollout.absent import stood_in

with stood_in():
    from openrlhf.models import Actor, PolicyLoss
    from openrlhf.trainer.ppo_utils.experience import (
        Experience,
        make_experience_batch,
        remove_padding_in_sequences,
        split_experience_batch,
    )
    from openrlhf.trainer.ray.launcher import BaseModelActor
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from openrlhf.utils.agent import SingleTurnAgentExecutor
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

_RolloutActor = RolloutRayActor.__ray_metadata__.modified_class


class _Measured:
    """The growth of this process's peak memory since `begin`, and the time of reading inputs."""

    def begin(self) -> None:
        """Begin to measure."""
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): reset the peak
        self._before = _peak()
        self._reading_s = 0.0

    def measured(self) -> tuple[int, float]:
        """The growth in bytes, and the seconds in which inputs were merged."""
        return _peak() - self._before, self._reading_s


def _peak() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


class _Model(BaseModelActor, _Measured):
    """A worker with the vision-language model."""

    def init_model_from_pretrained(self, strategy: Any, pretrain: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.strategy = strategy
        self.model = Actor(pretrain, attn_implementation="sdpa", param_dtype="bf16")

    def empty_cache(self) -> None:
        pass

    def forward(
        self, sequences: Any, action_mask: Any = None, attention_mask: Any = None, mm_train_inputs_list: Any = None
    ) -> Any:
        with torch.no_grad():
            return self.model(sequences, action_mask, attention_mask, **self._merged(mm_train_inputs_list))

    def _merged(self, inputs: Any) -> dict[str, Any]:
        began = time.perf_counter()
        merged = merge_mm_train_inputs(inputs, "cpu") if inputs else {}
        self._reading_s += time.perf_counter() - began
        return merged


class ReferenceWorker(_Model):
    """The reference model."""


class PolicyWorker(_Model):
    """The model that is trained."""

    def init_model_from_pretrained(self, strategy: Any, pretrain: str) -> None:
        super().init_model_from_pretrained(strategy, pretrain)
        self.loss = PolicyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.items: list[Experience] = []

    def append(self, experience: Experience) -> None:
        experience.to_device(torch.device("cpu"))
        self.items += remove_padding_in_sequences(split_experience_batch(experience))

    def fit(self, kl_ctl: float = 0.0) -> dict[str, float]:
        losses = []
        size = self.strategy.args.train.micro_batch_size
        for start in range(0, len(self.items), size):
            batch = make_experience_batch(self.items[start : start + size])
            log_probs = self.model(
                batch.sequences, batch.action_mask, batch.attention_mask, **self._merged(batch.mm_train_inputs)
            )
            loss = self.loss(log_probs, batch.action_log_probs, batch.advantages, action_mask=batch.action_mask)[0]
            loss.backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.items.clear()
        norm = sum(float(parameter.float().norm()) for parameter in self.model.parameters())
        return {"loss": sum(losses) / len(losses), "weights": norm}


class RewardWorker(BaseModelActor, _Measured):
    """In place of a reward model: the share of even tokens."""

    def init_model_from_pretrained(self, strategy: Any, pretrain: str) -> None:
        self.strategy = strategy

    def empty_cache(self) -> None:
        pass

    def forward(self, sequences: Any, attention_mask: Any = None, pad_sequence: bool = False) -> Any:
        even = (sequences % 2 == 0) * attention_mask
        return even.sum(-1).float() / attention_mask.sum(-1)


class PlainExecutor(SingleTurnAgentExecutor):
    """OpenRLHF's executor: the processor runs for each sample, and each sample carries its tensors."""


class LazyExecutor(LazyInputs, SingleTurnAgentExecutor):
    """The only change for the plane: samples carry handles of tensors."""


class RolloutWorker(_RolloutActor, _Measured):
    """OpenRLHF's rollout worker, with an engine that draws tokens at random."""

    async def __init__(self) -> None:
        """Create nothing; `use` chooses the executor."""

    async def use(self, lazy: bool) -> None:
        """Choose the executor, and seed the tokens again. lazy: samples carry handles of pixels, not pixels."""
        self.executor = LazyExecutor() if lazy else PlainExecutor()
        self._drawn = random.Random(0)

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        draw = random.Random(f"{self._drawn.random()}")
        tokens = [draw.randrange(8, 64) for _ in range(draw.randrange(2, sampling_params.max_tokens + 1))]
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tokens, text="", finish_reason="stop", logprobs=None)]
        )

    def get_num_unfinished_requests(self) -> int:
        return 0


#: The classes above keep their names, so that Ray pickles them by name.
Reference = ray.remote(num_gpus=1)(ReferenceWorker)
Policy = ray.remote(num_gpus=1)(PolicyWorker)
Reward = ray.remote(num_gpus=1)(RewardWorker)
Rollout = ray.remote(num_cpus=0)(RolloutWorker)
