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
    """The counters of an epoch: tokens, seconds without and with drafts, drafted tokens, and responses that differ."""

    tokens: int = 0
    plain_s: float = 0.0
    drafted_s: float = 0.0
    proposed: int = 0
    accepted: int = 0
    verifications: int = 0
    different: int = 0

    @property
    def gain(self) -> float:
        """The ratio of tokens a second, with history to without; 0 if nothing was generated."""
        return self.plain_s / self.drafted_s if self.drafted_s else 0.0


@torch.inference_mode()
def respond(model: Any, prompt: list[int], seed: int, drafter: Drafter | None) -> list[int]:
    """Sample a response at temperature 1; drafter: None for none. Returns its tokens without the prompt."""
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
    """Make a response without and with drafts, and add to `measured`. Returns the one without drafts.

    key: of the prompt, in the history. The way that comes first depends on the seed's parity.
    """
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
