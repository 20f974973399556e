"""Drafts in `generate`: the tokens are those without drafts, greedy and sampled, and there are fewer forward passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.history.drafter import Drafter, Learnt, Response

END = 15


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=END, pad_token_id=END, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def responded(model: Any, drafter: Drafter | None, seed: int | None, tokens: int = 40) -> tuple[list[int], int]:
    """What it makes, and in how many forward passes."""
    import torch

    from dataplane.integrations.drafting.huggingface import SeededSampling, generate

    asked = torch.tensor([[1, 2, 3, 4]])
    how = {"do_sample": False, "max_new_tokens": tokens, "attention_mask": torch.ones_like(asked)}
    if seed is not None:
        how["logits_processor"] = [SeededSampling(seed, 0.7)]
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_hook(count)
    with torch.inference_mode():
        found = model.generate(asked, **how) if drafter is None else generate(model, asked, drafter, **how)
    hook.remove()
    return found[0, 4:].tolist(), passes


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_generated_tokens_equal_those_without_drafts(model: Any, seed: int | None) -> None:
    alone, passes = responded(model, None, seed)
    assert len(alone) == passes
    history = [Response(np.array(alone, np.int32))]
    drafted, fewer = responded(model, Drafter(history), seed)
    assert drafted == alone
    assert fewer < passes / 2 or len(alone) < 8
    for other in ([], [Response(np.array(alone[3:] + alone[:3], np.int32))], [Response(np.arange(16, dtype=np.int32))]):
        assert responded(model, Drafter(other), seed)[0] == alone


def test_the_drafter_learns_all_generated_tokens(model: Any) -> None:
    alone, _ = responded(model, None, 5)
    drafter = Drafter([Response(np.array(alone, np.int32))], learnt=Learnt())
    responded(model, drafter, 5)
    assert drafter.statistics().tokens == len(alone)
    assert not hasattr(model, "__dict__") or "_get_candidate_generator" not in vars(model)


def test_an_end_in_a_draft_ends_the_response(model: Any) -> None:
    alone, _ = responded(model, None, 7, tokens=200)
    for cut in range(1, min(6, len(alone))):
        history = [Response(np.array([*alone[:cut], END, *alone[cut:]], np.int32))]
        assert responded(model, Drafter(history), 7, tokens=200)[0] == alone


def test_drafts_do_not_exceed_the_maximum_length(model: Any) -> None:
    for tokens in (1, 2, 5, 17):
        alone, _ = responded(model, None, 9, tokens=tokens)
        history = [Response(np.array(responded(model, None, 9, tokens=60)[0], np.int32))]
        assert responded(model, Drafter(history), 9, tokens=tokens)[0] == alone


def test_batches_of_several_are_refused(model: Any) -> None:
    import torch

    from dataplane.integrations.drafting.huggingface import SeededSampling, generate

    with pytest.raises(ValueError, match="batch"):
        generate(model, torch.zeros((2, 3), dtype=torch.int64), Drafter(), max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="temperature"):
        SeededSampling(0, 0.0)


def test_seeded_sampling_draws_from_the_softmax() -> None:
    import torch

    from dataplane.integrations.drafting.huggingface import SeededSampling

    scores = torch.tensor([[0.0, 1.0, -1.0, 0.5]])
    drawn = [int(SeededSampling(seed)(torch.zeros((1, 3)), scores).argmax()) for seed in range(4000)]
    share = scores[0].softmax(0).numpy()
    assert np.abs(np.bincount(drawn, minlength=4) / 4000 - share).max() < 0.03


# The example, small: it trains, and its responses are the same with and without history.

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_the_example_generates_the_same_responses_with_history(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    small = ["--epochs", "2", "--prompts", "2", "--samples", "2", "--shown", "20", "--json", str(figures)]
    command = [sys.executable, "-m", "examples.history_rollout", *small]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    first, second = json.loads(figures.read_text())
    assert first["different"] == second["different"] == 0
    assert first["proposed"] == 0 < second["proposed"]
    assert second["verifications"] <= second["tokens"]
