"""Notifies nodes of columns that no row needs any more, and marks columns of nodes that are gone as lost. The leader of
a partition decides both. The columns themselves are in the stores of nodes.

When a node is gone, the leader of each partition with columns on that node commits a command. The command marks the
columns that only that node had as lost, so `lost()` reports their rows even after the leader has ended. When the node
is a member again, another command permits columns on it. A node that was restarted on its data directory has lost only
the columns that it stored before, of partitions that are not durable.

A notification is an entry of the node's outbox. Outboxes are part of the state of the partition, so a new leader
repeats entries that may not have arrived. Entries are numbered, so a node recognises repeated ones. The leader's own
node gets new entries at once, other nodes within `_LOOK_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dataplane.background_tasks import BackgroundTasks
from dataplane.clock import monotonic
from dataplane.cluster.membership import Membership
from dataplane.errors import DataplaneError
from dataplane.node.partitions.channel import PartitionChannel
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.node.partitions.replicas import Replicas
from dataplane.replication.machine import StateMachine
from dataplane.stream import requests as r
from dataplane.wire import partition_messages as m

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # interval of the checks of outboxes; entries of one interval are sent together
_ASK_S = 5.0
_ENTRIES = 1024


Settled = Callable[[str, int, tuple[bytes, ...]], None]


class ColumnReleases:
    """See the module. `settled(partition, last, entries)` is called with the outbox entries that a leader sends to this
    node. `last` is the number of the last entry. Entries may be repeated."""

    def __init__(self, members: Membership, replicas: Replicas, channel: PartitionChannel, settled: Settled) -> None:
        self._me = members.me
        self._members = members
        self._replicas = replicas
        self._channel = channel
        self._settled = settled
        self._changing: set[tuple[str, str]] = set()  # (partition, node) with a `Lose` or `Return` in progress
        self._telling: set[tuple[str, str]] = set()
        self._seen: dict[str, int] = {}  # partition led here -> the epoch of the last look
        self._lives: dict[str, int] = {}  # by node with a data directory: the life of its last process
        self._restarted: dict[str, set[str]] = {}  # by partition that is not durable: nodes that were started again
        self._told: dict[str, int] = {}  # partition led here -> number of the last entry that was sent to this node
        self._background = BackgroundTasks()
        replicas.settle = self._settle
        replicas.performed = self._performed
        members.watch(self.look)

    async def run(self) -> None:
        """Send outboxes, and mark columns as lost, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Start the commands and messages that are due, in the background."""
        self._note_restarts()
        for hosted in self._replicas:
            self._look_at(hosted)
        known = {**self._told, **self._seen, **self._restarted}
        for partition in [each for each in known if self._replicas.find(each) is None]:
            self.forget(partition)

    def forget(self, partition: str) -> None:
        """Forget a partition that no longer exists, or of which this node has no replica any more."""
        self._told.pop(partition, None)
        self._seen.pop(partition, None)
        self._restarted.pop(partition, None)

    def _note_restarts(self) -> None:
        for node, member in self._members.current.items():
            if member.keeps and self._lives.setdefault(node, member.life) != member.life:
                self._lives[node] = member.life
                for hosted in self._replicas:
                    if not hosted.durable:
                        self._restarted.setdefault(hosted.partition, set()).add(node)

    def _look_at_restarted(self, hosted: HostedReplica) -> None:
        """Mark the columns that restarted nodes stored before as lost, unless an earlier leader has done so. Also of
        nodes that store none: a later leader would do it when they have new ones, and would release copies among
        these."""
        machine, nodes = hosted.machine, self._restarted.get(hosted.partition, set())
        for node in [*nodes]:
            member = self._members.current.get(node)
            if member is None or (hosted.partition, node) in self._changing:
                continue
            if machine.lost_nodes.before(bytes.fromhex(node)) >= member.first:
                nodes.discard(node)
            else:
                what = "what node %s had of %s before its restart is lost"
                self._change(hosted, r.Lose(node=bytes.fromhex(node), before=member.first), what)

    def _look_at(self, hosted: HostedReplica) -> None:
        machine = hosted.machine
        if not hosted.replica.serves(monotonic()):
            return
        for node in machine.holders():
            if self._members.gone(node, durable=hosted.durable) and (hosted.partition, node) not in self._changing:
                what = "what node %s alone held of %s is lost"
                self._change(hosted, r.Lose(node=bytes.fromhex(node)), what)
        self._look_at_restarted(hosted)
        for node in [each.hex() for each in machine.lost_nodes.lost]:
            member = self._members.current.get(node)
            if member is not None and (hosted.partition, node) not in self._changing:
                returned = r.Return(node=bytes.fromhex(node), first=member.first)
                self._change(hosted, returned, "node %s, which was lost, stores columns of %s again")
        for node in machine.waiting():
            if (hosted.partition, node) not in self._telling:
                self._telling.add((hosted.partition, node))
                self._background.spawn(self._tell(hosted, machine, node))

    def _performed(self, hosted: HostedReplica) -> None:
        """Pass new entries of a partition that is led here to this node, after commands."""
        machine = hosted.machine
        if not hosted.replica.serves(monotonic()):
            return
        if machine.outbox(self._me, 1)[0]:
            self._tell_here(hosted, machine)
        epoch = hosted.configuration.epoch
        if self._seen.get(hosted.partition) != epoch:  # a new leader must not deliver lost rows: check at once
            self._seen[hosted.partition] = epoch
            asyncio.get_running_loop().call_soon(self._look_at, hosted)

    def _tell_here(self, hosted: HostedReplica, machine: StateMachine) -> None:
        entries, last = machine.outbox(self._me, _ENTRIES)
        before = self._told.get(hosted.partition, 0)
        if last > before or not before:
            self._told[hosted.partition] = last
            self._settled(hosted.partition, last, entries)

    def _change(self, hosted: HostedReplica, request: r.Lose | r.Return, what: str) -> None:
        node = request.node.hex()

        def done(outcome: bytes | DataplaneError) -> None:
            self._changing.discard((hosted.partition, node))
            if isinstance(outcome, bytes):
                log.info(what, node, hosted.partition)
            else:
                log.info(
                    "recording that node %s has lost its columns of %s failed, and is tried again: %s",
                    node,
                    hosted.partition,
                    outcome,
                )

        self._changing.add((hosted.partition, node))
        hosted.request(r.encode_request(request), done)

    async def _tell(self, hosted: HostedReplica, machine: StateMachine, node: str) -> None:
        """Send a node its outbox, one message at a time."""
        try:
            while not hosted.closed and hosted.replica.leads:
                entries, last = machine.outbox(node, _ENTRIES)
                if not entries:
                    return
                if node == self._me:
                    self._tell_here(hosted, machine)
                elif not self._members.gone(node, durable=hosted.durable):

                    def settle(number: int, last: int = last, entries: tuple[bytes, ...] = entries) -> m.Item:
                        return m.SettleOutbox(number, hosted.partition, last, entries)

                    await self._channel.ask(node, settle, _ASK_S)
                received = r.encode_request(r.OutboxReceived(node=bytes.fromhex(node), last=last))
                await self._replicas.request(hosted.partition, received, _ASK_S)
        except DataplaneError as error:
            log.debug(
                "sending releases to node %s for %s failed, and is tried again: %s", node, hosted.partition, error
            )
        finally:
            self._telling.discard((hosted.partition, node))

    def _settle(self, node: str, told: m.SettleOutbox) -> None:
        """Release the columns of the entries that a leader sends to this node, and confirm the entries."""
        try:
            self._settled(told.partition, told.last, told.entries)
        except DataplaneError as error:
            self._channel.answer(node, told.number, error)
        else:
            self._channel.answer(node, told.number, b"")

    async def aclose(self) -> None:
        await self._background.aclose()
