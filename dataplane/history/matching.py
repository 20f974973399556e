"""The matcher: finds the position in earlier responses that a new response has reached, and what follows there.

`order` sorts the positions of a response by the tokens before them, read backwards, so that the longest suffix of
another response that occurs in it is found by one binary search (Manber and Myers 1990, on the reversed text). The
index of a response has 4 bytes a token and is independent of others: responses are added and removed without a change
to any other, and the only state between searches is the last position, near which the next search begins.

Invariants: the extension (`_suffix.c`) and the Python code here propose the same tokens; a proposal follows responses
that agree with the last `match` tokens or more, the likeliest continuation first.

Tried and rejected: one suffix tree for all responses of a prompt, as SuffixDecoding has (arXiv 2411.04975): it needs
a node a token and more, and the removal of a response touches all of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

DEPTH = 64
"""The largest number of tokens of a match."""

MOST = 64
"""The largest number of responses of a matcher."""

_NODES, _AROUND, _SCANNED, _BUCKETS, _ENOUGH = 256, 8, 32, 8, 32


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


def order_by_sorting(tokens: Tokens) -> Tokens:
    """As `order`."""
    n = len(tokens)
    if not n:
        return np.empty(0, np.int32)
    rank = np.zeros(n, np.int64)
    rank[1:] = np.unique(tokens[:-1], return_inverse=True)[1] + 1
    known = 1
    while known < DEPTH and rank.max() < n - 1:
        before = np.zeros(n, np.int64)
        before[known:] = rank[:-known] + 1 if known < n else 0
        rank = np.unique(rank * (n + 1) + before, return_inverse=True)[1]
        known *= 2
    return np.argsort(rank, kind="stable").astype(np.int32)


class _Response:
    def __init__(self, tokens: list[int], order: list[int], weight: float, expected: int) -> None:
        self.tokens, self.order, self.weight, self.expected = tokens, order, weight, expected
        self.at, self.match = expected, -1


class PlainMatcher:
    """As the extension's, if that is not built: some hundred times slower."""

    def __init__(self) -> None:
        self._responses: list[_Response] = []
        self._own: list[int] = []
        self._nodes: list[tuple[float, int, int, int, int, frozenset[int]]] = []
        self._hits = [2.0 if bucket else 1.0 for bucket in range(_BUCKETS)]
        self._tries = [2.25 if bucket else 2.0 for bucket in range(_BUCKETS)]

    def add(self, tokens: Any, order: Any, weight: float, /) -> None:
        """See Matcher."""
        if len(self._responses) == MOST:
            raise ValueError("64 responses at most")
        listed, ordered = np.frombuffer(tokens, np.int32).tolist(), np.frombuffer(order, np.int32).tolist()
        if len(listed) != len(ordered) or not 0 < weight < 1e30:
            raise ValueError("tokens and their order are int32, as many of each; a weight is above 0")
        self._responses.append(_Response(listed, ordered, weight, len(self._own)))
        self._nodes = []

    def chances(self) -> list[tuple[float, float]]:
        """See Matcher."""
        return list(zip(self._hits, self._tries, strict=True))

    def set_chances(self, chances: list[tuple[float, float]], /) -> None:
        """See Matcher."""
        if len(chances) != _BUCKETS or not all(0 < hits <= tries < 1e12 for hits, tries in chances):
            raise ValueError("hits are above 0, and no more than tries")
        self._hits, self._tries = [list(each) for each in zip(*chances, strict=True)]

    # matching

    def _compare(self, of: _Response, at: int) -> tuple[int, int]:
        """The number of tokens before `at` that equal the last ones, and the order of the next."""
        for back in range(DEPTH):
            a, b = len(self._own) - 1 - back, at - 1 - back
            if a < 0 or b < 0:
                return (back + 1, 0) if a < 0 and b < 0 else (back, -1 if a < 0 else 1)
            if self._own[a] != of.tokens[b]:
                return back, -1 if self._own[a] < of.tokens[b] else 1
        return DEPTH, 0

    @staticmethod
    def _better(of: _Response, at: int, match: int) -> None:
        nearer = abs(at - of.expected) < abs(of.at - of.expected)
        if match > of.match or (match == of.match and nearer):
            of.at, of.match = at, match

    def _find(self, of: _Response) -> None:
        size = len(of.tokens)
        of.match, of.at = -1, of.expected
        if 0 <= of.expected < size:
            self._better(of, of.expected, self._compare(of, of.expected)[0])
        if of.match >= _ENOUGH:
            return
        for at in range(max(0, of.expected - _AROUND), min(size, of.expected + _AROUND + 1)):
            self._better(of, at, self._compare(of, at)[0])
        low, high = 0, size
        while low < high:
            middle = (low + high) // 2
            if not 0 <= of.order[middle] < size:
                return
            low, high = (low, middle) if self._compare(of, of.order[middle])[1] <= 0 else (middle + 1, high)
        for places in (range(low - 1, max(-1, low - 1 - _SCANNED), -1), range(low, min(size, low + _SCANNED))):
            for place in places:
                at = of.order[place]
                match = self._compare(of, at)[0] if 0 <= at < size else -1
                if match < max(of.match, 1):
                    break
                self._better(of, at, match)

    # proposing

    def _votes(self, depth: int, active: frozenset[int]) -> list[tuple[float, int, int, frozenset[int]]]:
        """(share, token, match, responses) of the continuations, the largest share first."""
        votes: dict[int, tuple[float, int, frozenset[int]]] = {}
        total = 0.0
        for number in sorted(active):
            of = self._responses[number]
            at, match = of.at + depth, of.match + depth
            if not 0 <= at < len(of.tokens):
                continue
            trust = match + 0.25 if match < 16 else 16.25
            weight = of.weight * trust * trust
            had, longest, who = votes.get(of.tokens[at], (0.0, 0, frozenset()))
            votes[of.tokens[at]] = had + weight, max(longest, match), who | {number}
            total += weight
        found = [(weight / total, token, match, who) for token, (weight, match, who) in votes.items()]
        return sorted(found, key=lambda vote: (-vote[0], vote[1]))

    def _best(
        self, parent: int, branches: int, threshold: float
    ) -> list[tuple[float, int, int, int, int, frozenset[int]]]:
        chance, depth, active = 1.0, 0, frozenset(range(len(self._responses)))
        if parent >= 0:
            chance, _, _, depth, _, active = self._nodes[parent]
        found = []
        for share, token, match, who in self._votes(depth, active)[:branches]:
            bucket = min(match.bit_length(), _BUCKETS - 1)
            likely = chance * share * (self._hits[bucket] / self._tries[bucket])
            if likely < threshold:
                break
            found.append((likely, token, parent, depth + 1, bucket, who))
        return found

    def propose(self, most: int, threshold: float, branches: int, /) -> tuple[list[int], list[int]]:
        """See Matcher."""
        self._nodes = []
        for of in self._responses:
            self._find(of)
        waiting = self._best(-1, branches, threshold) if most > 0 else []
        while waiting and len(self._nodes) < min(most, _NODES):
            best = max(range(len(waiting)), key=lambda at: waiting[at][0])
            self._nodes.append(waiting.pop(best))
            waiting += self._best(len(self._nodes) - 1, branches, threshold)[: _NODES - len(waiting)]
        return [node[1] for node in self._nodes], [node[2] for node in self._nodes]

    def accept(self, tokens: Any, /) -> int:
        """See Matcher."""
        came = np.frombuffer(tokens, np.int32).tolist()
        at, accepted = -1, 0
        for token in came:
            children = [number for number, node in enumerate(self._nodes) if node[2] == at]
            after = next((number for number in children if self._nodes[number][1] == token), -1)
            if children:
                self._learn(self._nodes[children[0]][4], after == children[0])
            if after < 0:
                break
            at, accepted = after, accepted + 1
        self._own += came
        for of in self._responses:
            of.expected = (of.at if self._nodes else of.expected) + len(came)
        self._nodes = []
        return accepted

    def _learn(self, bucket: int, came: bool) -> None:
        self._tries[bucket] += 1
        self._hits[bucket] += came
        if self._tries[bucket] > 256:  # older tries count half
            self._tries[bucket] /= 2
            self._hits[bucket] /= 2


try:
    from dataplane.history import _suffix

    NATIVE = True
except ImportError:  # not built: no C compiler
    NATIVE = False


def order(tokens: npt.ArrayLike) -> Tokens:
    """The positions of tokens, int32, sorted by at most 64 tokens before each, the nearest first; the beginning
    sorts first, and equal positions stay in order."""
    own = np.ascontiguousarray(tokens, np.int32)
    return np.frombuffer(_suffix.order(own), np.int32) if NATIVE else order_by_sorting(own)


def matcher() -> Matcher:
    """A matcher without responses."""
    return _suffix.Matcher() if NATIVE else PlainMatcher()
