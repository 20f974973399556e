"""The state of a replica in either role: its log, its committed index, and the applied state.

Committed and applied are one index: commands that are known to be committed are applied at once.
"""

from __future__ import annotations

import gc
import math

from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.effects import Effect, Send, SendAnswer, Swap
from dataplane.replication.lease import Promise
from dataplane.replication.log import Log, StoredLog
from dataplane.replication.machine import StateMachine
from dataplane.replication.messages import Message, StateSnapshot
from dataplane.replication.settings import ReplicationSettings

_ENTRY = 128
"""Approximate bytes of an entry of the log besides its command."""


class State:
    """The state of one replica that both roles use."""

    __slots__ = (
        "committed",
        "configuration",
        "effects",
        "log",
        "machine",
        "me",
        "promise",
        "reconfiguration",
        "settings",
        "since_snapshot",
        "suspend_guard",
    )

    def __init__(
        self, me: ReplicaId, settings: ReplicationSettings, machine: StateMachine, stored: StoredLog, now: float
    ) -> None:
        self.me = me
        self.settings = settings
        self.machine = machine
        self.log = Log(stored, durable=settings.durable)
        self.committed = self.log.base
        self.since_snapshot = 0
        """Approximate bytes of the log from the snapshot to `committed`."""
        self.promise = Promise(settings.grace_s, now)
        self.suspend_guard = SuspendGuard(settings.beat_s, now)
        self.reconfiguration = Reconfiguration(settings.retry_s)
        self.configuration = Configuration(0, ("", 0))
        """The newest configuration that was seen. Epoch 0, without a leader, means that none was seen yet."""
        self.effects: list[Effect] = []
        _restore(machine, stored.snapshot.state)

    def send(self, to: ReplicaId, message: Message) -> None:
        self.effects.append(Send(to, message))

    def commit(self, to: int, requests: dict[int, int]) -> None:
        """Apply commands up to an index that every in-sync replica has, and answer their requests.

        `requests`: the number of the request by the index of its last command. Answered requests are removed.
        """
        log, machine = self.log, self.machine
        while self.committed < to:
            index = self.committed + 1
            command = log.command(index)
            result = machine.apply(command) if command else b""
            self.committed = index
            self.since_snapshot += len(command) + _ENTRY
            request = requests.pop(index, None)
            if request is not None:
                self.effects.append(SendAnswer(request, result))

    def install(self, snapshot: StateSnapshot) -> None:
        """Replace the state and the log by the leader's snapshot."""
        _restore(self.machine, snapshot.state)
        self.log.install(snapshot)
        self.committed = snapshot.index
        self.since_snapshot = 0

    def snapshot_if_due(self, spare: int) -> None:
        """Replace committed commands by a snapshot once there are `snapshot_every` plus `spare` of them, with as many
        bytes as the last snapshot, so that a large state is encoded less often."""
        log = self.log
        few = self.committed - log.base < self.settings.snapshot_every + spare
        if few or self.since_snapshot < len(log.snapshot.state):
            return
        epoch = log.epoch_at(self.committed)
        log.compact(StateSnapshot(self.committed, epoch, self.machine.snapshot()))
        self.since_snapshot = 0


def _restore(machine: StateMachine, state: bytes) -> None:
    """Restore the machine without garbage collections, each of which would traverse all of the new objects. With 20,000
    rows they take 40 % of the time, during which the node answers no request."""
    collected = gc.isenabled()
    gc.disable()
    try:
        machine.restore(state)
    finally:
        if collected:
            gc.enable()


class SuspendGuard:
    """Detects that a replica did not run for a while, so that it does not take its own pause for silence of its peers.

    A replica of the configuration is ticked at every beat. If a tick is overdue, the process or the whole host was
    stopped, or got too little processor time. Messages of peers may still wait to be received, and the replica has sent
    none that they could acknowledge. So it treats its leader or followers as silent again only after it has run for two
    beats. Waiting longer is always safe. All times are by the replica's clock.
    """

    __slots__ = ("_most_s", "_since_s", "_ticked_s")

    def __init__(self, beat_s: float, now: float) -> None:
        self._most_s = 2 * beat_s
        self._ticked_s = now
        self._since_s = -math.inf

    def tick(self, now: float) -> None:
        """Note that the replica runs."""
        if now - self._ticked_s > self._most_s:
            self._since_s = now
        self._ticked_s = now

    def judges(self, now: float) -> bool:
        """Whether a peer may be treated as silent: this replica has run for long enough without a pause."""
        return now - self._ticked_s <= self._most_s and now - self._since_s >= self._most_s


class Reconfiguration:
    """Configuration changes that were requested and may have taken effect already (PacificA, sections 2.2 and 2.4).

    The answer to a compare-and-set can be lost, and the compare-and-set itself can arrive much later, even after its
    sender has restarted. So a requested change *may have taken effect* at any time from the request until a newer
    configuration is seen. All changes of one configuration compare with it, so at most one of them takes effect, and
    the next epoch rules out the others. No change is ever undone, and repeating a request is always safe.
    """

    __slots__ = ("_asked_s", "_followers", "_retry_s", "asked")

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._asked_s = -math.inf
        self._followers: tuple[ReplicaId, ...] | None = None
        self.asked: list[Configuration] = []
        """The requested configurations that may have taken effect, in the order of the requests."""

    def ask(self, current: Configuration | None, wanted: Configuration, now: float, effects: list[Effect]) -> None:
        """Add the request of a change to `effects`, unless the same was requested less than `retry_s` ago. `current`
        None: the coordinator has no configuration."""
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
