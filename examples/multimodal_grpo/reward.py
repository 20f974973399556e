"""The reward worker: compares what was answered with what is right.

It asks for two columns of text and tokens, so the pixels of the batch, in memory or on disk, stay where they are. It
adds a column without touching the others: stored by itself, joined by the reference (`union`). And it needs no torch.
"""

from __future__ import annotations

import numpy as np

import dataplane as dp
from examples.multimodal_grpo import tokens
from examples.multimodal_grpo.wires import Inlet, Outlet


def work(address: str, answered: Inlet, rewarded: Outlet) -> None:
    """Reward batches until somebody says stop."""
    with dp.connect(address) as plane:
        for ref in answered:
            batch = plane.get(ref.select("response_ids", "answer"))
            rewards = verify(batch["response_ids"].to_list(), batch["answer"].to_list())
            rewarded.send(ref.union(plane.put({"reward": rewards})))


def verify(responses: list[list[int]], answers: list[str]) -> np.ndarray:
    """1 for each response that says the answer, else 0."""
    right = [tokens.text(response) == answer for response, answer in zip(responses, answers, strict=True)]
    return np.array(right, dtype=np.float32)
