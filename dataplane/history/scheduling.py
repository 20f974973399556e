"""Which rollout worker makes which responses, by predicted length: HistoPipe's two tiers (RhymeRL, arXiv 2508.18588).

Within a step, prompts are spread such that workers end together: the longest first, each to the worker that would end
first with it (Graham 1969). Across steps, a worker that ends early begins with the next step's prompts, as far as
`max_lag` lets it, and what it is `behind` or ahead counts when those are spread; workers are gone through in turned
order each step, so that who had the longest of one step has the shortest of the next. Where lengths are mispredicted,
`migrate` names the few responses that are to move.

A worker decodes up to `slots` responses at once, and a step of decoding costs `BASE + active` (a weight is read once
for all, and the cache of each): it needs at least `sum + BASE * max(longest, sum / slots)`. That is the model by
which all here is told; only ratios of it count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse
from dataplane.history.lengths import Floats, Lengths

Index = npt.NDArray[np.int64]

BASE = 50.0
"""What a step of decoding costs beyond its responses, in what one more response costs: a 7B model in bfloat16 reads
14 GB of weights, and 0.3 GB of cache for a response of some thousand tokens."""

SLOTS = 256
"""Responses that a worker decodes at once, where nothing is said: what vLLM does."""


def finish(total: Floats, longest: Floats, slots: int) -> Floats:
    """When workers end that have so many tokens to make, and one response so long."""
    found: Floats = total + BASE * np.maximum(longest, total / slots)
    return found


@dataclass(frozen=True, slots=True)
class Move:
    """A prompt's responses that have not ended, from one worker to another; begun ones go on from their tokens."""

    position: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Who makes what in one step. `workers`: of each, the positions of its prompts, in the order to begin them. `ends`:
    when each is predicted to end, what it was behind included; `tokens`: what it is predicted to make."""

    workers: list[Index]
    ends: Floats
    tokens: Floats
    lengths: Lengths = field(repr=False)
    samples: int = 1
    slots: int = SLOTS

    @property
    def owner(self) -> Index:
        """The worker of each prompt."""
        found = np.empty(len(self.lengths), np.int64)
        for worker, positions in enumerate(self.workers):
            found[positions] = worker
        return found

    @property
    def bubbles(self) -> float:
        """The share of the workers' time that is predicted to be idle if nothing of the next step is begun."""
        latest = float(self.ends.max(initial=0.0))
        return 1 - float(self.ends.mean()) / latest if latest else 0.0

    def migrate(
        self, made: Mapping[int, Sequence[float]], *, owner: Index | None = None, most: int = 8, gain: float = 0.1
    ) -> list[Move]:
        """What is to move now so that workers end together again; nothing where that saves less than the share `gain`.

        made: by the position of each prompt that has not ended, the tokens so far of each response that has not. owner:
        the worker of each prompt, where it has moved since; see `Schedule.owner`.
        """
        owner = self.owner if owner is None else owner.copy()
        left = {at: [self.lengths.remaining(at, each) for each in tokens] for at, tokens in made.items() if len(tokens)}
        moves: list[Move] = []
        for _ in range(most):
            ends = self._ends(left, owner)
            late, early = int(ends.argmax()), int(ends.argmin())
            best, target = ends[late] * (1 - gain), -1
            for at in (at for at in left if owner[at] == late):
                owner[at] = early
                after = self._ends(left, owner, (late, early))
                owner[at] = late
                if after[[late, early]].max() < best:
                    best, target = after[[late, early]].max(), at
            if target < 0:
                break
            moves.append(Move(target, late, early))
            owner[target] = early
        return moves

    def _ends(self, left: Mapping[int, list[float]], owner: Index, only: tuple[int, ...] | None = None) -> Floats:
        total, longest = np.zeros(len(self.workers)), np.zeros(len(self.workers))
        for at, tokens in left.items():
            worker = owner[at]
            if only is None or worker in only:
                total[worker] += sum(tokens)
                longest[worker] = max(longest[worker], max(tokens))
        return finish(total, longest, self.slots)


def plan(
    lengths: Lengths,
    workers: int,
    *,
    step: int = 0,
    samples: int = 1,
    slots: int | None = None,
    behind: npt.ArrayLike | None = None,
) -> Schedule:
    """A schedule of one step: a group of `samples` responses to each prompt, which stay together.

    step: its number; workers are gone through in turned order every other one. slots: responses at once of a worker.
    behind: of each worker, for how long it goes on with earlier steps, as `Schedule.ends` says it. Raises Misuse.
    """
    if workers < 1 or samples < 1 or (slots is not None and slots < 1):
        raise Misuse(f"a schedule is of one worker, sample and slot or more, not {workers}, {samples} and {slots}")
    late = np.zeros(workers) if behind is None else np.array(behind, np.float64)
    if late.shape != (workers,):
        raise Misuse(f"behind is a number for each of {workers} workers, not {late.shape}")
    late -= late.min(initial=0.0)
    slots = SLOTS if slots is None else slots
    tokens, longest = lengths.tokens * samples, lengths.longest(samples)
    order = np.argsort(-tokens, kind="stable")
    turned = np.arange(workers)[:: -1 if step % 2 else 1]
    total, tail = np.zeros(workers), np.zeros(workers)
    given: list[list[int]] = [[] for _ in range(workers)]
    for at in order.tolist():
        ends = late + finish(total + tokens[at], np.maximum(tail, longest[at]), slots)
        worker = int(turned[int(ends[turned].argmin())])
        total[worker] += tokens[at]
        tail[worker] = max(tail[worker], longest[at])
        given[worker].append(at)
    found = [np.array(positions, np.int64) for positions in given]
    return Schedule(found, late + finish(total, tail, slots), total, lengths, samples, slots)
