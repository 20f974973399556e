"""Which tokens of a draft stay: those that the model itself would have made.

A draft says tokens and no probabilities, so at each place the model draws from its own distribution, or takes its
likeliest token, and the draft stays as far as it is the same. Each token that stays, and the one behind them, is then a
draw from the model's distribution given those before it: speculative sampling (arXiv 2211.17192) for a draft that is
certain of itself accepts a token with just that chance. Nothing of the output depends on the draft but how many tokens
come at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse


def accepted(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The tokens that come: those of the draft that the model chose too, and its own behind them.

    chosen: what the model chose at each place of the draft and behind it, [len(draft) + 1], each given the draft before
    it. Raises Misuse for others.
    """
    if len(chosen) != len(draft) + 1:
        raise Misuse(f"a draft of {len(draft)} tokens has {len(draft) + 1} places, not {len(chosen)}")
    right = 0
    while right < len(draft) and draft[right] == chosen[right]:
        right += 1
    return [int(token) for token in chosen[: right + 1]]


def accepted_of_tree(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """As `accepted`, of `Drafter.propose_tree`: chosen[0] is what the model chose first, and chosen[n + 1] behind the
    n-th token of the tree. A token of each place is drawn once, whatever the tree has there."""
    if len(chosen) != len(tokens) + 1:
        raise Misuse(f"a tree of {len(tokens)} tokens has {len(tokens) + 1} places, not {len(chosen)}")
    at, found = -1, [int(chosen[0])]
    while True:
        following = (n for n, parent in enumerate(parents) if parent == at and tokens[n] == found[-1])
        at = next(following, -1)
        if at < 0:
            return found
        found.append(int(chosen[at + 1]))


def choose(scores: npt.ArrayLike, seed: int, first: int, *, temperature: float = 1.0) -> npt.NDArray[np.int64]:
    """A token for each place: scores are [places, vocabulary], the first of them is place `first` of the response.

    With a temperature of 0 the highest. Else a draw from the softmax of scores / temperature, by Gumbel noise that
    depends on seed and place alone: the same tokens come with any draft, and without.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim != 2:
        raise Misuse(f"scores are [places, vocabulary], not {values.shape}")
    if temperature > 0:
        noise = [np.random.default_rng((seed, first + at)).gumbel(size=values.shape[1]) for at in range(len(values))]
        values = values / temperature + np.array(noise).reshape(values.shape)
    found: npt.NDArray[np.int64] = values.argmax(axis=1)
    return found
