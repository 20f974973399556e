"""Drafters: what they propose, how long, and what they learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dataplane as dp
from dataplane.history import matching
from dataplane.history._suffix import Matcher
from dataplane.history.drafter import LEAST, LONGEST, Drafter, Response, weights
from dataplane.history.lengths import Past, predict
from dataplane.history.sampling import HistoPipe
from dataplane.history.scheduling import plan
from dataplane.history.verifying import accepted, accepted_of_tree, choose
from dataplane.stream.sampler import Candidates, checked
from tests.cases import each_case


def response(*tokens: int, epoch: int = 0, reward: float | None = None) -> Response:
    return Response(np.array(tokens, np.int32), epoch, reward)


def played(drafter: Drafter, new: list[int]) -> list[int]:
    """How many tokens each draft had, while the response became this."""
    asked, at = [], 0
    while at < len(new):
        draft = drafter.propose()
        right = 0
        while right < len(draft) and new[at + right : at + right + 1] == [draft[right]]:
            right += 1
        came = new[at : at + right + 1]
        assert drafter.accept(came) == min(right, len(came))
        asked.append(len(draft))
        at += len(came)
    return asked


def test_newer_and_better_rewarded_responses_have_more_weight() -> None:
    assert Drafter([response(1, 5, epoch=1), response(1, 6, epoch=3)]).propose(2) == [1, 6]
    assert Drafter([response(1, 5, reward=1.0), response(1, 6, reward=0.0)]).propose(2) == [1, 5]
    assert Drafter([response(1, 5), response(1, 6, epoch=1), response(1, 5)]).propose(2) == [1, 5]  # two of three
    found = weights([response(1, epoch=-(10**6)), response(1, reward=float("nan")), response(1, reward=2.0)])
    assert (found > 0).all()


def test_drafts_grow_while_accepted_and_shrink_when_refused() -> None:
    same = list(range(1000))
    asked = played(Drafter([response(*same)]), same)
    assert asked[0] < max(asked) <= LONGEST
    assert len(asked) < 40
    drafter = Drafter([response(*same)])
    for _ in range(12):
        drafter.propose()
        drafter.accept([5000])
    assert drafter.length == LEAST


@each_case("tokens", [[1.5], [True], ["7"], np.array([1 << 40]), np.array([1 << 31], np.uint32), [1 << 70], [[1]]])
def test_accepted_tokens_that_are_not_integers_of_32_bits_are_refused(tokens: object) -> None:
    drafter = Drafter()
    with pytest.raises(dp.Misuse, match="integers"):
        drafter.accept(tokens)
    assert drafter.statistics().tokens == 0


# Matching: proposals follow the longest match that there is; orders are sorted.

texts = st.lists(st.integers(0, 3), max_size=90).map(lambda values: np.array(values, np.int32))


def common(a: list[int], b: list[int]) -> int:
    """How many of the last tokens are equal, of 64; the beginning of both counts as one."""
    pairs = zip([-1, *a][:-65:-1], [-1, *b][:-65:-1], strict=False)
    return next((count for count, (x, y) in enumerate(pairs) if x != y), min(len(a) + 1, len(b) + 1, 64))


@given(texts)
def test_positions_are_ordered_by_the_tokens_before_them(tokens: np.ndarray) -> None:
    listed = tokens.tolist()
    assert matching.order(tokens).tolist() == sorted(range(len(listed)), key=lambda at: listed[:at][:-65:-1])


@given(texts, texts)
def test_a_proposal_continues_a_longest_match(old: np.ndarray, new: np.ndarray) -> None:
    each, response, own = Matcher(), old.tolist(), new.tolist()
    each.add(old, matching.order(old), 1.0)
    for done in range(0, len(own), 3):
        tokens, _ = each.propose(12, 0.0, 1)
        matches = [common(own[:done], response[:at]) for at in range(len(response))]
        longest = min(max(matches, default=0), 32)  # a match of 32 at the expected position is enough
        found = [response[at : at + 12] for at, match in enumerate(matches) if match >= longest]
        assert tokens in found if tokens else not longest
        came = own[done : done + 3]
        same = next(
            (at for at, (a, b) in enumerate(zip(tokens, came, strict=False)) if a != b), min(len(tokens), len(came))
        )
        assert each.accept(np.array(came, np.int32)) == same


@each_case("order", [[-1, -5, 99, 1 << 30], [7, 7, 7, 7], [0, 0, 0, 0], [3, 2, 1, 0]])
def test_an_invalid_suffix_order_causes_no_read_out_of_bounds(order: list[int]) -> None:
    each = Matcher()
    each.add(np.array([1, 2, 3, 4], np.int32), np.array(order, np.int32), 1.0)
    for token in (1, 9, 3, 3, 2, 1):
        tokens, _ = each.propose(8, 0.0, 2)
        assert set(tokens) <= {1, 2, 3, 4}
        each.accept(np.array([token], np.int32))


# Verification is lossless: whatever a draft says, the tokens are the model's own draws.

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
    cut = HistoPipe().choose(groups, 3)
    assert (cut.rows.tolist(), cut.full) == ([1, 3], True)
    with pytest.raises(dp.Misuse, match="ask for 2 rows or more, not 1"):
        HistoPipe().choose(groups, 1)
    with pytest.raises(dp.Misuse, match="no tag"):
        HistoPipe(tag="other").choose(shown, 1)
