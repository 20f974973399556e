"""Schedules, and the sampler that takes prompts as they say."""

from __future__ import annotations

import numpy as np
import pytest

import dataplane as dp
from dataplane.history.lengths import Past, predict
from dataplane.history.sampling import HistoPipe
from dataplane.history.scheduling import plan
from dataplane.stream.sampler import Candidates, checked


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
