"""What `train_ppo_ray` runs with, on a CPU: OpenRLHF's own trainers, samples generator, experience maker, groups,
executors and data sets; made up is what the engine generates and what the models compute.

What models compute follows from what they received, pixels included, and what a rank received to train on is written
to a file: two runs saw the same if these are the same.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch

from dataplane.integrations.openrlhf import LazyInputs
from examples.openrlhf_rollout.absent import stood_in
from examples.openrlhf_rollout.vision import Processor, make_tokenizer

with stood_in():
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ppo_utils.experience import Experience, remove_padding_in_sequences, split_experience_batch
    from openrlhf.trainer.ray.launcher import BaseModelActor
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
    from openrlhf.utils.agent import SingleTurnAgentExecutor
    from openrlhf.utils.deepspeed import DeepspeedStrategy
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

SIDE = 56  # pixels of a picture, in each direction
_LONGEST = 6  # tokens of an answer


class Strategy(DeepspeedStrategy):  # type: ignore[misc]  # OpenRLHF has no types
    """OpenRLHF's own, without DeepSpeed's processes: ranks of a group do not speak with each other."""

    def setup_distributed(self, *_: Any, **__: Any) -> None:
        pass

    def is_rank_0(self) -> bool:
        return False  # nobody shows progress

    def print(self, *_: Any) -> None:
        pass


def strategy_of(args: Any) -> Strategy:
    return Strategy(args=args, train_batch_size=args.train.batch_size)


def tokenizer_of(pretrain: str, *_: Any, **__: Any) -> Any:
    """The processor where there are pictures, else the tokenizer. Called before prompts are shuffled."""
    torch.manual_seed(0)
    return Processor(SIDE) if (Path(pretrain) / "pictures").exists() else make_tokenizer()


for _module in (ppo_trainer, ppo_trainer_async):  # in each process that has a trainer of these
    _module.get_tokenizer = tokenizer_of


class Trainer(ppo_trainer.PPOTrainer.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
    """Of a module that can be imported without CUDA."""


class AsyncTrainer(ppo_trainer_async.PPOTrainerAsync.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
    """As above; it makes the two below."""


class _Generating(ppo_trainer_async.GenerateSamplesActor.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
    pass


class _Training(ppo_trainer_async.TrainingActor.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
    pass


class _Lock(ppo_trainer_async.VLLMLock.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
    pass


ppo_trainer_async.GenerateSamplesActor = ray.remote(num_cpus=0)(_Generating)
ppo_trainer_async.TrainingActor = ray.remote(num_cpus=0)(_Training)
ppo_trainer_async.VLLMLock = ray.remote(num_cpus=0)(_Lock)


class _Model(BaseModelActor):  # type: ignore[misc]
    """A rank of a model whose "weights" are how often it was trained."""

    def init_model_from_pretrained(self, strategy: Any, pretrain: str, *_: Any) -> None:
        torch.set_num_threads(1)
        self._setup_distributed(strategy)
        self.trained = 0

    def empty_cache(self) -> None:
        pass

    def forward(
        self,
        sequences: Any,
        action_mask: Any = None,
        attention_mask: Any = None,
        packed_seq_lens: Any = None,
        mm_train_inputs_list: Any = None,
    ) -> Any:
        pixels = _pixels(mm_train_inputs_list) if mm_train_inputs_list else 0.0
        return -((sequences[:, 1:] * 31 + self.trained * 7) % 97 / 97 + pixels) * action_mask


class Reference(_Model):
    pass


class Critic(_Model):
    def append(self, experience: Experience) -> None:
        self.appended = len(experience.sequences)

    def fit(self) -> dict[str, float]:
        self.trained += 1
        return {"critic_loss": float(self.appended)}

    def save_checkpoint(self, tag: str, **_: Any) -> None:
        pass

    def save_model(self) -> None:
        pass


class Reward(_Model):
    def forward(self, sequences: Any, attention_mask: Any = None, pad_sequence: bool = False) -> Any:
        return ((sequences % 2 == 0) * attention_mask).sum(-1).float() / attention_mask.sum(-1)


class Policy(_Model):
    def init_model_from_pretrained(self, strategy: Any, pretrain: str, max_steps: int, engines: Any) -> None:
        super().init_model_from_pretrained(strategy, pretrain)
        self._engines = engines
        self._items: list[Experience] = []
        self._states: dict[str, Any] = {}
        args = strategy.args
        self._seen = Path(args.ckpt.output_dir) / f"seen-{self._rank}.jsonl"
        self._kept = Path(args.ckpt.path) / "_actor"
        if args.ckpt.load_enable and self._kept.exists():
            self._states = torch.load(self._kept / "states.pt", weights_only=False)
            self.trained = self._states["trained"]

    def append(self, experience: Experience) -> None:
        experience.to_device(torch.device("cpu"))
        self._items += remove_padding_in_sequences(split_experience_batch(experience))

    def fit(self, kl_ctl: float = 0.0) -> dict[str, float]:
        with self._seen.open("a") as seen:
            for item in self._items:
                json.dump({"step": self.trained, **_row(item)}, seen)
                seen.write("\n")
        self.trained += 1
        kl = sum(float(item.info["kl"]) for item in self._items) / len(self._items)
        self._items.clear()
        return {"policy_loss": 0.0, "kl": kl}

    def broadcast_to_vllm(self) -> None:
        if not self._rank:
            ray.get([engine.updated.remote(self.trained) for engine in self._engines])

    def save_checkpoint(self, tag: str, client_states: Any = None, **_: Any) -> None:
        if not self._rank and not tag.startswith("best"):
            self._kept.mkdir(parents=True, exist_ok=True)
            torch.save({**(client_states or {}), "trained": self.trained}, self._kept / "states.pt")

    def get_checkpoint_states(self) -> dict[str, Any]:
        return self._states

    def save_model(self) -> None:
        pass


def _pixels(inputs: Any) -> float:
    """A number that changes with each pixel that was received."""
    merged = merge_mm_train_inputs(inputs, "cpu")
    return zlib.crc32(merged["pixel_values"].contiguous().numpy().tobytes()) / (1 << 32) if merged else 0.0


def _row(item: Experience) -> dict[str, Any]:
    inputs = item.mm_train_inputs
    return {
        "prompt": item.prompts[0] if isinstance(item.prompts, list) else item.prompts,
        "tokens": item.sequences.tolist(),
        "mask": item.action_mask.long().tolist(),
        "log_probs": [round(each, 5) for each in item.action_log_probs.float().tolist()],
        "advantages": item.advantages.float().tolist(),
        "reward": round(float(item.info["reward"]), 5),
        "pixels": _pixels(inputs if isinstance(inputs, list) else [inputs]) if inputs else None,
    }


class _Rewarding:
    """Gives the reward with the answer, as an agent does: evaluation and filters need it."""

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        response = await super().execute(*arguments, **options)  # type: ignore[misc]
        even = sum(token % 2 == 0 for token in response["observation_tokens"]) / len(response["observation_tokens"])
        return {**response, "reward": even, "scores": even}


class PlainAgent(_Rewarding, SingleTurnAgentExecutor):  # type: ignore[misc]
    pass


class LazyAgent(LazyInputs, _Rewarding, SingleTurnAgentExecutor):  # type: ignore[misc]
    pass


class Engine(RolloutRayActor.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
    """OpenRLHF's rollout worker. The k-th answer to a prompt is the same in each run."""

    async def __init__(self, agent: str) -> None:
        kinds = {"": SingleTurnAgentExecutor, "plain": PlainAgent, "lazy": LazyAgent}
        self.executor = kinds[agent]()
        self._answers: Counter[tuple[int, ...]] = Counter()
        self.weights = 0

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        prompt = tuple(prompt_token_ids)
        self._answers[prompt] += 1
        draw = random.Random(f"{prompt}{self._answers[prompt] % 4}")
        tokens = [draw.randrange(8, 64) for _ in range(draw.randrange(2, _LONGEST))]
        answer = SimpleNamespace(token_ids=tokens, text="", finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[answer])

    async def updated(self, weights: int) -> None:
        self.weights = weights

    async def pause_generation(self) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    def get_num_unfinished_requests(self) -> int:
        return 0
