"""The reward worker: compares the responses with the right answers.

It requests the columns of responses and answers, so it reads no pixels, in memory or on disk. `extend` adds the column
`reward` and does not rewrite the others. Rows are rewarded in the order of arrival; only the trainer needs whole
groups. This process does not import torch.
"""

from __future__ import annotations

import numpy as np

import dataplane as dp
from examples.multimodal_grpo import tokens

ROWS = 100  # of a delivery, at most


def work(address: str) -> None:
    """Reward rows until the stream is closed and drained."""
    with dp.connect(address) as plane:
        rollouts = plane.stream("rollouts")
        for delivery in rollouts.deliveries("reward", rows=ROWS, columns=["response_ids", "answer"]):
            batch = delivery.get()
            rewards = verify(batch["response_ids"].to_list(), batch["answer"].to_list())
            rollouts.extend(delivery.ref, {"reward": rewards})


def verify(responses: list[list[int]], answers: list[str]) -> np.ndarray:
    """The reward of each response: 1 if it is the answer, else 0."""
    right = [tokens.text(response) == answer for response, answer in zip(responses, answers, strict=True)]
    return np.array(right, dtype=np.float32)
