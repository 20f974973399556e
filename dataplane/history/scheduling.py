"""Assigns responses to rollout workers by predicted length: HistoPipe's two tiers (RhymeRL, arXiv 2508.18588).

Within a step, prompts are distributed so that workers end together: the longest first, each to the worker that would
end first with it (Graham 1969). Across steps, a worker that ends early begins with prompts of the next step, whose plan
takes its lead or lag (`behind`) into account. The order of workers alternates each step, so that the worker with the
longest prompts of one step has the shortest of the next. If lengths were mispredicted, `migrate` names the few
responses to move.

A worker decodes up to `slots` responses at once. A decoding step costs `BASE + active`: the weights are read once for
all, and the cache of each active response. So a worker needs at least `sum + BASE * max(longest, sum / slots)`. All
times are predicted by this model, in units of which only ratios matter.
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
"""The cost of a decoding step beyond its responses, relative to that of one more response: a 7B model in bfloat16
reads 14 GB of weights, and 0.3 GB of cache for a response of some thousand tokens."""

SLOTS = 256
"""The default number of responses that a worker decodes at once: that of vLLM."""


def finish(total: Floats, longest: Floats, slots: int) -> Floats:
    """The times that workers need for these totals of tokens and these longest responses, one entry a worker."""
    found: Floats = total + BASE * np.maximum(longest, total / slots)
    return found


@dataclass(frozen=True, slots=True)
class Move:
    """A move of the prompt `position` with its unfinished responses, which continue from their tokens."""

    position: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The assignment of one step. For each worker, `workers`: the positions of its prompts, in order; `ends`: the
    predicted time of its end, with its delayed start; `tokens`: its predicted number of tokens."""

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
        """The predicted idle share of the workers' time, if no worker begins the next step early."""
        latest = float(self.ends.max(initial=0.0))
        return 1 - float(self.ends.mean()) / latest if latest else 0.0

    def migrate(
        self, made: Mapping[int, Sequence[float]], *, owner: Index | None = None, most: int = 8, gain: float = 0.1
    ) -> list[Move]:
        """At most `most` moves after which workers end closer together. Each shortens the later of two workers by the
        share `gain`.

        made: by the position of each unfinished prompt, the tokens so far of each unfinished response. owner: the
        present worker of each prompt; by default `Schedule.owner`.
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
    """A schedule of one step. The `samples` responses to a prompt go to the same worker.

    step: its number; the order of workers is reversed in steps of odd number. slots: the responses that a worker
    decodes at once. behind: for each worker, the remaining time of earlier steps, as in `Schedule.ends`. Raises Misuse
    for invalid numbers.
    """
    for name, value in (("workers", workers), ("samples", samples), ("slots", slots)):
        if value is not None and value < 1:
            raise Misuse(f"{name} is 1 or more, not {value}")
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
