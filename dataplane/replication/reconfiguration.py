"""Configuration changes that were requested and may have taken effect already (PacificA, sections 2.2 and 2.4).

The answer to a compare-and-set can be lost, and the compare-and-set itself can arrive much later, even after the
replica that sent it has restarted. So a requested change *may be true* from the request until another configuration
is seen: all changes of one configuration compare with it, so at most one of them takes effect, and the next epoch,
whoever made it, rules out the others. Nothing is ever undone; requesting again is always safe.
"""

from __future__ import annotations

import math

from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.effects import Effect, Swap


class Reconfiguration:
    """What one replica has requested in place of the configuration that it knows."""

    __slots__ = ("_asked_s", "_followers", "_retry_s", "asked")

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._asked_s = -math.inf
        self._followers: tuple[ReplicaId, ...] | None = None
        self.asked: list[Configuration] = []
        """Those that may be the partition's configuration already, in the order asked."""

    def ask(self, current: Configuration | None, wanted: Configuration, now: float, effects: list[Effect]) -> None:
        """Request a change, or request it again if it was not answered for `retry_s`. `current` None: there is no
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
        """A newer configuration was seen: no earlier request can take effect any more."""
        self.asked.clear()
        self._followers = None

    def followers(self, current: Configuration) -> tuple[ReplicaId, ...]:
        """All that are followers, or may be: any of them could take over, so each must have what is committed, and
        renew the lease."""
        if not self.asked:
            return current.followers
        if self._followers is None:
            extra = {f for wanted in self.asked for f in wanted.followers} - {*current.followers, current.leader}
            self._followers = (*current.followers, *sorted(extra))
        return self._followers
