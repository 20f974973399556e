"""Leases and promises, by which two leaders never answer at the same time (PacificA, section 2.3).

There are two halves. A leader holds a **lease** of every follower: it answers until `lease_s` after it *sent* the last
message that the follower has acknowledged. A follower keeps a **promise** to its earlier leaders: it answers as a
leader only `grace_s` after it *received* their last message. A message is sent before it is received, and `grace_s`
exceeds `lease_s` by more than clocks drift. So the old leader has stopped before a new one begins, and neither reads
the other's clock.

The promise binds a new leader however it became the leader: by its own request, by another replica, or by an old
compare-and-set of its own that takes effect late, after it has heard the old leader again or has been restarted. So a
follower may continue to acknowledge entries while it requests to lead, and the partition continues to work while the
coordinator does not answer.

When a process ends, the promises to it end too. The end must be certain. It is proved if the host refuses connections
to the process's address, but not by a broken connection or silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dataplane.replication.configuration import ReplicaId

_ANY: ReplicaId = ("", 0)  # any leader before this replica was started
_LEADERS = 4  # if more leaders are remembered, those whose promises have ended are forgotten


class Lease:
    """The leader's half: for each peer, the time at which the leader sent the last message that the peer
    acknowledged. All times are by the leader's clock."""

    __slots__ = ("_lease_s", "_renewed")

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._renewed: dict[ReplicaId, float] = {}

    def renew(self, peer: ReplicaId, sent_s: float) -> None:
        """Note that the peer has acknowledged a message that was sent at this time."""
        if sent_s > self._renewed.get(peer, -math.inf):
            self._renewed[peer] = sent_s

    def holds(self, peers: Iterable[ReplicaId], now: float) -> bool:
        """Whether the lease of each peer holds, so that none of them can answer as a leader yet."""
        oldest = now - self._lease_s
        renewed = self._renewed
        return all(renewed.get(peer, -math.inf) > oldest for peer in peers)

    def silent(self, peer: ReplicaId, since: float, now: float) -> bool:
        """Whether a peer has acknowledged nothing for `lease_s`, counted from `since` at the earliest."""
        return now - max(self._renewed.get(peer, -math.inf), since) >= self._lease_s

    def heard_since(self, peer: ReplicaId, moment_s: float) -> bool:
        """Whether the peer has acknowledged a message that was sent after this time."""
        return self._renewed.get(peer, -math.inf) > moment_s

    def forget(self, peer: ReplicaId) -> None:
        self._renewed.pop(peer, None)


class Promise:
    """A follower's half: the time at which it last heard each leader. A replica that has just started is assumed to
    have heard every leader just before."""

    __slots__ = ("_deaf_to", "_grace_s", "_heard")

    def __init__(self, grace_s: float, now: float) -> None:
        self._grace_s = grace_s
        self._heard: dict[ReplicaId, float] = {_ANY: now}
        self._deaf_to: ReplicaId | None = None  # a leader that has ended; its late messages are ignored

    def begin(self) -> None:
        """Begin an epoch. Its leader may be one that was restarted, so it is heard again."""
        self._deaf_to = None

    def hear(self, leader: ReplicaId, now: float) -> None:
        if leader == self._deaf_to:
            return
        heard = self._heard
        heard[leader] = now
        if len(heard) > _LEADERS:
            self._heard = {each: at for each, at in heard.items() if each == _ANY or now - at < self._grace_s}

    def end_all(self) -> None:
        """End all promises."""
        self._heard = {_ANY: -math.inf}

    def end_of_node(self, node: str, before_s: float) -> None:
        """End the promises to the leaders on a node that were last heard by `before_s`: their process has ended."""
        for leader, at in self._heard.items():
            if leader[0] == node and at <= before_s:
                self._heard[leader] = -math.inf

    def end_of_leader(self, leader: ReplicaId) -> None:
        """End the promise to the leader of this epoch, whose process has ended. Its messages of this epoch that arrive
        later are ignored."""
        self._deaf_to = leader
        self._heard[leader] = -math.inf

    def over(self, now: float) -> bool:
        """Whether all promises have ended, so that no earlier leader can still hold a lease of this replica."""
        return now - max(self._heard.values()) >= self._grace_s

    def silent(self, leader: ReplicaId, now: float) -> bool:
        """Whether this leader has not been heard for `grace_s`."""
        return now >= self.until(leader)

    def ended(self, leader: ReplicaId) -> bool:
        """Whether this leader is known to have ended."""
        return self._heard.get(leader) == -math.inf

    def until(self, leader: ReplicaId) -> float:
        """The time at which this leader counts as silent, unless it is heard again."""
        return self._heard.get(leader, self._heard[_ANY]) + self._grace_s
