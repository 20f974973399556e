"""The trainer: one GRPO update a batch, after which the batch is freed and the new weights are published.

Weights travel as everything does: they are put, a reference of them goes up on the board, and once newer ones are there
the old ones are freed.
"""

from __future__ import annotations

import time
from collections import deque
from multiprocessing.connection import Connection

import numpy as np
import torch

import dataplane as dp
from examples.multimodal_grpo import grpo, tokens
from examples.multimodal_grpo.job import Finished, Job, Step
from examples.multimodal_grpo.policy import Policy
from examples.multimodal_grpo.rollout import PROMPT_COLUMNS, put_prompts
from examples.multimodal_grpo.wires import Board, Inlet


def work(
    job: Job, address: str, deadline: float, held_out: dp.BatchRef, board: Board, batches: Inlet, reports: Connection
) -> None:
    """Train until the target is reached, or steps or time are over; then examine the policy. deadline: monotonic."""
    torch.set_num_threads(1)
    policy = Policy(job.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=job.learning_rate)
    published: dp.BatchRef | None = None
    recent: deque[float] = deque(maxlen=job.averaged)
    with dp.connect(address) as plane:
        for number, ref in enumerate(batches, 1):
            reward, version = update(plane, job, policy, optimizer, ref)
            recent.append(reward)
            reports.send(_report(job, number, ref, recent, number - 1 - version))
            plane.free(ref)
            published = publish(plane, policy, number, board, published)
            reached = len(recent) == job.averaged and np.mean(recent) >= job.target
            if reached or number == job.steps or time.monotonic() > deadline:
                break
        reports.send(Finished(float(np.mean(recent)), examine(plane, job, policy, held_out), len(held_out)))


def update(
    plane: dp.Plane, job: Job, policy: Policy, optimizer: torch.optim.Optimizer, ref: dp.BatchRef
) -> tuple[float, float]:
    """One step of the optimizer. The batch's mean reward, and the mean version of the policy that answered.

    Responses of a prompt follow one another, so every eighth row has all the pixels there are: they are read in
    place, from the memory where the rollout worker wrote them, and go through the policy once for all eight.
    """
    seen = plane.get(ref[:: job.responses].select("pixel_values", "image_grid_thw"))
    said = plane.get(ref.select("response_ids", "log_prob", "policy_version", "reward"))

    rewards = said["reward"].torch().reshape(-1, job.responses)
    behaviour = said["log_prob"].torch().reshape(-1, job.responses)
    first = said["response_ids"].torch().values().reshape(-1, job.responses, 2)[:, :, 0]

    log_probs = policy(seen).log_softmax(1)
    chosen = log_probs.gather(1, first - tokens.DIGIT_0)
    loss = grpo.loss(chosen, behaviour, grpo.advantages(rewards), job.clip) - job.entropy * grpo.entropy(log_probs)

    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return rewards.mean().item(), said["policy_version"].torch().float().mean().item()


def publish(plane: dp.Plane, policy: Policy, version: int, board: Board, old: dp.BatchRef | None) -> dp.BatchRef:
    """Put the weights, tell everybody, and free those that they replace."""
    weights = plane.put({name: values[None] for name, values in policy.state_dict().items()})
    board.post(version, weights)
    if old is not None:
        plane.free(old)
    return weights


@torch.no_grad()
def examine(plane: dp.Plane, job: Job, policy: Policy, held_out: dp.BatchRef) -> float:
    """The part of these digits that the policy names rightly when it says what it holds most likely."""
    rng = np.random.default_rng(job.seed)
    right = 0
    for part in held_out.split(job.prompts):
        prompts = put_prompts(plane, job, plane.get(part), rng)
        batch = plane.get(prompts.select("pixel_values", "image_grid_thw", "answer"))
        said = policy(batch).argmax(1).tolist()
        right += sum(str(digit) == answer for digit, answer in zip(said, batch["answer"].to_list(), strict=True))
        plane.free(prompts)
    return right / len(held_out)


def _report(job: Job, number: int, ref: dp.BatchRef, recent: deque[float], lag: float) -> Step:
    once = ref[:: job.responses].select(*PROMPT_COLUMNS).nbytes + ref.drop(*PROMPT_COLUMNS).nbytes
    return Step(number, recent[-1], float(np.mean(recent)), lag, len(ref), ref.nbytes, once)
