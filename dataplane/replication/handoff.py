"""A leader passes the lead on, with nothing in doubt: a planned change costs no wait and no unknown outcome.

It takes no more requests, waits until all that it proposed is committed, and asks for the configuration in which the
follower leads. When it sees the new epoch it has stopped, and says `Release`: the follower need not wait until its
promise is over. If the answer is long in coming it leads on; should the change come true later, the promise binds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.progress import Progress


class Handoff:
    """The handoff of one leader, if `to` is not None."""

    __slots__ = ("_until_s", "to")

    def __init__(self) -> None:
        self.to: ReplicaId | None = None
        self._until_s = math.inf

    def begin(self, to: ReplicaId, until_s: float) -> None:
        self.to, self._until_s = to, until_s

    def give_up(self, now: float) -> None:
        """Lead on, if it takes longer than to lose a follower."""
        if now >= self._until_s:
            self.to, self._until_s = None, math.inf

    def ready(
        self, configuration: Configuration, peers: Mapping[ReplicaId, Progress], committed: int, last: int
    ) -> ReplicaId | None:
        """Who is to lead, once all that was proposed is committed."""
        to = self.to
        if to is None or to not in configuration.followers or committed < last or peers[to].match < last:
            return None
        return to
