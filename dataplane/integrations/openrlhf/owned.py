"""Handles to a sample's inputs that free what they stand for, once the samples that hold them are gone.

A rollout worker puts pixels and sends a handle. Whoever draws samples (OpenRLHF's PPOTrainer; its generator and then
its TrainingActor where training is asynchronous) keeps it in an Experience, drops what a filter or an evaluation drops,
and the rest when the step is over. So there, and only there, a handle that arrives owns what it stands for: it is freed
when the last sample of the prompt goes. Workers of the models receive plain handles (`remote`), which own nothing.

Invariants: pickled, a handle gives what it owns away, to whoever unpickles it; so nothing is freed that a
process may still get, and what is lost on the way stays until the node ends. The samples of a prompt that arrive in one
message share one handle, as they did where they came from.
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
        """Whether what it stands for is freed when it goes."""
        return self._watch is not None and self._watch.active

    def own(self) -> None:
        """From now on. Idempotent."""
        if not self.owning:
            self._watch = freeing.Watch(self.ref, [self])

    def give_away(self) -> None:
        """It is somebody else's to free. Idempotent."""
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
