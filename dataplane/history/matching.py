"""The matcher, an extension (`_suffix.c`). It finds the positions in earlier responses that follow the same tokens as
the new response's last ones, and the next tokens there.

`order` sorts the positions of a response by the tokens before them, read backwards, so that the longest suffix of
another response that occurs in it is found by one binary search (Manber and Myers 1990, on the reversed text). The
index of a response has 4 bytes a token, and is independent of the indexes of others. The only state between searches is
the last position, near which the next search begins.

Invariant: a proposal follows responses that agree with the last `match` tokens or more, the likeliest continuation
first.

Tried and rejected: one suffix tree for all responses of a prompt, as SuffixDecoding has (arXiv 2411.04975): it needs
a node a token and more, and the removal of a response touches all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import SchemaMismatch
from dataplane.history import _suffix

Tokens = npt.NDArray[np.int32]

MOST = 64
"""The largest number of responses of a matcher."""


def order(tokens: npt.ArrayLike) -> Tokens:
    """The positions of tokens, int32, sorted by at most 64 tokens before each, the nearest first. The beginning sorts
    first, and equal positions stay in order."""
    return np.frombuffer(_suffix.order(np.ascontiguousarray(tokens, np.int32)), np.int32)


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
