"""Actors on OpenRLHF's own base classes, for the tests: they tell what they received, and keep it."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

from dataplane.integrations import process
from dataplane.integrations.openrlhf import LazyInputs, hook
from dataplane.integrations.rows import LazyRow
from examples.openrlhf_rollout.absent import stood_in

with stood_in():
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray.launcher import BaseModelActor
    from openrlhf.utils.agent import SingleTurnAgentExecutor
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs


class EchoWorker(BaseModelActor):
    """Gives back what it received, handles read."""

    def init_model_from_pretrained(self) -> None:
        self.strategy = SimpleNamespace(is_rank_0=lambda: False)
        self.kept: list[Any] = []

    def forward(self, **received: Any) -> Any:
        return self._read(received)

    def append(self, experience: Experience) -> Any:
        self.kept.append(experience)
        return type(experience).__name__

    def appended(self) -> Any:
        return [self._read(each) for each in self.kept]

    def clear(self) -> None:
        self.kept.clear()

    def merged(self, mm_train_inputs_list: Any) -> Any:
        return {name: value.clone() for name, value in merge_mm_train_inputs(mm_train_inputs_list, "cpu").items()}

    def pinned(self) -> int:
        return process.plane().stats().pinned_bytes

    def pid(self) -> int:
        return os.getpid()

    def die(self, wait: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _read(self, value: Any) -> Any:
        if isinstance(value, LazyRow):
            return value.read()
        if isinstance(value, list):
            return [self._read(each) for each in value]
        if isinstance(value, dict):
            return {key: self._read(each) for key, each in value.items()}
        if isinstance(value, Experience):
            return Experience(**{key: self._read(each) for key, each in value.__dict__.items()})
        return value


class ControllerWorker:
    """In the place of PPOTrainer: an actor that is given groups and calls them."""

    def call(self, group: Any, method: str, **arguments: Any) -> tuple[bool, Any]:
        """Whether the hook is here, and what the workers gave back."""
        import ray

        found = ray.get(group.async_run_method_batch(method, **arguments))
        return hook.installed(), [each for part in found for each in part]


class Engine:
    """In the place of vLLM: the prompt's length says what comes."""

    def __init__(self) -> None:
        self.pictures: list[int] = []

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        self.pictures.append(len((multi_modal_data or {}).get("image", [])))
        made = SimpleNamespace(token_ids=[8, 9], text="w1 w2", finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[made])


class LazyExecutor(LazyInputs, SingleTurnAgentExecutor):
    """As a user writes it."""


class RolloutWorker:
    """In the place of RolloutRayActor: n samples of a prompt at once, by an executor."""

    def __init__(self) -> None:
        self.executor = LazyExecutor()

    async def generate_responses(self, prompt: str, processor: Any, images: Any, count: int) -> Any:
        import asyncio

        params = SimpleNamespace(max_tokens=4, logprobs=None)
        asked = [
            self.executor.execute(prompt, "0", params, 4096, processor, Engine(), images=images) for _ in range(count)
        ]
        return await asyncio.gather(*asked)

    def pid(self) -> int:
        return os.getpid()
