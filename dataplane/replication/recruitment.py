"""Recruits: replicas that become followers. A recruit gets a snapshot and then the log after it, until it is in-sync
(PacificA, section 2.4).

A recruit receives the same messages as followers, but commits do not wait for it. Once it has every committed command
and lacks at most one batch of the others, the leader requests a configuration in which it is a follower. From that
request on, nothing is committed without it. A recruit that falls silent is given up. The driver chooses the replicas to
recruit (`choose`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.lease import Lease
from dataplane.replication.progress import PeerProgress
from dataplane.replication.state import State


def choose(
    partition: str, configuration: Configuration, candidates: Iterable[ReplicaId], wanted: int
) -> tuple[ReplicaId, ...]:
    """The candidates to recruit for `wanted` followers in all: those with the highest rendezvous hashes, on nodes
    without a replica."""
    lack = wanted - len(configuration.followers)
    if lack <= 0:
        return ()
    nodes = {configuration.leader[0], *(follower[0] for follower in configuration.followers)}

    def weight(candidate: ReplicaId) -> bytes:
        return hashlib.blake2b(f"{partition}\0{candidate[0]}".encode(), digest_size=8).digest()

    return tuple(sorted((c for c in candidates if c[0] not in nodes), key=weight, reverse=True)[:lack])


class Recruitment:
    """The recruits of one leader. Their progress is among that of its peers."""

    __slots__ = ("_lease", "_peers", "_recruits")

    def __init__(self, peers: dict[ReplicaId, PeerProgress], lease: Lease) -> None:
        self._peers = peers
        self._lease = lease
        self._recruits: dict[ReplicaId, PeerProgress] = {}

    def recruits(self, replica: ReplicaId) -> bool:
        return replica in self._recruits

    def begin(self, replica: ReplicaId, progress: PeerProgress) -> None:
        self._peers[replica] = self._recruits[replica] = progress

    def joined(self, replica: ReplicaId) -> None:
        """Note that the replica is a follower now, if it was a recruit."""
        self._recruits.pop(replica, None)

    def give_up(self, followers: tuple[ReplicaId, ...], now: float) -> None:
        """Forget silent recruits, except those that may be followers already."""
        for replica, progress in [*self._recruits.items()]:
            if replica not in followers and self._lease.silent(replica, progress.since, now):
                self.drop(replica)

    def drop(self, peer: ReplicaId) -> None:
        """Forget a peer, whether it is a recruit or not."""
        self._recruits.pop(peer, None)
        self._peers.pop(peer, None)
        self._lease.forget(peer)

    def ready(self, state: State, now: float) -> ReplicaId | None:
        """A recruit that answers and is in sync: it has all committed entries and nearly all others. None if there is
        none."""
        for replica, progress in self._recruits.items():
            if self.in_sync(progress, state) and self._lease.holds((replica,), now):
                return replica
        return None

    def in_sync(self, progress: PeerProgress, state: State) -> bool:
        return progress.match >= state.committed and state.log.last - progress.match <= state.settings.max_batch

    def spare(self, state: State) -> int:
        """The number of entries that are kept, rather than replaced by a snapshot, because recruits are about to
        receive them; at most three times `snapshot_every`. Without this, a slow recruit would be sent one snapshot
        after another."""
        if not self._recruits:
            return 0
        slowest = min(progress.match for progress in self._recruits.values())
        return min(state.committed - slowest, 3 * state.settings.snapshot_every)
