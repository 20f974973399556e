"""The trainer: makes one GRPO update for each batch of complete groups, acks its rows, and publishes new weights.

Weights are put, their reference is published on the board, and the older ones are freed. The stream frees the rows when
all tasks have acked them.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import torch

import dataplane as dp
from examples.multimodal_grpo import grpo, tokens
from examples.multimodal_grpo.board import Board
from examples.multimodal_grpo.job import Finished, Job, Step
from examples.multimodal_grpo.ledger import Ledger
from examples.multimodal_grpo.policy import Policy
from examples.multimodal_grpo.ranks import Ranks
from examples.multimodal_grpo.rollout import put_prompts
from examples.multimodal_grpo.saved import Saved

PROMPT_COLUMNS = ("pixel_values", "image_grid_thw")
RESPONSE_COLUMNS = ("response_ids", "log_prob", "reward")


def work(
    reports: Connection, job: Job, address: str, deadline: float, held_out: dp.BatchRef, board: Board, store: str
) -> None:
    """Train until the target is reached, or the steps or the time are over; then test the policy on `held_out`.
    `deadline`: a time of `time.monotonic()`."""
    policy, optimizer = learner(job)
    ranks = Ranks(job, 0, store)
    recent: deque[float] = deque(maxlen=job.averaged)
    ledger = Ledger()
    saved = Saved(job, policy, optimizer, recent, ledger)
    number = saved.load()
    with dp.connect(address) as plane:
        rollouts = plane.stream("rollouts")
        published = publish(plane, policy, number, board, None) if number else None
        for delivery in batches(job, rollouts):
            fresh = [at for at, key in enumerate(delivery.keys) if key not in ledger]
            if fresh:  # a batch comes again if all processes were killed after its update and before its ack
                share = ranks.share(plane, delivery.ref if len(fresh) == len(delivery) else delivery.ref[fresh])
                number += 1
                recent.append(update(job, policy, optimizer, share, ranks))
                del share  # the next batch may need its memory
                reports.send(report(job, number, delivery, recent))
                ledger.count([delivery.keys[at] for at in fresh])
                saved.save(number)
            delivery.ack()
            published = publish(plane, policy, number, board, published)
            reached = len(recent) == job.averaged and np.mean(recent) >= job.target
            if reached or number == job.steps or time.monotonic() > deadline:
                break
        ranks.end(plane, held_out)
        rollouts.close()
        count_the_rest(job, rollouts, ledger)
        average, accuracy = float(np.mean(recent)), examine(plane, job, policy, held_out)
        reports.send(Finished(average, accuracy, len(held_out), ledger.books(rollouts.stats())))


def follow(job: Job, address: str, rank: int, store: str) -> None:
    """Train on this rank's share of each batch, until there are no more."""
    policy, optimizer = learner(job)
    ranks = Ranks(job, rank, store)
    with dp.connect(address) as plane:
        while len(share := ranks.share(plane, None)):
            update(job, policy, optimizer, share, ranks)


def learner(job: Job) -> tuple[Policy, torch.optim.Optimizer]:
    """An untrained policy, the same in every process, and its optimizer."""
    torch.set_num_threads(1)
    policy = Policy(job.seed)
    return policy, torch.optim.Adam(policy.parameters(), lr=job.learning_rate)


def batches(job: Job, rollouts: dp.Stream) -> Iterator[dp.Delivery]:
    """Batches of complete groups with rewards, the responses of a prompt in adjacent rows."""
    rows = job.prompts * job.responses
    columns = [*PROMPT_COLUMNS, *RESPONSE_COLUMNS]
    return rollouts.deliveries(
        "actor", rows=rows, min_rows=rows, columns=columns, sampler=dp.CompleteGroups(job.responses)
    )


def count_the_rest(job: Job, rollouts: dp.Stream, ledger: Ledger) -> None:
    """Count the remaining rows, which are not used for training. Their pixels are not read."""
    sampler = dp.CompleteGroups(job.responses)  # groups that lack rows expire now: the stream is closed
    for delivery in rollouts.deliveries("actor", rows=1024, columns=["reward"], sampler=sampler):
        delivery.ack()
        ledger.count([key for key in delivery.keys if key not in ledger])


def update(job: Job, policy: Policy, optimizer: torch.optim.Optimizer, said: dp.Batch, ranks: Ranks) -> float:
    """Make one step of the optimizer with this rank's share of a batch. Returns the mean reward of the batch.

    The responses of a prompt are adjacent rows with the same pixels. So the policy evaluates every eighth row only. The
    pixels are views of the shared memory into which the rollout worker wrote them.
    """
    seen = dp.Batch({name: said[name][:: job.responses] for name in PROMPT_COLUMNS})
    rewards = said["reward"].torch().reshape(-1, job.responses)
    behaviour = said["log_prob"].torch().reshape(-1, job.responses)
    first = said["response_ids"].torch().values().reshape(-1, job.responses, 2)[:, :, 0]

    log_probs = policy(seen).log_softmax(1)
    chosen = log_probs.gather(1, first - tokens.DIGIT_0)
    loss = grpo.loss(chosen, behaviour, grpo.advantages(rewards), job.clip) - job.entropy * grpo.entropy(log_probs)

    optimizer.zero_grad()
    loss.backward()
    ranks.average(policy)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return ranks.mean(rewards.mean())


def publish(plane: dp.Plane, policy: Policy, version: int, board: Board, old: dp.BatchRef | None) -> dp.BatchRef:
    """Put the weights, publish their reference, and free the weights `old`. Returns the reference."""
    weights = plane.put({name: values[None] for name, values in policy.state_dict().items()})
    board.post(version, weights)
    if old is not None:
        plane.free(old)
    return weights


@torch.no_grad()
def examine(plane: dp.Plane, job: Job, policy: Policy, held_out: dp.BatchRef) -> float:
    """The accuracy of the policy's most likely answers on these digits."""
    rng = np.random.default_rng(job.seed)
    right = 0
    for part in held_out.split(job.prompts):
        prompts = put_prompts(plane, job, plane.get(part), rng)
        batch = plane.get(prompts.select("pixel_values", "image_grid_thw", "answer"))
        said = policy(batch).argmax(1).tolist()
        right += sum(str(digit) == answer for digit, answer in zip(said, batch["answer"].to_list(), strict=True))
        plane.free(prompts)
    return right / len(held_out)


def report(job: Job, number: int, delivery: dp.Delivery, recent: deque[float]) -> Step:
    """The report of an update."""
    ref = delivery.ref
    once = ref[:: job.responses].select(*PROMPT_COLUMNS).nbytes + ref.select(*RESPONSE_COLUMNS).nbytes
    lag = number - 1 - float(np.mean(delivery.versions))
    sent = len(pickle.dumps(ref))
    return Step(number, recent[-1], float(np.mean(recent)), lag, len(ref), ref.nbytes, once, sent)
