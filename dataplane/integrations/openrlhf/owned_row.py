"""Handles to a sample's inputs that free them when the samples are gone.

A rollout worker puts pixels and sends a handle. The process that draws samples (OpenRLHF's PPOTrainer; with
asynchronous training its generator and then its TrainingActor) keeps it in an Experience, and drops it with a filter,
an evaluation, or the end of the step. Only in that process, an unpickled handle owns its inputs: they are freed with
the last sample of the prompt. Workers of the models receive plain handles (`remote`), which own nothing.

Invariants: pickling passes the ownership to the process that unpickles the handle, so nothing is freed that a
process may still read; the inputs of a handle that is lost on the way stay until the node ends. The samples of a
prompt that arrive in one message share one handle, as they did at the sender.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from dataplane.batch.ref import BatchRef
from dataplane.integrations import freeing
from dataplane.integrations.rows import LazyRow

#: What is imported wherever samples are drawn from rollout workers, and nowhere else.
_DRAWS = "openrlhf.trainer.ppo_utils.samples_generator"


class OwnedRow(LazyRow):
    """A handle that a rollout worker sends."""

    __slots__ = ("__weakref__", "_watch")

    def __init__(self, ref: BatchRef, column: str | None = None) -> None:
        """As `LazyRow`; it owns nothing yet."""
        super().__init__(ref, column)
        self._watch: freeing.Watch | None = None

    @property
    def owning(self) -> bool:
        """Whether its inputs are freed with it."""
        return self._watch is not None and self._watch.active

    def own(self) -> None:
        """Take the ownership. Idempotent."""
        if not self.owning:
            self._watch = freeing.Watch(self.ref, [self])

    def give_away(self) -> None:
        """Leave the inputs to another owner. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()

    def __reduce__(self) -> tuple[Callable[[bytes, str | None], OwnedRow], tuple[bytes, str | None]]:
        self.give_away()
        return _arrived, (self.ref.encode(), self.column)


def _arrived(ref: bytes, column: str | None) -> OwnedRow:
    row = OwnedRow(BatchRef.decode(ref), column)
    if _DRAWS in sys.modules:
        row.own()
    return row
