"""Predicted lengths: what is known counts as much as it tells."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.history.lengths import Past, predict
from tests.cases import each_case


def drawn(between: float, within: float, *, prompts: int = 300, samples: int = 8, epochs: int = 1, drift: float = 0.0):
    random = np.random.default_rng(0)
    means = 6 + between * random.standard_normal(prompts)
    logs = means[:, None, None] + within * random.standard_normal((prompts, epochs + 1, samples))
    logs += drift * np.arange(epochs + 1)[:, None]
    tokens = np.exp(logs).astype(int)
    return [Past([(e, t) for e in range(epochs) for t in row[e]]) for row in tokens], logs[:, epochs]


def test_a_prompt_without_history_is_predicted_as_all_are() -> None:
    pasts, _ = drawn(0.7, 0.3)
    lengths = predict([*pasts, Past([])])
    assert abs(lengths.center[-1] - lengths.center[:-1].mean()) < 0.05
    assert lengths.error[-1] > 2 * lengths.error[:-1].mean()


@each_case(("between", "within"), [(0.1, 0.3), (0.4, 0.9), (0.7, 0.2)])
def test_the_error_is_what_it_says(between: float, within: float) -> None:
    pasts, now = drawn(between, within)
    lengths = predict(pasts)
    missed = now - lengths.center[:, None]
    assert np.abs(missed).std() > 0
    assert missed.std() == pytest.approx(np.sqrt((lengths.error**2).mean()), rel=0.15)
    plain = now - np.array([np.mean(np.log([t for _, t in past.lengths])) for past in pasts])[:, None]
    assert (missed**2).mean() <= (plain**2).mean() * 1.01  # shrinking does not make it worse
    assert lengths.tokens.mean() == pytest.approx(np.exp(now).mean(), rel=0.2)


def test_a_drift_of_all_is_followed() -> None:
    pasts, now = drawn(0.5, 0.2, epochs=3, drift=0.3)
    lengths = predict(pasts)
    assert lengths.drift.mean() == pytest.approx(0.3, abs=0.05)
    assert abs((now - lengths.center[:, None]).mean()) < 0.1


def test_what_is_left_grows_where_a_response_outlives_its_prediction() -> None:
    pasts, _ = drawn(0.2, 0.5)
    lengths = predict(pasts)
    tokens = float(lengths.tokens[0])
    left = [lengths.remaining(0, made) for made in (0.0, 0.5 * tokens, 4 * tokens, 40 * tokens, 1e6 * tokens)]
    assert left[0] == pytest.approx(tokens)
    assert 0 < left[1] < tokens
    assert left[2] < left[3] < left[4] < np.inf
    assert (lengths.longest(8) > lengths.longest(2)).all()
