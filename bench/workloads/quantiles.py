"""Distributions as what is known of them: quantiles. Values are drawn by the inverse of the distribution function.

Between two known quantiles a value is interpolated: linearly, as NumPy's percentiles are; by a power law beyond the
99th percentile, where tails are heavy (of video answers the last hundredth spans 310 to 16,000 tokens), and there
geometrically to the largest; and not at all across a gap, two clusters between which nothing lies: where between its
percentiles the jump is, is not known, so it is put in the middle, which is off by half of them at most.

Draws are spread, not independent: `spread` turns any scores into evenly spaced shares of the same order. So a trace of
any size has the table's distribution to within one part in its size, while how values go together is up to the scores,
and steps, which are parts of a trace, differ as much as random parts do.
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
    """An inverse distribution function by its knots."""

    def __init__(self, shares: npt.ArrayLike, values: npt.ArrayLike) -> None:
        self._shares = np.asarray(shares, np.float64)
        self._values = np.asarray(values, np.float64)

    @classmethod
    def of(
        cls, percentiles: Sequence[float], values: Sequence[float], gaps: Sequence[Sequence[float]] = ()
    ) -> Quantiles:
        """From a table. `gaps` are pairs of neighbouring values between which nothing lies."""
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
        """The values below which such shares of all lie."""
        return np.interp(shares, self._shares, self._values)


def _pareto(low: float, high: float) -> Floats:
    """The shares at which a value has grown by equal factors between two of a power law's."""
    shares: Floats = 1 - (1 - low) * ((1 - high) / (1 - low)) ** _TAIL_KNOTS
    return shares


def _normal_shares(values: Floats, normal: NormalDist) -> Floats:
    scaled = (values - normal.mean) / (normal.stdev * math.sqrt(2))
    return np.array([0.5 * math.erfc(-x) for x in scaled.tolist()])


def spread(scores: Floats, source: np.random.Generator) -> Floats:
    """Shares in (0, 1), as many as scores and in their order, one in each of as many equal parts of that range."""
    n = len(scores)
    shares = np.empty(n)
    shares[np.argsort(scores, kind="stable")] = (np.arange(n) + source.random(n)) / max(n, 1)
    return shares


def scattered(n: int, source: np.random.Generator) -> Floats:
    """As many shares, spread as evenly, in no order."""
    return (source.permutation(n) + source.random(n)) / max(n, 1)


def tokens(values: Floats, least: int = 0, most: int | None = None) -> npt.NDArray[np.int64]:
    """Whole numbers of tokens, not below `least` nor above `most`."""
    return np.clip(np.rint(values), least, most).astype(np.int64)
