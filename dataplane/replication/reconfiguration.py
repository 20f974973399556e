"""Configuration changes that were requested and may have taken effect already (PacificA, sections 2.2 and 2.4).

The answer to a compare-and-set can be lost, and the compare-and-set itself can arrive much later, even after its sender
has restarted. So a requested change *may have taken effect* at any time from the request until a newer configuration
is seen. All changes of one configuration compare with it, so at most one of them takes effect, and the next epoch rules
out the others. No change is ever undone, and repeating a request is always safe.
"""

from __future__ import annotations

import math

from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.effects import Effect, Swap


class Reconfiguration:
    """The changes that one replica has requested of the configuration that it knows."""

    __slots__ = ("_asked_s", "_followers", "_retry_s", "asked")

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._asked_s = -math.inf
        self._followers: tuple[ReplicaId, ...] | None = None
        self.asked: list[Configuration] = []
        """The requested configurations that may have taken effect, in the order of the requests."""

    def ask(self, current: Configuration | None, wanted: Configuration, now: float, effects: list[Effect]) -> None:
        """Request a change, or repeat a request that was not answered for `retry_s`. `current` None: there is no
        configuration."""
        if wanted in self.asked:
            if now - self._asked_s < self._retry_s:
                return
        else:
            self.asked.append(wanted)
            self._followers = None
        self._asked_s = now
        effects.append(Swap(current, wanted))

    def settled(self) -> None:
        """Forget all requests: a newer configuration was seen, so none of them can take effect any more."""
        self.asked.clear()
        self._followers = None

    def followers(self, current: Configuration) -> tuple[ReplicaId, ...]:
        """The followers, and the replicas that may have become followers. Any of them could take over, so each must
        have every committed command and renew the lease."""
        if not self.asked:
            return current.followers
        if self._followers is None:
            extra = {f for wanted in self.asked for f in wanted.followers} - {*current.followers, current.leader}
            self._followers = (*current.followers, *sorted(extra))
        return self._followers
