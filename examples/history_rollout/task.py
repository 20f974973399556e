"""The task: sort digits by insertion, and write the sorted list after each digit."""

from __future__ import annotations

import numpy as np

DIGITS = 9
BEGIN, STEP, END = 10, 11, 12  # tokens 0 to 9 are the digits
VOCABULARY = 13
LONGEST = DIGITS * (DIGITS + 3) // 2 + 4


def prompts(count: int, seed: int) -> list[list[int]]:
    """`count` prompts: `DIGITS` random digits and `BEGIN` each."""
    random = np.random.default_rng(seed)
    return [[*random.integers(0, 10, DIGITS).tolist(), BEGIN] for _ in range(count)]


def answer(prompt: list[int]) -> list[int]:
    """The right answer: the sorted list after each digit, and `END`."""
    found: list[int] = []
    for count in range(1, DIGITS + 1):
        found += [*sorted(prompt[:count]), STEP if count < DIGITS else END]
    return found


def reward(prompt: list[int], response: list[int]) -> float:
    """The share of right places in the last list of the response; 0 if it is longer than `DIGITS`."""
    body = response[:-1] if response and response[-1] == END else response
    last = body[len(body) - body[::-1].index(STEP) :] if STEP in body else body
    right = sum(one == other for one, other in zip(last, sorted(prompt[:DIGITS]), strict=False))
    return right / DIGITS if len(last) <= DIGITS else 0.0
