"""Responses that are alike from epoch to epoch, as RhymeRL reports of them (arXiv 2508.18588): 75 to 95 % of the tokens
of a response stand in earlier ones to the same prompt, and what differs comes in runs.

A prompt has a few ways to be answered, each of them text of a Zipf vocabulary. A response of an epoch is one of the
last epoch's with edits: runs of tokens, `RUN` on average, that are replaced by others, left out, or put in between. The
similarity of two texts is 2 M / T of `difflib`: M tokens match, of T in both.
"""

from __future__ import annotations

import difflib

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

VOCABULARY = 32_000
RUN = 12.0
"""Tokens of an edit, on average: a clause."""


def text(random: np.random.Generator, tokens: int) -> Tokens:
    """So many tokens, the k-th most frequent 1 / k as often as the first."""
    share = 1 / np.arange(1, VOCABULARY + 1)
    return random.choice(VOCABULARY, tokens, p=share / share.sum()).astype(np.int32)


def edited(random: np.random.Generator, before: Tokens, similarity: float, run: float = RUN) -> Tokens:
    """The text with edits, such that about this share of what comes of it was there before."""
    parts, at = [], 0
    every = run * 2 / 3 * similarity / (1 - similarity)  # between two edits, of which two of three bring tokens
    while at < len(before):
        stays = 1 + int(random.exponential(every))
        parts.append(before[at : at + stays])
        at += stays
        if at >= len(before):
            break
        length, kind = 1 + int(random.exponential(run - 1)), random.integers(3)
        if kind != 0:  # replaced, or put in
            parts.append(text(random, length))
        if kind != 1:  # replaced, or left out
            at += length
    return np.concatenate(parts) if parts else before


def epochs(
    seed: int, similarity: float, *, tokens: int, samples: int, count: int, ways: int = 3, run: float = RUN
) -> list[list[Tokens]]:
    """The responses of each epoch to one prompt."""
    random = np.random.default_rng(seed)
    roots = [text(random, tokens) for _ in range(ways)]
    made = [[edited(random, roots[random.integers(ways)], similarity, run) for _ in range(samples)]]
    for _ in range(count - 1):
        made.append([edited(random, made[-1][random.integers(samples)], similarity, run) for _ in range(samples)])
    return made


def similarity_of(one: Tokens, other: Tokens) -> float:
    """2 M / T, from 0 to 1."""
    return difflib.SequenceMatcher(None, one.tolist(), other.tolist(), autojunk=False).ratio()
