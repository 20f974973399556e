"""A rollout worker: draws images, generates eight answers to each, and appends the rows to the stream.

The pixels are written once, directly into shared memory. `repeat` makes a reference with eight rows a prompt, so the
pixels are not copied. Only processes that request the pixels read them.

A worker may be killed at any time: an append adds all of its rows or none. A restarted worker has a new life number, so
no key is used twice.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch

import dataplane as dp
from examples.multimodal_grpo import digits, ledger, patches, tokens
from examples.multimodal_grpo.board import Board
from examples.multimodal_grpo.job import Job
from examples.multimodal_grpo.policy import Policy


def work(job: Job, address: str, worker: int, life: int, pictures: dp.BatchRef, board: Board) -> None:
    """Append batches. Raises Closed when the stream is closed."""
    torch.set_num_threads(1)
    rng = np.random.default_rng([job.seed, worker, life])
    torch.manual_seed(int(rng.integers(1 << 32)))
    policy, version = Policy(job.seed), 0
    with dp.connect(address) as plane:
        rollouts = plane.stream("rollouts")
        for batch in itertools.count():
            version = refresh(plane, policy, version, board)
            chosen = pictures[rng.integers(len(pictures), size=job.prompts)]
            prompts = put_prompts(plane, job, plane.get(chosen), rng)
            rows = prompts.repeat(job.responses).union(put_responses(plane, job, policy, prompts))
            keys = ledger.keys(worker, life, batch * len(rows), len(rows))
            groups = [key for key in keys[:: job.responses] for _ in range(job.responses)]
            rollouts.append(rows, keys=keys, group=groups, version=version)
            time.sleep(job.pauses[worker])


def refresh(plane: dp.Plane, policy: Policy, version: int, board: Board) -> int:
    """Load the newest weights if they are newer than `version`. Returns the version of the policy."""
    while (newest := board.read()) is not None and newest[0] > version:
        try:
            policy.load_batch(plane.get(newest[1]))
            return newest[0]
        except dp.Freed:
            continue  # newer weights were published meanwhile, and these were freed
    return version


def put_prompts(plane: dp.Plane, job: Job, chosen: dp.Batch, rng: np.random.Generator) -> dp.BatchRef:
    """Draw the pictures in random sizes, as patches in shared memory. Returns the rows of prompts."""
    sizes = digits.sizes(len(chosen), job.smallest, job.largest, rng)
    grids = [patches.grid_of(height, width) for height, width in sizes]
    spec = dp.ragged([np.prod(grid) for grid in grids], (patches.PATCH_VALUES,), "float32")
    with plane.draft({"pixel_values": spec}) as draft:
        for picture, size, room in zip(chosen["picture"].numpy(), sizes, draft["pixel_values"], strict=True):
            patches.write_patches(digits.draw(picture, *size), room)
        pixels = draft.seal()
    rest = {
        "image_grid_thw": np.array(grids),
        "input_ids": [tokens.prompt(grid) for grid in grids],
        "answer": chosen["answer"].to_list(),
    }
    return pixels.union(plane.put(rest))


@torch.no_grad()
def put_responses(plane: dp.Plane, job: Job, policy: Policy, prompts: dp.BatchRef) -> dp.BatchRef:
    """Generate the responses to each prompt. Returns rows with their tokens and log-probabilities."""
    seen = plane.get(prompts.select("pixel_values", "image_grid_thw"))  # views of the pixels in shared memory
    log_probs = policy(seen).log_softmax(1)
    answers = torch.multinomial(log_probs.exp(), job.responses, replacement=True)
    return plane.put(
        {
            "response_ids": [tokens.response(answer) for answer in answers.flatten().tolist()],
            "log_prob": log_probs.gather(1, answers).flatten(),
        }
    )
