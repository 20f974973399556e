"""The trainer's count of rows, which shows that each appended row was counted once, whichever processes were killed.

The key of a row is its worker, the worker's life (the number of times that it was started before), and the row's number
in that life: `1.0/37` is row 37 of rollout worker 1 before it was first killed.
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
        """Count the rows with these keys."""
        self._times.update(rows)

    def __contains__(self, key: str) -> bool:
        """Whether a row was counted."""
        return key in self._times

    @property
    def counted(self) -> list[str]:
        """The keys, each as often as it was counted."""
        return list(self._times.elements())

    def books(self, stream: Mapping[str, Any]) -> Books:
        """The counts, compared with the statistics of the stream, which is closed and drained."""
        actor = stream["task"]["actor"]
        return Books(
            appended=stream["appended"],
            counted=dict(sorted(Counter(key.partition("/")[0] for key in self._times).items())),
            again=self._times.total() - len(self._times),
            left_out=actor["expired"] + actor["left"] + actor["dead"],
        )
