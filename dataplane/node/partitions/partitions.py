"""Assembles the parts of `node.partitions` for one node, and starts and stops them together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext

from dataplane.background_tasks import BackgroundTasks
from dataplane.clock import monotonic
from dataplane.closing import close_each
from dataplane.cluster.membership import Membership
from dataplane.coordinator.base import Coordinator
from dataplane.errors import DataplaneError
from dataplane.node.partitions.channel import PartitionChannel
from dataplane.node.partitions.column_releases import ColumnReleases, Settled
from dataplane.node.partitions.directory import Directory
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.node.partitions.record import Record
from dataplane.node.partitions.replicas import SETTINGS, Logs, Machines, Replicas, in_memory
from dataplane.node.partitions.router import Needing, Router
from dataplane.replication.configuration import Configuration
from dataplane.replication.settings import ReplicationSettings
from dataplane.stream.requests import EndClients, encode_request
from dataplane.wire.partition_messages import PartitionFrame
from dataplane.wire.peer import Peers


class Partitions:
    """The partitions of one node. `peers`: the control channel of the node, whose frames go to `receive`.
    `opening(record)` returns the first request to a new partition of a stream. `settled`: see `ColumnReleases`.
    `needing`: see `router`. `alone`: there is no other node. The creator closes the membership, the coordinator and the
    sockets."""

    def __init__(
        self,
        members: Membership,
        coordinator: Coordinator,
        peers: Peers,
        machines: Machines,
        opening: Callable[[Record], bytes],
        *,
        settled: Settled = lambda partition, last, entries: None,
        settings: ReplicationSettings = SETTINGS,
        logs: Logs = in_memory,
        needing: Needing = nullcontext,
        alone: bool = False,
    ) -> None:
        self.members = members
        self.channel = PartitionChannel(peers, members, members.current[members.me].life)
        self.replicas = Replicas(
            members, self.channel, coordinator, machines, settings=settings, logs=logs, alone=alone
        )
        self.router = Router(self.replicas, members, self.channel, coordinator, needing)
        self.directory = Directory(coordinator, members, self.replicas, self.router, opening)
        self.columns = ColumnReleases(members, self.replicas, self.channel, settled)
        self.departed = ClientDepartures(members, self.replicas)
        self._background = BackgroundTasks()

    def receive(self, frame: PartitionFrame) -> None:
        self.channel.receive(frame)

    def start(self) -> None:
        """Start the background work. The caller runs the membership."""
        for work in (self.directory.run, self.columns.run, self.departed.run):
            self._background.spawn(work())

    def configurations(self) -> dict[str, Configuration]:
        """The leader and the followers of each partition that this node knows, as last seen."""
        hosted = {hosted.partition: hosted.configuration for hosted in self.replicas}
        return {**self.router.configurations, **hosted}

    async def aclose(self) -> None:
        """Stop, without a message to other nodes. Idempotent."""
        parts = (self._background, self.columns, self.departed, self.directory, self.replicas, self.channel)
        await close_each(*[part.aclose for part in parts])


log = logging.getLogger(__name__)

_LOOK_S = 0.25
_LOOK_AT_ALL_S = 5.0
_ASK_S = 5.0
_REMEMBERED = 4096  # the most ended incarnations that are remembered

_REPLACED_S = 60.0
"""A durable partition may have clients of an incarnation that this node never saw, since all nodes were restarted in
between. An unseen incarnation counts as ended once its node has been a member with another one for these seconds. If it
were the newer one, this node would have seen it by then."""


class ClientDepartures:
    """Removes the clients of ended nodes from the partitions that this node leads. Rows leased to these clients are
    delivered to others at once, not only when the leases expire.

    A client is called NODE/LIFE/NUMBER: its node, the incarnation of the node, and its number there. An incarnation
    counts as ended when its process has ended, its node is gone, or its node was seen with a later one. For
    incarnations that were never seen see `_REPLACED_S`.

    `run` removes the clients of ended processes at intervals, until cancelled.
    """

    def __init__(self, members: Membership, replicas: Replicas) -> None:
        self._members = members
        self._replaced: dict[str, float] = {}  # unseen NODE/LIFE of members with another incarnation -> since this time
        self._replicas = replicas
        self._lives: dict[str, str] = {}
        self._past: dict[str, None] = {}
        self._leaving: set[tuple[str, str]] = set()
        self._led: dict[HostedReplica, None] = {}  # partitions led here whose clients were looked at
        self._all_s = 0.0  # the time from which the clients of all of them are looked at again
        self._background = BackgroundTasks()
        members.watch(self._changed)
        members.watch_ended(self._process_ended)

    def _changed(self) -> None:
        self._all_s = 0.0
        for node, member in self._members.current.items():
            life = str(member.life)
            before = self._lives.setdefault(node, life)
            if before != life:
                self._lives[node] = life
                self._over(node, before)

    def _process_ended(self, node: str, before_s: float) -> None:
        """Note that the process of a node has ended. A node with a data directory may return, but its clients do
        not."""
        self._all_s = 0.0
        life = self._lives.get(node)
        if life is not None:
            self._over(node, life)

    def _over(self, node: str, life: str) -> None:
        self._past[f"{node}/{life}"] = None
        if len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]

    def _ended(self, process: str) -> bool:
        node, _, life = process.partition("/")
        if process in self._past or self._members.gone(node):
            return True
        member = self._members.current.get(node)
        if member is None or str(member.life) == life or not self._members.coordination.answers:
            self._replaced.pop(process, None)
            return False
        if len(self._replaced) > _REMEMBERED:
            self._replaced.clear()
        return monotonic() - self._replaced.setdefault(process, monotonic()) >= _REPLACED_S

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Remove the clients of ended processes, in the background.

        The clients of all partitions are checked only after a change of the members and every `_LOOK_AT_ALL_S`, because
        a partition may have many. At other times only the clients of partitions that this node has begun to lead are
        checked."""
        now = monotonic()
        if now >= self._all_s:
            self._led, self._all_s = {}, now + _LOOK_AT_ALL_S
        before, self._led = self._led, {hosted: None for hosted in self._replicas if hosted.replica.serves(now)}
        for hosted in self._led:
            for process in hosted.machine.clients() if hosted not in before else ():
                if (hosted.partition, process) not in self._leaving and self._ended(process):
                    self._leaving.add((hosted.partition, process))
                    self._background.spawn(self._leave(hosted, process))

    async def _leave(self, hosted: HostedReplica, process: str) -> None:
        try:
            await self._replicas.request(hosted.partition, encode_request(EndClients(clients=f"{process}/")), _ASK_S)
        except DataplaneError as error:
            log.info(
                "releasing the leases of ended clients of %s in %s failed, and is tried again: %s",
                process,
                hosted.partition,
                error,
            )
            self._all_s = 0.0
        finally:
            self._leaving.discard((hosted.partition, process))

    async def aclose(self) -> None:
        await self._background.aclose()
