"""Verification is lossless: whatever a draft says, the tokens are the model's own draws."""

from __future__ import annotations

import numpy as np
import pytest

import dataplane as dp
from dataplane.history.drafter import Drafter, Response
from dataplane.history.lengths import Past, predict
from dataplane.history.sampling import HistoPipe
from dataplane.history.scheduling import plan
from dataplane.history.verifying import accepted, accepted_of_tree, choose
from dataplane.stream.sampler import Candidates, checked
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


# Schedules, and the sampler that takes prompts as they say.


def steps(count: int, prompts: int = 64, samples: int = 4, error: float = 0.2):
    random = np.random.default_rng(1)
    told, now = [], []
    for _ in range(count):
        means = 6 + 0.8 * random.standard_normal(prompts)
        tokens = np.exp(means[:, None] + error * random.standard_normal((prompts, 2 * samples)))
        told.append(predict([Past([(0, int(each)) for each in row[:samples]]) for row in tokens]))
        now.append(tokens[:, samples:])
    return told, now


def test_each_prompt_has_one_worker_and_they_end_together() -> None:
    told, _ = steps(1)
    schedule = plan(told[0], 8, samples=4, slots=4)
    assert sorted(np.concatenate(schedule.workers).tolist()) == list(range(64))
    assert (schedule.owner >= 0).all()
    assert schedule.bubbles < 0.15
    assert plan(told[0], 100).bubbles < 1  # more workers than prompts
    assert plan(predict([]), 3).bubbles == 0


def candidates(predicted: list[float], version: list[int], group: list[int]) -> Candidates:
    count = len(predicted)
    return Candidates(
        group=np.array(group, np.int64), version=np.array(version, np.int64), age_s=np.zeros(count),
        group_rows=np.ones(count, np.int64), group_dropped=np.zeros(count, np.int64), lengths={},
        tags={"predicted_tokens": np.array(predicted)}, latest=max(version, default=0), closed=False, whole=True,
    )  # fmt: skip


def test_the_sampler_takes_the_longest_first_and_of_the_next_step_the_shortest() -> None:
    shown = candidates([5, 9, 7, 3, 8, 1], [0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5])
    choice = checked(HistoPipe().choose(shown, 6), shown, 6)
    assert choice.rows.tolist() == [1, 2, 0, 3, 4]  # none of step 2: a lag of one
    assert HistoPipe(max_lag=0).choose(shown, 2).rows.tolist() == [1, 2]
    assert HistoPipe(alternate=False, max_lag=2).choose(shown, 6).rows.tolist() == [1, 2, 0, 4, 3, 5]
    nothing = candidates([], [], [])
    assert len(HistoPipe().choose(nothing, 4).rows) == 0
    groups = candidates([5, 9, 5, 9], [0] * 4, [7, 3, 7, 3])
    assert HistoPipe().choose(groups, 4).rows.tolist() == [1, 3, 0, 2]
    with pytest.raises(dp.Misuse, match="no tag"):
        HistoPipe(tag="other").choose(shown, 1)
