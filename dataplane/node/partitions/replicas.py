"""All replicas of this node: their messages, timers, disks, and requests to the coordinator.

One timer of the node ticks all replicas that are due or nearly due, so that their heartbeats are sent in one iteration
of the event loop and in one frame to each peer. Each replica has one task, which watches its configuration.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

from dataplane.background_tasks import BackgroundTasks
from dataplane.clock import monotonic
from dataplane.cluster.membership import Membership
from dataplane.coordinator.base import DELETED, Coordinator, Unavailable
from dataplane.errors import DataplaneError, DirectoryUnusable, LimitExceeded, Misuse, OutcomeUnknown, PeerUnavailable
from dataplane.node.partitions.channel import Late, PartitionChannel
from dataplane.node.partitions.hosted import EARLY_S, HostedReplica
from dataplane.node.partitions.record import called, is_durable, kind_of, name_of
from dataplane.node.partitions.recruiter import Recruiter
from dataplane.node.partitions.unconfirmed_grants import UnconfirmedGrants
from dataplane.node.partitions.waiters import NOTHING, Done, WaitingRequest
from dataplane.replication.configuration import Configuration, ReplicaId, decode, encode
from dataplane.replication.log import StoredLog
from dataplane.replication.machine import StateMachine
from dataplane.replication.replica import NotLeader
from dataplane.replication.settings import ReplicationSettings
from dataplane.store.durable.log import JournaledLog
from dataplane.wire import partition_messages as m

if TYPE_CHECKING:
    from dataplane.node.partitions.directory import Directory

log = logging.getLogger(__name__)

SETTINGS = ReplicationSettings(lease_s=3.0, grace_s=3.5, drift=0.01, beat_s=0.5, retry_s=1.0)
"""A silent leader is replaced within 5 s, the sum of `grace_s`, a heartbeat, and an answer of the coordinator. The
times suit a node that gets a ninth of a core: it still sends a heartbeat every second. A leader whose process is known
to have ended is replaced at once."""

_LEAST_S = 0.02  # the shortest interval between ticks
_AGAIN_S, _AGAIN_MOST_S = 0.5, 8.0  # the first and the longest pause between attempts to watch a configuration
_DELETED_S = 60.0
_COUNT_S = 2.0
_INCARNATIONS = 48  # bits of the random number that identifies an incarnation

Machines = Callable[[str], StateMachine]
Logs = Callable[[str, ReplicaId], Awaitable[tuple[JournaledLog | None, ReplicaId, StoredLog]]]


async def in_memory(partition: str, replica: ReplicaId) -> tuple[JournaledLog | None, ReplicaId, StoredLog]:
    """A log that lives as long as the process. Raises Misuse for a durable partition."""
    if is_durable(partition):
        raise Misuse(f"no log of {partition} can be kept here: start the node with --data-dir DIR")
    return None, replica, StoredLog()


class Replicas:
    """The replicas of one node; see the module. `machines(partition)` creates a state machine. `logs(partition,
    replica)` opens the log of a partition on this node, or creates one for `replica`. It returns the log on
    disk (None if it ends with the process), the replica that owns the log, and its contents. `alone`: no other node
    ever has a replica."""

    def __init__(
        self,
        members: Membership,
        channel: PartitionChannel,
        coordinator: Coordinator,
        machines: Machines,
        *,
        settings: ReplicationSettings = SETTINGS,
        logs: Logs = in_memory,
        alone: bool = False,
    ) -> None:
        self.me = members.me
        self.settings = settings
        self.alone = alone
        self.coordinator = coordinator
        self.background = BackgroundTasks()
        self.settle: Callable[[str, m.SettleOutbox], None] = lambda node, told: None
        """Called with the node of a leader, and the outbox entries that it sends to this node."""
        self.performed: Callable[[HostedReplica], None] = lambda hosted: None
        """Called when a replica here may have applied commands."""
        self.retained: Callable[[str], int] = lambda partition: 0
        """Returns the number of rows of a partition that producers here appended and whose columns this node
        retains."""
        self.stopped: dict[str, DirectoryUnusable] = {}
        """By partition whose only replica has ended with an error of the disk: the error of all later requests."""
        self.directories: dict[str, Directory] = {}
        """The records of partitions, by their kind (`record.kind_of`)."""
        self._members = members
        self._channel = channel
        self._machines = machines
        self._logs = logs
        self._hosted: dict[str, HostedReplica] = {}
        self._opening = asyncio.Lock()  # one durable log at a time is opened: no log is opened twice
        self._removals: dict[str, asyncio.Future[None]] = {}  # by partition: logs that are being deleted
        self._asked: dict[tuple[str, int], tuple[HostedReplica, WaitingRequest]] = {}  # waiting requests of other nodes
        self._unconfirmed = UnconfirmedGrants(channel, members)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        self.recruiting = Recruiter(self, members, channel)
        self._recruit_s = 0.0
        channel.heard = self._heard
        members.watch_ended(self.gone)

    def key(self, partition: str) -> str:
        """The key of the configuration of the partition at the coordinator."""
        return f"partitions/{partition}"

    def __iter__(self) -> Iterator[HostedReplica]:
        return iter([*self._hosted.values()])

    def find(self, partition: str) -> HostedReplica | None:
        return self._hosted.get(partition)

    # The replicas

    def incarnation(self, partition: str) -> int:
        """The incarnation of the replica here; 0 if there is none, or only an `orphaned` one that is not durable."""
        hosted = self._hosted.get(partition)
        return 0 if hosted is None or (hosted.replica.orphaned and not hosted.durable) else hosted.me[1]

    async def host(self, partition: str) -> HostedReplica:
        """Return the replica of a partition on this node. If there is none, open its durable log, or create it with an
        empty log. Raises Misuse for a durable partition if this node has no data directory; Corrupt; Backpressure or
        DirectoryUnusable if the disk is full or fails."""
        async with self._opening if is_durable(partition) else nullcontext():
            hosted = self._hosted.get(partition)
            if hosted is None:
                if (removal := self._removals.get(partition)) is not None:
                    await asyncio.wait([removal])
                new = (self.me, secrets.randbits(_INCARNATIONS))
                disk, me, stored = await self._logs(partition, new)
                machine = self._machines(partition)
                hosted = HostedReplica(self, partition, disk, machine, me, stored, fresh=me == new)
                self._hosted[partition] = hosted
                hosted.watching = self.background.spawn(self._watch(hosted))
                if (directory := self.directories.get(kind_of(partition))) is not None:
                    directory.records.watch(name_of(partition))
            return hosted

    async def create(self, partition: str, node: str, followers: int = 0, epoch: int = 1) -> Configuration:
        """Create a partition with `node` as its leader and `followers` other nodes, or fewer if some do not answer.
        `epoch`: the first epoch of the partition. Returns the configuration at the coordinator, which stays as it is if
        there is one. Raises Unavailable, OutcomeUnknown, PeerUnavailable, and the errors of `host` for the leader."""
        others = self.recruiting.others(partition, node, followers)
        there = await asyncio.gather(*(self._follower(partition, each) for each in others))
        first = Configuration(
            epoch, await self._new(partition, node), tuple(each for each in there if each is not None)
        )
        value = await self.coordinator.swap(self.key(partition), None, encode(first))
        return decode(value) if value is not None else first

    async def _new(self, partition: str, node: str) -> ReplicaId:
        if node == self.me:
            return (await self.host(partition)).me
        return node, await self.recruiting.ask(node, partition)

    async def _follower(self, partition: str, node: str) -> ReplicaId | None:
        try:
            return await self._new(partition, node)
        except DataplaneError as error:
            log.info("node %s cannot become a follower of %s: %s", node, partition, error)
            return None

    async def delete(self, partition: str) -> None:
        """Delete a partition at the coordinator. Its replicas end when they see that, on this node and others. Raises
        Unavailable, OutcomeUnknown."""
        key = self.key(partition)
        while (value := await self.coordinator.read(key)) not in (None, DELETED):
            await self.coordinator.swap(key, value, DELETED)
        self.background.spawn(forget(self.coordinator, key))

    def end(self, hosted: HostedReplica, *, forget: bool = False) -> None:
        """End a replica of this node. `forget`: delete its durable log. After that, or without a durable log, a later
        replica of the partition on this node is a new one."""
        if self._hosted.get(hosted.partition) is hosted:
            del self._hosted[hosted.partition]
        if not hosted.closed:
            hosted.close()
            if hosted.watching is not None:
                hosted.watching.cancel()
            if forget and (removal := hosted.remove()) is not None:
                self._removals[hosted.partition] = removal
                removal.add_done_callback(lambda done: self._removed(hosted.partition, done))

    def _removed(self, partition: str, removal: asyncio.Future[None]) -> None:
        del self._removals[partition]
        if not removal.cancelled() and removal.exception() is not None:
            log.info(
                "deleting the log of %s failed, and is tried again at the next start: %s",
                partition,
                removal.exception(),
            )

    async def _watch(self, hosted: HostedReplica) -> None:
        """Pass the values of the configuration at the coordinator to the replica, until it is closed."""
        missing, pause_s = True, _AGAIN_S  # the configuration may be written after the replica is created
        while not hosted.closed:
            try:
                async for value in self.coordinator.watch(self.key(hosted.partition)):
                    pause_s = _AGAIN_S
                    if value is not None or not missing:
                        hosted.changed(value)
                    missing = missing and value is None
                    if hosted.closed:
                        return
            except Unavailable as error:
                log.debug("the coordinator does not answer for %s: %s", hosted.partition, error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _AGAIN_MOST_S)

    # Requests

    def ask(
        self, partition: str, request: bytes, done: Done, waiting: WaitingRequest | None = None
    ) -> HostedReplica | None:
        """Pass a request to the replica of this node. `waiting`: the request, if it may wait in a queue. `done` is
        called once with the outcome. Returns the replica; None if there is none, after `done` with NotLeader or the
        error that stopped it."""
        hosted = self._hosted.get(partition)
        if hosted is None:
            done(self.stopped.get(partition) or NotLeader(f"node {self.me} has no replica of {partition}"))
        elif waiting is None:
            hosted.request(request, done)
        else:
            hosted.wait(waiting)
        return hosted

    async def request(
        self,
        partition: str,
        request: bytes,
        timeout_s: float,
        queue: str = "",
        wait_s: float = 0.0,
        late: Late | None = None,
    ) -> bytes:
        """Return the answer of this node's replica to a request. `queue`, `wait_s`: the queue in which the request may
        wait, and for how long. `late` is called with a result that arrives after a timeout or a cancellation. Raises
        the error of the replica, NotLeader or DirectoryUnusable if there is none here, and PeerUnavailable after
        `timeout_s`."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        returned = False

        def done(outcome: bytes | DataplaneError) -> None:
            if future.done():
                if late is not None and isinstance(outcome, bytes):
                    late(outcome)
            elif isinstance(outcome, bytes):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

        waiting = WaitingRequest(queue, request, done, self.me, monotonic() + wait_s) if queue else None
        hosted = self.ask(partition, request, done, waiting)
        try:
            async with asyncio.timeout(timeout_s):
                result = await future
            returned = True
            return result
        except TimeoutError:
            raise PeerUnavailable(f"{called(partition)} has not answered for {timeout_s:.1f} s") from None
        finally:
            if waiting is not None and hosted is not None:
                hosted.waiters.withdraw(waiting)
            heard = future.done() and not future.cancelled() and future.exception() is None
            if late is not None and heard and not returned:
                late(future.result())

    # Messages of other nodes

    def _heard(self, node: str, item: m.Item) -> None:
        match item:
            case m.ToReplica(partition, sender, to, message):
                hosted = self._hosted.get(partition)
                if hosted is not None and hosted.me[1] == to:
                    hosted.receive((node, sender), message)
            case m.Ask():
                self._ask_of(node, item)
            case m.Withdrawn(number):
                hosted, waiting = self._asked.get((node, number), (None, None))
                if hosted is not None and waiting is not None:
                    hosted.waiters.withdraw(waiting)
            case m.HostReplica(number, partition):
                self.background.spawn(self._host_for(node, number, partition))
            case m.SettleOutbox():
                self.settle(node, item)
            case m.CountRows(number, partition):
                self._channel.answer(node, number, str(self.retained(partition)).encode())
            case m.FindReplica(number, partition):
                self._channel.say(node, m.ReplicaHosted(number, self.incarnation(partition)))
            case m.Received():
                self._unconfirmed.received(node, item)
            case _:
                log.warning("node %s sent an unexpected %s", node, type(item).__name__)

    async def _host_for(self, node: str, number: int, partition: str) -> None:
        """Answer another node's request to host a replica."""
        try:
            hosted = await self.host(partition)
        except DataplaneError as error:
            self._channel.answer(node, number, error)
        else:
            self._channel.say(node, m.ReplicaHosted(number, hosted.me[1]))

    def _ask_of(self, node: str, asked: m.Ask) -> None:
        def done(outcome: bytes | DataplaneError) -> None:
            self._asked.pop((node, asked.number), None)
            hosted = self._hosted.get(asked.partition)

            def undoing(result: bytes) -> bytes:
                return b"" if hosted is None else hosted.machine.undo(asked.request, result)

            if isinstance(outcome, bytes):
                try:
                    self._channel.check(outcome)
                    if hosted is not None and asked.gives and outcome != NOTHING:
                        self._unconfirmed.gave(node, asked.number, hosted, undoing(outcome))
                except LimitExceeded as error:  # the result is too large for a frame: give back its grant
                    if hosted is not None and (undo := undoing(outcome)):
                        asyncio.get_running_loop().call_soon(hosted.request, undo, lambda outcome: None)
                    outcome = error
            self._channel.answer(node, asked.number, outcome)

        if not asked.queue:
            self.ask(asked.partition, asked.request, done)
            return
        waiting = WaitingRequest(asked.queue, asked.request, done, node, monotonic() + asked.wait_s)
        hosted = self._hosted.get(asked.partition)
        if hosted is not None:
            self._asked[node, asked.number] = hosted, waiting
        self.ask(asked.partition, asked.request, done, waiting)

    def send(self, node: str, item: m.ToReplica) -> None:
        self._channel.say(node, item)

    async def retained_rows(self, partition: str) -> list[tuple[str, int]]:
        """Return the nodes that retain columns of a partition for their own producers, each with the number of rows. A
        node that does not answer is left out."""

        async def one(node: str) -> tuple[str, int]:
            if node == self.me:
                return node, self.retained(partition)
            try:
                return node, int(await self._channel.ask(node, lambda number: m.CountRows(number, partition), _COUNT_S))
            except DataplaneError as error:
                log.info("node %s has not reported which columns of %s it retains: %s", node, partition, error)
                return node, 0

        found = await asyncio.gather(*map(one, self._members.current))
        return [(node, rows) for node, rows in found if rows]

    def gone(self, node: str, before_s: float) -> None:
        """Tell all replicas here that the process that a node had at `before_s` has ended."""
        log.info("the process of node %s has ended", node)
        self._unconfirmed.gone(node)
        for hosted in self:
            hosted.gone(node, before_s)

    # Time

    def due(self, deadline_s: float) -> None:
        """Set the timer so that it fires at this monotonic time at the latest."""
        if deadline_s < self._due_s - 1e-3:
            self._set(deadline_s)

    def _set(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = deadline_s
        delay_s = max(0.0, deadline_s - monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        now = monotonic()
        self._due_s, self._timer = math.inf, None
        for hosted in self:
            if hosted.deadline <= now + EARLY_S:
                hosted.tick(now)
            if not hosted.closed:
                self.due(max(hosted.deadline, now + _LEAST_S))
        if now >= self._recruit_s:
            self._recruit_s = now + self.settings.beat_s
            self.recruiting.look(now)

    async def aclose(self) -> None:
        """End all replicas, without a message to other nodes. Idempotent."""
        self._unconfirmed.close()
        if self._timer is not None:
            self._timer.cancel()
        for hosted in self:
            self.end(hosted)
        await self.background.aclose()


async def forget(coordinator: Coordinator, key: str) -> None:
    """Remove a deleted key from the coordinator, after all watchers had time to see the deletion."""
    await asyncio.sleep(_DELETED_S)
    with suppress(Unavailable, OutcomeUnknown):
        await coordinator.swap(key, DELETED, None)
