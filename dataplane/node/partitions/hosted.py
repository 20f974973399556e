"""One replica on this node: its events in, its effects carried out in order.

Operations of a durable log go to a thread, one write and one sync at a time: what comes meanwhile is the next (group
commit). A compare-and-set is tried once; the replica asks again when that is due.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from dataplane.clock import monotonic
from dataplane.coordinator.base import DELETED, Unavailable
from dataplane.errors import Backpressure, Corrupt, DataplaneError, OutcomeUnknown
from dataplane.node.partitions.waiters import NOTHING, Done, Waiters, Waiting
from dataplane.replication.configuration import Configuration, ReplicaId, decode, encode
from dataplane.replication.effects import Answer, Effect, Fault, Refuse, Send, Store, Swap
from dataplane.replication.machine import StateMachine
from dataplane.replication.messages import Message
from dataplane.replication.replica import Replica
from dataplane.replication.storage import Operation, Storage
from dataplane.wire import partition_messages as m

if TYPE_CHECKING:
    from dataplane.node.partitions.replicas import Replicas

log = logging.getLogger(__name__)

_AGAIN_S = 0.5


class Hosted:
    """See the module. Its owner ticks it at `deadline`."""

    def __init__(
        self, owner: Replicas, partition: str, storage: Storage, machine: StateMachine, new: ReplicaId
    ) -> None:
        """The log is of the replica `new` if it was made for it just now. Raises Corrupt for one that can't be read."""
        self.me, stored = storage.load()
        self.partition = partition
        self.machine = machine
        self.waiters = Waiters(machine)
        self.distrusted: set[ReplicaId] = set()
        self.recruited: dict[str, float] = {}  # node -> when it was asked
        self.refused: dict[str, float] = {}  # node -> when it could not
        self.heard_s = monotonic()
        self._owner = owner
        self._storage = storage
        self._durable = owner.settings.durable
        self._numbers = itertools.count(1)
        self._requests: dict[int, Done] = {}
        self._asked: Swap | None = None
        self._writes: list[Operation] = []
        self._ticket = 0  # of the last of them
        self._writing = False
        self._serving = False
        self.closed = False
        self.replica = Replica(self.me, owner.settings, machine, stored, monotonic(), fresh=self.me == new)

    @property
    def deadline(self) -> float:
        """When `tick` is due; never before it has read the configuration."""
        return self.replica.deadline if self.replica.configuration.epoch else math.inf

    @property
    def configuration(self) -> Configuration:
        return self.replica.configuration

    # Events

    def configured(self, configuration: Configuration) -> None:
        self._perform(self.replica.configured(configuration, monotonic()))

    def receive(self, sender: ReplicaId, message: Message) -> None:
        """A message of another replica. A log that is not of this partition ends the replica."""
        self.heard_s = now = monotonic()
        try:
            effects = self.replica.receive(sender, message, now)
        except Corrupt as error:
            log.error(
                "replica %s of %s ends: what %s sent does not go with it: %s", self.me, self.partition, sender, error
            )
            self._owner.end(self)
            return
        self._perform(effects)

    def request(self, request: bytes, done: Done) -> None:
        """Decide a request; `done` is called with its result or error, now or later, once."""
        number = next(self._numbers)
        self._requests[number] = done
        self._perform(self.replica.request(number, request, monotonic()))

    def wait(self, waiting: Waiting, *, first: bool = False) -> None:
        """Decide a request; where there is nothing for it, let it wait in its queue."""

        def decided(outcome: bytes | DataplaneError) -> None:
            now = monotonic()
            if outcome == NOTHING and not waiting.withdrawn and waiting.until_s > now:
                try:
                    self.waiters.add(waiting, now, first=first)
                except Backpressure as error:
                    waiting.done(error)
                return
            if outcome == NOTHING:
                self.waiters.remember(waiting.queue, waiting.node, waiting.request)
            waiting.done(outcome)

        self.request(waiting.request, decided)

    def tick(self, now: float) -> None:
        self._perform(self.replica.tick(now))
        self.serve()

    def gone(self, node: str, before_s: float) -> None:
        """The process that the node was by then has ended."""
        self.waiters.gone(node)
        self._perform(self.replica.gone(node, before_s, monotonic()))

    def recruit(self, replica: ReplicaId) -> None:
        self._perform(self.replica.recruit(replica, monotonic()))

    def hand_off(self, to: ReplicaId) -> None:
        self._perform(self.replica.hand_off(to, monotonic()))

    # Effects

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self._owner.send(to[0], m.Replicate(self.partition, self.me[1], to[1], message))
                case Answer(request, result):
                    self._requests.pop(request)(result)
                case Refuse(request, error):
                    self._requests.pop(request)(error)
                case Swap():
                    if effect != self._asked:
                        self._asked = effect
                        self._owner.background.spawn(self._swap(effect.expected, effect.wanted, effect))
                case Store(ticket, operation):
                    self._writes.append(operation)
                    self._ticket = ticket
                case Fault(peer, error):
                    self.distrusted.add(peer)
                    log.error("replica %s of %s is dropped: %s", peer, self.partition, error)
        if self._writes and not self._writing:
            self._write()
        if self.waiters and effects and not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self.serve)
        self._owner.due(self.deadline)

    async def _swap(self, expected: Configuration | None, wanted: Configuration, swap: Swap | None = None) -> None:
        try:
            key = self._owner.key(self.partition)
            before = None if expected is None else encode(expected)
            value = await self._owner.coordinator.swap(key, before, encode(wanted))
        except (Unavailable, OutcomeUnknown) as error:
            log.debug("the coordinator did not answer for %s: %s", self.partition, error)
            return
        finally:
            if self._asked is swap:
                self._asked = None
        self.changed(value)

    def changed(self, value: bytes | None) -> None:
        """The coordinator has this value for the partition."""
        if self.closed:
            return
        if value == DELETED:
            self._owner.end(self)
            return
        if value is None:
            self._restore()
            return
        try:
            configuration = decode(value)
        except msgspec.MsgspecError:
            log.error("the coordinator's value for %s is no configuration; it is left as it is", self.partition)
            return
        if configuration.epoch < self.configuration.epoch and self.replica.leads:
            # Either it is newer by now, and this does nothing; or one who was deposed has told a wiped coordinator.
            self._owner.background.spawn(self._swap(configuration, self.configuration))
        self.configured(configuration)
        self._owner.configured(self)

    def _restore(self) -> None:
        """The coordinator has forgotten the partition: who leads it says what it knows."""
        configuration = self.configuration
        if self.replica.leads:
            log.warning("the coordinator has forgotten %s; this node leads it, and says so", self.partition)
            self._owner.background.spawn(self._swap(None, configuration))

    # The disk

    def _write(self) -> None:
        writes, self._writes, self._writing = self._writes, [], True
        ticket = self._ticket
        if not self._durable:
            self._storage.write(writes)
            self._stored(ticket)
            return
        loop = asyncio.get_running_loop()
        self._owner.pool.submit(self._write_through, writes).add_done_callback(
            lambda future: _call_soon(loop, self._written, future.exception(), writes, ticket)
        )

    def _write_through(self, writes: list[Operation]) -> None:
        self._storage.write(writes)
        self._storage.sync()

    def _written(self, error: BaseException | None, writes: list[Operation], ticket: int) -> None:
        if self.closed:
            return
        if isinstance(error, Backpressure | OSError):  # a full disk may have room again; nothing is acknowledged before
            log.error("the log of %s can not be written: %s", self.partition, error)
            self._writes[:0] = writes
            asyncio.get_running_loop().call_later(_AGAIN_S, self._write)
        elif error is not None:
            log.error("replica %s of %s ends: its log can not be written: %s", self.me, self.partition, error)
            self._owner.end(self)
        else:
            self._stored(ticket)

    def _stored(self, ticket: int) -> None:
        self._writing = False
        self._perform(self.replica.stored(ticket, monotonic()))

    # Who waits

    def serve(self) -> None:
        """Decide requests that wait for something that there is now."""
        self._serving = False
        if not self.waiters or self.closed:
            return
        if not self.replica.leads:
            for waiting in self.waiters.drain():
                self.request(waiting.request, waiting.done)  # it is told who leads
            return
        now = monotonic()
        for waiting in self.waiters.served(now):
            self.wait(waiting, first=True)
        for node, queue in self.waiters.told(now):
            self._owner.ready(node, self.partition, queue)

    def close(self) -> None:
        """Do nothing more; who waits is told so."""
        self.closed = True
        gone = OutcomeUnknown("the replica has ended; ask the leader under the same sequence")
        for waiting in self.waiters.drain():
            waiting.done(gone)
        requests, self._requests = self._requests, {}
        for done in requests.values():
            done(gone)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
