"""Rollouts by `generate`, with and without history, by turns: the same seeds, and so the same tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from dataplane.history.drafter import Drafter
from dataplane.integrations.drafting.huggingface import SeededSampling, generate
from examples.history_rollout import task


@dataclass
class Measured:
    """Of one epoch: tokens, seconds with and without drafts, and what became of those."""

    tokens: int = 0
    plain_s: float = 0.0
    drafted_s: float = 0.0
    proposed: int = 0
    accepted: int = 0
    verifications: int = 0
    different: int = 0

    @property
    def gain(self) -> float:
        """Tokens a second with history over without."""
        return self.plain_s / self.drafted_s if self.drafted_s else 0.0


@torch.inference_mode()
def respond(model: Any, prompt: list[int], seed: int, drafter: Drafter | None) -> list[int]:
    """A response, sampled at temperature 1."""
    tokens = torch.tensor([prompt])
    how = {
        "do_sample": False,
        "logits_processor": [SeededSampling(seed)],
        "max_new_tokens": task.LONGEST,
        "attention_mask": torch.ones_like(tokens),
    }
    found = model.generate(tokens, **how) if drafter is None else generate(model, tokens, drafter, **how)
    made: list[int] = found[0, len(prompt) :].tolist()
    return made


def both(model: Any, prompt: list[int], seed: int, history: Any, key: str, measured: Measured) -> list[int]:
    """A response made twice, whichever way first by the seed's parity; what the model makes without drafts."""
    plain: list[int] = []
    drafted: list[int] = []
    for way in (0, 1) if seed % 2 else (1, 0):
        began = time.perf_counter()
        if way:
            drafter = history.drafter(key)
            drafted = respond(model, prompt, seed, drafter)
            measured.drafted_s += time.perf_counter() - began
            seen = drafter.statistics()
            measured.proposed += seen.proposed
            measured.accepted += seen.accepted
            measured.verifications += seen.verifications
        else:
            plain = respond(model, prompt, seed, None)
            measured.plain_s += time.perf_counter() - began
    measured.tokens += len(plain)
    measured.different += plain != drafted
    return plain
