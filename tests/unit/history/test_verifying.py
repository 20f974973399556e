"""Verification is lossless: whatever a draft says, the tokens are the model's own draws."""

from __future__ import annotations

import numpy as np
import pytest

import dataplane as dp
from dataplane.history.drafter import Drafter, Response
from dataplane.history.verifying import accepted, accepted_of_tree, choose
from tests.cases import each_case

VOCABULARY = 5


def scores_after(tokens: list[int]) -> np.ndarray:
    """A model: scores of the next token, by the last two."""
    seed = sum(token * 7**at for at, token in enumerate(tokens[-2:]))
    return np.random.default_rng(seed).normal(size=VOCABULARY) * 1.5


def made(length: int, seed: int, drafter: Drafter | None, temperature: float, *, tree: bool = False) -> list[int]:
    """A response of the model, by drafts or token by token."""
    tokens: list[int] = []
    while len(tokens) < length:
        draft, parents = ([], []) if drafter is None else drafter.propose_tree(8) if tree else (drafter.propose(8), [])
        if not tree:
            parents = list(range(-1, len(draft) - 1))
        paths: list[list[int]] = []
        for token, parent in zip(draft, parents, strict=True):
            paths.append((paths[parent] if parent >= 0 else []) + [token])
        chosen = [
            int(choose(scores_after(tokens + path)[None], seed, len(tokens) + len(path), temperature=temperature)[0])
            for path in [[], *paths]
        ]
        came = accepted_of_tree(draft, parents, chosen) if tree else accepted(draft, chosen)
        if drafter is not None:
            assert drafter.accept(came) == len(came) - 1
        tokens += came
    return tokens[:length]


@each_case("tree", [False, True])
@each_case("temperature", [0.0, 1.0])
def test_tokens_are_the_same_with_and_without_drafts(temperature: float, tree: bool) -> None:
    history: list[Response] = []
    for seed in range(6):
        alone = made(60, seed, None, temperature)
        assert made(60, seed, Drafter(history), temperature, tree=tree) == alone
        history.append(Response(np.array(alone, np.int32)))


def test_drawn_tokens_follow_the_model_distribution() -> None:
    scores = np.array([0.0, 1.0, -1.0, 0.5])
    drawn = choose(np.tile(scores, (4000, 1)), 3, 0)
    share = np.exp(scores) / np.exp(scores).sum()
    assert np.abs(np.bincount(drawn, minlength=4) / 4000 - share).max() < 0.03
    assert choose(scores[None], 0, 0, temperature=0).tolist() == [1]


def test_drafts_and_choices_of_different_lengths_are_refused() -> None:
    assert accepted([5, 6], [5, 7, 9]) == [5, 7]
    assert accepted([], [3]) == [3]
    with pytest.raises(dp.Misuse, match="3 places"):
        accepted([1, 2], [1])
    with pytest.raises(dp.Misuse, match="2 places"):
        accepted_of_tree([1], [-1], [1])
    with pytest.raises(dp.Misuse, match="places"):
        choose(np.zeros(3), 0, 0)
