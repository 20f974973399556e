"""The trainer's count of rows: was each that was appended counted once, whoever was killed meanwhile?

A row's key says who made it, in which life, and its number there: `1.0/37` is row 37 that rollout worker 1 made before
it was first killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from examples.multimodal_grpo.job import Books


def keys(worker: int, life: int, first: int, count: int) -> list[str]:
    """The keys of `count` rows from number `first` on."""
    return [f"{worker}.{life}/{number}" for number in range(first, first + count)]


class Ledger:
    """How often each row was counted."""

    def __init__(self) -> None:
        self._times: Counter[str] = Counter()

    def count(self, rows: Iterable[str]) -> None:
        """The trainer has acked the rows of these keys."""
        self._times.update(rows)

    def __contains__(self, key: str) -> bool:
        """Whether a row was counted."""
        return key in self._times

    @property
    def counted(self) -> list[str]:
        """The rows, each as often as it was counted."""
        return list(self._times.elements())

    def books(self, stream: Mapping[str, Any]) -> Books:
        """The count beside the figures of a stream that is closed and drained."""
        actor = stream["task"]["actor"]
        return Books(
            appended=stream["appended"],
            counted=dict(sorted(Counter(key.partition("/")[0] for key in self._times).items())),
            again=self._times.total() - len(self._times),
            left_out=actor["expired"] + actor["left"] + actor["dead"],
        )
