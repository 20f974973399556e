"""One replica of one partition, without I/O: each event is passed in with the time, and effects are returned.

Each method is an event. `now` is by a clock of this replica that never goes back. A replica learns configurations by
the event `configured`, after its own request (`Swap`) or from the driver, which watches the value, and from messages of
a newer epoch, in any order.

A replica that was started again does not lead before it has requested a new epoch, even if the coordinator names it
as leader: it has forgotten its proposals in that epoch, and acknowledgements may still be in flight. For that reason,
and because of promises that it may have made (`lease`), a replica with an old log starts in the same way as one with a
new log. It accepts no message before it has the coordinator's configuration, from a read that began after it started:
otherwise it could take the epoch of an old message for the current one. A fresh replica accepts messages at once: none
was sent to it before it started, and the leader of a new partition often reads the configuration before its followers.
"""

from __future__ import annotations

from dataplane.errors import Retryable
from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.effects import Effect, Refuse, StoreOperation
from dataplane.replication.follower import Follower
from dataplane.replication.leader import Leader
from dataplane.replication.log import StoredLog
from dataplane.replication.machine import StateMachine
from dataplane.replication.messages import AppendEntries, Install, Message, Outdated
from dataplane.replication.settings import ReplicationSettings
from dataplane.replication.state import State


class NotLeader(Retryable):
    """The error of a request to a replica that does not lead the partition, or leads it and may not answer now. Nothing
    was changed. The error is sent to the requester, never raised here.

    `leader`: the node that leads the partition in `epoch`, as known to this replica. It may be the node of this
    replica.
    """

    FIELDS = {"leader": "", "epoch": 0}


