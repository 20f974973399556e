"""The two tasks with published parameters and no samples: a mixture for one, moments for the other.

The parameters describe pairs of prompt and response, but responses share their prompt. So a prompt's length is drawn
from the mixture. Each of its responses is drawn from the conditional distribution for this length: first its component,
by Bayes' rule, then its value in that component. So each pair has the distribution of the mixture. Siblings are similar
only through their prompt's length, which is little.
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
        """`n` values, spread evenly over the components and over each component."""
        bounds = np.cumsum(self.weights) / self.weights.sum()
        which = np.searchsorted(bounds, scattered(n, source), side="right").clip(max=len(bounds) - 1)
        scores = self.means[which] + self.deviations[which] * source.standard_normal(n)
        return Quantiles.normals(self.weights, self.means, self.deviations).at(spread(scores, source))

    def component(self, of: Floats, source: np.random.Generator) -> Ints:
        """A component for each value, drawn by its probability given the value."""
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
    """Mean and deviation of the logarithm of a log-normal variable with this mean and deviation."""
    variance = np.log1p((deviation / mean) ** 2)
    return np.log(mean) - variance / 2, np.sqrt(variance)


def calls(
    figures: Mapping[str, Any], prompts: int, samples: int, source: np.random.Generator
) -> tuple[Ints, Ints, Ints, Ints]:
    """Prompts' tokens [prompts], turns of each response, and each turn's tokens in and out.

    Published are the means and deviations of every turn's tokens, for each number of calls. Lengths are positive and
    skewed, so they are assumed to be log-normal."""
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
