"""The reward worker: compares what was answered with what is right.

It asks for two columns of text and tokens, so the pixels of the rows, in memory or on disk, stay where they are. It
adds a column without touching the others (`extend`), to rows as they come; groups are the trainer's affair. And it
needs no torch.
"""

from __future__ import annotations

import numpy as np

import dataplane as dp
from examples.multimodal_grpo import tokens

ROWS = 100  # at a time, at most


def work(address: str) -> None:
    """Reward rows until the stream is closed and drained."""
    with dp.connect(address) as plane:
        rollouts = plane.stream("rollouts")
        for delivery in rollouts.deliveries("reward", rows=ROWS, columns=["response_ids", "answer"]):
            batch = delivery.get()
            rewards = verify(batch["response_ids"].to_list(), batch["answer"].to_list())
            rollouts.extend(delivery.ref, {"reward": rewards})


def verify(responses: list[list[int]], answers: list[str]) -> np.ndarray:
    """1 for each response that says the answer, else 0."""
    right = [tokens.text(response) == answer for response, answer in zip(responses, answers, strict=True)]
    return np.array(right, dtype=np.float32)
