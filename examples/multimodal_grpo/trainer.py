"""The trainer: one GRPO update a batch of complete groups, after which its rows are acked and new weights published.

Weights travel as everything does: they are put, a reference of them goes up on the board, and once newer ones are there
the old ones are freed. The rows' memory is the stream's affair: it goes when every task has acked them.
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
    """Train until the target is reached, or steps or time are over; then examine the policy. deadline: monotonic."""
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
            if fresh:  # what was learnt before everything was killed may come once more, if its ack was not heard
                share = ranks.share(plane, delivery.ref if len(fresh) == len(delivery) else delivery.ref[fresh])
                number += 1
                recent.append(update(job, policy, optimizer, share, ranks))
                del share  # before the next batch is waited for: it may hold the memory that it needs
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
    """Learn from this rank's share of each batch, until there are no more."""
    policy, optimizer = learner(job)
    ranks = Ranks(job, rank, store)
    with dp.connect(address) as plane:
        while len(share := ranks.share(plane, None)):
            update(job, policy, optimizer, share, ranks)


def learner(job: Job) -> tuple[Policy, torch.optim.Optimizer]:
    """A policy that has learnt nothing, equal in every process, and what updates it."""
    torch.set_num_threads(1)
    policy = Policy(job.seed)
    return policy, torch.optim.Adam(policy.parameters(), lr=job.learning_rate)


def batches(job: Job, rollouts: dp.Stream) -> Iterator[dp.Delivery]:
    """Batches of complete groups whose rows have their reward, the responses of a prompt side by side."""
    rows = job.prompts * job.responses
    columns = [*PROMPT_COLUMNS, *RESPONSE_COLUMNS]
    return rollouts.deliveries(
        "actor", rows=rows, min_rows=rows, columns=columns, sampler=dp.CompleteGroups(job.responses)
    )


def count_the_rest(job: Job, rollouts: dp.Stream, ledger: Ledger) -> None:
    """Nobody learns from what was still on its way. It is counted, and its pixels are not read."""
    sampler = dp.CompleteGroups(job.responses)  # groups that lack rows expire now: the stream is closed
    for delivery in rollouts.deliveries("actor", rows=1024, columns=["reward"], sampler=sampler):
        delivery.ack()
        ledger.count([key for key in delivery.keys if key not in ledger])


def update(job: Job, policy: Policy, optimizer: torch.optim.Optimizer, said: dp.Batch, ranks: Ranks) -> float:
    """One step of the optimizer, with this rank's share of a batch; the batch's mean reward.

    Responses of a prompt follow one another, so every eighth row has all the pixels there are: they are read in
    place, from the memory where the rollout worker wrote them, and go through the policy once for all eight.
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


def report(job: Job, number: int, delivery: dp.Delivery, recent: deque[float]) -> Step:
    """What there is to say of an update."""
    ref = delivery.ref
    once = ref[:: job.responses].select(*PROMPT_COLUMNS).nbytes + ref.select(*RESPONSE_COLUMNS).nbytes
    lag = number - 1 - float(np.mean(delivery.versions))
    sent = len(pickle.dumps(ref))
    return Step(number, recent[-1], float(np.mean(recent)), lag, len(ref), ref.nbytes, once, sent)
