"""The controller: a step of verl's trainer, with DataProtos or with references to them (RemoteProtos).

By reference, a step puts its prompts, and frees its scope at the end. Its calls are the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from verl.protocol import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage

from dataplane.integrations.process import plane
from dataplane.integrations.verl.proto import put
from examples.verl_rollout.memory import forget_peak, passed_bytes, peak_bytes
from examples.verl_rollout.workers import ActorWorker, RewardWorker, RolloutWorker


@dataclass(frozen=True)
class Job:
    """The sizes of the job."""

    prompts: int = 8
    responses: int = 4
    side: int = 112  # pixels of an image
    response_length: int = 6
    steps: int = 2
    rollout_workers: int = 2
    actor_workers: int = 2

    @property
    def cpus(self) -> int:
        """For Ray: one for each worker, and one for verl's own actor."""
        return self.rollout_workers + 1 + self.actor_workers + 1


@dataclass
class Report:
    """The steps' metrics and costs."""

    steps: list[dict[str, float]] = field(default_factory=list)
    passed: int = 0  # bytes of arguments and results in the controller
    moving_s: float = 0.0  # of the calls, without the slowest worker's computing
    computing_s: float = 0.0
    stored: int = 0  # bytes in the plane at the end of a step, at most
    peaks: dict[str, int] = field(default_factory=dict)  # resident bytes


class Trainer:
    """Owner of a job's worker groups. Ray must be initialised. One run at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pools: list[RayResourcePool] = []
        rollout = RayClassWithInitArgs(
            cls=ray.remote(RolloutWorker), side=job.side, response_length=job.response_length
        )
        self._rollout = self._group(job.rollout_workers, rollout)
        self._reward = self._group(1, RayClassWithInitArgs(cls=ray.remote(RewardWorker)))
        self._actor = self._group(job.actor_workers, RayClassWithInitArgs(cls=ray.remote(ActorWorker)))
        self._groups = {"rollout": self._rollout, "reward": self._reward, "actor": self._actor}

    def run(self, *, plain: bool) -> Report:
        """Run all steps with new models. plain: DataProtos by value, as in verl alone."""
        self._plain, self.report = plain, Report()
        forget_peak()
        for group in self._groups.values():
            group.start(plain)  # waits for them, so that no step includes their start
        for number in range(self._job.steps):
            self._step(number)
        self.report.peaks = {"controller": peak_bytes()}
        for name, group in self._groups.items():
            self.report.peaks |= {f"{name} {rank}": peak for rank, peak in enumerate(group.peak())}
        return self.report

    def close(self) -> None:
        """Kill the workers, and remove their placement groups."""
        for group in self._groups.values():
            for worker in group.workers:
                ray.kill(worker)
        for pool in self._pools:
            for place in pool.pgs:
                ray.util.remove_placement_group(place)

    def _step(self, number: int) -> None:
        job, scope = self._job, f"step-{number}"
        prompts = self._prompts(number)
        batch = (prompts if self._plain else put(prompts, scope=scope)).repeat(job.responses, interleave=True)
        metrics: dict[str, float] = {}
        batch = batch.union(self._call(self._rollout.generate_sequences, batch, metrics))
        batch = batch.union(self._call(self._reward.compute_rm_score, batch, metrics))
        batch = batch.union(self._call(self._actor.compute_log_prob, batch, metrics))
        batch = batch.union(self._call(self._actor.compute_ref_log_prob, batch, metrics))
        batch = compute_advantage(batch, AdvantageEstimator.GRPO)  # of verl; it reads and assigns small columns
        self._call(self._actor.update_actor, batch, metrics)
        self._rollout.load(self._actor.state())
        if not self._plain:
            self.report.stored = max(self.report.stored, plane().stats().memory_used)
            plane().free(scope=scope)
        self.report.steps.append(metrics)

    def _call(self, method: Callable[[Any], Any], batch: Any, metrics: dict[str, float]) -> Any:
        """Call a method of a group, and add to the report and to `metrics`. Returns the result."""
        began = time.perf_counter()
        result = method(batch)
        taken = time.perf_counter() - began
        told = result.meta_info.pop("metrics")
        computing = max(told.pop("computed"))
        self.report.computing_s += computing
        self.report.moving_s += taken - computing
        self.report.passed += passed_bytes(batch) + passed_bytes(result)
        metrics.update({name: float(np.mean(values)) for name, values in told.items()})
        return result

    def _prompts(self, number: int) -> DataProto:
        images = np.empty(self._job.prompts, object)
        images[:] = [number * self._job.prompts + prompt for prompt in range(self._job.prompts)]
        uids = np.array([f"{number}-{prompt}" for prompt in range(self._job.prompts)], dtype=object)
        return DataProto.from_dict(
            tensors={"dummy_tensor": torch.zeros(self._job.prompts, 1)},  # as in verl: a batch needs a tensor
            non_tensors={"uid": uids, "image": images},
            meta_info={"seed": number},
        )

    def _group(self, workers: int, of: RayClassWithInitArgs) -> RayWorkerGroup:
        pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
        self._pools.append(pool)
        os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")  # verl logs each worker's start
        return RayWorkerGroup(pool, of)