class Replica:
    """One replica. `stored`: the log on its disk, or `StoredLog()` for a new one. `fresh`: no process with this
    replica's id was ever started before, so the replica has made no promise and proposed nothing. `alone`: the
    partition never had another replica, so this one has made no promise."""

    __slots__ = ("_adopted_s", "_follower", "_forgotten", "_fresh", "_leader", "_state", "_ticked_s")

    def __init__(
        self,
        me: ReplicaId,
        settings: ReplicationSettings,
        machine: StateMachine,
        stored: StoredLog,
        now: float,
        *,
        fresh: bool = False,
        alone: bool = False,
    ) -> None:
        self._state = State(me, settings, machine, stored, now)
        self._fresh = fresh
        if fresh or alone:
            self._state.promise.end_all()
        self._follower = Follower(self._state)
        self._leader: Leader | None = None
        self._forgotten = False  # the coordinator has no configuration
        self._adopted_s = now  # the time at which the epoch was learned
        self._ticked_s = now

    # State

    @property
    def configuration(self) -> Configuration:
        """The newest configuration that this replica knows; epoch 0 means none."""
        return self._state.configuration

    @property
    def committed(self) -> int:
        """The index up to which this replica knows commands to be committed, and has applied them."""
        return self._state.committed

    @property
    def leads(self) -> bool:
        return self._leader is not None

    @property
    def orphaned(self) -> bool:
        """Whether the coordinator has lost the configuration and this replica cannot restore it, since it does not
        lead."""
        return self._forgotten and not self.leads

    def serves(self, now: float) -> bool:
        """Whether this replica would answer a request now."""
        return self._leader is not None and self._leader.serves(now)

    @property
    def deadline(self) -> float:
        """The time of the next `tick`, by this replica's clock."""
        if self._leader is not None:
            return self._ticked_s + self._state.settings.beat_s
        return self._follower.deadline(self._ticked_s)

    # Events. Each returns the effects to execute, in order.

    def configured(self, configuration: Configuration, now: float) -> list[Effect]:
        """The coordinator has, or had, this configuration. The first one must be read after the replica was created."""
        self._forgotten = False
        self._adopt(configuration, now)
        return self._finish(now)

    def forgotten(self, now: float) -> list[Effect]:
        """The coordinator has lost the configuration. A leader writes its own again only if no other replica can have
        a newer one, so an epoch never has two leaders, and two leaders never answer."""
        self._forgotten = True
        return self._finish(now)

    def request(self, number: int, request: bytes, now: float) -> list[Effect]:
        """A client has sent a request. The effect that answers or refuses it has the same `number`."""
        if self._leader is not None and self._leader.serves(now):
            self._leader.request(number, request, now)
        else:
            leader, epoch = self._state.configuration.leader[0], self._state.configuration.epoch
            error = NotLeader(
                f"node {self._state.me[0]} cannot answer for the partition now", leader=leader, epoch=epoch
            )
            self._state.effects.append(Refuse(number, error))
        return self._finish(now)

    def receive(self, sender: ReplicaId, message: Message, now: float) -> list[Effect]:
        """A message of another replica has arrived. Raises Corrupt if it contradicts what this replica has committed,
        or has an invalid snapshot."""
        if not (self._state.configuration.epoch or self._fresh):
            return []
        if isinstance(message, AppendEntries | Install):
            if self._accept(sender, message.configuration, now):
                if isinstance(message, AppendEntries):
                    self._follower.append(message, now)
                else:
                    self._follower.install(message, now)
        elif isinstance(message, Outdated):
            self._adopt(message.configuration, now)
        elif self._leader is not None and message.epoch == self._state.configuration.epoch:
            self._leader.answered(sender, message, now)
        return self._finish(now)

    def stored(self, ticket: int, now: float) -> list[Effect]:
        """The operations of `StoreOperation` up to this ticket are durable."""
        self._state.log.stored(ticket)
        if self._leader is not None:
            self._leader.commit()
        else:
            self._follower.stored()
        return self._finish(now)

    def tick(self, now: float) -> list[Effect]:
        """`deadline` has come."""
        self._ticked_s = now
        self._state.suspend_guard.tick(now)
        if self._leader is not None:
            self._leader.tick(now)
        return self._finish(now)

    def gone(self, node: str, before_s: float, now: float) -> list[Effect]:
        """The process that `node` had at `before_s`, by this replica's clock, has certainly ended (`lease`). The
        promises to it end. A leader drops the node's replicas that have acknowledged no later message. The node may
        have started another process since."""
        state = self._state
        leader = state.configuration.leader
        if leader[0] == node and leader != state.me and self._adopted_s <= before_s:
            state.promise.end_of_leader(leader)
        state.promise.end_of_node(node, before_s)
        if self._leader is not None:
            self._leader.gone(node, before_s)
        return self._finish(now)

    def recruit(self, replica: ReplicaId, now: float) -> list[Effect]:
        """Begin to make another replica a follower, if this one `serves`. The other may have any log of this partition,
        or none."""
        if self._leader is not None and self._leader.serves(now):
            self._leader.recruit(replica, now)
        return self._finish(now)

    # Internals

    def _accept(self, sender: ReplicaId, configuration: Configuration, now: float) -> bool:
        """Adopt the configuration of a leader's message if it is newer. Returns whether the sender then leads this
        replica's epoch."""
        state = self._state
        if configuration.epoch < state.configuration.epoch:
            state.send(sender, Outdated(state.configuration))
            return False
        self._adopt(configuration, now)
        return self._leader is None and sender == state.configuration.leader

    def _adopt(self, configuration: Configuration, now: float) -> None:
        """Take the role that a newer configuration gives this replica."""
        state = self._state
        before = state.configuration
        if configuration.epoch <= before.epoch:
            return
        state.configuration = configuration
        state.reconfiguration.settled()
        state.promise.begin()
        self._forgotten = False
        self._adopted_s = now
        leader = self._leader
        if configuration.leader == state.me:
            if leader is not None:
                leader.reconfigured(now)
            elif before.epoch or self._fresh:
                self._leader = Leader(state, now)
            return
        self._follower.begin()
        if leader is not None:
            leader.step_down()
            self._leader = None
        if before.leader != configuration.leader:
            state.promise.hear(configuration.leader, now)

    def _finish(self, now: float) -> list[Effect]:
        """Request a change of the configuration if one is due, and return the effects: those for the disk first."""
        state = self._state
        leader = self._leader
        current: Configuration | None = state.configuration
        if self._forgotten:
            current, wanted = None, None if leader is None else leader.restored(now)
        else:
            wanted = self._follower.wanted(now) if leader is None else leader.wanted(now)
        if wanted is not None:
            state.reconfiguration.ask(current, wanted, now, state.effects)
        if leader is None:
            state.snapshot_if_due(0)
        effects, state.effects = state.effects, []
        changes = state.log.changes
        if changes:
            state.log.changes = []
            effects[:0] = [StoreOperation(ticket, operation) for ticket, operation in changes]
        return effects
