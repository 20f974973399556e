"""Drafters: what they propose, how long, and what they learn."""

from __future__ import annotations

import numpy as np

from dataplane.history.drafter import LEAST, LONGEST, Drafter, Response, weights


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
