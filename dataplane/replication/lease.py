"""Why two leaders never answer at the same time (PacificA, section 2.3).

There are two halves. A leader holds a **lease** of every follower: it answers until `lease_s` after it *sent* the last
message that the follower has acknowledged. A follower keeps a **promise** to whoever led it: it answers as a leader
only `grace_s` after it *received* the last message. A message is sent before it is received, and `grace_s` exceeds
`lease_s` by more than clocks drift. So the old leader has stopped before a new one begins, and neither reads the
other's clock.

The promise binds however the new leader became one: by asking, by a compare-and-set that it sent before it heard the
old leader again (or before it crashed), or because it was named. So a follower may continue to acknowledge while it
asks for the lead, and nothing stops while the coordinator is away.

When a process ends, so do the promises to it. Whoever reports that must know that it ended, as a host does that
refuses connections to the address; a broken connection, or silence, is no proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dataplane.replication.configuration import ReplicaId

_ANY: ReplicaId = ("", 0)  # any leader before this replica was started
_LEADERS = 4  # that are remembered before those are forgotten to whom nothing is promised any more


class Lease:
    """A leader's half: when the message was sent that each peer acknowledged last, in seconds of the leader's clock."""

    __slots__ = ("_lease_s", "_renewed")

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._renewed: dict[ReplicaId, float] = {}

    def renew(self, peer: ReplicaId, sent_s: float) -> None:
        """The peer has acknowledged a message that was sent at this time."""
        if sent_s > self._renewed.get(peer, -math.inf):
            self._renewed[peer] = sent_s

    def holds(self, peers: Iterable[ReplicaId], now: float) -> bool:
        """Whether none of the peers can answer as a leader yet."""
        oldest = now - self._lease_s
        renewed = self._renewed
        return all(renewed.get(peer, -math.inf) > oldest for peer in peers)

    def silent(self, peer: ReplicaId, since: float, now: float) -> bool:
        """Whether a peer from which an acknowledgement has been due since then has sent none for `lease_s`."""
        return now - max(self._renewed.get(peer, -math.inf), since) >= self._lease_s

    def since(self, peer: ReplicaId, moment_s: float) -> bool:
        """Whether the peer has acknowledged a message that was sent after this time."""
        return self._renewed.get(peer, -math.inf) > moment_s

    def forget(self, peer: ReplicaId) -> None:
        self._renewed.pop(peer, None)


class Promise:
    """A follower's half: when it last heard each leader. A replica that has just started may have heard any leader
    just before."""

    __slots__ = ("_deaf_to", "_grace_s", "_heard")

    def __init__(self, grace_s: float, now: float) -> None:
        self._grace_s = grace_s
        self._heard: dict[ReplicaId, float] = {_ANY: now}
        self._deaf_to: ReplicaId | None = None  # that has ended, in this epoch: what still comes was sent before

    def begin(self) -> None:
        """A new epoch: its leader may be one that was restarted."""
        self._deaf_to = None

    def hear(self, leader: ReplicaId, now: float) -> None:
        if leader == self._deaf_to:
            return
        heard = self._heard
        heard[leader] = now
        if len(heard) > _LEADERS:
            self._heard = {each: at for each, at in heard.items() if each == _ANY or now - at < self._grace_s}

    def release(self) -> None:
        """End all promises."""
        self._heard = {_ANY: -math.inf}

    def void(self, node: str, before_s: float) -> None:
        """What was heard of the node until then came from a process that has ended."""
        for leader, at in self._heard.items():
            if leader[0] == node and at <= before_s:
                self._heard[leader] = -math.inf

    def end(self, leader: ReplicaId) -> None:
        """The process in which this one leads this epoch has ended: all that is heard of it in this epoch was sent
        before."""
        self._deaf_to = leader
        self._heard[leader] = -math.inf

    def over(self, now: float) -> bool:
        """Whether no replica that this one acknowledged can hold a lease."""
        return now - max(self._heard.values()) >= self._grace_s

    def silent(self, leader: ReplicaId, now: float) -> bool:
        """Whether this leader has not been heard for `grace_s`."""
        return now >= self.until(leader)

    def ended(self, leader: ReplicaId) -> bool:
        """Whether this leader is known to have ended."""
        return self._heard.get(leader) == -math.inf

    def until(self, leader: ReplicaId) -> float:
        """When this leader will count as silent, if nothing is heard of it."""
        return self._heard.get(leader, self._heard[_ANY]) + self._grace_s
