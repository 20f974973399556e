"""One replica on this node: feeds it events and carries out its effects in order.

Operations of a durable log are saved in batches: all that arrive during one save are the next batch (group commit).
While the disk of the leader is full, requests that change something are refused. A compare-and-set at the coordinator
is attempted once. If it fails, the replica requests it again later. A read precedes each compare-and-set, since a host
that can send but not receive would otherwise make itself the only replica.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from typing import TYPE_CHECKING

import msgspec

from dataplane.clock import monotonic
from dataplane.coordinator.base import DELETED, Unavailable
from dataplane.errors import Backpressure, Corrupt, DataplaneError, DirectoryUnusable, NotReady, OutcomeUnknown
from dataplane.node.partitions.record import called
from dataplane.node.partitions.waiters import NOTHING, Done, Waiters, WaitingRequest
from dataplane.replication.configuration import Configuration, ReplicaId, decode, encode
from dataplane.replication.effects import Effect, Refuse, Send, SendAnswer, StoreOperation, Swap
from dataplane.replication.log import Operation, StoredLog
from dataplane.replication.machine import StateMachine
from dataplane.replication.messages import Message
from dataplane.replication.replica import Replica
from dataplane.store.durable.log import JournaledLog
from dataplane.wire import partition_messages as m

if TYPE_CHECKING:
    from dataplane.node.partitions.replicas import Replicas

log = logging.getLogger(__name__)

_TICK_S = 0.01  # the shortest interval between ticks of a state machine
EARLY_S = 0.1
"""Seconds by which a replica may be ticked before its deadline, together with others that are due."""


class HostedReplica:
    """A replica of this node; see the module. Its owner calls `tick` at `deadline`."""

    def __init__(
        self,
        owner: Replicas,
        partition: str,
        disk: JournaledLog | None,
        machine: StateMachine,
        me: ReplicaId,
        stored: StoredLog,
        *,
        fresh: bool,
    ) -> None:
        """`stored`: the log on `disk`; with None, the log ends with the process. `fresh`: whether the log was just
        created. Raises Corrupt for a log that cannot be read."""
        self.me = me
        self.partition = partition
        self.machine = machine
        self.waiters = Waiters(self._serves)
        machine.waits = self.waiters.requests
        self.recruited: dict[str, float] = {}  # node -> time when it was asked
        self.refused: dict[str, float] = {}  # node -> time when it refused
        self.heard_s = monotonic()
        self.watching: asyncio.Task[None] | None = None  # the task of the owner that watches the configuration
        self._owner = owner
        self._disk = disk
        self._numbers = itertools.count(1)
        self._requests: dict[int, Done] = {}
        self._asked: Swap | None = None
        self._writes: list[Operation] = []
        self._ticket = 0  # the ticket of the last of `_writes`
        self._writing = False
        self._serving = False
        self._ticking = False
        self._machine_due_s = math.inf
        self.closed = False
        settings = msgspec.structs.replace(owner.settings, durable=self.durable)
        self.replica = Replica(self.me, settings, machine, stored, monotonic(), fresh=fresh, alone=owner.alone)

    @property
    def deadline(self) -> float:
        """The monotonic time at which `tick` is due; infinite until a configuration is known."""
        if not self.replica.configuration.epoch:
            return math.inf
        return min(self.replica.deadline, self._machine_due_s)

    @property
    def configuration(self) -> Configuration:
        return self.replica.configuration

    @property
    def durable(self) -> bool:
        """Whether the log of the replica outlives the process."""
        return self._disk is not None

    # Events

    def configured(self, configuration: Configuration) -> None:
        self._perform(self.replica.configured(configuration, monotonic()))

    def receive(self, sender: ReplicaId, message: Message) -> None:
        """Handle a message of another replica. If the message contradicts the log of this replica, this replica
        ends."""
        now = self.heard_s = monotonic()
        try:
            effects = self.replica.receive(sender, message, now)
        except Corrupt as error:
            log.error(
                "replica %s of %s stops: a message of node %s contradicts its log: %s",
                self.me,
                self.partition,
                sender,
                error,
            )
            self._owner.end(self)
            return
        self._perform(effects)

    def request(self, request: bytes, done: Done) -> None:
        """Decide a request. `done` is called once with its result or error, now or later."""
        refusal = self._disk.refusal if self._disk is not None and self.replica.leads else None
        if refusal is not None and not self.machine.reads(request):
            done(Backpressure(str(refusal), **refusal.fields))
            return
        number = next(self._numbers)
        self._requests[number] = done
        self._perform(self.replica.request(number, request, monotonic()))

    def wait(self, waiting: WaitingRequest, *, first: bool = False) -> None:
        """Decide a request. A request that cannot be served waits in its queue until its deadline, and then gets
        NOTHING. If it is decided after its deadline, it gets the Backpressure that refuses it, else NOTHING."""

        def decided(outcome: bytes | DataplaneError) -> None:
            now, refused = monotonic(), outcome
            if isinstance(outcome, NotReady | Backpressure):
                outcome = NOTHING
            if outcome == NOTHING and not waiting.withdrawn and waiting.until_s > now:
                waiting.in_vain = self.machine.version
                try:
                    self.waiters.add(waiting, now, first=first)
                except Backpressure as error:
                    waiting.done(error)
                return
            waiting.done(refused if isinstance(refused, Backpressure) else outcome)

        self.request(waiting.request, decided)

    def _serves(self, waiting: WaitingRequest) -> bool:
        serves = self.machine.serves(waiting.request, waiting.in_vain)
        if not serves:
            waiting.in_vain = self.machine.version
        return serves

    def tick(self, now: float) -> None:
        if now >= self.replica.deadline - EARLY_S:
            self._perform(self.replica.tick(now))
            self.serve()
        self._tick_machine()

    def _tick_machine(self) -> None:
        """Tick the state machine if it is due and this replica serves."""
        self._ticking = False
        now = monotonic()
        if self.closed or not self.replica.serves(now):
            self._machine_due_s = math.inf
            return
        if self.machine.deadline(now) <= now:
            self.request(self.machine.tick(), lambda outcome: None)
            now = monotonic()
        self._machine_due_s = max(self.machine.deadline(now), now + _TICK_S)
        self._owner.due(self.deadline)

    def gone(self, node: str, before_s: float) -> None:
        """Withdraw the waiting requests of a node, and tell the replica that the process that the node had at
        `before_s` has ended."""
        self.waiters.gone(node)
        self._perform(self.replica.gone(node, before_s, monotonic()))

    def recruit(self, replica: ReplicaId) -> None:
        self._perform(self.replica.recruit(replica, monotonic()))

    # Effects

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._owner.send(to[0], m.ToReplica(self.partition, self.me[1], to[1], message))
                case SendAnswer(request, result):
                    self._requests.pop(request)(result)
                case Refuse(request, error):
                    self._requests.pop(request)(error)
                case Swap():
                    if effect != self._asked:
                        self._asked = effect
                        self._owner.background.spawn(self._swap(effect))
                case StoreOperation(ticket, operation):
                    self._writes.append(operation)
                    self._ticket = ticket
        if self._writes and not self._writing:
            self._write()
        if effects or not self.replica.leads:
            self._serve_soon()
        if effects and not self._ticking and self.replica.leads:
            now = monotonic()
            due_s = self.machine.deadline(now)
            if due_s <= now:
                self._ticking = True
                asyncio.get_running_loop().call_soon(self._tick_machine)
            elif due_s < self._machine_due_s:
                self._machine_due_s = due_s
        self._owner.due(self.deadline)
        if effects:
            self._owner.performed(self)

    async def _swap(self, swap: Swap) -> None:
        try:
            key = self._owner.key(self.partition)
            before = None if swap.expected is None else encode(swap.expected)
            value = await self._owner.coordinator.read(key)  # a host that can send but not receive must change nothing
            if value == before:
                value = await self._owner.coordinator.swap(key, before, encode(swap.wanted))
        except (Unavailable, OutcomeUnknown) as error:
            log.debug("the coordinator did not answer for %s: %s", self.partition, error)
            return
        finally:
            if self._asked is swap:
                self._asked = None
        self.changed(value)

    def changed(self, value: bytes | None) -> None:
        """Apply the coordinator's value for the partition."""
        if self.closed:
            return
        if value == DELETED:
            self._owner.end(self, forget=True)
            return
        if value is None:
            log.warning("the coordinator has lost the configuration of %s", self.partition)
            self._perform(self.replica.forgotten(monotonic()))
            return
        try:
            configuration = decode(value)
        except Corrupt as error:
            log.error("%s: %s", self._owner.key(self.partition), error)
            return
        self.configured(configuration)

    # The disk

    def _write(self) -> None:
        assert self._disk is not None, "a log in memory has no operations"
        writes, self._writes, self._writing = self._writes, [], True
        ticket = self._ticket
        self._disk.save(writes).add_done_callback(lambda saved: self._saved(saved, ticket))

    def _saved(self, saved: asyncio.Future[None], ticket: int) -> None:
        error = None if saved.cancelled() else saved.exception()
        if self.closed or saved.cancelled():
            return
        if error is None:
            self._stored(ticket)
        else:
            log.error("replica %s of %s stops: writing its log failed: %s", self.me, self.partition, error)
            if isinstance(error, DataplaneError) and not self.configuration.followers:  # no other replica takes over
                fields = {"path": "", "reason": "failed"} | error.fields
                self._owner.stopped[self.partition] = DirectoryUnusable(
                    f"{called(self.partition)} has stopped: {error}", path=fields["path"], reason=fields["reason"]
                )
            self._owner.end(self)

    def _stored(self, ticket: int) -> None:
        self._writing = False
        self._perform(self.replica.stored(ticket, monotonic()))

    # Waiting requests

    def _serve_soon(self) -> None:
        if self.waiters and not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self.serve)

    def serve(self) -> None:
        """Decide the waiting requests that may be served now."""
        self._serving = False
        if not self.waiters or self.closed:
            return
        if not self.replica.leads:
            for waiting in self.waiters.drain():
                self.request(waiting.request, waiting.done)  # its error names the leader
            return
        version, self._serving = self.machine.version, True  # decisions that serve nothing do not repeat this
        try:
            for waiting in self.waiters.served():
                self.wait(waiting, first=True)
        finally:
            self._serving = False
        if self.machine.version != version:
            self._serve_soon()

    def close(self) -> None:
        """Stop. All requests without an answer get OutcomeUnknown."""
        self.closed = True
        gone = OutcomeUnknown("the replica has ended; ask the leader under the same sequence")
        for waiting in self.waiters.drain():
            waiting.done(gone)
        requests, self._requests = self._requests, {}
        for done in requests.values():
            done(gone)

    def remove(self) -> asyncio.Future[None] | None:
        """Delete the log, after `close`. Returns a future that is done once the log is deleted; None if the log is not
        durable."""
        return None if self._disk is None else self._disk.remove()
