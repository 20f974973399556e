"""Assembles the parts of `node.partitions` for one node, and starts and stops them together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from dataplane.background_tasks import BackgroundTasks
from dataplane.closing import close_each
from dataplane.cluster.membership import Membership
from dataplane.coordinator.base import Coordinator
from dataplane.node.partitions.channel import PartitionChannel
from dataplane.node.partitions.client_departures import ClientDepartures
from dataplane.node.partitions.column_releases import ColumnReleases, Settled
from dataplane.node.partitions.directory import Directory
from dataplane.node.partitions.record import Record
from dataplane.node.partitions.replicas import SETTINGS, Logs, Machines, Replicas, in_memory
from dataplane.node.partitions.router import Needing, Router
from dataplane.replication.configuration import Configuration
from dataplane.replication.settings import ReplicationSettings
from dataplane.wire.partition_messages import PartitionFrame
from dataplane.wire.peer import Peers


class Partitions:
    """The partitions of one node. `peers`: its control channel, which passes frames to `receive`. `opening(record)`:
    the first request to a new partition of a stream. The creator closes the membership, the coordinator and the
    sockets. `needing`: see `router`. `alone`: there is no other node."""

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
            members,
            self.channel,
            coordinator,
            machines,
            settings=settings,
            logs=logs,
            alone=alone,
        )
        self.router = Router(self.replicas, members, self.channel, coordinator, needing)
        self.directory = Directory(coordinator, members, self.replicas, self.router, opening)
        self.columns = ColumnReleases(members, self.replicas, self.channel, settled)
        self.departed = ClientDepartures(members, self.replicas)
        self._background = BackgroundTasks()

    def receive(self, frame: PartitionFrame) -> None:
        """Handle a frame of another node."""
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
