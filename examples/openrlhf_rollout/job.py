"""Steps of OpenRLHF's PPO with a group of answers for each prompt: rollout, reward, log-probs, advantages, update.

The controller's classes are OpenRLHF's: `SamplesGenerator` gets samples from the rollout worker,
`RemoteExperienceMaker` has the models score them and computes advantages, `RayActorGroup` sends inputs to the workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from PIL import Image

from dataplane.integrations import process
from examples.openrlhf_rollout.absent import stood_in
from examples.openrlhf_rollout.meter import Meter
from examples.openrlhf_rollout.vision import WORDS, Processor, make_model
from examples.openrlhf_rollout.workers import Policy, Reference, Reward, Rollout, _Measured

with stood_in():
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.trainer.ray.launcher import RayActorGroup


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the job. `side`: of a picture, in pixels; `ranks`: of the policy."""

    prompts: int = 8
    answers: int = 8
    side: int = 224
    steps: int = 2
    ranks: int = 2


@dataclass(frozen=True, slots=True)
class Report:
    """The results and costs of a run. Each list has a value for each step."""

    losses: list[float]
    weights: list[float]  # sum of the parameters' norms
    rewards: list[float]
    step_s: list[float]
    moving_s: float  # in the driver
    moved_bytes: dict[str, int]
    peaks: dict[str, int] = field(default_factory=dict)  # bytes beyond the start


def settings(size: Size) -> Any:
    """The options of OpenRLHF that the used classes read."""
    group = SimpleNamespace
    return group(
        actor=group(num_nodes=1, num_gpus_per_node=size.ranks),
        ds=group(ring_attn_size=1, tensor_parallel_size=1),
        rollout=group(batch_size=size.prompts, n_samples_per_prompt=size.answers, micro_batch_size=size.answers),
        train=group(
            dynamic_batch_enable=False,
            colocate_all=False,
            colocate_actor_ref=False,
            colocate_critic_reward=False,
            micro_batch_size=size.answers,
        ),
        algo=group(
            advantage=group(estimator="group_norm", gamma=1.0, lambd=1.0, is_correction_level="off"),
            kl=group(use_loss=False, estimator="k1"),
            dynamic_filtering_enable=False,
        ),
        reward=group(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        vllm=group(enable_sleep=False),
    )


class Strategy:
    """In place of DeepSpeed's: the options, and no output."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.ring_attn_group = None

    def is_rank_0(self) -> bool:
        return False  # so no progress is printed


def prompts(size: Size, where: Path) -> Iterator[tuple[Any, ...]]:
    """Prompts in the format of OpenRLHF's data loader: a few words, and the path of a random picture, which is written
    to the directory `where`."""
    draw = np.random.default_rng(0)
    for i in range(size.prompts * size.steps):
        picture = where / f"{i}.png"
        Image.fromarray(draw.integers(0, 255, (size.side, size.side, 3), np.uint8)).save(picture)
        text = f"<vision> <image> </vision> w{i % WORDS} w{(i + 1) % WORDS}"
        yield ["pictures"], [text], ["0"], [[str(picture)]]


class Crew:
    """The workers. Ray must be initialised. One run at a time, each with new models."""

    def __init__(self, size: Size, where: Path) -> None:
        """where: a directory for the model and the pictures."""
        make_model(where)
        self._size, self._where = size, where
        self._strategy, self._processor = Strategy(settings(size)), Processor(size.side)
        self._rollout = Rollout.remote()
        self._groups = {
            "policy": RayActorGroup(1, size.ranks, Policy, num_gpus_per_actor=0.2),
            "reference": RayActorGroup(1, 1, Reference, num_gpus_per_actor=0.2),
            "reward": RayActorGroup(1, 1, Reward, num_gpus_per_actor=0.2),
        }
        self._workers = {
            f"{name} {rank}": worker
            for name, group in self._groups.items()
            for rank, worker in enumerate(group._actor_handlers)
        }
        self._workers["rollout"] = self._rollout

    def run(self, *, lazy: bool) -> Report:
        """Run all steps. lazy: samples carry handles of pixels, not pixels. Groups send references if the hook is
        installed, independently of `lazy`."""
        policy, reference, reward = (self._groups[name] for name in ("policy", "reference", "reward"))
        starting = [self._rollout.use.remote(lazy)]
        for group in self._groups.values():
            starting += group.async_init_model_from_pretrained(self._strategy, str(self._where))
        ray.get(starting)
        pictures = list(prompts(self._size, self._where))
        generator = SamplesGenerator(self._strategy, pictures, None, self._processor, [self._rollout])
        maker = RemoteExperienceMaker(
            policy, None, reward, reference, FixedKLController(0.01), self._strategy, self._processor
        )
        driver = _Measured()
        driver.begin()
        ray.get([worker.begin.remote() for worker in self._workers.values()])
        losses, weights, rewards, step_s = [], [], [], []
        meter = Meter()
        with meter:
            for _ in range(self._size.steps):
                began = time.perf_counter()
                samples, *_ = generator.generate_samples(max_new_tokens=8, max_len=4096)
                experiences = maker.make_experience_batch(samples)
                ray.get(policy.async_run_method_batch(method_name="append", experience=experiences))
                status = ray.get(policy.async_run_method(method_name="fit", kl_ctl=0.01))
                step_s.append(time.perf_counter() - began)
                losses.append(sum(each["loss"] for each in status) / len(status))
                weights.append(sum(each["weights"] for each in status))
                rewards.append(float(torch.cat([each.info["reward"] for each in experiences]).mean()))
                del samples, experiences
        peaks = {"driver": driver.measured()[0]}
        peaks |= {name: ray.get(worker.measured.remote())[0] for name, worker in self._workers.items()}
        if lazy:
            peaks["the node's memory"] = process.plane().stats().memory_peak
        return Report(losses, weights, rewards, step_s, meter.seconds, meter.moved, peaks)
