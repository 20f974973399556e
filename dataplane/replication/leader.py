"""The replica that leads: it orders commands, sends them, and answers when every in-sync follower has them.

Invariants (PacificA, sections 2.1 and 2.4):

- A command is committed once this replica and all others that may be in-sync have it. The next leader is one of these
  replicas, so it has the command. `state.Reconfiguration` explains why a replica only *may* be in-sync.
- A new leader first proposes all entries of its log again, followed by an entry of its own epoch. Once that entry is
  committed, the leader has every command that any leader answered (reconciliation), and entries that only other
  replicas have are discarded.
- A leader answers only while it holds the lease of each in-sync follower, and after its own promise to earlier leaders
  has ended (`lease`). Commits need neither lease nor promise: a committed command stays committed under any leader.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from dataplane.errors import DataplaneError, LimitExceeded, OutcomeUnknown
from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.effects import Refuse, SendAnswer
from dataplane.replication.lease import Lease
from dataplane.replication.messages import EntriesAppended, Installing, LogEntry, Missing, Outdated
from dataplane.replication.progress import PeerProgress
from dataplane.replication.state import State


class Leader:
    """The role of a leader, over a replica's state, from the epoch `term` on until another replica leads."""

    __slots__ = ("_lease", "_out", "_peers", "_recruitment", "_requests", "_start", "_state", "term")

    def __init__(self, state: State, now: float) -> None:
        self._state = state
        self.term = state.configuration.epoch
        self._lease = Lease(state.settings.lease_s)
        self._peers: dict[ReplicaId, PeerProgress] = {}
        self._requests: dict[int, int] = {}  # index -> the request to answer when it is committed
        self._recruitment = Recruitment(self._peers, self._lease)
        self._out: dict[ReplicaId, float] = {}  # peers whose process has ended -> time by which it had
        state.machine.forget()
        for follower in state.configuration.followers:
            self._peers[follower] = PeerProgress(state, follower, now)
        state.log.append((LogEntry(self.term, b""),))
        self._start = state.log.last
        self._send(now)
        self.commit()

    # Requests

    def serves(self, now: float) -> bool:
        """Whether this replica may answer requests: it has every command that was answered, and no other replica can
        answer now."""
        state = self._state
        return state.committed >= self._start and state.promise.over(now) and self._lease.holds(self._followers(), now)

    def request(self, number: int, request: bytes, now: float) -> None:
        """Answer a request, now or when its commands are committed, or refuse it. Call only while this replica
        `serves`."""
        state = self._state
        try:
            decision = state.machine.decide(request, self.term, now)
        except DataplaneError as error:
            state.effects.append(Refuse(number, error))
            return
        if not decision.commands:
            state.effects.append(SendAnswer(number, decision.result))
            return
        largest = max(map(len, decision.commands))
        if largest > state.settings.max_command:
            state.machine.withdraw(request)
            too_large = LimitExceeded(
                f"a command of {largest} bytes; one may have {state.settings.max_command}: ask for fewer rows at once",
                what="command",
                asked=largest,
                limit=state.settings.max_command,
            )
            state.effects.append(Refuse(number, too_large))
            return
        epoch = state.configuration.epoch
        state.log.append(tuple(LogEntry(epoch, command) for command in decision.commands))
        self._requests[state.log.last] = number
        self._send(now)
        self.commit()

    # Peers

    def answered(self, sender: ReplicaId, message: EntriesAppended | Missing | Installing, now: float) -> None:
        """A peer has answered a message of this leader's epoch: note what it has, and send what it lacks."""
        peer = self._heard(sender, message.sent_s)
        if peer is None:
            return
        if isinstance(message, EntriesAppended):
            peer.appended(message)
            self.commit()
        elif isinstance(message, Missing):
            peer.missing(message)
        else:
            peer.installing(message)
        peer.flow(now)

    def gone(self, node: str, before_s: float) -> None:
        """Drop the replicas of a node whose process had ended by `before_s`, except those that acknowledged a later
        message."""
        for replica in [*self._peers]:
            if replica[0] == node and not self._lease.heard_since(replica, before_s):
                self._drop(replica, before_s)

    def commit(self) -> None:
        """Commit the entries that this replica has on disk and all present and possible followers have."""
        state, peers = self._state, self._peers
        to = state.log.persisted
        for follower in self._followers():
            to = min(to, peers[follower].match)
        if to > state.committed:
            state.commit(to, self._requests)
            state.snapshot_if_due(self._recruitment.spare(state))

    # Time, and the configuration

    def tick(self, now: float) -> None:
        """Send the heartbeats and repeat the batches that are due, and give up silent recruits."""
        self._recruitment.give_up(self._followers(), now)
        for peer in self._peers.values():
            peer.beat(now)

    def wanted(self, now: float) -> Configuration | None:
        """The configuration to request: without silent followers, or with a recruit that has caught up. None if no
        change is due. A requested recruit stays requested until a newer configuration is seen."""
        state = self._state
        configuration, reconfiguration = state.configuration, state.reconfiguration
        dropped = self._dropped(configuration.followers, now)
        if dropped:
            return configuration.without(dropped)
        if reconfiguration.followers(configuration) != configuration.followers:
            return next(w for w in reconfiguration.asked if len(w.followers) > len(configuration.followers))
        if not self.serves(now):
            return None
        recruit = self._recruitment.ready(state, now)
        return None if recruit is None else configuration.joined_by(recruit)

    def restored(self, now: float) -> Configuration | None:
        """The configuration to write to a coordinator that has lost it, or None if another replica may have taken over.
        No other has taken over if this replica holds the lease of each present and possible follower. For a follower
        whose process has ended, it is enough to have held the lease at that time."""
        configuration, lease = self._state.configuration, self._lease
        if all(lease.holds((f,), min(now, self._out.get(f, now))) for f in self._followers()):
            return configuration.restored()
        return None

    def reconfigured(self, now: float) -> None:
        """Adopt a configuration in which this replica still leads: send it to all replicas, and commit what its
        followers have."""
        state = self._state
        followers = state.configuration.followers
        for replica in [r for r in self._peers if r not in followers and not self._recruitment.recruits(r)]:
            state.send(replica, Outdated(state.configuration))  # a replica that cannot send may still receive
            self._recruitment.drop(replica)
        self._out = {replica: until for replica, until in self._out.items() if replica in followers}
        for replica in followers:
            self._recruitment.joined(replica)
            if replica not in self._peers:
                self._peers[replica] = PeerProgress(state, replica, now)
        for peer in self._peers.values():
            peer.send_batch(now)
        self.commit()

    def recruit(self, replica: ReplicaId, now: float) -> None:
        """Send the log to a replica until it has caught up, then request it as a follower. Ignores a known peer."""
        state = self._state
        if replica == state.me or replica in self._peers:
            return
        self._recruitment.begin(replica, PeerProgress(state, replica, now))
        self._peers[replica].send_batch(now)

    def step_down(self) -> None:
        """Answer all open requests with OutcomeUnknown: another leader decides the outcome of uncommitted commands."""
        epoch = self._state.configuration.epoch
        for number in self._requests.values():
            error = OutcomeUnknown(
                "the partition has another leader since; ask it under the same sequence", epoch=epoch
            )
            self._state.effects.append(Refuse(number, error))
        self._requests.clear()
        self._state.machine.forget()

    # Internals

    def _followers(self) -> tuple[ReplicaId, ...]:
        state = self._state
        return state.reconfiguration.followers(state.configuration)

    def _dropped(self, followers: tuple[ReplicaId, ...], now: float) -> frozenset[ReplicaId]:
        """The followers to continue without."""
        lease, out, judges = self._lease, self._out, self._state.suspend_guard.judges(now)
        return frozenset(f for f in followers if f in out or (judges and lease.silent(f, self._peers[f].since, now)))

    def _heard(self, sender: ReplicaId, sent_s: float) -> PeerProgress | None:
        """Renew the lease of the peer that acknowledges a message, and return its progress. None if the sender is not a
        peer, or if this leader sent the message (at `sent_s`) before the peer's process ended."""
        peer = self._peers.get(sender)
        if peer is None or sent_s <= self._out.get(sender, -math.inf):
            return None
        self._out.pop(sender, None)  # the sender was started again
        self._lease.renew(sender, sent_s)
        return peer

    def _drop(self, peer: ReplicaId, until_s: float) -> None:
        """Continue without a peer; if it may be a follower, request a configuration without it."""
        if peer in self._followers():
            self._out[peer] = until_s
        else:
            self._recruitment.drop(peer)

    def _send(self, now: float) -> None:
        for peer in self._peers.values():
            peer.flow(now)


