"""Tasks of which parameters were published, and not samples: a mixture for one, moments for the other.

Responses share their prompt, but the parameters are of pairs of prompt and response. So a prompt's length is drawn
from the mixture, and each of its responses from what the mixture says of responses to prompts of that length: which
component it is of, by Bayes' rule, and then its place in that one. Every response and its prompt are together as the
mixture has them, and siblings are alike by as much as their prompt's length tells, which is little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.workloads.quantiles import Quantiles, scattered, spread, tokens

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Normals:
    """A mixture of normal distributions of prompts' lengths, or of their logarithms."""

    weights: Floats
    means: Floats
    deviations: Floats

    def draw(self, n: int, source: np.random.Generator) -> Floats:
        """So many, spread over all components and each."""
        bounds = np.cumsum(self.weights) / self.weights.sum()
        which = np.searchsorted(bounds, scattered(n, source), side="right").clip(max=len(bounds) - 1)
        scores = self.means[which] + self.deviations[which] * source.standard_normal(n)
        return Quantiles.normals(self.weights, self.means, self.deviations).at(spread(scores, source))

    def component(self, of: Floats, source: np.random.Generator) -> Ints:
        """For each value, of which component it may be."""
        scaled = (of[:, None] - self.means) / self.deviations
        logs = np.log(self.weights / self.deviations) - 0.5 * scaled**2
        likely = np.exp(logs - logs.max(axis=1, keepdims=True))
        bounds = np.cumsum(likely, axis=1)
        drawn = scattered(len(of), source) * bounds[:, -1]
        which: Ints = (drawn[:, None] > bounds[:, :-1]).sum(axis=1)
        return which


def pairs(figures: Mapping[str, Any], prompts: int, samples: int, source: np.random.Generator) -> tuple[Floats, Floats]:
    """Lengths of prompts [prompts] and of responses [prompts * samples] by a mixture of two-dimensional normals."""
    weights, mean, covariance = (np.array(figures[name]) for name in ("weights", "means", "covariances"))
    deviation = np.sqrt(covariance[:, [0, 1], [0, 1]])
    of_prompts = Normals(weights, mean[:, 0], deviation[:, 0])
    lengths = of_prompts.draw(prompts, source)
    x = np.repeat(lengths, samples)
    which = of_prompts.component(x, source)
    slope = covariance[:, 0, 1] / covariance[:, 0, 0]
    left = np.sqrt(covariance[:, 1, 1] - slope * covariance[:, 0, 1])
    given = mean[which, 1] + slope[which] * (x - mean[which, 0])
    scores = given + left[which] * source.standard_normal(len(x))
    return lengths, Quantiles.normals(weights, mean[:, 1], deviation[:, 1]).at(spread(scores, source))


_STANDARD = Quantiles.normals([1.0], [0.0], [1.0])


def log_moments(mean: Floats, deviation: Floats) -> tuple[Floats, Floats]:
    """Mean and deviation of the logarithm of what is log-normal with such a mean and deviation."""
    variance = np.log1p((deviation / mean) ** 2)
    return np.log(mean) - variance / 2, np.sqrt(variance)


def calls(
    figures: Mapping[str, Any], prompts: int, samples: int, source: np.random.Generator
) -> tuple[Ints, Ints, Ints, Ints]:
    """Prompts' tokens [prompts], turns of each response, and each turn's tokens in and out.

    Of each number of calls the means and deviations of every turn's tokens were published; lengths are positive and
    skewed, so they are taken to be log-normal."""
    counts, moments = figures["calls"], figures["tokens_per_call"]
    numbers = np.array([int(n) for n in counts])
    first = np.array([moments[n]["input"][0] for n in counts])
    of_prompts = Normals(np.array(list(counts.values()), np.float64), *log_moments(first[:, 0], first[:, 1]))
    logs = of_prompts.draw(prompts, source)
    turns = numbers[of_prompts.component(np.repeat(logs, samples), source)]
    place = np.arange(turns.sum()) - np.repeat(np.cumsum(turns) - turns, turns)
    of = np.repeat(turns, turns)
    inputs, outputs = np.zeros(len(of), np.int64), np.zeros(len(of), np.int64)
    inputs[place == 0] = np.repeat(tokens(np.exp(logs), 1), samples)
    for n in numbers.tolist():
        for i in range(n):
            cell = np.flatnonzero((of == n) & (place == i))
            for part, values in (("input", inputs), ("output", outputs)):
                if part == "output" or i:
                    mean, deviation = log_moments(*np.array(moments[str(n)][part][i])[:, None])
                    scores = _STANDARD.at(scattered(len(cell), source))
                    values[cell] = tokens(np.exp(mean + deviation * scores), 1)
    return tokens(np.exp(logs), 1), turns, inputs, outputs
