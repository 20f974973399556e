"""Accepts the tokens of a draft that the model itself would have produced.

A draft has tokens and no probabilities. The model samples from its own distribution at each position, or takes its
likeliest token, and the draft is accepted as far as it agrees. Each accepted token, and the model's own token after
them, is then a sample from the model's distribution given the tokens before it. Speculative sampling (arXiv 2211.17192)
with a deterministic draft accepts tokens with the same probability. The draft influences only how many tokens are
produced at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse


def accepted(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The produced tokens: the first tokens of the draft that agree with the model's choices, and the model's own next
    token.

    chosen: the model's choice at each position of the draft and after it, [len(draft) + 1], given the draft before it.
    Raises Misuse for another length.
    """
    if len(chosen) != len(draft) + 1:
        raise Misuse(f"a draft of {len(draft)} tokens has {len(draft) + 1} places, not {len(chosen)}")
    right = 0
    while right < len(draft) and draft[right] == chosen[right]:
        right += 1
    return [int(token) for token in chosen[: right + 1]]


def accepted_of_tree(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The produced tokens for a tree of `Drafter.propose_tree`: its longest path that agrees with the model, and the
    model's own next token. chosen[0] is the model's first choice, and chosen[n + 1] its choice after token n of the
    tree. Raises Misuse for another length."""
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
    """A token for each position. scores: [positions, vocabulary], from position `first` of the response on. Raises
    Misuse for another dimension.

    A temperature of 0 takes the argmax. Otherwise each token is sampled from the softmax of scores / temperature, by
    Gumbel noise. The noise depends only on the seed and the position, so the tokens do not depend on the draft.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim != 2:
        raise Misuse(f"scores are [places, vocabulary], not {values.shape}")
    if temperature > 0:
        noise = [np.random.default_rng((seed, first + at)).gumbel(size=values.shape[1]) for at in range(len(values))]
        values = values / temperature + np.array(noise).reshape(values.shape)
    found: npt.NDArray[np.int64] = values.argmax(axis=1)
    return found
