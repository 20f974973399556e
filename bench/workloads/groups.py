"""Correlated lengths: responses to one prompt are similar, and long prompts tend to have long responses.

A Gaussian copula. The score of a response is `sqrt(s) * prompt + sqrt(1 - s) * own`, both standard normal. Part of the
prompt's score is the score of its length. `s` is chosen for the measured rank correlation of siblings: normal scores
with the correlation r have the rank correlation 6 / pi * asin(r / 2) (Pearson, 1907). Only the order of the scores is
used, so the distributions remain those of the tables.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bench.workloads.quantiles import spread

Floats = npt.NDArray[np.float64]


def normal_correlation(rank_correlation: npt.ArrayLike) -> Floats:
    """The correlation of normal scores whose ranks have this correlation."""
    return 2 * np.sin(np.pi / 6 * np.asarray(rank_correlation, np.float64))


def shares(
    prompts: int, samples: int, siblings: float, input_output: float, source: np.random.Generator
) -> tuple[Floats, Floats]:
    """Shares for the inputs [prompts] and the outputs [prompts * samples]. siblings, input_output: rank correlations
    of two responses to one prompt, and of a prompt's length and a response's."""
    alike, follows = normal_correlation([siblings, input_output]).tolist()
    share = follows / math.sqrt(alike) if alike > 0 else 0.0
    length = source.standard_normal(prompts)
    prompt = share * length + math.sqrt(1 - share**2) * source.standard_normal(prompts)
    own = source.standard_normal((prompts, samples))
    response = math.sqrt(alike) * prompt[:, None] + math.sqrt(1 - alike) * own
    return spread(length, source), spread(response.ravel(), source)
