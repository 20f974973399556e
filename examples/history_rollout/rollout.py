"""Rollouts with and without drafts. The same seed gives the same tokens in both ways."""

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
    """Counters of an epoch. `proposed` and `accepted`: tokens of drafts; `different`: responses."""

    tokens: int = 0
    plain_s: float = 0.0
    drafted_s: float = 0.0
    proposed: int = 0
    accepted: int = 0
    verifications: int = 0
    different: int = 0

    @property
    def gain(self) -> float:
        """Tokens a second with history, divided by those without."""
        return self.plain_s / self.drafted_s if self.drafted_s else 0.0


@torch.inference_mode()
def respond(model: Any, prompt: list[int], seed: int, drafter: Drafter | None) -> list[int]:
    """Sample a response at temperature 1. Returns its tokens."""
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
    """Make a response with and without drafts; the seed's parity says which comes first. Returns the one without. key:
    the prompt's, in the history."""
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
