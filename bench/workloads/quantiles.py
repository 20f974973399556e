"""Distributions by their known quantiles. Values are drawn by the inverse of the distribution function.

Values between two known quantiles are interpolated linearly, as by NumPy's percentiles. Beyond the 99th percentile
tails are heavy (the longest hundredth of video answers spans 310 to 16,000 tokens): there a power law is used, and a
geometric interpolation up to the largest value. A gap between two clusters has no values. The share at which it lies is
not known, so the middle between its percentiles is used, which is wrong by half of their distance at most.

Draws are spread evenly, not independent: `spread` maps scores to evenly spaced shares of the same order. So the
distribution of a trace of n values differs from the table's by at most 1/n. The scores determine the correlations of
values. Steps are parts of a trace, and differ like random parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_TAIL = 0.99
_TAIL_KNOTS = np.arange(1, 16) / 16
_GRID = 4097


class Quantiles:
    """An inverse distribution function, linear between knots."""

    def __init__(self, shares: npt.ArrayLike, values: npt.ArrayLike) -> None:
        self._shares = np.asarray(shares, np.float64)
        self._values = np.asarray(values, np.float64)

    @classmethod
    def of(
        cls, percentiles: Sequence[float], values: Sequence[float], gaps: Sequence[Sequence[float]] = ()
    ) -> Quantiles:
        """From a table. gaps: pairs of adjacent values without values between them."""
        shares = np.array(percentiles) / 100
        at: list[float] = [shares[0]]
        of: list[float] = [values[0]]
        for p, q, low, high in zip(shares, shares[1:], values, values[1:], strict=False):
            if [low, high] in [list(gap) for gap in gaps]:
                at += [(p + q) / 2] * 2
                of += [low, high]
            elif p >= _TAIL and low > 0:
                of += (low * (high / low) ** _TAIL_KNOTS).tolist()
                at += (_pareto(p, q) if q < 1 else p + _TAIL_KNOTS * (q - p)).tolist()
            at.append(q)
            of.append(high)
        return cls(at, of)

    @classmethod
    def normals(cls, weights: npt.ArrayLike, means: npt.ArrayLike, deviations: npt.ArrayLike) -> Quantiles:
        """Of a mixture of normal distributions."""
        parts = [NormalDist(m, s) for m, s in zip(np.asarray(means), np.asarray(deviations), strict=True)]
        low, high = min(n.mean - 7 * n.stdev for n in parts), max(n.mean + 7 * n.stdev for n in parts)
        grid = np.linspace(low, high, _GRID)
        total = float(np.sum(weights))
        shares = sum(w / total * _normal_shares(grid, n) for w, n in zip(np.asarray(weights), parts, strict=True))
        return cls(shares, grid)

    def at(self, shares: Floats) -> Floats:
        """The values at these shares."""
        return np.interp(shares, self._shares, self._values)


def _pareto(low: float, high: float) -> Floats:
    """The shares of a power law at which the value has grown by equal factors, between two shares."""
    shares: Floats = 1 - (1 - low) * ((1 - high) / (1 - low)) ** _TAIL_KNOTS
    return shares


def _normal_shares(values: Floats, normal: NormalDist) -> Floats:
    scaled = (values - normal.mean) / (normal.stdev * math.sqrt(2))
    return np.array([0.5 * math.erfc(-x) for x in scaled.tolist()])


def spread(scores: Floats, source: np.random.Generator) -> Floats:
    """Random shares in (0, 1) in the order of the n scores, one in each of n equal parts of the range."""
    n = len(scores)
    shares = np.empty(n)
    shares[np.argsort(scores, kind="stable")] = (np.arange(n) + source.random(n)) / max(n, 1)
    return shares


def scattered(n: int, source: np.random.Generator) -> Floats:
    """`n` evenly spread shares in random order."""
    return (source.permutation(n) + source.random(n)) / max(n, 1)


def tokens(values: Floats, least: int = 0, most: int | None = None) -> npt.NDArray[np.int64]:
    """Whole numbers of tokens, not below `least` nor above `most`."""
    return np.clip(np.rint(values), least, most).astype(np.int64)
