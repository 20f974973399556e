"""The state of a replica in either role: its log, its committed index, and the applied state.

Committed and applied are one index: commands that are known to be committed are applied at once.
"""

from __future__ import annotations

from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.effects import Effect, Send, SendAnswer
from dataplane.replication.lease import Promise
from dataplane.replication.log import Log
from dataplane.replication.machine import StateMachine
from dataplane.replication.messages import Message, StateSnapshot
from dataplane.replication.reconfiguration import Reconfiguration
from dataplane.replication.settings import ReplicationSettings
from dataplane.replication.storage import StoredLog
from dataplane.replication.suspend_guard import SuspendGuard

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
        """Bytes of the log from the snapshot to `committed`."""
        self.promise = Promise(settings.grace_s, now)
        self.suspend_guard = SuspendGuard(settings.beat_s, now)
        self.reconfiguration = Reconfiguration(settings.retry_s)
        self.configuration = Configuration(0, ("", 0))
        """The newest configuration that was seen. Epoch 0, without a leader, means that none was seen yet."""
        self.effects: list[Effect] = []
        machine.restore(stored.snapshot.state)

    def send(self, to: ReplicaId, message: Message) -> None:
        self.effects.append(Send(to, message))

    def commit(self, to: int, requests: dict[int, int]) -> None:
        """Apply commands up to an index that every in-sync replica has, and answer their requests.

        `requests`: request number by index.
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
        self.machine.restore(snapshot.state)
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