def choose(
    partition: str, configuration: Configuration, candidates: Iterable[ReplicaId], wanted: int
) -> tuple[ReplicaId, ...]:
    """The candidates to recruit so that the partition has `wanted` followers, if there are enough. They are on nodes
    without a replica, and have the highest rendezvous hashes of `partition` and node."""
    lack = wanted - len(configuration.followers)
    if lack <= 0:
        return ()
    nodes = {configuration.leader[0], *(follower[0] for follower in configuration.followers)}

    def weight(candidate: ReplicaId) -> bytes:
        return hashlib.blake2b(f"{partition}\0{candidate[0]}".encode(), digest_size=8).digest()

    return tuple(sorted((c for c in candidates if c[0] not in nodes), key=weight, reverse=True)[:lack])


class Recruitment:
    """The recruits of one leader: replicas that become followers. A recruit gets a snapshot and then the log after it,
    until it is in-sync (PacificA, section 2.4).

    A recruit receives the same messages as followers, but commits do not wait for it. Once it has every committed
    command and lacks at most one batch of the others, the leader requests a configuration in which it is a follower.
    From that request on, nothing is committed without it. A recruit that falls silent is given up. The driver chooses
    the replicas to recruit (`choose`). Their progress is kept with that of the leader's peers.
    """

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
        """A recruit whose lease holds and that is in sync, or None."""
        for replica, progress in self._recruits.items():
            if self.in_sync(progress, state) and self._lease.holds((replica,), now):
                return replica
        return None

    def in_sync(self, progress: PeerProgress, state: State) -> bool:
        """Whether a recruit has all committed entries, and lacks at most one batch of the others."""
        return progress.match >= state.committed and state.log.last - progress.match <= state.settings.max_batch

    def spare(self, state: State) -> int:
        """The number of committed entries to keep in the log because a recruit lacks them, at most three times
        `snapshot_every`. If a snapshot replaced them, a slow recruit would be sent one snapshot after another."""
        if not self._recruits:
            return 0
        slowest = min(progress.match for progress in self._recruits.values())
        return min(state.committed - slowest, 3 * state.settings.snapshot_every)
