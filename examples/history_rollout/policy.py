"""The policy: a small Hugging Face Llama with random weights. Supervised steps come first, so that GRPO can rank
responses."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.history_rollout import task


def policy(seed: int, width: int = 96, layers: int = 4) -> Any:
    """A random model, by default of half a million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=task.VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=task.END,
        pad_token_id=task.END,
    )
    return LlamaForCausalLM(config).eval()


def show(model: Any, steps: int, seed: int, rows: int = 48) -> float:
    """Train on right answers, `rows` in each step. Returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    model.train()
    loss = torch.zeros(())
    for step in range(steps):
        asked = task.prompts(rows, seed + step)
        tokens = torch.tensor([prompt + task.answer(prompt) for prompt in asked])
        labels = tokens.clone()
        labels[:, : task.DIGITS + 1] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    model.eval()
    return float(loss.detach())


class Grpo:
    """GRPO (arXiv 2402.03300) without clipping and KL penalty. Rewards are normalised
    in each group."""

    def __init__(self, model: Any, rate: float = 3e-5) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def update(self, prompts: list[list[int]], responses: list[list[list[int]]], rewards: list[list[float]]) -> None:
        """Make one step with a group of responses and their rewards for each prompt."""
        rows, weights = [], []
        for prompt, group, got in zip(prompts, responses, rewards, strict=True):
            scores = torch.tensor(got)
            advantages = (scores - scores.mean()) / (scores.std(unbiased=False) + 1e-4)
            for response, advantage in zip(group, advantages.tolist(), strict=True):
                rows.append(prompt + response)
                weights.append(advantage)
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [task.END] * (longest - len(row)) for row in rows])
        begins = len(prompts[0])
        mask = torch.tensor([[begins <= at < len(row) for at in range(1, longest)] for row in rows]).float()
        self._model.train()
        scores = self._model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        chosen = scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(chosen * mask * torch.tensor(weights)[:, None]).sum() / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._model.eval()
