"""Predicts the length of responses, from the lengths of earlier ones to the same prompts.

The logarithm of a response's length is modelled as normal around the mean of its prompt, and the means of prompts as
normal around their common mean (empirical Bayes: Efron and Morris 1975). A prompt's own mean has more weight the more
responses it has and the less they differ. So a prompt with few responses is predicted near the common mean. Older
epochs have less weight. The common drift, the median change of prompts' means from one epoch to the next, is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RECENCY = 0.8
"""The weight of a length for each epoch that it is older than the newest."""

_UNKNOWN = 512.0  # tokens, if no prompt has a response
_SPREAD = 0.75  # the standard deviation of logarithms, if the data are too few for an estimate


@dataclass(frozen=True, slots=True)
class Past:
    """The earlier responses to one prompt: (epoch, tokens) of each."""

    lengths: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Predicted lengths, one entry a prompt. `known`: the number of responses used; `center` and `error`: mean and
    standard deviation of the logarithm of a response's tokens; `drift`: the change of the prompt's own mean per
    epoch, in logarithms, shrunk towards that of all."""

    center: Floats
    error: Floats
    drift: Floats
    known: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.center)

    @property
    def tokens(self) -> Floats:
        """The expected number of tokens of a response."""
        found: Floats = np.exp(np.minimum(self.center + self.error**2 / 2, 40.0))
        return found

    def remaining(self, position: int, made: float) -> float:
        """The expected remaining tokens of a response to the prompt `position` that has `made` tokens."""
        if made <= 0:
            return float(self.tokens[position])
        error = float(self.error[position])
        above = (float(self.center[position]) - np.log(made)) / error
        rest = _normal(above)  # the probability of a longer response
        if rest < 1e-6:
            return float(made * error * error / max(1e-6, -above * error))  # the tail is nearly Pareto's
        return max(1.0, float(self.tokens[position]) * _normal(above + error) / rest - made)

    def longest(self, samples: int) -> Floats:
        """The approximate number of tokens of the longest of `samples` responses to each prompt (Blom 1958)."""
        score = _quantile((samples - 0.375) / (samples + 0.25))
        found: Floats = np.exp(np.minimum(self.center + score * self.error, 40.0))
        return found


def predict(pasts: Sequence[Past]) -> Lengths:
    """The lengths of the next responses to these prompts."""
    count = len(pasts)
    prompt = np.repeat(np.arange(count), [len(past.lengths) for past in pasts])
    flat = np.array([pair for past in pasts for pair in past.lengths], np.float64).reshape(-1, 2)
    logs = np.log(np.maximum(flat[:, 1], 1.0))
    known = np.bincount(prompt, minlength=count)
    if not len(flat):
        unknown = np.full(count, np.log(_UNKNOWN))
        return Lengths(unknown, np.full(count, _SPREAD), np.zeros(count), known)
    newest = np.full(count, -np.inf)
    np.maximum.at(newest, prompt, flat[:, 0])
    drift, moved = _drift(prompt, flat[:, 0], logs, newest, count)
    age = newest[prompt] - flat[:, 0]
    weight = RECENCY ** np.minimum(age, 64)
    total = np.bincount(prompt, weight, count)
    level = logs + moved * age  # shifted to the newest epoch
    mean = np.bincount(prompt, weight * level, count) / np.where(total > 0, total, 1)
    squares = np.bincount(prompt, weight * (level - mean[prompt]) ** 2, count)
    own = total * total / np.maximum(np.bincount(prompt, weight**2, count), 1e-12)  # the effective number of responses
    own = np.where(known > 0, own, 0.0)
    freedom = np.maximum(own - 1, 0)
    has = known > 0
    within = (squares / np.where(total > 0, total, 1) * own).sum() / freedom.sum() if freedom.sum() >= 1 else _SPREAD**2
    within = max(within, 1e-4)
    every = float(mean[has].mean())
    between = max(float(mean[has].var()) - float((within / own[has]).mean()), 1e-6) if has.sum() > 1 else within
    share = own / (own + within / between)
    center = share * mean + (1 - share) * every + moved
    spread = (squares / np.where(total > 0, total, 1) * own + 4 * within) / (freedom + 4)  # the prior: 4 responses
    error = np.sqrt(np.where(has, spread, within) + (1 - share) * between)
    return Lengths(center, np.maximum(error, 1e-3), drift, known)


def _drift(
    prompt: npt.NDArray[np.int64], epoch: Floats, logs: Floats, newest: Floats, count: int
) -> tuple[Floats, float]:
    """The change of each prompt's mean to the newest epoch, per epoch and shrunk towards the median, and this
    median."""
    last = epoch == newest[prompt]
    now, before = np.bincount(prompt[last], minlength=count), np.bincount(prompt[~last], minlength=count)
    both = (now > 0) & (before > 0)
    if not both.any():
        return np.zeros(count), 0.0
    apart = np.bincount(prompt[~last], (newest[prompt] - epoch)[~last], count) / np.maximum(before, 1)
    step = np.bincount(prompt[last], logs[last], count) / np.maximum(now, 1)
    step = (step - np.bincount(prompt[~last], logs[~last], count) / np.maximum(before, 1)) / np.maximum(apart, 1)
    moved = float(np.median(step[both]))
    share = np.minimum(now, before) / (np.minimum(now, before) + 8.0)  # 8 responses: half is its own
    return np.where(both, share * step + (1 - share) * moved, moved), moved


def _normal(score: float) -> float:
    from math import erf, sqrt

    return 0.5 * (1 + erf(score / sqrt(2)))


def _quantile(share: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)
