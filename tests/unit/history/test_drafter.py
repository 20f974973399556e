"""Drafters: what they propose, how long, and what they learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dataplane as dp
from dataplane.history import matching
from dataplane.history.drafter import LEAST, LONGEST, Drafter, Response, weights
from tests.cases import each_case


def response(*tokens: int, epoch: int = 0, reward: float | None = None) -> Response:
    return Response(np.array(tokens, np.int32), epoch, reward)


def played(drafter: Drafter, new: list[int]) -> list[int]:
    """How many tokens each draft had, while the response became this."""
    asked, at = [], 0
    while at < len(new):
        draft = drafter.propose()
        right = 0
        while right < len(draft) and new[at + right : at + right + 1] == [draft[right]]:
            right += 1
        came = new[at : at + right + 1]
        assert drafter.accept(came) == min(right, len(came))
        asked.append(len(draft))
        at += len(came)
    return asked


def test_newer_and_better_rewarded_responses_have_more_weight() -> None:
    assert Drafter([response(1, 5, epoch=1), response(1, 6, epoch=3)]).propose(2) == [1, 6]
    assert Drafter([response(1, 5, reward=1.0), response(1, 6, reward=0.0)]).propose(2) == [1, 5]
    assert Drafter([response(1, 5), response(1, 6, epoch=1), response(1, 5)]).propose(2) == [1, 5]  # two of three
    found = weights([response(1, epoch=-(10**6)), response(1, reward=float("nan")), response(1, reward=2.0)])
    assert (found > 0).all()


def test_drafts_grow_while_accepted_and_shrink_when_refused() -> None:
    same = list(range(1000))
    asked = played(Drafter([response(*same)]), same)
    assert asked[0] < max(asked) <= LONGEST
    assert len(asked) < 40
    drafter = Drafter([response(*same)])
    for _ in range(12):
        drafter.propose()
        drafter.accept([5000])
    assert drafter.length == LEAST


# Matching: proposals follow the longest match that there is; orders are sorted.

texts = st.lists(st.integers(0, 3), max_size=90).map(lambda values: np.array(values, np.int32))
native = pytest.mark.skipif(not matching.BUILT, reason="the extension is not built: no C compiler was there")


def common(a: list[int], b: list[int]) -> int:
    """How many of the last tokens are equal, of 64; the beginning of both counts as one."""
    pairs = zip([-1, *a][:-65:-1], [-1, *b][:-65:-1], strict=False)
    return next((count for count, (x, y) in enumerate(pairs) if x != y), min(len(a) + 1, len(b) + 1, 64))


@native
@given(texts)
def test_positions_are_ordered_by_the_tokens_before_them(tokens: np.ndarray) -> None:
    listed = tokens.tolist()
    assert matching.order(tokens).tolist() == sorted(range(len(listed)), key=lambda at: listed[:at][:-65:-1])


@native
@given(texts, texts)
def test_a_proposal_continues_a_longest_match(old: np.ndarray, new: np.ndarray) -> None:
    each, response, own = matching.matcher(), old.tolist(), new.tolist()
    each.add(old, matching.order(old), 1.0)
    for done in range(0, len(own), 3):
        tokens, _ = each.propose(12, 0.0, 1)
        matches = [common(own[:done], response[:at]) for at in range(len(response))]
        longest = min(max(matches, default=0), 32)  # a match of 32 at the expected position is enough
        found = [response[at : at + 12] for at, match in enumerate(matches) if match >= longest]
        assert tokens in found if tokens else not longest
        came = own[done : done + 3]
        same = next(
            (at for at, (a, b) in enumerate(zip(tokens, came, strict=False)) if a != b), min(len(tokens), len(came))
        )
        assert each.accept(np.array(came, np.int32)) == same


@native
@each_case("order", [[-1, -5, 99, 1 << 30], [7, 7, 7, 7], [0, 0, 0, 0], [3, 2, 1, 0]])
def test_an_invalid_suffix_order_causes_no_read_out_of_bounds(order: list[int]) -> None:
    each = matching.matcher()
    each.add(np.array([1, 2, 3, 4], np.int32), np.array(order, np.int32), 1.0)
    for token in (1, 9, 3, 3, 2, 1):
        tokens, _ = each.propose(8, 0.0, 2)
        assert set(tokens) <= {1, 2, 3, 4}
        each.accept(np.array([token], np.int32))


def test_drafts_without_the_extension_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_suffix", None)
    for refused in (matching.matcher, lambda: matching.order([1])):
        with pytest.raises(dp.Misuse, match="install a C compiler"):
            refused()
