"""Proposes the next tokens of a response from earlier responses to its prompt.

Invariants: a draft is a guess that the model verifies (`history.verifying`), so the tokens are those that the model
would have produced; a drafter without responses proposes nothing. Not thread-safe.

A token is proposed if the probability that it is accepted is above a threshold. The probability is estimated by the
share of accepted tokens after matches of similar length, which the drafters of a history learn together. The threshold
is `COST` times the mean number of tokens for each verification, within `THRESHOLDS`: this makes the number of tokens
for each unit of cost as large as possible (Dinkelbach 1967). A proposal has at most `length` tokens: first 16, then up
to twice the length of a completely accepted draft, and closer to the accepted length after a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse
from dataplane.history import _suffix
from dataplane.history.matching import MOST, Tokens, order

FIRST, LEAST, LONGEST = 16, 4, 64
"""The limit of the first draft, the lowest limit, and the default of the highest limit, in tokens."""

COST = 0.085
"""The cost of a drafted token, relative to that of a verification."""

THRESHOLDS = 0.27, 0.75
"""The bounds of the threshold, which is a probability."""

_PACED = 64  # verifications over which the mean of tokens for each (`pace`) is smoothed

RECENCY = 0.8
"""The weight of a response for each epoch that it is older than the newest."""


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """An earlier response. `tokens`: int32. `order`: see `matching.order`; computed if it is None."""

    tokens: Tokens
    epoch: int = 0
    reward: float | None = None
    order: Tokens | None = None


@dataclass(slots=True)
class Learnt:
    """The statistics that drafters of a history share. `chances`: see `Matcher.chances`; `pace`: the mean tokens of a
    verification."""

    chances: list[tuple[float, float]] = field(default_factory=list)
    pace: float = 4.0


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """Statistics of one drafter: `drafts` with a proposal, tokens `proposed` and `accepted` of these;
    `verifications`: calls of `accept`; `tokens` of the response."""

    drafts: int
    proposed: int
    accepted: int
    verifications: int
    tokens: int

    @property
    def acceptance(self) -> float:
        """The share of accepted tokens among the proposed ones; 0 if none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_verification(self) -> float:
        """The mean number of tokens that a call of `accept` added, including the model's own; 0 before the first."""
        return self.tokens / self.verifications if self.verifications else 0.0


def weights(responses: Sequence[Response]) -> npt.NDArray[np.float64]:
    """The weight of each response: `RECENCY` to the power of its age in epochs, times a factor that rises linearly from
    0.5 for the lowest reward to 1.5 for the highest, and is 1 if all are equal or it has none."""
    newest = max((each.epoch for each in responses), default=0)
    age = np.array([newest - each.epoch for each in responses], np.float64)
    rewards = np.array([np.nan if each.reward is None else each.reward for each in responses], np.float64)
    known = np.isfinite(rewards)
    low, high = (rewards[known].min(), rewards[known].max()) if known.any() else (0.0, 0.0)
    place = np.where(known & (high > low), (rewards - low) / max(high - low, 1e-30), 0.5)
    found: npt.NDArray[np.float64] = np.maximum(RECENCY**age, 1e-9) * (0.5 + place)
    return found


class Drafter:
    """Proposes continuations of a new response. Created by `history.drafter`."""

    def __init__(
        self, responses: Sequence[Response] = (), *, max_tokens: int = LONGEST, learnt: Learnt | None = None
    ) -> None:
        counted = weights(responses)
        best = sorted(np.argsort(-counted, kind="stable")[:MOST].tolist())
        self._matcher = _suffix.Matcher()
        for number in best:
            each = responses[number]
            tokens = np.ascontiguousarray(each.tokens, np.int32)
            if len(tokens):
                ordered = order(tokens) if each.order is None else each.order
                self._matcher.add(tokens, ordered, float(counted[number]))
        self._learnt = Learnt() if learnt is None else learnt
        if self._learnt.chances:
            self._matcher.set_chances(self._learnt.chances)
        self._most = max_tokens
        self._length = min(FIRST, max_tokens)
        self._asked = 0
        self._drafts = self._proposed = self._accepted = self._verifications = self._tokens = 0

    def propose(self, max_tokens: int | None = None) -> list[int]:
        """The likely next tokens, at most `max_tokens` and `length`; none if nothing is likely."""
        return self._propose(max_tokens, 1)[0]

    def propose_tree(self, max_tokens: int | None = None, *, branches: int = 3) -> tuple[list[int], list[int]]:
        """Several likely continuations, as a tree with at most `branches` children of a token: tokens, and the position
        of each one's parent among them, -1 for first tokens. Parents precede their children."""
        return self._propose(max_tokens, branches)

    def _propose(self, max_tokens: int | None, branches: int) -> tuple[list[int], list[int]]:
        most = self._length if max_tokens is None else min(self._length, max_tokens)
        threshold = min(max(COST * self._learnt.pace, THRESHOLDS[0]), THRESHOLDS[1])
        tokens, parents = self._matcher.propose(max(0, most), threshold, branches)
        self._asked = len(tokens)
        return tokens, parents

    def accept(self, tokens: Any) -> int:
        """Add the next tokens of the response, both accepted and the model's own. Returns the number of leading tokens
        that agree with the last proposal. Raises Misuse unless they are a flat sequence of 32-bit integers."""
        try:
            given = np.atleast_1d(tokens)
        except (TypeError, ValueError) as error:
            raise Misuse(f"tokens are a flat sequence of integers within 32 bits: {error}") from None
        if given.ndim != 1:
            raise Misuse(f"tokens are a flat sequence of integers, not of shape {given.shape}")
        if given.size and given.dtype.kind not in "iu":
            raise Misuse(f"tokens are a flat sequence of integers, not {given.dtype}")
        came = np.ascontiguousarray(given, np.int32)
        if given.size and (came != given).any():
            raise Misuse(f"tokens are integers within 32 bits, not {given[came != given][0]}")
        accepted = self._matcher.accept(came)
        if self._asked:
            self._adapt(accepted, len(came))
            self._drafts += 1
            self._proposed += self._asked
        self._accepted += accepted
        self._verifications += 1
        self._tokens += len(came)
        self._asked = 0
        self._learnt.pace += (len(came) - self._learnt.pace) / _PACED
        self._learnt.chances = self._matcher.chances()
        return accepted

    def _adapt(self, accepted: int, came: int) -> None:
        if accepted >= self._asked:
            self._length = min(self._most, max(self._length, 2 * self._asked))
        elif came > accepted:  # a token was rejected: the draft was not only cut off by the end
            self._length = min(self._most, max(LEAST, (self._length + accepted) // 2))

    @property
    def length(self) -> int:
        """The largest number of tokens of the next proposal."""
        return self._length

    def statistics(self) -> DraftStatistics:
        """The statistics of this drafter."""
        return DraftStatistics(self._drafts, self._proposed, self._accepted, self._verifications, self._tokens)
