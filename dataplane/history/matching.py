"""The matcher, an extension (`_suffix.c`): finds the position in earlier responses that a new response has reached, and
what follows there.

`order` sorts the positions of a response by the tokens before them, read backwards, so that the longest suffix of
another response that occurs in it is found by one binary search (Manber and Myers 1990, on the reversed text). The
index of a response has 4 bytes a token and is independent of others: responses are added and removed without a change
to any other, and the only state between searches is the last position, near which the next search begins.

Invariant: a proposal follows responses that agree with the last `match` tokens or more, the likeliest continuation
first.

Tried and rejected: one suffix tree for all responses of a prompt, as SuffixDecoding has (arXiv 2411.04975): it needs
a node a token and more, and the removal of a response touches all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse, SchemaMismatch

Tokens = npt.NDArray[np.int32]

MOST = 64
"""The largest number of responses of a matcher."""


class Matcher(Protocol):
    """Positions of a new response in earlier ones; it begins empty."""

    def add(self, tokens: Any, order: Any, weight: float, /) -> None:
        """Add a response: tokens, their `order`, and its weight. Raises ValueError for the 65th."""

    def propose(self, most: int, threshold: float, branches: int, /) -> tuple[list[int], list[int]]:
        """At most `most` tokens that may follow, and the position of the parent of each among them, -1 for a first
        one: the likeliest first, none with a probability below the threshold, at most `branches` of each parent."""

    def accept(self, tokens: Any, /) -> int:
        """Add int32 tokens of the response. Returns how many of the first of them the last proposal has."""

    def chances(self) -> list[tuple[float, float]]:
        """By the length of the match (0, 1, 2 to 3, 4 to 7, ...): the numbers of accepted and of proposed tokens."""

    def set_chances(self, chances: list[tuple[float, float]], /) -> None:
        """Continue with the statistics of another matcher."""


try:
    from dataplane.history import _suffix
except ImportError:  # not built: no C compiler
    _suffix = None  # type: ignore[assignment]

BUILT = _suffix is not None
"""Whether the extension is there."""


def order(tokens: npt.ArrayLike) -> Tokens:
    """The positions of tokens, int32, sorted by at most 64 tokens before each, the nearest first; the beginning
    sorts first, and equal positions stay in order. Raises Misuse without the extension."""
    return np.frombuffer(_built().order(np.ascontiguousarray(tokens, np.int32)), np.int32)


def matcher() -> Matcher:
    """A matcher without responses. Raises Misuse without the extension."""
    found: Matcher = _built().Matcher()
    return found


def _built() -> Any:
    if _suffix is None:
        raise Misuse(
            "drafts need an extension that was not built when rollout-dataplane was installed: install a C compiler"
            " (gcc), then rollout-dataplane again"
        )
    return _suffix


def tokens_of(tokens: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The tokens, a flat sequence of 32-bit integers, as an array of the dtype. Raises SchemaMismatch."""
    found = np.asarray(tokens if isinstance(tokens, np.ndarray | Sequence) else list(tokens))
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise SchemaMismatch(
            f"tokens are a flat sequence of integers, not {found.dtype} of shape {found.shape}",
            column="tokens", expected="integers", found=f"{found.dtype} {found.shape}",
        )  # fmt: skip
    bounds = np.iinfo(np.int32)
    if len(found) and not bounds.min <= int(found.min()) <= int(found.max()) <= bounds.max:
        raise SchemaMismatch("token ids are within 32 bits", column="tokens", expected="int32", found=str(found.max()))
    return np.ascontiguousarray(found, dtype)
