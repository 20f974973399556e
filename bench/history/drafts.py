"""Drafts from similar responses: acceptance and cost, compared with the suffix decoding of `arctic-inference` if it can
be imported. Both alternate, with the same responses and the same greedy verification.

Drafts are made for responses of the last of three epochs. The two epochs before are history. The peer has them in its
global cache, of this prompt only, and has the settings of vLLM (32 tokens, depth 24, factor 1, probability 0.1). The
prompt, which shares no text with the response, is empty for both.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from bench.history.responses import RUN, Tokens, epochs, similarity_of
from dataplane.history.drafter import Drafter, Learnt, Response
from dataplane.history.matching import Tokens as Order
from dataplane.history.matching import order

SIMILARITIES = (0.75, 0.80, 0.85, 0.90, 0.95)


class Count:
    """Counters of drafts, and the seconds spent on them."""

    def __init__(self) -> None:
        self.proposed = self.accepted = self.verifications = self.tokens = 0
        self.draft_s = 0.0

    def play(self, new: Tokens, propose: Any, accept: Any) -> None:
        """Simulate the generation of a response, with drafts verified against its known tokens."""
        at, clock = 0, time.perf_counter
        while at < len(new):
            began = clock()
            draft = propose(at)
            self.draft_s += clock() - began
            length = min(len(draft), len(new) - at)
            wrong = np.flatnonzero(np.asarray(draft[:length]) != new[at : at + length])
            right = int(wrong[0]) if len(wrong) else length
            came = new[at : at + right + 1]
            began = clock()
            accept(came)
            self.draft_s += clock() - began
            self.proposed += len(draft)
            self.accepted += right
            self.verifications += 1
            self.tokens += len(came)
            at += len(came)

    def figures(self) -> dict[str, float]:
        """Ratios of the counters."""
        return {
            "acceptance": self.accepted / max(1, self.proposed),
            "accepted a verification": self.accepted / self.verifications,
            "tokens a verification": self.tokens / self.verifications,
            "us a proposed token": self.draft_s / max(1, self.proposed) * 1e6,
            "us a token made": self.draft_s / self.tokens * 1e6,
        }


def ours(count: Count, history: list[Response], new: Tokens, learnt: Learnt) -> None:
    drafter = Drafter(history, learnt=learnt)
    count.play(new, lambda _: drafter.propose(), drafter.accept)


def theirs(count: Count, cache: Any, request: int, new: Tokens) -> None:
    cache.start_request(request, [])
    listed = new.tolist()

    def propose(at: int) -> list[int]:
        pattern = listed[max(0, at - 24) : at]
        if not pattern:
            return []
        return list(
            cache.speculate(request, pattern, max_spec_tokens=32, max_spec_factor=1.0, min_token_prob=0.1).token_ids
        )

    count.play(new, propose, lambda came: cache.add_active_response(request, came.tolist()))
    cache.stop_request(request)
    cache.evict_cached_response(request)


def peer() -> Any:
    """The class of the peer's cache; None if it is not installed."""
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError:
        return None
    return SuffixDecodingCache


def similar(
    similarity: float, *, prompts: int = 6, tokens: int = 2048, samples: int = 8, drafted: int = 4, run: float = RUN
) -> dict[str, Any]:
    """The figures of both for responses of this similarity. run: mean tokens of an edit."""
    mine, other, make, alike = Count(), Count(), peer(), []
    learnt = Learnt()
    for seed in range(prompts):
        *before, last = epochs(seed, similarity, tokens=tokens, samples=samples, count=3, run=run)
        history = [Response(each, epoch, order=order(each)) for epoch, several in enumerate(before) for each in several]
        cache = make(max_tree_depth=24) if make is not None else None
        if cache is not None:
            for number, each in enumerate(history):
                cache.start_request(number, [])
                cache.add_active_response(number, each.tokens.tolist())
                cache.stop_request(number)
        if seed < 2:
            alike.append(max(similarity_of(last[0], each) for each in before[-1]))
        for number, new in enumerate(last[:drafted]):
            for way in (0, 1) if number % 2 else (1, 0):
                if way:
                    ours(mine, history, new, learnt)
                elif cache is not None:
                    theirs(other, cache, 10**6 + number, new)
    found: dict[str, Any] = {
        "similarity": similarity,
        "nearest response": float(np.mean(alike)),
        "ours": mine.figures(),
    }
    if make is not None:
        found["arctic"] = other.figures()
    return found


def update(tokens: int = 8192, turns: int = 15) -> dict[str, float]:
    """Median milliseconds to index a response of several kinds of text, and bytes of the index for each token."""
    random = np.random.default_rng(0)
    kinds: dict[str, Order] = {
        "Zipf text": epochs(0, 0.9, tokens=tokens, samples=1, count=1)[0][0][:tokens],
        "ten tokens": random.integers(0, 10, tokens).astype(np.int32),
        "one token": np.zeros(tokens, np.int32),
        "uniform of 150,000": random.integers(0, 150_000, tokens).astype(np.int32),
    }
    found = {}
    for name, text in kinds.items():
        took = []
        for _ in range(turns):
            began = time.perf_counter()
            made = Drafter([Response(text)])
            took.append(time.perf_counter() - began)
            del made
        found[f"ms, {name}"] = float(np.median(took)) * 1e3
    found["bytes a token"] = order(kinds["Zipf text"]).nbytes / len(kinds["Zipf text"])
    return found


def run() -> dict[str, Any]:
    """Run all measurements, and print the results."""
    rows = []
    for similarity, length in ((each, length) for length in (RUN, RUN / 2) for each in SIMILARITIES):
        rows.append(similar(similarity, run=length))
        print(f"{similarity}, edits of {length:.0f}", f"nearest {rows[-1]['nearest response']:.2f}", file=sys.stderr)
        for who in ("ours", "arctic"):
            if who in rows[-1]:
                said = "; ".join(f"{name} {value:.3g}" for name, value in rows[-1][who].items())
                print(f"  {who}: {said}", file=sys.stderr)
    found = {"drafts": rows, "update": update()}
    print(found["update"], file=sys.stderr)
    return found
