"""Responses that are similar from epoch to epoch, as reported by RhymeRL (arXiv 2508.18588): 75 to 95 % of the tokens
of a response occur in earlier responses to the same prompt, and the differences are runs of tokens.

A prompt has a few basic answers, which are texts of a Zipf vocabulary. A response is a response of the last epoch with
edits: runs of `RUN` tokens on average are replaced, removed or inserted. The similarity of two texts is 2 M / T of
`difflib`: M tokens match, of T in both.
"""

from __future__ import annotations

import difflib

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

VOCABULARY = 32_000
RUN = 12.0
"""Mean tokens of an edit: a clause."""


def text(random: np.random.Generator, tokens: int) -> Tokens:
    """Random tokens, of which the k-th most frequent is 1 / k as frequent as the first."""
    share = 1 / np.arange(1, VOCABULARY + 1)
    return random.choice(VOCABULARY, tokens, p=share / share.sum()).astype(np.int32)


def edited(random: np.random.Generator, before: Tokens, similarity: float, run: float = RUN) -> Tokens:
    """The text with edits, of which about the share `similarity` is tokens of the old text."""
    parts, at = [], 0
    every = run * 2 / 3 * similarity / (1 - similarity)  # between two edits, of which two of three add tokens
    while at < len(before):
        stays = 1 + int(random.exponential(every))
        parts.append(before[at : at + stays])
        at += stays
        if at >= len(before):
            break
        length, kind = 1 + int(random.exponential(run - 1)), random.integers(3)
        if kind != 0:  # replaced or inserted
            parts.append(text(random, length))
        if kind != 1:  # replaced or removed
            at += length
    return np.concatenate(parts) if parts else before


def epochs(
    seed: int, similarity: float, *, tokens: int, samples: int, count: int, ways: int = 3, run: float = RUN
) -> list[list[Tokens]]:
    """The responses to one prompt by epoch, `[count][samples]`."""
    random = np.random.default_rng(seed)
    roots = [text(random, tokens) for _ in range(ways)]
    made = [[edited(random, roots[random.integers(ways)], similarity, run) for _ in range(samples)]]
    for _ in range(count - 1):
        made.append([edited(random, made[-1][random.integers(samples)], similarity, run) for _ in range(samples)])
    return made


def similarity_of(one: Tokens, other: Tokens) -> float:
    """The similarity 2 M / T of two texts, 0 to 1."""
    return difflib.SequenceMatcher(None, one.tolist(), other.tolist(), autojunk=False).ratio()
