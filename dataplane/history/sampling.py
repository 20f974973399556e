"""HistoPipe as a sampler: rollout workers take prompts of a stream by their predicted lengths.

Prompts are appended with a tag for the predicted number of tokens of their responses (`history.lengths`), and the step
as their version. A worker takes prompts of the oldest step first, and among these the longest. Since an idle worker
takes the longest that is left, workers end together even if predictions are wrong (Graham 1969). In every second step
the shortest come first, while the step before finishes. Short responses fill the idle time of that step, and long ones
begin when a whole worker is free.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse
from dataplane.stream.sampler import Candidates, Choice


class HistoPipe:
    """Prompts by predicted length, in whole groups. The longest come first in steps of even number, the shortest in the
    others. Steps more than `max_lag` beyond the oldest remaining one wait.

    tag: the tag with the predicted number of tokens of each row's responses. alternate: if False, the longest come
    first in all steps. Raises Misuse for a negative max_lag.
    """

    def __init__(self, tag: str = "predicted_tokens", *, max_lag: int = 1, alternate: bool = True) -> None:
        if max_lag < 0:
            raise Misuse(f"HistoPipe: max_lag is 0 or more, not {max_lag}")
        self.tag, self.max_lag, self.alternate = tag, max_lag, alternate

    @property
    def tags_read(self) -> tuple[str, ...]:
        """The tag."""
        return (self.tag,)

    @property
    def needs(self) -> tuple[str, ...]:
        """No column."""
        return ()

    def choose(self, candidates: Candidates, want: int) -> Choice:
        """At most `want` rows. Raises Misuse if the first group alone has more, or no row has the tag."""
        predicted = candidates.tags.get(self.tag)
        if predicted is None:
            raise Misuse(f"the rows have no tag {self.tag!r}: append prompts with the tokens that history.lengths says")
        if not len(candidates):
            return Choice(np.empty(0, np.int64))
        order = self._order(candidates, np.asarray(predicted, np.float64))
        group = candidates.group[order]
        ends = np.flatnonzero(np.append(group[1:] != group[:-1], True)) + 1
        fit = int(ends[ends <= want].max(initial=0))
        if not fit and want:
            raise Misuse(f"a group of {ends[0]} rows is delivered whole: ask for {ends[0]} rows or more, not {want}")
        return Choice(order[:fit], full=fit < len(order))

    def _order(self, candidates: Candidates, predicted: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        version = candidates.version
        rows = np.flatnonzero(version <= version.min() + self.max_lag)
        _, group = np.unique(candidates.group[rows], return_inverse=True)
        longest = np.full(group.max(initial=-1) + 1, -np.inf)
        np.maximum.at(longest, group, predicted[rows])
        up = (version[rows] % 2 == 1) & self.alternate
        length = np.where(up, longest[group], -longest[group])
        found: npt.NDArray[np.int64] = rows[np.lexsort((rows, group, length, version[rows]))]
        return found
